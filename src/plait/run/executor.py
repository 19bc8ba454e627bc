"""A run: what is still to do of a job, doing it on an engine, and the files at the end.

with open_run(job, options) as run:             # lock, journal, resume; nothing is loaded yet
    if len(run.rows):                           # job rows to compute, int64 [k]
        outcome = run.execute(planned, engine)  # planned: a scheduler over (some of) those rows
    else:
        outcome = run.finish()                  # already complete: the files are written again
sys.exit(outcome.exit_code)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import TracebackType

import msgspec
import numpy as np

from plait.data.job import BatchRequest, Job
from plait.data.problems import Fault
from plait.drive import Stop, drive
from plait.errors import EngineError, InputError, UsageError
from plait.events import Engine, EngineRequest, Event, Failed, Finished
from plait.run.adopt import adopted_records
from plait.run.duplicates import equal_rows
from plait.run.files import RunFiles
from plait.run.final import write_results
from plait.run.journal import ANSWERED, FAILED, FAULTED, FORMAT, NONE, Header, Journal, Record, State
from plait.run.lines import LineWriter, is_json_line, is_server_fault
from plait.run.lock import RunLock
from plait.run.options import Observer, Options, Outcome, Planned, Unwatched
from plait.run.stop import Stopper, interrupts
from plait.table import I64

__all__ = ["Observer", "Options", "Outcome", "Planned", "Run", "execute", "open_run"]


class Run:
    """An opened run; use it in a ``with`` statement. Made by ``open_run``."""

    rows: I64
    """Job rows to compute, int64 [k], in input order: one of each group of equal requests."""
    adopted: int
    """Rows taken over from result files without a journal, matched by custom_id."""
    files: RunFiles

    def __init__(self, job: Job, options: Options) -> None:
        self.files = RunFiles.of(options.output)
        self.files.refuse_inputs(options.inputs)
        self.adopted = 0
        self._job, self._options = job, options
        self._lines = LineWriter(job.fingerprint, options.secrets)
        self._lock = RunLock(self.files.lock)
        try:
            self._journal = self._open_journal()
        except BaseException:
            self._lock.release()
            raise
        self._copies: dict[int, list[int]] = {}  # row to compute -> equal rows that get its answer
        self._planned: Planned | None = None
        self._requests: dict[int, BatchRequest] = {}  # at the engine, by the scheduler's row
        self._tries: dict[int, int] = {}
        self._faults_in_a_row = 0
        self._random = random.Random(options.seed)
        self.stopper = Stopper(options.grace_s)
        try:
            self.rows = self._to_do()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def state(self) -> State:
        """What is recorded so far, over all runs of the job."""
        return self._journal.state

    @property
    def complete(self) -> bool:
        """Whether nothing is left to run."""
        return not len(self.rows)

    def execute(self, planned: Planned, engine: Engine, observer: Observer | None = None) -> Outcome:
        """Run the planned rows, then write the final files. The engine is not closed.

        An engine that dies ends the run with ``Outcome.reason``. Raises JournalError when the run's own files cannot be
        written, and InputError when an input changed under the run: what was recorded until then is kept.
        """
        watcher = observer or Unwatched()
        self._planned = planned
        try:
            for row, fault in planned.faults.items():
                self._refuse(row, fault)
            with interrupts(self.stopper):
                drive(
                    planned.scheduler,
                    engine,
                    self._fetch,
                    lambda event: self._take(event, watcher),
                    stop=self.stopper.wanted,
                    heartbeat=self._beat(watcher),
                )
        except EngineError as error:
            self.stopper.give_up(str(error))
        except InputError:
            self.finish()
            raise
        finally:
            self._planned = None
        return self.finish()

    def finish(self) -> Outcome:
        """Write the final files from what is recorded, and say what they hold."""
        self._journal.sync()
        write_results(self._job, self._journal, self._lines, self.files, self._options.order)
        status = self.state.status
        answered = int(np.count_nonzero(status == ANSWERED))
        failed = int(np.count_nonzero((status > ANSWERED) | self._job.bad))
        remaining = self._job.n - answered - failed
        return Outcome(self._job.n, answered, failed, remaining, self.stopper.interrupted, self.stopper.reason)

    def close(self) -> None:
        """Sync the journal and let go of the lock. Idempotent."""
        try:
            self._journal.close()
        finally:
            self._lock.release()

    # ---- opening

    def _open_journal(self) -> Journal:
        job, options, files = self._job, self._options, self.files
        settings = msgspec.json.decode(msgspec.json.encode(dict(options.settings)))
        header = Header(FORMAT, job.fingerprint, job.n, settings, dict(options.notes))
        if options.restart:
            Journal.create(files.live, header)
        elif not files.live.exists():
            Journal.create(files.live, header, adopted_records(job, files))
            journal = Journal(files.live, job.n)
            self.adopted = int(np.count_nonzero(journal.state.status))
            return journal
        journal = Journal(files.live, job.n)
        try:
            journal.check_same_job(job.fingerprint, settings)
        except BaseException as error:
            journal.close()
            if not (journal.empty and isinstance(error, UsageError)):
                raise
            Journal.create(files.live, header)  # the run stopped before it recorded anything: nothing is lost
            return Journal(files.live, job.n)
        return journal

    def _to_do(self) -> I64:
        """Rows that have to be computed; equal requests that an earlier run answered are copied on the way."""
        again = {"server": [NONE, FAULTED], "all": [NONE, FAULTED, FAILED], "none": [NONE]}[self._options.retry_failed]
        wanted = np.isin(self.state.status, again) & ~self._job.bad
        if self._options.dedupe:
            for group in equal_rows(self._job):
                missing = group[wanted[group]]
                answered = group[self.state.status[group] == ANSWERED]
                if len(answered) and len(missing):
                    self._copy(int(answered[0]), missing.tolist())
                    wanted[missing] = False
                elif len(missing) > 1:
                    self._copies[int(missing[0])] = missing[1:].tolist()
                    wanted[missing[1:]] = False
        return np.flatnonzero(wanted).astype(np.int64)

    def _copy(self, source: int, rows: list[int]) -> None:
        """Answer rows with the recorded answer of an equal request."""
        answer = msgspec.json.decode(self._journal.line(source), type=_Answer).response
        for row in rows:
            request = self._job.request(row)
            line = self._lines.answer(
                row, request.custom_id, request.metadata, answer.status_code, memoryview(answer.body).tobytes()
            )
            self._journal.append(line, Record(row, True, copy_of=source))

    # ---- running

    def _beat(self, watcher: Observer) -> Callable[[float], None]:
        due_s = 0.0

        def beat(now_s: float) -> None:
            nonlocal due_s
            self._journal.tick()
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + self._options.heartbeat_s
                watcher.heartbeat(now_s)

        return beat

    def _fetch(self, i: int) -> EngineRequest:
        assert self._planned is not None
        request = self._job.request(int(self._planned.rows[i]))
        self._requests[i] = request
        return self._planned.request(i, request)

    def _take(self, event: Event, watcher: Observer) -> float | None:
        """Record what ends a row, or say after how many seconds to try it again."""
        if isinstance(event, Finished) and not is_json_line(event.body):
            message = f"the engine's answer (status {event.status_code}) is not one JSON object"
            event = Failed(event.row, event.t_s, "invalid_response", message, retryable=True)
        if isinstance(event, Finished) and event.status_code == 200:
            self._faults_in_a_row = 0
            self._record(event)
        elif isinstance(event, Finished | Failed):
            retry_s = self._fail(event)
            if retry_s is not None:
                watcher.retrying(event, retry_s)
                return retry_s
        watcher.event(event)
        return None

    def _fail(self, event: Finished | Failed) -> float | None:
        """Record a failure, unless it is worth another try."""
        if is_server_fault(event):
            tries = self._tries[event.row] = self._tries.get(event.row, 0) + 1
            if self.stopper.wanted() is not Stop.RUN:
                return 0.0  # no verdict: it runs again when the run is resumed
            if tries <= self._options.retries:
                full_s = min(self._options.backoff_s * 2.0 ** (tries - 1), self._options.max_backoff_s)
                return full_s * self._random.uniform(0.5, 1.0)
            self._faults_in_a_row += 1
        self._record(event)
        if self._faults_in_a_row >= self._options.max_failures > 0:
            why = event.message if isinstance(event, Failed) else f"status {event.status_code}"
            self.stopper.give_up(f"{self._faults_in_a_row} requests in a row failed by the server's fault: {why}")
        return None

    def _record(self, event: Finished | Failed) -> None:
        """Put a row's end, and that of its copies, into the journal."""
        request = self._requests.pop(event.row)
        record = _record_of(request.row, event)
        self._journal.append(self._line(request, event), record)
        for row in self._copies.get(request.row, ()):
            copy = Record(row, record.ok, record.retry, record.t, copy_of=request.row)
            self._journal.append(self._line(self._job.request(row), event), copy)

    def _line(self, request: BatchRequest, event: Finished | Failed) -> bytes:
        notes = self._planned.notes.get(request.row, {}) if self._planned else {}
        metadata = {**request.metadata, **notes}
        if isinstance(event, Failed):
            return self._lines.failure(request.row, request.custom_id, metadata, event)
        return self._lines.answer(request.row, request.custom_id, metadata, event.status_code, event.body)

    def _refuse(self, row: int, fault: Fault) -> None:
        """Record a row, and its copies, that turned out not to fit."""
        for each in (row, *self._copies.get(row, ())):
            metadata = self._job.request(each).metadata
            line = self._lines.refusal(each, self._job.problem(each, fault), metadata)
            self._journal.append(line, Record(each, False))


def open_run(job: Job, options: Options) -> Run:
    """Lock the output, open or make its journal, and find what is still to do.

    Raises UsageError for an output that cannot be used, belongs to another job or to other settings; JournalError if
    another run holds it, or its journal is damaged or cannot be written.
    """
    return Run(job, options)


def execute(
    job: Job, plan: Callable[[I64], Planned], engine: Engine, options: Options, observer: Observer | None = None
) -> Outcome:
    """Open, plan the rows that are left, run them, write the files. ``plan`` is not called if nothing is left."""
    with open_run(job, options) as run:
        return run.finish() if run.complete else run.execute(plan(run.rows), engine, observer)


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Answer(msgspec.Struct):
    response: _Response


def _record_of(row: int, event: Finished | Failed) -> Record:
    if isinstance(event, Finished) and event.status_code == 200:
        return Record(
            row,
            True,
            t=round(event.t_s, 3),
            prompt=event.prompt_tokens,
            cached=event.cached_tokens,
            output=event.output_tokens,
            finish=event.finish_reasons,
        )
    return Record(row, False, retry=is_server_fault(event), t=round(event.t_s, 3))
