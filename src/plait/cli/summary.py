"""How a run went, for people and for machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from plait.cli.display import duration
from plait.plan import Outlook
from plait.run.batch import Report
from plait.run.files import RunFiles
from plait.run.results import ErrorCount, read_results, top_errors

LEAST_GAIN = 0.02
"""Below this share of the time, ordering is said to gain nothing."""


def summary_dict(report: Report, output: Path, exit_code: int) -> str:
    """One JSON object on one line; ``exit_code`` is what the command ends with."""
    outcome, files = report.outcome, RunFiles.of(output)
    found: dict[str, Any] = {
        "total": outcome.total,
        "answered": outcome.answered,
        "failed": outcome.failed,
        "remaining": outcome.remaining,
        "exit_code": exit_code,
        "reason": outcome.reason or None,
        "output": str(files.output),
        "errors": str(files.errors) if outcome.failed else None,
        "top_errors": [
            {"message": error.message, "count": error.count, "custom_id": error.custom_id} for error in _errors(files)
        ],
        "run": report.numbers.as_dict() if report.numbers else None,
        "unique_prompt_tokens": report.unique_prompt_tokens,
        "driver_cpu_s": report.driver_cpu_s,
        "predicted_s": _seconds(report.forecast),
        "hindsight_s": _seconds(report.hindsight),
    }
    return msgspec.json.encode(found).decode()


def summary_text(report: Report, output: Path) -> str:
    """A few lines."""
    outcome, files = report.outcome, RunFiles.of(output)
    lines = [f"{outcome.answered:,} of {outcome.total:,} answered, {outcome.failed:,} failed -> {files.output}"]
    if report.numbers is not None:
        lines += _figures(report)
    for error in _errors(files):
        example = error.place if error.custom_id is None else f"custom_id {error.custom_id!r}"
        lines.append(f"  {error.count:,} x {error.message}" + (f" ({example})" if example else ""))
    if outcome.failed:
        lines.append(f"failed requests: {files.errors}")
    if outcome.reason:
        lines.append(f"stopped early: {outcome.reason}")
    if outcome.remaining:
        lines.append(f"{outcome.remaining:,} requests are left; run the same command again to go on")
    return "\n".join(lines)


def _figures(report: Report) -> list[str]:
    numbers = report.numbers
    assert numbers is not None
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(numbers.finish_reasons.items()))
    cut = f" ({numbers.truncated:,} cut off at max_tokens)" if numbers.truncated else ""
    share = numbers.reused_prompt_tokens / numbers.prompt_tokens if numbers.prompt_tokens else 0.0
    if not numbers.answered:
        return []
    lines = [
        f"{duration(numbers.duration_s)} ({numbers.duration_s:.1f} s), {numbers.tokens_per_s:,.0f} tokens/s, "
        f"mean completion {numbers.mean_completion_s:.1f} s, tail {numbers.tail_share:.0%} of the time",
        f"prompt tokens: {numbers.prompt_tokens:,}, computed {numbers.computed_prompt_tokens:,}, "
        f"reused {numbers.reused_prompt_tokens:,} ({share:.0%}); output tokens: {numbers.output_tokens:,}",
        f"finish reasons: {reasons or 'none'}{cut}; preemptions: {numbers.preemptions:,}",
    ]
    return lines if report.outcome.remaining else [*lines, *_beside_file_order(report)]


def _beside_file_order(report: Report) -> list[str]:
    """The chosen order and file order, both simulated with the same lengths and step times; only their ratio where the
    engine's step times were never seen."""
    found = report.hindsight or report.forecast
    if found is None:
        return []
    chosen, base = found.chosen, found.forecasts[-1]
    if base.makespan_s - chosen.makespan_s < LEAST_GAIN * base.makespan_s:
        return ["estimated: file order would have taken about as long; no gain from ordering was to be expected here"]
    ratio = f"{base.makespan_s / chosen.makespan_s:.2f} x as long"
    if report.hindsight is None:
        return [f"estimated: file order would have taken {ratio}"]
    times = f"{chosen.policy} {chosen.makespan_s:.1f} s, file order {base.makespan_s:.1f} s"
    return [f"estimated: {times} ({ratio})"]


def _seconds(found: Outlook | None) -> dict[str, float] | None:
    return None if found is None else {forecast.policy: forecast.makespan_s for forecast in found.forecasts}


def _errors(files: RunFiles) -> list[ErrorCount]:
    return top_errors(read_results(files.errors)) if files.errors.exists() else []
