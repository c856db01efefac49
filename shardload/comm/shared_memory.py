"""How can processes of one machine pass values on without sending them? One process makes memory that the others can read.

A `Segment` is anonymous memory behind a file descriptor (memfd). It has no name in /dev/shm, so it needs no room there and
leaves nothing behind however a job ends. It is freed when the last process that mapped it ends. Other processes open it through
/proc, by the process and descriptor of its maker, and accept it only if they find the maker's random token in it. If any of
this is not possible (another system, containers with separate process tables), the ranks send messages instead.

The ranks of a machine make their segments together (`Node`), once; they are kept for the next call, and made anew if more
is needed.

A `Bell` wakes a process that has nothing to do. Its own threads ring it, and so do the processes that attached to its segment.
So no process has to poll.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from shardload.comm.collectives import Bytes, Collectives
from shardload.system.undo import Undo

HANDLE_SIZE = 5
_TOKEN_NBYTES = 4096  # a whole page, so that the data begins on a page boundary


class Bell:
    """A pipe whose bytes only mean "look": one end to ring and, in the process that made it, one end to wait at.

    A ring before the wait is not lost. Several rings wake the process once.
    """

    def __init__(self, write_end: int | None = None) -> None:
        self._read_end: int | None = None
        if write_end is None:
            self._read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._poll = select.poll()
            self._poll.register(self._read_end, select.POLLIN)
        self.descriptor = write_end
        self.close = weakref.finalize(self, _close, write_end, self._read_end)

    def ring(self) -> None:
        """Wake the process that waits. Can be called from any thread or process."""
        with suppress(BlockingIOError, BrokenPipeError):  # full: it rings already; broken: the process ended (MPI reports it)
            os.write(self.descriptor, b"!")

    def wait(self, seconds: float | None) -> bool:
        """Return when the bell has been rung since the last call, or after `seconds`. True if it was rung."""
        if self._read_end is None:
            raise ValueError("another process waits at this bell")
        is_rung = bool(self._poll.poll(None if seconds is None else max(1, round(seconds * 1000))))
        if is_rung:
            with suppress(BlockingIOError):
                os.read(self._read_end, 1 << 16)
        return is_rung


def _close(*descriptors: int | None) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


class Segment:
    """Memory that processes of one machine share.

    Attributes
    ----------
    data : ndarray of uint8
        The memory, the same in all processes (at different addresses).
    handle : ndarray of int64, shape (HANDLE_SIZE,)
        What another process needs to `attach`: process, descriptor, bytes, token, descriptor of the bell.
    bell : Bell
        Wakes the process that made it.
    """

    def __init__(
        self, memory: mmap.mmap, handle: np.ndarray[Any, np.dtype[np.int64]], descriptor: int | None, bell: Bell
    ) -> None:
        whole: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self.data = whole[_TOKEN_NBYTES:]
        self.handle = handle
        self._token = whole[:8].view(np.int64)
        self.bell = bell
        # Closes the descriptor: no other process can attach from now on. A call may be interrupted before it does that.
        self.seal = weakref.finalize(self, _close, descriptor)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Make a segment. OSError if this system cannot (AttributeError if it has no memfd)."""
        descriptor = os.memfd_create("shardload", os.MFD_CLOEXEC)
        with Undo(lambda: os.close(descriptor)):
            size = _TOKEN_NBYTES + nbytes
            os.ftruncate(descriptor, size)
            os.posix_fallocate(descriptor, 0, size)  # all pages in one call, instead of one by one during the first load
            memory = mmap.mmap(descriptor, size)
            bell = Bell()
        handle = np.array([os.getpid(), descriptor, nbytes, secrets.randbits(62), bell.descriptor], dtype=np.int64)
        segment = cls(memory, handle, descriptor, bell)
        segment._token[0] = handle[3]
        return segment

    @classmethod
    def attach(cls, handle: np.ndarray[Any, np.dtype[np.int64]]) -> Segment:
        """Map the segment of another process. OSError if that is not possible, or if it is a different segment."""
        process, number, nbytes, token, ringing = (int(v) for v in handle)
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            size = _TOKEN_NBYTES + nbytes
            if os.fstat(descriptor).st_size != size:
                raise OSError(f"descriptor {number} of process {process} is something else here")
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        if np.frombuffer(memory, dtype=np.int64, count=1)[0] != token:
            raise OSError(f"descriptor {number} of process {process} is another memory here")
        bell = Bell(os.open(f"/proc/{process}/fd/{ringing}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        return cls(memory, handle, None, bell)


class Node:
    """The ranks of a group that share this rank's machine, and their shared memory.

    Parameters
    ----------
    rank : int
        This rank.
    leaders : sequence of int
        For each rank of the group the lowest rank on its machine.
    collectives : Collectives
        How the ranks of the group agree.

    Attributes
    ----------
    ranks : tuple of int
        The ranks on this machine, ascending.
    segments : dict of int to Segment
        The segment of each rank of this machine, including this rank; empty if none is shared (yet).
    """

    def __init__(self, rank: int, leaders: Sequence[int], collectives: Collectives) -> None:
        self._rank, self._collectives = rank, collectives
        self.ranks = tuple(other for other, leader in enumerate(leaders) if leader == leaders[rank])
        self.segments: dict[int, Segment] = {}
        self._nbytes = 0
        self._is_alone = len(set(leaders)) == len(leaders)  # each rank is, on its machine
        self._can_share = len(self.ranks) > 1  # the same on every rank of this machine
        self._is_enabled = os.environ.get("SHARDLOAD_SHARED_MEMORY", "1") != "0"  # on this rank

    def shared_memory(self, nbytes: int) -> dict[int, Segment]:
        """Shared memory of every rank of this machine, by rank, at least `nbytes` each; empty if it cannot be shared.

        Collective, over all ranks of the group. Each rank passes the bytes that it needs (0: none). The memory is kept for the
        next load.
        """
        if self._is_alone:
            return {}
        # A rank whose exchange was interrupted has dropped its segments: then all ranks make new ones.
        needs_more = self._can_share and (nbytes > self._nbytes or not self.segments)
        if self._collectives.reduce(np.array([needs_more, nbytes], dtype=np.int64), "max").all():
            self._make(nbytes)
        return self.segments

    def _make(self, nbytes: int) -> None:
        self.segments, segments, segment = {}, dict[int, Segment](), None
        if self._can_share and self._is_enabled:
            with suppress(OSError, AttributeError):
                segment = Segment.create(max(nbytes, self._nbytes))
        handles = self._collectives.gather(np.zeros(HANDLE_SIZE, dtype=np.int64) if segment is None else segment.handle)
        if segment is not None:
            with suppress(OSError, ValueError):
                segments = {rank: segment if rank == self._rank else Segment.attach(handles[rank]) for rank in self.ranks}
        are_mapped = self._collectives.gather(np.array([bool(segments)], dtype=np.int64))
        if segment is not None:
            segment.seal()
        self._can_share = bool(are_mapped[list(self.ranks)].all())
        if self._can_share:
            self.segments, self._nbytes = segments, max(nbytes, self._nbytes)
