"""What a run learns while it goes: its numbers, step times and output lengths; and what it says by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from plait.data.job import Job
from plait.events import Event, Failed, Finished, Step
from plait.lengths import Lengths
from plait.model.calibrate import Calibrator
from plait.plan import Machine, Objective, Outlook, outlook
from plait.report.metrics import Beat, LiveStats, Summary
from plait.run.executor import Observer, Run
from plait.run.place import Place
from plait.run.prepare import Prepared
from plait.scheduler import Scheduler

FAR_LONGER = 1.5
"""Times the expected time left from which on it is also said how long it could take."""
SAID_AT = 0.1
"""Share of its time after which a run says how long it will take in all."""
MIN_CALIBRATION_STEPS = 50
"""Steps a run must have had before its step times are worth keeping."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ready:
    """A run that is about to start; what a display needs to know of it."""

    job: Job
    run: Run
    prepared: Prepared
    scheduler: Scheduler
    stats: LiveStats
    forecast: Outlook
    """Under the chosen policy, then under file order, with lengths as assumed before anything ran."""
    kv_tokens: int

    def custom_id(self, i: int) -> str | None:
        """Of the scheduler's row i."""
        return self.job.custom_id(int(self.prepared.rows[i]))

    def beat(self, now_s: float) -> Beat:
        """What there is to show now."""
        return self.stats.beat(now_s, self.scheduler.running, self.scheduler.waiting)


class Watcher:
    """Collects a run's numbers, step times and output lengths, and passes every event on to the display."""

    def __init__(self, observer: Observer, ready: Ready, start_s: float, calibrator: Calibrator, say: Say) -> None:
        self.summary = Summary(start_s)
        self._observer, self._ready, self._calibrator = observer, ready, calibrator
        self._say, self._said, self._told_of_stop = say, False, False
        self._output = np.full(ready.prepared.table.n, -1, np.int64)

    def event(self, event: Event) -> None:
        """Take note, then pass on."""
        self.summary.event(event)
        self._ready.stats.event(event)
        if isinstance(event, Step):
            self._calibrator.observe(event)
        elif isinstance(event, Finished) and event.status_code == 200:
            self._output[event.row] = event.output_tokens
        self._observer.event(event)

    def retrying(self, event: Finished | Failed, after_s: float) -> None:
        """Pass on."""
        self._observer.retrying(event, after_s)

    def heartbeat(self, now_s: float) -> None:
        """Pass on; say once, after the first tenth, how long the whole run will take by what it has shown."""
        self._observer.heartbeat(now_s)
        stopper = self._ready.run.stopper
        if stopper.interrupted and not self._told_of_stop:
            self._told_of_stop = True
            left_s, running = stopper.left_s(), self._ready.scheduler.running
            self._say(f"stopping: at most {left_s:.0f} s for {running:,} running requests; interrupt again to stop now")
        if not self._said:
            beat = self._ready.beat(now_s)
            total_s = beat.elapsed_s + beat.eta_s
            if beat.eta_s > 0 and beat.elapsed_s >= SAID_AT * total_s:
                self._said = True
                most = self._most(beat)
                self._say(f"about {total_s:,.0f} s in all, by the {beat.done:,} answers and the steps so far{most}")

    def _most(self, beat: Beat) -> str:
        """How long it could take, where that is another matter."""
        longest_s = self._ready.stats.longest_s()
        if longest_s is None or not longest_s > FAR_LONGER * beat.eta_s:
            return ""
        return f"; {beat.elapsed_s + longest_s:,.0f} s if each answer went on to its max_tokens"

    def hindsight(self, policy: str, seed: int, place: Place) -> Outlook | None:
        """Forecast with what is known now, where every request of the run was answered; step times and output lengths
        are kept for later runs."""
        prepared = self._ready.prepared
        if place.history is not None:
            begun = Lengths.unknown(prepared.table, prepared.tree, seed)
            place.history.learn(begun, prepared.table, prepared.tree, self._output)
        if self._calibrator.seen < MIN_CALIBRATION_STEPS:
            return None
        calibration = self._calibrator.fit()
        place.learn(self._calibrator)
        if np.any(self._output < 0):
            return None
        known = Lengths.known(prepared.table, np.maximum(self._output, 1))
        machine = Machine(place.machine.capacity, calibration.step_time)
        return outlook(prepared.table, prepared.tree, known, machine, ["fcfs"], seed, Objective(policy=policy))
