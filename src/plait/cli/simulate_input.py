"""What ``plait simulate`` runs on: a length trace, or a batch file whose answers are not known yet."""

from __future__ import annotations

import tempfile
import zlib
from itertools import islice
from pathlib import Path

import click
import numpy as np

from plait.data.traces import Trace, is_mooncake, read_trace, require_fit
from plait.errors import InputError
from plait.events import Capacity

TRACE_KINDS = (".csv", ".parquet")


def load(path: str, capacity: Capacity, tokenizer: str | None, seed: int) -> Trace:
    """The file as a trace that fits ``capacity``. Raises InputError and CapacityError naming what cannot run."""
    if is_trace(path):
        trace = read_trace(path)
        require_fit(trace, capacity.kv_tokens)
        return trace
    return _batch(path, capacity, tokenizer, seed)


def is_trace(path: str) -> bool:
    """Whether the file is a table of lengths or a Mooncake trace; anything else is read as a batch file. What cannot be
    read at all counts as a trace, whose reader says why."""
    name = path.lower().removesuffix(".gz")
    if name.endswith(TRACE_KINDS) or not Path(path).is_file():
        return True
    if not name.endswith(".jsonl"):
        return False
    try:
        return is_mooncake(path)
    except (OSError, EOFError, zlib.error):
        return True


def _batch(path: str, capacity: Capacity, tokenizer: str | None, seed: int) -> Trace:
    """A batch file, tokenised as ``plait plan`` does; output lengths are drawn from what is known before a run: a prior
    of 256 tokens on average, cut at each request's max_tokens."""
    from plait.data.job import LISTED_PROBLEMS, open_job
    from plait.data.tokenize import Tokenizer
    from plait.engine.models import find_model
    from plait.lengths import Lengths
    from plait.run.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="plait-simulate-") as workdir, open_job([path], workdir) as job:
        encode = Tokenizer.load(find_model(tokenizer, lambda line: click.echo(line, err=True)).path)
        ready = prepare(job, np.flatnonzero(~job.bad), encode, capacity)
        problems = [problem for problem in job.iter_problems() if problem.severity == "error"]
        problems += [job.problem(row, fault) for row, fault in sorted(ready.faults.items())]
        if problems:
            listed = "\n".join(str(problem) for problem in islice(problems, LISTED_PROBLEMS))
            raise InputError(f"{len(problems)} of the {job.n} requests cannot run\n{listed}")
    lengths = Lengths.unknown(ready.table, ready.tree, seed)
    drawn = lengths.drawn(np.arange(ready.table.n), np.zeros(ready.table.n, np.int64))
    return Trace(Path(path).name, ready.table, ready.tree, np.maximum(1, np.rint(drawn)).astype(np.int64))
