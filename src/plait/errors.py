"""Everything Plait raises on purpose.

    PlaitError
    ├── UsageError        exit 2: an option or a combination of options that cannot work
    ├── InputError        exit 2: a file, line or trace row that cannot be used
    ├── CapacityError     exit 2: a request or setting that can never fit the KV cache or the context
    ├── EngineError       exit 3: the engine is unreachable, died or gave up; the run can be resumed
    └── JournalError      exit 3: the run's own files could not be written or are not usable (disk full, lock held)

A message says what was wrong, where (file, line, custom_id), what is allowed, and what to do next.
Only ``plait.cli`` turns these into exit codes.
"""

from __future__ import annotations


class PlaitError(Exception):
    """Base of every deliberate error; ``exit_code`` is what the command line returns for it."""

    exit_code = 2


class UsageError(PlaitError):
    """An option, or a combination of options, that cannot work."""


class InputError(PlaitError):
    """A file, line or row that cannot be used; the message names it."""


class CapacityError(PlaitError):
    """A request that can never fit the KV cache or the context window."""


class EngineError(PlaitError):
    """The engine cannot be reached, died or gave up. Finished work is kept; the run can be resumed."""

    exit_code = 3


class JournalError(PlaitError):
    """The run's own files cannot be written or read (disk full, lock held by another run, foreign journal)."""

    exit_code = 3
