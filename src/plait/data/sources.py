"""Where the requests of a synthetic workload come from: length distributions of one application each.

A source is a function ``(k, rng) -> Part`` that draws k requests *evenly*: one from each of k equal slices of its
distribution, in random order, so that sums over a part hardly depend on the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from plait.data.traces import read_trace
from plait.table import F64, I64


@dataclass(frozen=True, slots=True)
class Part:
    """Requests of one source. int64 [k] each."""

    prompt_tokens: I64
    output_tokens: I64
    group: I64
    """Requests of one group share a prefix; -1 = none but the system prompt."""
    prefix_tokens: I64
    """Length of the group's prefix, system prompt included; 0 without a group."""


Source = Callable[[int, np.random.Generator], Part]

PUBLISHED = {"burstgpt": (0.02, 17.78), "openvid": (0.0, 0.05), "mmlu": (0.86, 54.91)}
"""Prefix sharing and density of BlendServe's sources (table 2 there)."""

LONGEST_CONTEXT_TOKENS = 131_072
"""Longer requests of a real trace are left out: no model of the evaluation takes them."""

_Z = np.linspace(-6, 6, 4801)
_NORMAL_CDF = np.array([0.5 * (1 + math.erf(z / math.sqrt(2))) for z in _Z])

# Quantiles of the first 59 999 rows of BurstGPT (CC BY 4.0), as published; the smallest is set to one token.
_BURST_AT = (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)
_BURST_PROMPT = (1, 74, 1291, 1697, 3023, 6142)
_BURST_OUTPUT = (1, 14, 401, 510, 757, 7315)
_BURST_OUTPUT_SCALE = 0.275
"""Scales the outputs to the density the paper gives for its (unpublished) sample of BurstGPT."""


def burstgpt_like(k: int, rng: np.random.Generator) -> Part:
    """API traffic: long-tailed prompts (mean about 370 tokens), short outputs, independent of each other."""
    prompt = _between_quantiles(_even(k, rng), _BURST_PROMPT)
    output = _between_quantiles(_even(k, rng), _BURST_OUTPUT) * _BURST_OUTPUT_SCALE
    return _ungrouped(prompt, output)


def openvid_like(k: int, rng: np.random.Generator) -> Part:
    """Video generation: a caption in, 256 tokens a frame out, mean 16 000 tokens, longest 65 536."""
    output = np.clip(_lognormal(_even(k, rng), 16_550, 1.0), 256, 65_536)
    return _ungrouped(_lognormal(_even(k, rng), 150, 0.5), np.rint(output / 256) * 256)


def mmlu_like(k: int, rng: np.random.Generator) -> Part:
    """Few-shot questions: 57 subjects, each with its own shots; short answers."""
    subjects = 57
    shots = np.rint(_lognormal(_even(subjects, rng), 640, 0.6))
    subject = rng.permutation(k) % subjects
    question = _lognormal(_even(k, rng), 100, 0.7)
    return _below_prefixes(shots[subject] + 1 + question, _lognormal(_even(k, rng), 14, 0.6), subject, shots)


def grouped(k: int, rng: np.random.Generator, groups: int, long_mean: float) -> Part:
    """Many applications: ``groups`` prefixes of 500–3 000 tokens; one group in ten answers at length (group means
    around ``long_mean`` tokens), the others briefly (around 20); lengths vary within a group as well."""
    prefix = np.rint(500 + 2500 * _even(groups, rng))
    typical = np.where(_even(groups, rng) < 0.1, long_mean, 20.0)
    mean = typical * _lognormal(_even(groups, rng), 1, 0.6)
    group = rng.permutation(k) % groups
    output = np.minimum(mean[group] * _lognormal(_even(k, rng), 1, 0.7), 32_768)
    return _below_prefixes(prefix[group] + 1 + _lognormal(_even(k, rng), 400, 0.8), output, group, prefix)


def from_trace(path: Path) -> Source:
    """Source of a real trace: its (prompt, output) pairs, evenly over the requests sorted by their KV footprint."""

    def draw(k: int, rng: np.random.Generator) -> Part:
        prompt, output = _pairs(path)
        rows = (_even(k, rng) * len(prompt)).astype(np.int64)
        return _ungrouped(prompt[rows], output[rows])

    return draw


@lru_cache(maxsize=8)
def _pairs(path: Path) -> tuple[F64, F64]:
    """Lengths of a trace, sorted by p d + d²/2."""
    trace = read_trace(path)
    prompt, output = trace.table.prompt_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    keep = prompt + output <= LONGEST_CONTEXT_TOKENS
    order = np.argsort((prompt * output + output * output / 2)[keep], kind="stable")
    return prompt[keep][order], output[keep][order]


def _even(k: int, rng: np.random.Generator) -> F64:
    """The middles of k equal slices of (0, 1), shuffled."""
    return (rng.permutation(k) + 0.5) / k


def _lognormal(u: F64, mean: float, variation: float) -> F64:
    """Quantiles at u of the log-normal distribution with this mean and coefficient of variation."""
    sigma = math.sqrt(math.log1p(variation**2))
    z: F64 = np.interp(u, _NORMAL_CDF, _Z)
    return np.exp(math.log(mean) - sigma**2 / 2 + sigma * z)


def _between_quantiles(u: F64, values: tuple[int, ...]) -> F64:
    """Quantiles at u of a distribution known at _BURST_AT, log-linear in between."""
    return np.exp(np.interp(u, _BURST_AT, np.log(values)))


def _tokens(lengths: F64) -> I64:
    return np.maximum(1, np.rint(lengths)).astype(np.int64)


def _ungrouped(prompt: F64, output: F64) -> Part:
    return Part(_tokens(prompt), _tokens(output), np.full(len(prompt), -1, np.int64), np.zeros(len(prompt), np.int64))


def _below_prefixes(prompt: F64, output: F64, group: I64, prefix: F64) -> Part:
    return Part(_tokens(prompt), _tokens(output), group, _tokens(prefix)[group])
