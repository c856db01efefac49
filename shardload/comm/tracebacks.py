"""Which rank shows the traceback of an error that all ranks raise?

An error that the ranks have agreed on is the same everywhere: four ranks would print it four times, each with a traceback. So
rank 0 shows it, and so does a rank whose error has a cause of its own, which no other rank has seen. Other ranks print one
line; if there are many ranks, most print nothing.

Where the program's calls or the file are at fault, the traceback ends at the user's own line: the calls inside shardload, and
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
from shardload.errors import ConfigError, PeerError, ShardloadError, SourceError

__all__ = ["blame_calls", "is_pythons_own", "is_shown_elsewhere", "share", "show", "text_of"]

_MOST_LINES = 8  # ranks that print a line
_AGREED = "_shardload_rank"  # attribute of an agreed error: the rank it is raised on, or None if that rank shows it
_OF_CALLS = "_shardload_of_calls"  # attribute of a `PeerError` whose cause is which calls the program makes
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


def blame_calls(error: PeerError) -> PeerError:
    """Mark an error of ranks that make different calls, or none: the user's lines say why. Return it."""
    setattr(error, _OF_CALLS, True)
    return error


def is_shown_elsewhere(error: BaseException) -> bool:
    """True if all ranks raise this error, and others than this one show it."""
    return getattr(error, _AGREED, None) is not None


def is_pythons_own() -> bool:
    """True if uncaught exceptions are printed by Python or by `show`, and end the program."""
    is_own = sys.excepthook in (sys.__excepthook__, show)
    return is_own and not hasattr(sys, "ps1") and not sys.flags.interactive


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception. Used as ``sys.excepthook``."""
    text = text_of(error)
    if text is None and not hasattr(error, _AGREED):
        sys.__excepthook__(kind, error, trace)
    else:
        # In one write, because other ranks write to the same terminal.
        sys.stderr.write("".join(traceback.format_exception(kind, error, trace)) if text is None else text)
        sys.stderr.flush()


def text_of(error: BaseException | None) -> str | None:
    """The text that this rank prints for an exception; None: all of it."""
    if error is None or os.environ.get("SHARDLOAD_TRACEBACKS") == "all":
        return None
    rank = getattr(error, _AGREED, None)
    if rank is not None:
        said = f"rank {rank}: {type(error).__name__}: {error} (as on other ranks; SHARDLOAD_TRACEBACKS=all shows where)\n"
        return said if rank < _MOST_LINES else ""
    found = traceback.TracebackException.from_exception(error)
    is_cut = _cut(error, found)
    if hasattr(error, _AGREED) and _end_at_the_call(error, found):
        return "".join(found.format()) + _ALL
    return "".join(found.format()) if is_cut else None


def _end_at_the_call(error: BaseException, found: traceback.TracebackException) -> bool:
    """Remove what the user did not write from the traceback of wrong calls or files. Return True if something was removed.

    A cause that the text does not have stays, with all of its calls.
    """
    if not isinstance(error, (ConfigError, SourceError)) and not hasattr(error, _OF_CALLS):
        return False
    own = next((i for i, frame in enumerate(found.stack) if frame.filename.startswith(_PACKAGE)), 0)
    if own:
        found.stack = traceback.StackSummary.from_list(found.stack[:own])
    cause = error.__cause__
    said = cause is not None and message_of(cause) in str(error)
    if said:
        found.__cause__ = None
        found.__suppress_context__ = True
    return bool(own) or said


def _cut(error: BaseException, found: traceback.TracebackException) -> bool:
    """Remove the traceback of an agreed error from the causes and contexts of an exception. Return True if there was one."""
    is_cut = False
    for cause, shown in ((error.__cause__, found.__cause__), (error.__context__, found.__context__)):
        if cause is None or shown is None:
            continue
        if getattr(cause, _AGREED, None) is None:
            is_cut |= _cut(cause, shown)
        else:
            shown.stack, shown.__cause__, shown.__context__ = None, None, None  # type: ignore[assignment]
            is_cut = True
    return is_cut
