"""How does one rank's error come to the others? As text, and back: the same type and the same words on every rank.

What a signal handler raises (an alarm, as Ctrl-C) is no error of this kind: it came in the middle of anything, and the call is
over where it stands. `let_interruption_pass` is for wherever errors are kept to be agreed on.
"""

from __future__ import annotations

import errno
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType

import numpy as np

from shardload.errors import ConfigError, PeerError, ShardloadError, SourceError, StallError, VerifyError

__all__ = ["as_shardload", "from_json", "let_interruption_pass", "outer_exception", "to_json"]

_TYPES: tuple[type[ShardloadError], ...] = (ShardloadError, ConfigError, SourceError, PeerError, StallError, VerifyError)
_ERRORS = {e.__name__: e for e in _TYPES}
_MORE: dict[type[ShardloadError], tuple[str, ...]] = {SourceError: ("path", "dataset", "chunk"), VerifyError: ("index",)}


def as_shardload(error: BaseException | None, rank: int | None) -> ShardloadError:
    """The error itself, or a PeerError of `rank` in the place of one that is not ours."""
    if _lacks_descriptors(error):  # whatever was made of it on the way: neither the file nor the call is to blame
        text = f"{error} (this process may open no more files: `ulimit -n 4096` before the job starts, or close some)"
        return PeerError(text if isinstance(error, ShardloadError) else f"{type(error).__name__}: {text}", rank=rank)
    if isinstance(error, ShardloadError):
        if error.rank is None:
            error.rank = rank
        return error
    return PeerError(f"{type(error).__name__}: {error}", rank=rank)


def _lacks_descriptors(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


_own = threading.local()


@contextmanager
def outer_exception() -> Iterator[None]:
    """For a call that may be made where an exception is handled, whose context it then is in all that is raised inside."""
    before, _own.outer = getattr(_own, "outer", None), sys.exc_info()[1]
    try:
        yield
    finally:
        _own.outer = before


def let_interruption_pass(error: BaseException) -> None:
    """Raise what a signal handler of the application's has raised, if `error` is that or came from it.

    Then there is a frame of a handler among those that it went through. What the caller was handling when the call began does
    not count (`outer_exception`).
    """
    outer = getattr(_own, "outer", None)
    handlers = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    seen: BaseException | None = error
    while handlers and seen is not None and seen is not outer:
        trace = seen.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in handlers:
                raise seen
            trace = trace.tb_next
        seen = seen.__cause__ or seen.__context__


def _code_of(handler: object) -> CodeType | None:
    """Of a signal handler in Python; None for what is not one (ignored, the system's own)."""
    handler = getattr(handler, "func", handler)  # functools.partial
    handler = getattr(handler, "__func__", handler)  # a bound method
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    found = getattr(handler, "__code__", None)
    return found if isinstance(found, CodeType) else None


def to_json(error: ShardloadError) -> str:
    """An error as text. Never fails, whatever a source put into it: the other ranks are waiting."""
    kind = next(name for name, e in reversed(_ERRORS.items()) if isinstance(error, e))
    names = _MORE.get(_ERRORS[kind], ())
    more = {k: getattr(error, k) for k in names}
    return json.dumps({"kind": kind, "text": str(error), "rank": error.rank, **more}, default=_plain)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else str(value)


def from_json(text: str, first: int, n_failed: int, size: int) -> ShardloadError:
    """The error again; its text says which rank failed, unless all `size` of them did."""
    found = json.loads(text)
    kind, message, rank = found.pop("kind"), found.pop("text"), found.pop("rank")
    if n_failed == size:
        rank = None  # everybody found it: it is no rank's in particular
    else:
        more = f" (and on {n_failed - 1} more)" if n_failed > 1 else ""
        message = f"on rank {first} of {size}{more}: {message}"
    for name in ("chunk", "index"):
        if found.get(name) is not None:
            found[name] = tuple(found[name])
    return _ERRORS[kind](message, rank=rank, **found)
