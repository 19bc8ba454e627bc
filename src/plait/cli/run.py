"""``plait run``: answer a batch file, resumably, in the planned order."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from plait.cli.display import Display, display
from plait.cli.options import EMBEDDED, ENGINE, PLANNING, POOL, FiniteRange, together
from plait.cli.summary import summary_dict, summary_text
from plait.engine.http_settings import HttpSettings
from plait.engine.machine import EngineSettings
from plait.engine.vllm import flags
from plait.errors import UsageError
from plait.run.batch import BatchOptions, Report, run_batch
from plait.run.embedded import Embedded
from plait.run.options import Options
from plait.run.place import Place
from plait.run.servers import Servers
from plait.run.vllm import Vllm
from plait.run.watcher import Ready

RUNNING = (
    click.option("--strict", is_flag=True, help="Stop before starting if any request cannot run."),
    click.option("--no-dedupe", is_flag=True, help="Compute identical deterministic requests each time."),
    click.option(
        "--order",
        type=click.Choice(["input", "completion"]),
        default="input",
        show_default=True,
        help="Order of the final file.",
    ),
    click.option(
        "--retries", type=click.IntRange(min=0), help="Tries after a server's fault. [default: 3; of servers 6]"
    ),
    click.option(
        "--retry-failed",
        type=click.Choice(["server", "all", "none"]),
        default="server",
        show_default=True,
        help="Failed rows of an earlier run that are run again.",
    ),
    click.option(
        "--max-failures",
        type=click.IntRange(min=0),
        default=20,
        show_default=True,
        help="Server faults in a row before the run stops, to be resumed; 0: never.",
    ),
    click.option(
        "--grace",
        type=FiniteRange(min=0),
        default=30.0,
        show_default=True,
        help="Seconds to wait for running requests after Ctrl-C.",
    ),
    click.option("--restart", is_flag=True, help="Throw away what an earlier run of this output recorded."),
    click.option("--fail-on", type=click.Choice(["length"]), help="Exit 1 if answers were cut off at max_tokens."),
)
DISPLAY = (
    click.option(
        "--progress",
        type=click.Choice(["auto", "bar", "plain", "json", "none"]),
        default="auto",
        show_default=True,
        help="Bar on a terminal, else a line every 5 s.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object."),
    click.option("--quiet", is_flag=True, help="No progress; with --json still the summary."),
)


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", required=True, metavar="FILE", help="Answers; failures go to *.errors.jsonl beside it.")
@together(PLANNING)
@together(RUNNING)
@together(ENGINE)
@together(EMBEDDED)
@together(POOL)
@together(DISPLAY)
def command(files: tuple[str, ...], output: str, progress: str, as_json: bool, quiet: bool, **given: Any) -> None:
    """Answer every request of FILE.

    FILE is OpenAI batch JSONL, or rows with a prompt or messages as JSONL, CSV or Parquet; gzip and zstd are unpacked,
    - is standard input. Run the same command again to go on after an interruption: what is finished is kept.
    """
    say = _quiet if quiet else _say
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C while nothing is sent yet: cleans up too
    try:
        sys.exit(_run(files, output, progress, as_json, quiet, say, given))
    except KeyboardInterrupt:  # before anything was sent, or for the third time
        click.echo("plait: interrupted; run the same command again to go on", err=True)
        sys.exit(130)


def _run(
    files: tuple[str, ...],
    output: str,
    progress: str,
    as_json: bool,
    quiet: bool,
    say: Callable[[str], None],
    given: dict[str, Any],
) -> int:
    """The exit code of a whole run."""
    with closing(_place(given, say)) as place:
        batch = BatchOptions(
            files=files,
            policy=given["policy"],
            seed=given["seed"],
            on_overflow=given["on_overflow"],
            default_max_tokens=given["default_max_tokens"],
            allow_duplicates=given["allow_duplicates"],
            strict=given["strict"],
            goal=given["goal"],
            deadline_s=math.inf if given["deadline"] is None else given["deadline"],
        )
        options = _options(files, output, batch, place, given)
        report = _watched_run(batch, place, options, "none" if quiet else progress, say)
    exit_code = _exit_code(report, given["fail_on"])
    if as_json:
        click.echo(summary_dict(report, options.output, exit_code))
    elif not quiet:
        click.echo(summary_text(report, options.output), err=True)
    return exit_code


def _place(given: dict[str, Any], say: Callable[[str], None]) -> Place:
    """Where the job runs: vLLM, the servers of --endpoint, else the embedded engine."""
    own = {name: given[name] for name in ("kv_gib", "max_num_seqs", "max_batched_tokens", "threads")}
    if given["engine"] == "vllm":
        return _vllm(given, own, say)
    if given["engine_arg"]:
        raise UsageError("--engine-arg is for --engine vllm")
    if not given["endpoint"] and given["endpoints_file"] is None:
        return Embedded(given["model"], EngineSettings(kv_tokens=given["kv_tokens"], **own), say)
    for name, value in own.items():
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')} is a setting of the embedded engine; servers have their own")
    settings = HttpSettings(
        endpoints=given["endpoint"],
        endpoints_file=given["endpoints_file"],
        http2=given["http2"],
        model=given["model"],
        api_key_env=given["api_key_env"],
        max_concurrency=given["max_concurrency"] or 0,
        rpm=given["rpm"],
        tpm=given["tpm"],
        stall_timeout_s=given["stall_timeout"],
        max_wait_s=given["max_wait"],
        kv_tokens=given["kv_tokens"] or 0,
        block_tokens=given["block_tokens"] or 0,
        **({} if given["retries"] is None else {"retries": given["retries"]}),
    )
    return Servers(settings, given["tokenizer"])


def _vllm(given: dict[str, Any], own: dict[str, Any], say: Callable[[str], None]) -> Place:
    """vLLM in a process of ours, which has its own names for its settings."""
    if given["endpoint"]:
        raise UsageError("--engine vllm and --endpoint exclude each other: a server runs its own engine")
    for name, value in {**own, "kv_tokens": given["kv_tokens"]}.items():
        if value is not None:
            fix = "give vLLM's own name with --engine-arg, e.g. max_num_seqs=64 or gpu_memory_utilization=0.9"
            raise UsageError(f"--{name.replace('_', '-')} is a setting of the built-in engine; {fix}")
    return Vllm(given["model"], flags(given["engine_arg"]), say)


def _options(files: tuple[str, ...], output: str, batch: BatchOptions, place: Place, given: dict[str, Any]) -> Options:
    """What the executor needs; everything that changes answers is in ``settings``."""
    changing = {"on_overflow": batch.on_overflow, "default_max_tokens": batch.default_max_tokens}
    return Options(
        output=Path(output),
        inputs=files,
        settings={**place.answer_settings, **changing},
        notes={"goal": batch.goal, "policy": batch.policy, "seed": batch.seed},
        retries=(3 if given["retries"] is None else given["retries"]) if place.retries else 0,
        max_failures=given["max_failures"],
        retry_failed=given["retry_failed"],
        order=given["order"],
        dedupe=not given["no_dedupe"],
        restart=given["restart"],
        grace_s=given["grace"],
        secrets=place.secrets,
        seed=batch.seed,
    )


def _watched_run(
    batch: BatchOptions, place: Place, options: Options, progress: str, say: Callable[[str], None]
) -> Report:
    shown: list[Display] = []

    def watch(ready: Ready) -> Display:
        shown.append(display(progress, ready))
        return shown[0]

    try:
        return run_batch(batch, place, options, watch, say)
    finally:
        for each in shown:
            each.close()


def _exit_code(report: Report, fail_on: str | None) -> int:
    code = report.outcome.exit_code
    return 1 if code == 0 and fail_on == "length" and report.truncated else code


def _say(line: str) -> None:
    print(f"plait: {line}", file=sys.stderr, flush=True)  # not click's echo: it would write into the bar, not above it


def _quiet(line: str) -> None:
    pass
