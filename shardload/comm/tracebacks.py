"""Which rank shows the traceback of an error that all ranks raise?

An error that the ranks have agreed on is the same everywhere: four ranks would print it four times, each with the calls that
led to it. Rank 0 shows it in full, and so does a rank with a cause of its own, which nobody else has seen. The others say one
line; of many ranks most say nothing. ``SHARDLOAD_TRACEBACKS=all`` has all of them show all.

Only what Python itself prints of an exception that nobody catches is cut: a hook that somebody else has set, as IPython does,
and whoever handles the exception, see it whole.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

from shardload.errors import ShardloadError

__all__ = ["is_pythons_own", "share", "show", "text_of"]

_MOST_LINES = 8  # ranks that say a line
_AGREED = "_shardload_rank"  # the rank that an agreed error is raised on, where that does not show it


def share(error: ShardloadError, rank: int, size: int, shows: bool | None = None) -> None:
    """Note that all `size` ranks raise this error, here on `rank`; from then on uncaught exceptions are printed by `show`.

    `shows`: whether this rank shows it in full. By default rank 0, the rank in the error, or one with a cause of its own.
    """
    if shows is None:
        cause = error.__cause__
        shows = rank in (0, error.rank) or (cause is not None and str(cause) not in str(error))
    setattr(error, _AGREED, None if shows or size == 1 else rank)
    if is_pythons_own() and size > 1:
        sys.excepthook = show


def is_pythons_own() -> bool:
    """Whether exceptions that nobody catches are printed by Python, or by `show`, and end the program."""
    is_own = sys.excepthook in (sys.__excepthook__, show)
    return is_own and not hasattr(sys, "ps1") and not sys.flags.interactive


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that nobody caught: ``sys.excepthook``."""
    text = text_of(error)
    if text is None and not hasattr(error, _AGREED):
        sys.__excepthook__(kind, error, trace)
    else:
        # At once: other ranks write to the same terminal.
        sys.stderr.write("".join(traceback.format_exception(kind, error, trace)) if text is None else text)
        sys.stderr.flush()


def text_of(error: BaseException | None) -> str | None:
    """What this rank says of an exception; None: all of it."""
    if error is None or os.environ.get("SHARDLOAD_TRACEBACKS") == "all":
        return None
    rank = getattr(error, _AGREED, None)
    if rank is not None:
        said = f"rank {rank}: {type(error).__name__}: {error} (as on other ranks; SHARDLOAD_TRACEBACKS=all shows where)\n"
        return said if rank < _MOST_LINES else ""
    found = traceback.TracebackException.from_exception(error)
    return "".join(found.format()) if _cut(error, found) else None


def _cut(error: BaseException, found: traceback.TracebackException) -> bool:
    """Take from what an exception was raised from, or in the handling of, the calls that led to an agreed error."""
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
