"""Did a signal handler of the application's raise this error?

What a signal handler raises (an alarm, as Ctrl-C) is no error of the call: it came in the middle of anything, and the call is
over where it stands. `let_interruption_pass` is for wherever errors are kept to be agreed on later.
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
