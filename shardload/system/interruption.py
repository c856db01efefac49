"""Does an error stay on this rank until the ranks agree, or was it raised by a signal handler of the application?

The first error of a rank is kept (`FirstError`), because other ranks may wait for this one. But an exception of a signal
handler (an alarm, Ctrl-C) is no error of the call: it interrupts the call at any point, and ends it there. Code that stores
errors, to agree on them later, calls `let_interruption_pass` first.

A signal handler may also call this package while it is at work in the same thread. That work holds locks, such as h5py's, for
which other threads of the new call would wait for ever: `is_called_by_handler`.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from shardload.errors import StallError, chain_of
from shardload.system.garbage import let_go

_thread = threading.local()


@contextmanager
def outer_exception() -> Iterator[None]:
    """Remember the exception in whose ``except`` block a call is made: it becomes the context of all that the call raises."""
    before, _thread.outer = getattr(_thread, "outer", None), sys.exc_info()[1]
    try:
        yield
    finally:
        _thread.outer = before


def let_interruption_pass(error: BaseException) -> None:
    """Raise `error`, or the exception that caused it, if a signal handler of the application raised it.

    Such an exception has a frame of a handler in its traceback. An exception that the caller was handling when the call began
    does not count (`outer_exception`).
    """
    outer = getattr(_thread, "outer", None)
    handlers = _handlers()
    for link in chain_of(error) if handlers else ():
        if link is outer:
            return
        trace = link.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in handlers:
                raise link
            trace = trace.tb_next


def is_called_by_handler() -> bool:
    """True if a signal handler of the application has called this package, and what it interrupted is a call of this package.

    For the beginning of a call inside another one: on the way from here to that one there is a frame of a handler.
    """
    handlers, package = _handlers(), __name__.partition(".")[0]
    frame: FrameType | None = sys._getframe(1)
    has_left = False  # the frames of the new call
    while frame is not None:
        is_own = frame.f_globals.get("__name__", "").partition(".")[0] == package
        if frame.f_code in handlers:
            return True
        if is_own and has_left:
            return False
        has_left = has_left or not (is_own or frame.f_globals.get("__name__") == "contextlib")
        frame = frame.f_back
    return False


def _handlers() -> set[CodeType]:
    """The code of the handlers in Python, of all signals."""
    codes = (_code_of(signal.getsignal(number)) for number in signal.valid_signals())
    return {code for code in codes if code is not None}


def _code_of(handler: object) -> CodeType | None:
    """The code of a signal handler in Python; None if there is none (ignored, the system's default)."""
    handler = getattr(handler, "func", handler)  # functools.partial
    handler = getattr(handler, "__func__", handler)  # a bound method
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None


class FirstError:
    """Keeps the first error of this rank. A context manager: it keeps what is raised inside.

    A stall passes, because after it the ranks cannot agree any more; so does what a signal handler raises.

    Attributes
    ----------
    error : Exception or None
        The error.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __bool__(self) -> bool:
        return self.error is not None

    def keep(self, error: BaseException) -> None:
        """Keep an error, if it is the first. Can be called in any thread."""
        let_interruption_pass(error)
        let_go(error)
        self.error = self.error or error

    def take(self) -> BaseException | None:
        """Return the error, and keep it no longer."""
        error, self.error = self.error, None
        return error

    def __enter__(self) -> FirstError:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, StallError):
            return False
        self.keep(error)
        return True
