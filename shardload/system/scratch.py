"""Where does a thread put temporary values? In memory of its own, which its next task uses again.

Decoders of many arrays share it (`shared_scratch`), so that a thread has one buffer of each kind, however many arrays are open.

A file may be looked into in the middle of a call of the same thread (in a finalizer, a signal handler, a function of the
caller), and that goes on with what it has in these buffers. So both have buffers of their own (`scratch_of_its_own`).
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

_ALIGNMENT = 64
_PAGE_NBYTES = 4096

Array = np.ndarray[Any, Any]


def empty_bytes(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Uninitialised memory, from a page on at a boundary of 64 bytes.

    What NumPy allocates begins 16 bytes after the beginning of a page, if it is large. Into that the kernel of Linux copies
    pages of a file 2.6 times as slowly on AMD's EPYC: a copy is that slow if it lies up to 31 bytes further in its page than
    what it is a copy of (docs/design/decode.md).
    """
    return np.empty(nbytes, dtype=np.uint8) if nbytes < _PAGE_NBYTES else aligned_bytes(nbytes)


def aligned_bytes(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Uninitialised memory at a boundary of 64 bytes, however little: a microsecond more for each."""
    raw = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.__array_interface__["data"][0] % _ALIGNMENT
    return raw[start : start + nbytes]


_depth = ContextVar("depth", default=0)  # how often this thread is inside of `scratch_of_its_own`


def is_in_a_call() -> bool:
    """True inside of `scratch_of_its_own`, in this thread."""
    return _depth.get() > 0


@contextmanager
def scratch_of_its_own() -> Iterator[None]:
    """Inside, this thread has other scratch memory than around it.

    >>> scratch = ThreadScratch()
    >>> outer = scratch.bytes("chunk", 3)
    >>> with scratch_of_its_own():
    ...     np.shares_memory(outer, scratch.bytes("chunk", 3))
    False
    >>> np.shares_memory(outer, scratch.bytes("chunk", 3))
    True
    """
    before = _depth.get()
    try:
        _depth.set(before + 1)
        yield
    finally:
        _depth.set(before)


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
        self._buffers_by_depth: list[dict[str, Array]] = []  # by their depth, from the outermost

    def bytes(self, name: str, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """`nbytes` uninitialised bytes, valid until this thread asks for the same name again in the same call."""
        depth = _depth.get()
        while len(self._buffers_by_depth) <= depth:
            self._buffers_by_depth.append({})
        del self._buffers_by_depth[depth + 1 :]  # of calls that have ended
        buffers = self._buffers_by_depth[depth]
        buffer = buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = None
            buffers.pop(name, None)  # free the old memory before asking for more
            buffer = buffers[name] = empty_bytes(nbytes)
        return buffer[:nbytes]

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Like `bytes`, but as an array."""
        return self.bytes(name, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


_shared: weakref.ref[ThreadScratch] | None = None
_sharing = threading.RLock()  # a call that interrupts another one of this thread asks, too


def shared_scratch() -> ThreadScratch:
    """The scratch memory that all users of it share now. It is freed when the last of them drops it.

    A user may keep nothing in it from one of its calls to the next: another one may have written there, in the same thread.

    >>> mine = shared_scratch()
    >>> mine is shared_scratch()
    True
    """
    global _shared
    with _sharing:
        scratch = None if _shared is None else _shared()
        if scratch is None:
            scratch = ThreadScratch()
            _shared = weakref.ref(scratch)
        return scratch
