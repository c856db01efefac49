"""Does a note wake the rank that it is for, and is it kept until MPI has taken it?"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardload.comm import store
from shardload.comm.shared_memory import Segment
from shardload.comm.store import StoreTransport
from shardload.comm.transport import MpiTransport, Transport
from tests.unit.ranks import Store


class Request:
    """A message that leaves when it is told to."""

    def __init__(self, has_left: bool) -> None:
        self.has_left = has_left

    def Test(self) -> bool:
        return self.has_left


def made(has_left: bool) -> tuple[Transport, list[tuple[int, int, Request]], Segment]:
    """The transport of rank 0, what it has sent, and the memory of rank 1 as its maker has it."""
    segment, sent = Segment.create(64), list[tuple[int, int, Request]]()

    def send(message: Any, dest: int, tag: int) -> Request:
        sent.append((dest, tag, Request(has_left)))
        return sent[-1][2]

    of_many = SimpleNamespace(Testsome=lambda requests: [k for k, request in enumerate(requests) if request.has_left])
    comm, mpi = SimpleNamespace(Isend=send), SimpleNamespace(Status=object, Request=of_many)
    return MpiTransport(0, comm, mpi, (5, 6), {1: Segment.attach(segment.handle)}), sent, segment


def test_a_note_wakes_its_rank() -> None:
    """Wrong if a rank that sleeps until its bell rings were not told: it would look only now and then."""
    transport, sent, segment = made(has_left=True)
    assert not segment.bell.wait(0)
    transport.send_note(1, np.zeros(3, dtype=np.int64))
    assert segment.bell.wait(0) and not segment.bell.wait(0)
    assert [(dest, of) for dest, of, _ in sent] == [(1, 6)]
    assert not transport
    segment.seal()


def test_a_note_that_has_not_left_is_kept() -> None:
    """Wrong if its memory were freed while MPI still reads it, or if nobody called MPI until it has left."""
    transport, sent, segment = made(has_left=False)
    note = np.zeros(3, dtype=np.int64)
    transport.send_note(1, note)
    assert not transport.test() and transport
    assert any(kept is note for kept in transport.in_use()[1])
    sent[0][2].has_left = True
    assert transport.test() and not transport
    segment.seal()


def test_values_through_the_store_come_whole_and_in_order_and_few_are_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the coordinator had to hold a whole array, or if pieces of one message were taken for those of another."""
    monkeypatch.setattr(store, "_PIECE_NBYTES", 100)
    monkeypatch.setattr(store, "_WINDOW_NBYTES", 900)
    monkeypatch.setattr(store, "_PAUSE_SECONDS", 0.0)
    client, sizes = Store(), list[int]()
    ranks = [StoreTransport(client, rank, 3, "here", {}) for rank in range(3)]
    sent = {(k, rank): np.arange(k, k + 70 * k, dtype="i4") for rank in (1, 2) for k in range(4)}
    left, come, notes = list[Any](), list[Any](), list[Any]()
    for key, values in sent.items():
        ranks[0].send(key[1], values, lambda key=key: left.append(key))  # type: ignore[misc]
    ranks[0].send_note(2, np.array([5, 6]))
    end = time.monotonic() + 60
    while any(ranks) or len(come) < len(sent) or not notes:
        assert time.monotonic() < end
        for transport in ranks:
            transport.test()
            sizes.append(sum(map(len, [*client.values.values()])))
            for source, nbytes, receive in transport.receive():
                into = np.zeros((nbytes // 4, 2), dtype="i4")[:, 0]  # with gaps
                receive(into, lambda: None)
                come.append((source, transport.rank, into))
            notes += [(rank, transport.rank, note.tolist()) for rank, note in transport.receive_notes()]
    assert notes == [(0, 2, [5, 6])] and sorted(left) == sorted(sent)
    for rank in (1, 2):
        here = [into for source, receiver, into in come if receiver == rank and source == 0]
        assert [into.tolist() for into in here] == [sent[k, rank].tolist() for k in range(4)]
    assert 100 < max(sizes) <= 300 + 50 and not client.values
