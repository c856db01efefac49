"""Was this error raised by a signal handler of the application?

An exception of a signal handler (an alarm, Ctrl-C) is no error of the call: it interrupts the call at any point, and ends it
there. Code that stores errors, to agree on them later, calls `let_interruption_pass` first.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType

__all__ = ["let_interruption_pass", "outer_exception"]

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
    """The code of a signal handler in Python; None if there is none (ignored, the system's default)."""
    handler = getattr(handler, "func", handler)  # functools.partial
    handler = getattr(handler, "__func__", handler)  # a bound method
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    found = getattr(handler, "__code__", None)
    return found if isinstance(found, CodeType) else None
