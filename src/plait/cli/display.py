"""What a run shows while it goes: a live bar on a terminal, plain lines elsewhere, JSON for machines."""

from __future__ import annotations

import math
import sys
from typing import Any

import msgspec

from plait.events import Event, Failed, Finished
from plait.report.metrics import Beat
from plait.run.watcher import Ready

PLAIN_EVERY_S = 5.0
"""Seconds between plain lines, whether anything was completed or not."""


def display(mode: str, ready: Ready) -> Display:
    """The display for ``--progress``: auto, bar, plain, json or none."""
    if mode == "auto":
        mode = "bar" if sys.stderr.isatty() else "plain"
    return {"bar": Bar, "plain": Plain, "json": Json, "none": Display}[mode](ready)


class Display:
    """Shows nothing; what the others have in common. Satisfies ``plait.run.options.Observer``."""

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.failed = self.retries = 0

    def event(self, event: Event) -> None:
        """Count failures; the figures themselves are ``LiveStats``'."""
        if isinstance(event, Failed) or (isinstance(event, Finished) and event.status_code != 200):
            self.failed += 1

    def retrying(self, event: Finished | Failed, after_s: float) -> None:
        """Count it."""
        self.retries += 1

    def heartbeat(self, now_s: float) -> None:
        """Draw, about once a second."""
        self.show(self.ready.beat(now_s))

    def show(self, beat: Beat) -> None:
        """Draw one moment."""

    def close(self) -> None:
        """Leave the terminal as it was."""

    def oldest(self, beat: Beat) -> str | None:
        """custom_id of the request that has been running longest."""
        return None if beat.oldest_row is None else self.ready.custom_id(beat.oldest_row)

    def text(self, beat: Beat) -> str:
        """The figures on one line."""
        parts = [
            f"{beat.done:,}/{beat.total:,} done",
            f"{beat.running} running, {beat.waiting:,} waiting",
            f"prompt {beat.prompt_tokens_per_s:,.0f} tok/s, output {beat.output_tokens_per_s:,.0f} tok/s",
            f"cached {beat.cached_share:.0%}",
        ]
        if beat.kv_tokens:
            parts.append(f"KV {beat.kv_tokens / self.ready.kv_tokens:.0%}")
        if self.failed or self.retries:
            parts.append(f"{self.failed} failed, {self.retries} retried")
        if beat.oldest_row is not None:
            parts.append(f"oldest {self.oldest(beat)!r} {beat.oldest_s:.0f} s")
        parts.append(f"ETA {duration(beat.eta_s)}")
        return " | ".join(parts)


class Plain(Display):
    """One line every few seconds on standard error."""

    def __init__(self, ready: Ready) -> None:
        super().__init__(ready)
        self._due_s = -math.inf

    def show(self, beat: Beat) -> None:
        """A line, if it is time for one."""
        if beat.t_s >= self._due_s:
            self._due_s = beat.t_s + PLAIN_EVERY_S
            print(self.text(beat), file=sys.stderr, flush=True)


class Json(Display):
    """One JSON object a second on standard error."""

    def show(self, beat: Beat) -> None:
        """The figures under their names in ``plait.report.metrics.Beat``."""
        figures: dict[str, Any] = {name: getattr(beat, name) for name in beat.__slots__ if name != "oldest_row"}
        figures["eta_s"] = None if math.isnan(beat.eta_s) else beat.eta_s
        figures |= {"oldest_custom_id": self.oldest(beat), "failed": self.failed, "retried": self.retries}
        print(msgspec.json.encode(figures).decode(), file=sys.stderr, flush=True)


class Bar(Display):
    """A progress bar with the figures below it."""

    def __init__(self, ready: Ready) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(ready)
        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        self._live.start()

    def show(self, beat: Beat) -> None:
        """Redraw."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        lines = Table.grid()  # a row each: a group would put the figures beside the bar, cut off at the terminal's edge
        lines.add_row(ProgressBar(total=beat.total, completed=beat.done, width=60))
        lines.add_row(Text(self.text(beat)))
        self._live.update(lines, refresh=True)

    def close(self) -> None:
        """Take the bar away."""
        self._live.stop()


def duration(seconds: float) -> str:
    """``1:02:03``, ``2:03`` or ``?`` for nan."""
    if math.isnan(seconds):
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
