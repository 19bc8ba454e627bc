"""``plait check``: every problem of the input in one pass, without an engine."""

from __future__ import annotations

import heapq
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from plait.data.job import Job, read_job
from plait.data.limits import model_problems, openai_limit_problems
from plait.data.problems import Problem


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option(
    "--max-problems",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="List at most this many; 0 lists all. All are counted.",
)
@click.option(
    "--openai-limits",
    is_flag=True,
    help="Also apply the limits of the hosted Batch API: 50 000 requests, 200 MB, one endpoint and one model a file.",
)
@click.option("--allow-duplicates", is_flag=True, help="Accept a custom_id that is used more than once.")
@click.option(
    "--passthrough",
    is_flag=True,
    help="Judge for an HTTP server: other endpoints, media parts and unknown parameters may pass.",
)
@click.option(
    "--model", "served", multiple=True, help="A model name the engine serves (repeatable); others are errors."
)
@click.option("--endpoint", multiple=True, metavar="URL", help="Ask this server for its models and context length.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the servers' API key.")
@click.option("--tokenizer", metavar="PATH_OR_ID", help="Count prompt tokens for --endpoint with this model's files.")
def command(
    files: tuple[str, ...],
    as_json: bool,
    max_problems: int,
    openai_limits: bool,
    allow_duplicates: bool,
    passthrough: bool,
    served: tuple[str, ...],
    endpoint: tuple[str, ...],
    api_key_env: str | None,
    tokenizer: str | None,
) -> None:
    """Report every problem of batch files, without an engine.

    FILE is OpenAI batch JSONL, or rows with a prompt or messages as JSONL, CSV or Parquet; gzip and zstd are unpacked,
    - is standard input. Exit code 2 if there is an error, 0 if there are none or only warnings.
    With --endpoint the servers must be reachable, serve the models that are asked for and, with --tokenizer, have room
    for every request; nothing is sent to be answered.
    """
    seen = None
    if endpoint:
        from plait.run.server_check import look_at_servers

        seen = look_at_servers(endpoint, api_key_env, tokenizer)
    if seen is not None and not as_json:
        click.echo(str(seen))
    with (
        tempfile.TemporaryDirectory(prefix="plait-check-") as workdir,
        read_job(files, workdir, allow_duplicates, passthrough or bool(endpoint)) as job,
    ):
        found = [job.iter_problems()]
        if seen is not None:
            found.append(seen.problems(job))
        if served:
            found.append(model_problems(job, served))
        if openai_limits:
            found.append(openai_limit_problems(job))
        report = _report(job, heapq.merge(*found, key=lambda problem: problem.row), max_problems, echo=not as_json)
    click.echo(msgspec.json.encode(report) if as_json else _summary(report))
    sys.exit(2 if report["errors"] else 0)


def _report(job: Job, problems: Iterator[Problem], max_problems: int, echo: bool) -> dict[str, Any]:
    """Count all problems and list the first ones, printing each as it is found if ``echo``."""
    counts: dict[str, Counter[str]] = {"error": Counter(), "warning": Counter()}
    listed: list[dict[str, Any]] = []
    bad = job.bad.copy()
    for problem in problems:
        counts[problem.severity][problem.code] += 1
        if problem.row >= 0 and problem.severity == "error":
            bad[problem.row] = True
        if max_problems and counts["error"].total() + counts["warning"].total() > max_problems:
            continue
        if echo:
            click.echo(str(problem))
        else:
            listed.append(problem.as_dict())
    total = counts["error"].total() + counts["warning"].total()
    return {
        "requests": job.n,
        "good": job.n - int(bad.sum()),
        "bad": int(bad.sum()),
        "errors": dict(counts["error"].most_common()),
        "warnings": dict(counts["warning"].most_common()),
        "models": job.models,
        "fingerprint": job.fingerprint,
        "problems": listed,
        "problems_not_listed": max(0, total - max_problems) if max_problems else 0,
    }


def _summary(report: dict[str, Any]) -> str:
    """The last lines of the text form."""
    lines = []
    if report["problems_not_listed"]:
        lines.append(f"... and {report['problems_not_listed']} more problems (--max-problems 0 lists all)")
    lines.append(f"{report['requests']} requests: {report['good']} good, {report['bad']} bad")
    for kind in ("errors", "warnings"):
        if report[kind]:
            lines.append(f"{kind}: " + ", ".join(f"{count} {code}" for code, count in report[kind].items()))
    return "\n".join(lines)
