"""Which rank shows the traceback of an error that all ranks raise?

An error that the ranks have agreed on is the same everywhere: four ranks would print it four times, each with a traceback. So
rank 0 shows it, and so does a rank whose error has a cause of its own, which no other rank has seen. Other ranks print one
line; if there are many ranks, most print nothing.

Where the call or the file is at fault, the traceback ends at the user's own line: the calls inside shardload, and
causes that the text has already, say nothing more. With ``SHARDLOAD_TRACEBACKS=all`` all ranks show everything.

Only the text that Python itself prints for an uncaught exception is cut. Code that handles the exception, and a hook that was
set by others (IPython), get all of it.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from shardload.comm.error_codec import message_of
from shardload.errors import ConfigError, ShardloadError, SourceError

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
    text = text_of(error)
    if text is None:
        sys.__excepthook__(kind, error, trace)
    else:
        sys.stderr.write(text)  # in one write, because other ranks write to the same terminal
        sys.stderr.flush()


def text_of(error: BaseException | None) -> str | None:
    """The text that this rank prints for an exception; None: all of it."""
    if error is None or os.environ.get("SHARDLOAD_TRACEBACKS") == "all":
        return None
    rank = getattr(error, _AGREED, None)
    if rank is not None:
        said = f"rank {rank}: {type(error).__name__}: {error} (as on other ranks; SHARDLOAD_TRACEBACKS=all shows where)\n"
        return said if rank < _MOST_LINES else ""
    if not hasattr(error, _AGREED) or not isinstance(error, (ConfigError, SourceError)):
        return None
    shown = traceback.TracebackException.from_exception(error)
    n_own = next((i for i, frame in enumerate(shown.stack) if frame.filename.startswith(_PACKAGE)), 0)
    if n_own:
        shown.stack = traceback.StackSummary.from_list(shown.stack[:n_own])
    if is_said := error.__cause__ is not None and message_of(error.__cause__) in str(error):
        shown.__cause__, shown.__suppress_context__ = None, True
    return "".join([*shown.format(), _ALL]) if n_own or is_said else None
