"""Can Python's garbage collection wait until many objects have been made, and does nothing have to wait for it?

Python looks for unreachable cycles each time that some hundred objects more exist, and now and then goes through all objects of
the process: with JAX these are half a million. Describing a thousand arrays makes objects that are all needed, so every such
search is in vain. It took a sixth of the time of loading a thousand small arrays.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FrameType

from shardload.errors import chain_of

_SUSPENDED = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR  # may go on later; to clear it would end it
_lock = threading.RLock()  # a signal handler may make a call while this thread holds it
_n_waiting = 0
_was_enabled = False


@contextmanager
def collections_wait() -> Iterator[None]:
    """Let automatic collections of all threads wait while this context lasts. For work that is short and bounded in memory.

    A collection that is asked for (`gc.collect`) happens. If the application has switched collections off, they stay off.
    """
    global _n_waiting, _was_enabled
    with _lock:
        if _n_waiting == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _n_waiting += 1
    try:
        yield
    finally:
        with _lock:
            _n_waiting -= 1
            if _n_waiting == 0 and _was_enabled:
                gc.enable()


def let_go(error: BaseException) -> None:
    """Clear the variables of the calls in which an error came up, and what caused it, as far as these calls have ended.

    For an error that is kept. It holds the calls, and these hold what they have as variables, perhaps also the error: all of it
    would stay until Python looks for unreachable cycles. After a load that failed, that would be its pieces.
    """
    for link in chain_of(error):
        trace = link.__traceback__
        while trace is not None:
            frame: FrameType | None = trace.tb_frame
            while frame is not None:
                try:
                    if not frame.f_code.co_flags & _SUSPENDED:
                        frame.clear()
                except RuntimeError:  # it still runs, and so do its callers
                    break
                frame = frame.f_back
            trace = trace.tb_next
