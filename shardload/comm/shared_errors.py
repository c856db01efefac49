"""How does the error of one rank get to the others, and which rank shows its traceback?

It travels as text, from which every rank makes an error of the same type and text.

An error that the ranks have agreed on is the same everywhere: four ranks would print it four times, each with a traceback. So
rank 0 shows it, and so does a rank whose error has a cause of its own, which no other rank has seen. Other ranks print one
line; if there are many ranks, most print nothing.

Where the call or the file is at fault, the traceback ends at the user's own line: the calls inside shardload, and
causes that the text has already, say nothing more. With ``SHARDLOAD_TRACEBACKS=all`` all ranks show everything.

Only the text that Python itself prints for an uncaught exception is cut. Code that handles the exception, and a hook that was
set by others (IPython), get all of it.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

import numpy as np

from shardload.errors import ConfigError, PeerError, ShardloadError, SourceError, StallError, VerifyError, chain_of

_TYPES: tuple[type[ShardloadError], ...] = (ShardloadError, ConfigError, SourceError, PeerError, StallError, VerifyError)
_ERRORS = {e.__name__: e for e in _TYPES}
_MORE: dict[type[ShardloadError], tuple[str, ...]] = {SourceError: ("path", "dataset", "chunk"), VerifyError: ("index",)}


def as_shardload(error: BaseException | None, rank: int | None) -> ShardloadError:
    """The error itself if it is a ShardloadError; otherwise a PeerError of `rank` in its place."""
    message = message_of(error)
    # Also as the cause of another error: neither the file nor the call is to blame.
    lacks = any(isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE) for cause in chain_of(error))
    if lacks:
        text = f"{message} (this process may open no more files: `ulimit -n 4096` before the job starts, or close some)"
        return PeerError(text if isinstance(error, ShardloadError) else f"{type(error).__name__}: {text}", rank=rank)
    if isinstance(error, RuntimeError) and "start new thread" in message:
        text = f"{message} (the limit of processes and threads is reached: `ulimit -u`, or pids.max of the job's control group)"
        return PeerError(f"{type(error).__name__}: {text}", rank=rank)
    if isinstance(error, ShardloadError):
        if error.rank is None:
            error.rank = rank
        return error
    return PeerError(f"{type(error).__name__}: {message}", rank=rank)


def message_of(error: object) -> str:
    """The text of an error. Some errors of libraries fail when they are turned into text, and the other ranks are waiting."""
    try:
        return str(error)
    except Exception as failure:
        return f"it has no text, because making it fails ({type(failure).__name__})"


def to_json(error: ShardloadError) -> str:
    """An error as text. Never fails, whatever values the error has, because the other ranks are waiting."""
    kind = next(name for name, e in reversed(_ERRORS.items()) if isinstance(error, e))
    names = _MORE.get(_ERRORS[kind], ())
    fields = {k: getattr(error, k) for k in names}
    return json.dumps({"kind": kind, "text": str(error), "rank": error.rank, **fields}, default=_plain)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else str(value)


def from_json(text: str, first: int, n_failed: int, size: int) -> ShardloadError:
    """The error, made from its text. Its message says which rank failed, unless all `size` ranks did."""
    fields = json.loads(text)
    kind, message, rank = fields.pop("kind"), fields.pop("text"), fields.pop("rank")
    if n_failed == size:
        rank = None  # all ranks found it: it belongs to no single rank
    else:
        more = f" (and on {n_failed - 1} more)" if n_failed > 1 else ""
        message = f"on rank {first} of {size}{more}: {message}"
    for name in ("chunk", "index"):
        if fields.get(name) is not None:
            fields[name] = tuple(fields[name])
    return _ERRORS[kind](message, rank=rank, **fields)


_MOST_LINES = 8  # ranks that print a line
_AGREED = "_shardload_rank"  # attribute of an agreed error: the rank it is raised on, or None if that rank shows it
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"  # not resolved: frames name files as they were imported, over links too
_ALL = "SHARDLOAD_TRACEBACKS=all shows the calls inside shardload\n"


def share(error: ShardloadError, rank: int, size: int, shows: bool | None = None) -> None:
    """Mark an error that all `size` ranks raise, here on `rank`. From now on uncaught exceptions are printed by `show`.

    `shows`: whether this rank shows it. By default these do: rank 0, the error's rank, a rank with a cause of its own.
    """
    if shows is None:
        cause = error.__cause__
        shows = rank in (0, error.rank) or (cause is not None and message_of(cause) not in str(error))
    setattr(error, _AGREED, None if shows or size == 1 else rank)
    if is_pythons_own():
        sys.excepthook = show


def is_pythons_own() -> bool:
    """True if uncaught exceptions are printed by Python or by `show`, and end the program."""
    is_own = sys.excepthook in (sys.__excepthook__, show)
    return is_own and not hasattr(sys, "ps1") and not sys.flags.interactive


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception. Used as ``sys.excepthook``."""
    text = printed_text(error)
    if text is None:
        sys.__excepthook__(kind, error, trace)
    else:
        sys.stderr.write(text)  # in one write, because other ranks write to the same terminal
        sys.stderr.flush()


def printed_text(error: BaseException | None) -> str | None:
    """The text that this rank prints for an exception; None: all of it."""
    if error is None or os.environ.get("SHARDLOAD_TRACEBACKS") == "all":
        return None
    rank = getattr(error, _AGREED, None)
    if rank is not None:
        line = f"rank {rank}: {type(error).__name__}: {error} (as on other ranks; SHARDLOAD_TRACEBACKS=all shows where)\n"
        return line if rank < _MOST_LINES else ""
    if not hasattr(error, _AGREED) or not isinstance(error, (ConfigError, SourceError)):
        return None
    report = traceback.TracebackException.from_exception(error)
    n_user_frames = next((i for i, frame in enumerate(report.stack) if frame.filename.startswith(_PACKAGE)), 0)
    if n_user_frames:
        report.stack = traceback.StackSummary.from_list(report.stack[:n_user_frames])
    cause = error.__cause__
    if is_cause_told := cause is not None and message_of(cause) in str(error):
        report.__cause__, report.__suppress_context__ = None, True
    elif isinstance(cause, ShardloadError):  # this rank's own: its text says all
        report.__cause__ = of_rank = traceback.TracebackException(type(cause), cause, None)
        of_rank.__cause__, of_rank.__suppress_context__ = None, True
    return "".join([*report.format(), _ALL]) if n_user_frames or is_cause_told else None
