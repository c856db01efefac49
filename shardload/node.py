"""How can processes of one machine hand values over without sending them? Memory that one makes and the others look into.

A `Segment` is anonymous memory behind a file descriptor (memfd): it has no name in /dev/shm, so it needs no room there,
nothing is left behind however a job ends, and it is gone when the last process that mapped it is. The others open it through
/proc by the maker's process and descriptor, and believe it only when they find the maker's random token in it. Where any of
this is not possible (another system, containers with process tables of their own) the ranks send messages instead.
"""

from __future__ import annotations

import mmap
import os
import secrets
from typing import Any

import numpy as np

__all__ = ["HANDLE_SIZE", "Segment"]

HANDLE_SIZE = 4
_TOKEN_NBYTES = 4096  # a page of its own, so that the data begins on one

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Segment:
    """Memory that processes of one machine share.

    Attributes
    ----------
    data : ndarray of uint8
        The memory, the same in all of them (at different addresses).
    handle : ndarray of int64, shape (HANDLE_SIZE,)
        What another process needs to `attach`: process, descriptor, bytes, token.
    """

    def __init__(self, memory: mmap.mmap, handle: np.ndarray[Any, np.dtype[np.int64]], descriptor: int | None) -> None:
        whole: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self.data = whole[_TOKEN_NBYTES:]
        self.handle = handle
        self._token = whole[:8].view(np.int64)
        self._descriptor = descriptor

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Make one. OSError (or AttributeError where there is no memfd) if this system cannot."""
        descriptor = os.memfd_create("shardload", os.MFD_CLOEXEC)
        try:
            size = _TOKEN_NBYTES + nbytes
            os.ftruncate(descriptor, size)
            os.posix_fallocate(descriptor, 0, size)  # an error now, not a dead process when the memory is first touched
            memory = mmap.mmap(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        handle = np.array([os.getpid(), descriptor, nbytes, secrets.randbits(62)], dtype=np.int64)
        made = cls(memory, handle, descriptor)
        made._token[0] = handle[3]
        return made

    @classmethod
    def attach(cls, handle: np.ndarray[Any, np.dtype[np.int64]]) -> Segment:
        """Look into one that another process made. OSError if that is not possible, or if it is not that one."""
        process, number, nbytes, token = (int(v) for v in handle)
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            size = _TOKEN_NBYTES + nbytes
            if os.fstat(descriptor).st_size != size:
                raise OSError(f"descriptor {number} of process {process} is something else here")
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        found = cls(memory, handle, None)
        if found._token[0] != token:
            raise OSError(f"descriptor {number} of process {process} is another memory here")
        return found

    def seal(self) -> None:
        """Close the descriptor: nobody else can attach from now on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
