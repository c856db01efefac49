"""Was this error raised by a signal handler of the application?

An exception of a signal handler (an alarm, Ctrl-C) is no error of the call: it interrupts the call at any point, and ends it
there. Code that stores errors, to agree on them later, calls `let_interruption_pass` first. A finalizer, of which Python
prints and forgets all exceptions, calls `interrupt_again`.

A signal handler may also call this package while it is at work in the same thread. That work holds locks, such as h5py's, for
which other threads of the new call would wait for ever: `is_called_by_handler`.
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from shardload.errors import chain_of

__all__ = ["interrupt_again", "is_called_by_handler", "let_interruption_pass", "outer_exception"]

_LOOK_SECONDS = 1e-3
_own = threading.local()


@contextmanager
def outer_exception() -> Iterator[None]:
    """For a call inside an ``except`` block: that exception becomes the context of all exceptions raised in the call."""
    before, _own.outer = getattr(_own, "outer", None), sys.exc_info()[1]
    try:
        yield
    finally:
        _own.outer = before


def let_interruption_pass(error: BaseException) -> None:
    """Raise `error`, or the exception that caused it, if a signal handler of the application raised it.

    Such an exception has a frame of a handler in its traceback. An exception that the caller was handling when the call began
    does not count (`outer_exception`).
    """
    outer = getattr(_own, "outer", None)
    handlers = set(_handlers().values())
    for seen in chain_of(error) if handlers else ():
        if seen is outer:
            return
        trace = seen.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in handlers:
                raise seen
            trace = trace.tb_next


def interrupt_again(error: BaseException) -> None:
    """Send this process once more the signal whose handler raised `error`, as soon as the caller has returned.

    For a finalizer. Otherwise a Ctrl-C, or an alarm that the program has set, would end in a line on stderr, and the call that
    it was to interrupt would go on, while other ranks stop.
    """
    caller, numbers = sys._getframe(1), list[int]()
    trace = error.__traceback__
    while trace is not None:
        numbers += _handled_in(trace.tb_frame)
        trace = trace.tb_next
    if not numbers and isinstance(error, KeyboardInterrupt):  # Python's own handler, which has no frame
        numbers = [signal.SIGINT]
    if numbers:
        # A thread, because handlers run wherever the main thread is, and that is still in the caller.
        call = (numbers[0], signal.getsignal(numbers[0]), threading.main_thread().ident, caller.f_code)
        threading.Thread(target=_send, args=call, daemon=True).start()


def is_called_by_handler() -> bool:
    """True if a signal handler of the application has called this package, and what it interrupted is a call of this package.

    For the beginning of a call inside another one: on the way from here to that one there is a frame of a handler.
    """
    handlers, package = set(_handlers().values()), __name__.partition(".")[0]
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


def _handled_in(frame: FrameType) -> list[int]:
    """The signals whose handler a frame may be: mostly one. A handler of several is told in its arguments which it is."""
    code = frame.f_code
    found = [number for number, one in _handlers().items() if one is code]
    n = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    given = [frame.f_locals.get(name) for name in code.co_varnames[:n]] if len(found) > 1 else []
    told = [one for value in given for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, int)]
    return [number for number in found if number in told] or found


def _send(number: int, handler: object, thread: int, code: CodeType) -> None:
    """Send a signal to a thread once it has left a function, unless the signal has another handler by then."""

    def is_inside() -> bool:
        frame = sys._current_frames().get(thread)
        while frame is not None:
            if frame.f_code is code:
                return True
            frame = frame.f_back
        return False

    while is_inside():
        time.sleep(_LOOK_SECONDS)
    if callable(handler) and signal.getsignal(number) is handler:
        signal.pthread_kill(thread, number)


def _handlers() -> dict[int, CodeType]:
    """The code of the handler of each signal that has one in Python."""
    found = ((number, _code_of(signal.getsignal(number))) for number in signal.valid_signals())
    return {int(number): code for number, code in found if code is not None}


def _code_of(handler: object) -> CodeType | None:
    """The code of a signal handler in Python; None if there is none (ignored, the system's default)."""
    handler = getattr(handler, "func", handler)  # functools.partial
    handler = getattr(handler, "__func__", handler)  # a bound method
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    found = getattr(handler, "__code__", None)
    return found if isinstance(found, CodeType) else None
