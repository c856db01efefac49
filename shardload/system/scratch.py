"""Where does a thread put temporary values? In memory of its own, which its next task uses again.

Decoders of many arrays share it (`shared_scratch`), so that a thread has one buffer of each kind, however many arrays are open.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any

import numpy as np

__all__ = ["ThreadScratch", "shared_scratch"]

Array = np.ndarray[Any, Any]


class ThreadScratch(threading.local):
    """A few named buffers for each thread. They grow to the largest size asked for, and are freed when the thread ends.

    Examples
    --------
    >>> scratch = ThreadScratch()
    >>> first = scratch.array("chunk", (2, 3), np.dtype("f8"))
    >>> np.shares_memory(first, scratch.array("chunk", (5,), np.dtype("f4"))), first.shape
    (True, (2, 3))
    """

    def __init__(self) -> None:
        self._held: dict[str, Array] = {}

    def bytes(self, name: str, nbytes: int, at_least: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """`nbytes` uninitialised bytes, valid until this thread asks for the same name again.

        `at_least`: bytes to allocate if the buffer is too small, so that growing requests do not allocate each time.
        """
        held = self._held.get(name)
        if held is None or held.nbytes < nbytes:
            held = None
            self._held.pop(name, None)  # free the old memory before asking for more
            held = self._held[name] = np.empty(max(nbytes, at_least), dtype=np.uint8)
        return held[:nbytes]

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Like `bytes`, but as an array."""
        return self.bytes(name, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


_shared: weakref.ref[ThreadScratch] | None = None
_sharing = threading.Lock()


def shared_scratch() -> ThreadScratch:
    """The scratch memory that all users of it share now. It is freed when the last of them drops it.

    A user may keep nothing in it from one of its calls to the next: another one may have written there, in the same thread.

    >>> mine = shared_scratch()
    >>> mine is shared_scratch()
    True
    """
    global _shared
    with _sharing:
        found = None if _shared is None else _shared()
        if found is None:
            found = ThreadScratch()
            _shared = weakref.ref(found)
        return found
