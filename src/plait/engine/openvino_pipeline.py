"""OpenVINO GenAI's continuous batching pipeline in Plait's terms. Runs in the child process; nothing else of Plait
touches ``openvino_genai`` but the tokenizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from plait.engine.chat import Generated
from plait.engine.flight import Flight
from plait.engine.wire import Sampling, Setup
from plait.table import I32

_FINISH = {genai.GenerationFinishReason.STOP: "stop", genai.GenerationFinishReason.LENGTH: "length"}


class Pipeline:
    """A loaded model without requests. Every method raises RuntimeError as OpenVINO does."""

    def __init__(self, setup: Setup) -> None:
        config = genai.SchedulerConfig()
        config.num_kv_blocks = setup.kv_blocks
        config.max_num_seqs = setup.max_num_seqs
        config.max_num_batched_tokens = setup.max_batched_tokens
        config.enable_prefix_caching = setup.prefix_caching
        config.dynamic_split_fuse = True
        properties = {"INFERENCE_NUM_THREADS": setup.threads}
        self._pipeline = genai.ContinuousBatchingPipeline(setup.model_path, config, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        own = self._pipeline.get_config()
        self._eos, self._stops = own.eos_token_id, set(own.stop_token_ids)
        self._kv_blocks = setup.kv_blocks
        self._serial = 0
        self._seed = -1

    def add(self, ids: I32, sampling: Sampling) -> Any:
        """Give the engine a request; its handle, which must be kept: dropping it ends the request."""
        config = self._generation_config(sampling)
        if config.do_sample:
            self._reseed(config.rng_seed)
        return self._add(ids, config)

    def step(self) -> tuple[int, int]:
        """One engine step; (requests it ran, KV blocks that running requests hold)."""
        self._pipeline.step()
        metrics = self._pipeline.get_metrics()
        return metrics.scheduled_requests, round(metrics.cache_usage / 100 * self._kv_blocks)

    def read(self, flight: Flight) -> bool:
        """Take over a request's new tokens; True if there were any."""
        new = False
        while flight.handle.can_read():
            for key, part in flight.handle.read().items():
                output = flight.outputs.setdefault(key, Generated([], [], "length"))
                output.ids += part.generated_ids
                output.logprobs += part.generated_log_probs
                output.finish_reason = _FINISH.get(part.finish_reason, output.finish_reason)
                new = True
        return new

    def ended(self, flight: Flight) -> bool:
        """Whether the engine is done with it, for whatever reason."""
        return bool(flight.handle.get_status() != genai.GenerationStatus.RUNNING)

    def dropped(self, flight: Flight) -> bool:
        """Whether the engine ended it for want of KV cache."""
        return bool(flight.handle.get_status() == genai.GenerationStatus.IGNORED)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of output tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def _add(self, ids: I32, config: Any) -> Any:
        """Under a number of its own, never the row: a cancelled one may come again while the engine still knows it."""
        self._serial += 1
        return self._pipeline.add_request(self._serial, openvino.Tensor(ids.astype(np.int64)[None, :]), config)

    def _reseed(self, seed: int) -> None:
        """Make the engine start its random numbers anew. It has one generator for all requests, set when a request
        comes with another seed than the last one's: so a request of a different seed is added, and dropped."""
        if seed == self._seed:
            other = genai.GenerationConfig()
            other.do_sample, other.max_new_tokens, other.rng_seed = True, 1, (seed + 1) % 2**63
            self._add(np.full(1, self._eos, np.int32), other).cancel()
        self._seed = seed

    def _generation_config(self, sampling: Sampling) -> Any:
        config = genai.GenerationConfig()
        config.eos_token_id = self._eos
        config.stop_token_ids = self._stops | set(sampling.stop_token_ids)
        config.max_new_tokens, config.min_new_tokens = sampling.max_tokens, sampling.min_tokens
        config.ignore_eos = sampling.ignore_eos
        config.num_return_sequences = sampling.n
        config.repetition_penalty = sampling.repetition_penalty
        config.presence_penalty, config.frequency_penalty = sampling.presence_penalty, sampling.frequency_penalty
        config.logprobs = 0 if sampling.logprobs is None else 1
        # With the stop string in, tokens come as they are made; the text is cut when the answer is written.
        config.stop_strings, config.include_stop_str_in_output = set(sampling.stop), True
        if sampling.temperature > 0:
            config.do_sample, config.temperature = True, sampling.temperature
            config.top_p, config.min_p = sampling.top_p, sampling.min_p
            if sampling.top_k:
                config.top_k = sampling.top_k
            seed = sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(4), "little")
            config.rng_seed = seed % 2**63
        if sampling.json_schema or sampling.regex or sampling.grammar:
            structured = genai.StructuredOutputConfig()
            structured.json_schema, structured.regex = sampling.json_schema, sampling.regex
            structured.grammar = sampling.grammar
            config.structured_output_config = structured
        config.validate()
        return config
