"""Ranks in the threads of one process: a transport that carries everything by hand, and what starts an exchange on each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardload.comm.collectives import IntArray
from shardload.comm.shared_memory import Bell, Segment
from shardload.comm.transport import MpiTransport, Receive
from shardload.comm.watchdog import Watchdog
from shardload.planning.region import aligned
from shardload.transfer import exchange as engine
from shardload.transfer.buffers import Resources, Slots
from shardload.transfer.counters import Counters
from shardload.transfer.moves import ArrayMove, Arrivals

Array = np.ndarray[Any, Any]
SECONDS = 20.0  # without progress, after which an exchange is given up


@dataclass
class Network:
    """What is on its way between ranks. Messages of one kind between two ranks arrive in the order in which they were sent."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    sent: dict[tuple[str, int, int], deque[list[Any]]] = field(default_factory=dict)
    may_arrive: Callable[[int, int], bool] = lambda sender, receiver: True  # values, and what offers name

    def queue(self, kind: str, sender: int, receiver: int) -> deque[list[Any]]:
        return self.sent.setdefault((kind, sender, receiver), deque())


class FakeTransport(MpiTransport):
    """A transport over a `Network`."""

    def __init__(self, group: Any, tags: tuple[int, int], segments: dict[int, Segment]) -> None:
        super().__init__(group.rank, None, None, tags, segments)
        self.network: Network = group.network
        self.network_size: int = group.size
        self._sends: list[tuple[list[Any], Callable[[], None]]] = []

    def __bool__(self) -> bool:
        return bool(self._sends)

    def send(self, rank: int, values: Array, on_done: Callable[[], None]) -> None:
        assert values.flags.c_contiguous
        message = [values, False]  # until it was taken the sender may not touch it
        with self.network.lock:
            self.network.queue("values", self.rank, rank).append(message)
        self._sends.append((message, on_done))

    def receive(self) -> Iterator[tuple[int, int, Receive]]:
        for sender in range(self.network_size):
            queue = self.network.queue("values", sender, self.rank)
            while queue and self.network.may_arrive(sender, self.rank):
                message = queue.popleft()
                yield sender, message[0].nbytes, partial(self._take, message)

    @staticmethod
    def _take(message: list[Any], into: Array, on_done: Callable[[], None]) -> None:
        assert into.nbytes == message[0].nbytes
        into[...] = message[0].reshape(-1).view(np.uint8).view(into.dtype).reshape(into.shape)
        message[1] = True
        on_done()

    def test(self) -> bool:
        is_taken = [message[1] for message, _ in self._sends]  # once: others set it at any time
        done = [on_done for taken, (_, on_done) in zip(is_taken, self._sends, strict=True) if taken]
        self._sends = [sent for taken, sent in zip(is_taken, self._sends, strict=True) if not taken]
        for callback in done:
            callback()
        return bool(done)

    def send_note(self, rank: int, note: IntArray) -> None:
        with self.network.lock:
            self.network.queue("notes", self.rank, rank).append([note, False])
        if rank in self._segments:
            self._segments[rank].bell.ring()

    def receive_notes(self) -> Any:
        for sender in range(self.network_size):
            if self.network.may_arrive(sender, self.rank):
                queue = self.network.queue("notes", sender, self.rank)
                while queue:
                    yield sender, queue.popleft()[0]


@dataclass
class Rank:
    """What an exchange on one rank is given."""

    number: int
    slots: Slots
    pack_slots: Slots
    segments: dict[int, Segment]
    bell: Bell


def ranks_of(nodes: Sequence[Sequence[int]], n_slots: int, nbytes: int) -> list[Rank]:
    """Ranks with slots; those of a node share memory where there are several."""
    made: dict[int, Rank] = {}
    room = (n_slots + 2) * aligned(nbytes)
    for node in nodes:
        segments = {rank: Segment.create(room + 64) for rank in node} if len(node) > 1 else {}
        for rank in node:
            own = segments.get(rank)
            seen = {k: segment if k == rank else Segment.attach(segment.handle) for k, segment in segments.items()}
            slots = Slots(n_slots, nbytes, None if own is None else own.data)
            packs = Slots(2, nbytes, None if own is None else own.data[n_slots * aligned(nbytes) :])
            made[rank] = Rank(rank, slots, packs, seen, Bell() if own is None else own.bell)
        for segment in segments.values():
            segment.seal()
    return [made[rank] for rank in sorted(made)]


def exchange_all(
    ranks: Sequence[Rank], arrays: Sequence[Sequence[ArrayMove]], network: Network | None = None, checksums: bool = False
) -> list[tuple[BaseException | None, Counters]]:
    """One exchange of these arrays of each rank; what each returns. AssertionError if one raises."""
    network = network or Network()
    found: list[Any] = [None] * len(ranks)

    def run(rank: Rank) -> None:
        watch = Watchdog(0, 1)
        watch.begin("test", SECONDS)
        about = dict(rank=rank.number, size=len(ranks), network=network, watch=watch)
        group: Any = SimpleNamespace(**about, forget_shared_memory=lambda: None)
        group.transport = partial(FakeTransport, group)
        resources = Resources(rank.slots, rank.bell, pack_slots=rank.pack_slots, segments=rank.segments)
        try:
            moves = arrays[rank.number]
            outgoing = engine.Outgoing(moves, rank.number)
            channels = engine.open_channels(group, moves, resources, tags=(0, 1), checksums=checksums)
            found[rank.number] = engine.exchange(group, channels, resources, outgoing)
        except BaseException as error:
            found[rank.number] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    raised = [error for error in found if error is None or isinstance(error, BaseException)]
    assert not raised, raised
    return found


def leave_no_memory(monkeypatch: pytest.MonkeyPatch, arrays: Sequence[ArrayMove]) -> None:
    """Let the rank that moves these arrays have no memory left while a part arrives."""
    receive = Arrivals.receive

    def fail(self: Arrivals, *given: Any) -> None:
        if self._moves is arrays:
            raise MemoryError("no more")
        receive(self, *given)

    monkeypatch.setattr(Arrivals, "receive", fail)
