"""Options that several subcommands share: where a job runs and how it is planned."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """A number in a range; nan and infinity are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Refuse what ``float`` would take."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, or a number with s, m, h or d behind it."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds above 0."""
        from plait.data.urgency import duration_s

        seconds = value if isinstance(value, float) else duration_s(str(value))
        if seconds is None:
            self.fail(f"{value!r} is not a time above 0 like 3600, 90s, 30m, 2h or 1d.", param, ctx)
        return seconds


EMBEDDED = (
    click.option(
        "--model",
        metavar="PATH_OR_ID",
        help="GGUF file, OpenVINO directory or Hugging Face id. [default: SmolLM2-135M]",
    ),
    click.option(
        "--kv-tokens", type=click.IntRange(min=1), help="KV cache size in tokens. [default: from free memory]"
    ),
    click.option("--kv-gib", type=FiniteRange(min=0, min_open=True), help="KV cache size in GiB instead."),
    click.option("--max-num-seqs", type=click.IntRange(min=1), help="Sequences that may run at once."),
    click.option("--max-batched-tokens", type=click.IntRange(min=1), help="Tokens one engine step may take."),
    click.option("--threads", type=click.IntRange(min=1), help="CPU threads. [default: physical cores]"),
)
"""Settings of the embedded engine."""

ENGINE = (
    click.option(
        "--engine",
        type=click.Choice(["openvino", "vllm"]),
        default="openvino",
        show_default=True,
        help="What runs the model here: the built-in CPU engine, or vLLM with --model a Hugging Face directory or id.",
    ),
    click.option(
        "--engine-arg",
        multiple=True,
        metavar="KEY=VALUE",
        help="An argument of vLLM, e.g. tensor_parallel_size=2 or quantization=fp8 (repeatable).",
    ),
)
"""Which engine runs the model on this machine."""

POOL = (
    click.option("--endpoint", multiple=True, metavar="URL", help="Run on this OpenAI-compatible server (repeatable)."),
    click.option(
        "--endpoints-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="More endpoints, one URL a line; read again when it changes, so that servers can come and go meanwhile.",
    ),
    click.option("--http2", is_flag=True, help="Speak HTTP/2 to https endpoints that offer it."),
    click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the servers' API key."),
    click.option("--tokenizer", metavar="PATH_OR_ID", help="Count the servers' prompt tokens with this model's files."),
    click.option(
        "--block-tokens", type=click.IntRange(min=1), help="Prefix-cache block of servers that do not tell theirs."
    ),
    click.option("--max-concurrency", type=click.IntRange(min=1), default=None, help="Requests in flight at most."),
    click.option("--rpm", type=FiniteRange(min=0), default=0.0, help="Requests a minute; 0: no limit."),
    click.option("--tpm", type=FiniteRange(min=0), default=0.0, help="Tokens a minute; 0: no limit."),
    click.option(
        "--stall-timeout",
        type=FiniteRange(min=0, min_open=True),
        default=300.0,
        show_default=True,
        help="Seconds without any movement after which a request is stuck.",
    ),
    click.option(
        "--max-wait",
        type=FiniteRange(min=0, min_open=True),
        default=600.0,
        show_default=True,
        help="Longest a server may ask a request to wait (Retry-After), in seconds.",
    ),
)
"""Servers instead of the embedded engine."""

PLANNING = (
    click.option(
        "--goal",
        type=click.Choice(["throughput", "balanced", "latency"]),
        default="throughput",
        show_default=True,
        help="Finish the job sooner; return answers sooner on average for at most 3 % of the time; or at any price.",
    ),
    click.option(
        "--deadline",
        type=Duration(),
        metavar="TIME",
        help="When the whole job is wanted, from its start: 3600, 30m, 2h, 1d. Said at once if it cannot be met.",
    ),
    click.option("--policy", metavar="NAME", help="Use this policy instead of the goal's, for comparison."),
    click.option(
        "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of random choices in the order."
    ),
    click.option(
        "--on-overflow",
        type=click.Choice(["error", "clamp", "skip"]),
        default="error",
        show_default=True,
        help="A request too long for the context or the KV cache fails, gets a lower max_tokens, or is left out.",
    ),
    click.option("--default-max-tokens", type=click.IntRange(min=1), help="For requests that set no max_tokens."),
    click.option("--allow-duplicates", is_flag=True, help="Accept a custom_id that is used more than once."),
)
"""How a job is planned."""


def together(options: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    """One decorator for a group of options, listed in help in the given order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate
