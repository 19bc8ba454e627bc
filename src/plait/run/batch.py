"""A whole run on the embedded engine: check, plan, run, write, learn. What ``plait run`` does behind its display."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from plait.data.job import LISTED_PROBLEMS, BatchRequest, Job, open_job
from plait.errors import InputError
from plait.events import EngineRequest, Event, Failed, Finished, Step
from plait.lengths import Lengths
from plait.model.calibrate import Calibrator
from plait.plan import Outlook, outlook, scheduler
from plait.run.embedded import Embedded
from plait.run.executor import Observer, Options, Outcome, Planned, Run, open_run
from plait.run.prepare import Overflow, Prepared, prepare
from plait.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What to run and how to plan it."""

    files: Sequence[str]
    policy: str
    seed: int = 0
    on_overflow: Overflow = "error"
    default_max_tokens: int | None = None
    allow_duplicates: bool = False
    strict: bool = False
    """Stop before starting if any request cannot run."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A run that is about to start; what a display needs to know of it."""

    job: Job
    run: Run
    prepared: Prepared
    lengths: Lengths
    scheduler: Scheduler
    forecast: Outlook
    """Under the chosen policy, then under file order."""


Watch = Callable[[Ready], Observer]


def run_batch(
    batch: BatchOptions, place: Embedded, options: Options, watch: Watch, say: Callable[[str], None]
) -> Outcome:
    """Run the files to their end, or as far as it goes. ``say`` gets a line before each slow step.

    Raises PlaitError where nothing could be started; afterwards the outcome says how it ended.
    """
    with (
        tempfile.TemporaryDirectory(prefix="plait-") as workdir,
        open_job(batch.files, workdir, batch.allow_duplicates) as job,
    ):
        if batch.strict and job.bad.any():
            raise InputError(_listed(str(p) for p in job.iter_problems() if p.severity == "error"))
        with open_run(job, options) as run:
            if run.complete:
                say("nothing left to run: every request has been recorded by an earlier run")
                return run.finish()
            return _execute(batch, place, job, run, watch, say)


def _execute(
    batch: BatchOptions, place: Embedded, job: Job, run: Run, watch: Watch, say: Callable[[str], None]
) -> Outcome:
    say(f"planning {len(run.rows):,} requests")
    prepared = prepare(
        job, run.rows, place.tokenizer(), place.machine.capacity, batch.on_overflow, batch.default_max_tokens
    )
    if batch.strict and prepared.faults:
        raise InputError(_listed(str(job.problem(row, fault)) for row, fault in prepared.faults.items()))
    lengths = Lengths.unknown(prepared.table, prepared.tree, batch.seed)
    policies = dict.fromkeys((batch.policy, "fcfs"))
    forecast = outlook(prepared.table, prepared.tree, lengths, place.machine, list(policies), batch.seed)
    chosen = scheduler(prepared.table, prepared.tree, lengths, place.machine, batch.policy, batch.seed)
    planned = Planned(prepared.rows, chosen, _request_maker(prepared), prepared.faults)
    say(f"loading {place.model.name}")
    engine = place.engine()
    try:
        observer = _Calibrating(watch(Ready(job, run, prepared, lengths, chosen, forecast)), place)
        outcome = run.execute(planned, engine, observer)
    finally:
        engine.close()
    observer.finish()
    return outcome


def _request_maker(prepared: Prepared) -> Callable[[int, BatchRequest], EngineRequest]:
    """Requests with their token ids and the cap of each of their sequences."""
    table = prepared.table
    assert table.tokens is not None and table.offsets is not None
    tokens, offsets = table.tokens, table.offsets

    def make(i: int, request: BatchRequest) -> EngineRequest:
        cap = int(table.max_tokens[i]) // int(request.body.get("n") or 1)
        ids = tokens[offsets[i] : offsets[i + 1]]
        return EngineRequest(i, request.url, request.body, ids, cap, int(prepared.tree.node_of[i]))

    return make


class _Calibrating:
    """Passes everything on, and fits the machine's step times to the steps it sees."""

    def __init__(self, observer: Observer, place: Embedded) -> None:
        self._observer, self._place = observer, place
        self._calibrator = Calibrator(place.machine.step_time)

    def event(self, event: Event) -> None:
        """Take note of steps."""
        if isinstance(event, Step):
            self._calibrator.observe(event)
        self._observer.event(event)

    def retrying(self, event: Finished | Failed, after_s: float) -> None:
        """Pass on."""
        self._observer.retrying(event, after_s)

    def heartbeat(self, now_s: float) -> None:
        """Pass on."""
        self._observer.heartbeat(now_s)

    def finish(self) -> None:
        """Keep what was learnt, if there were steps enough to learn from."""
        if self._calibrator.seen >= MIN_CALIBRATION_STEPS:
            self._place.learn(self._calibrator.fit())


MIN_CALIBRATION_STEPS = 50


def _listed(problems: Any) -> str:
    first = list(islice(problems, LISTED_PROBLEMS))
    return "--strict: not started.\n" + "\n".join(first)
