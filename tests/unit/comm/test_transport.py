"""Does a note wake the rank that it is for, and is it kept until MPI has taken it?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from shardload.comm.shared_memory import Segment
from shardload.comm.transport import Transport


class Request:
    """A message that leaves when it is told to."""

    def __init__(self, has_left: bool) -> None:
        self.has_left = has_left

    def Test(self) -> bool:
        return self.has_left


class Requests:
    """What MPI offers for many of them."""

    @staticmethod
    def Testsome(requests: list[Request]) -> list[int]:
        return [k for k, request in enumerate(requests) if request.has_left]


class Comm:
    """Keeps what is sent."""

    def __init__(self, has_left: bool) -> None:
        self.has_left = has_left
        self.sent: list[tuple[int, int, Request]] = []

    def Isend(self, message: Any, dest: int, tag: int) -> Request:
        self.sent.append((dest, tag, Request(self.has_left)))
        return self.sent[-1][2]


def made(has_left: bool) -> tuple[Transport, Comm, Segment]:
    """The transport of rank 0, and the memory of rank 1 as its maker has it."""
    segment = Segment.create(64)
    mpi, comm = SimpleNamespace(Status=object, Request=Requests), Comm(has_left)
    group: Any = SimpleNamespace(rank=0, comm=comm, mpi=mpi)
    return Transport(group, (5, 6), {1: Segment.attach(segment.handle)}), comm, segment


def test_a_note_wakes_its_rank() -> None:
    """Wrong if a rank that sleeps until its bell rings were not told: it would look only now and then."""
    transport, comm, segment = made(has_left=True)
    assert not segment.bell.wait(0)
    transport.tell(1, np.zeros(3, dtype=np.int64))
    assert segment.bell.wait(0) and not segment.bell.wait(0)
    assert [(dest, of) for dest, of, _ in comm.sent] == [(1, 6)]
    assert not transport
    segment.seal()


def test_a_note_that_has_not_left_is_kept() -> None:
    """Wrong if its memory were freed while MPI still reads it, or if nobody called MPI until it has left."""
    transport, comm, segment = made(has_left=False)
    note = np.zeros(3, dtype=np.int64)
    transport.tell(1, note)
    assert not transport.test() and transport
    assert any(kept is note for _, kept in transport.remains()[1])
    comm.sent[0][2].has_left = True
    assert transport.test() and not transport
    segment.seal()
