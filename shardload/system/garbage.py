"""Can Python's garbage collection wait until many objects have been made?

Python looks for unreachable cycles each time that some hundred objects more exist, and now and then goes through all objects of
the process: with JAX these are half a million. Describing a thousand arrays makes objects that are all needed, so every such
search is in vain. It took a sixth of the time of loading a thousand small arrays.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collections_wait"]

_lock = threading.Lock()
_n_waiting = 0
_was_enabled = False


@contextmanager
def collections_wait(is_worth: bool = True) -> Iterator[None]:
    """Let automatic collections of all threads wait while this context lasts. For work that is short and bounded in memory.

    A collection that is asked for (`gc.collect`) happens. If the application has switched collections off, they stay off.
    """
    global _n_waiting, _was_enabled
    if not is_worth:
        yield
        return
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
