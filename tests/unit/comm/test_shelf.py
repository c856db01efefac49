"""Does what one rank puts on the shelf come to all others whole, and nothing else?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardload.comm.group import Group, Invocation
from shardload.comm.shelf import Shelf
from tests.unit.comm.test_group import ThreadComm

FRONT = 1 << 16  # bytes before what is read straight into its place
pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment does not say where ranks are, or that they share nothing."""
    for name in ("SHARDLOAD_RANKS_PER_NODE", "SHARDLOAD_SHARED_MEMORY"):
        monkeypatch.delenv(name, raising=False)


class Counting(ThreadComm):
    """Counts the bytes of broadcasts."""

    def Bcast(self, data: Any, root: int) -> None:
        self.sent = [*getattr(self, "sent", []), data.nbytes]
        super().Bcast(data, root)


class OneMachine(Group):
    """Ranks that are threads of this process."""

    mpi = SimpleNamespace(IN_PLACE="in place", SUM="sum", MIN="min", MAX="max", COMM_TYPE_SHARED="shared")  # type: ignore[assignment]


def on_ranks(size: int, work: Callable[[OneMachine, Counting], Any]) -> list[Any]:
    """What `work` returns on each of `size` ranks."""
    barrier, slots, found = threading.Barrier(size), [None] * size, [None] * size

    def run(rank: int) -> None:
        comm = Counting(rank, size, barrier, slots)
        group = OneMachine(comm)
        _ = group.node
        found[rank] = work(group, comm)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(one is None for one in found), "a rank failed"
    return found


def asked() -> Invocation:
    return Invocation("load", "load of it", {"path": "a"})


@cache
def message(k: int, nbytes: int) -> bytes:
    return np.random.default_rng(k).bytes(nbytes)


def test_one_long_message_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a rank saw the message before, or the beginning or end of this one were cut off."""
    monkeypatch.setattr("shardload.comm.shelf._LEAST_NBYTES", 1 << 17)
    monkeypatch.setattr("shardload.comm.shelf._MOST_NBYTES", 1 << 19)
    lengths = [10, 5_000, 5_000, 200_000, 7, 199_999, 100_000, 300_000, 300_000, 600_000, 5_000]  # 600,000 are too many

    def work(group: OneMachine, comm: Counting) -> bool:
        for k, length in enumerate(lengths):
            told = group.begin(asked(), lambda k=k, length=length: [b"head", message(k, length)])  # type: ignore[misc]
            assert bytes(told) == b"head" + message(k, length)
            group.agree(None)
        return True

    assert on_ranks(3, work) == [True] * 3


@pytest.mark.parametrize("n_front", [10, FRONT - 17, FRONT, FRONT + 1000])
def test_what_was_read_in_its_place_is_not_copied(n_front: int) -> None:
    """Wrong if what comes before it were cut, or written over it where it is long; 17 bytes say what call it is."""

    def work(group: OneMachine, comm: Counting) -> int:
        for k in range(4):
            front, values = message(k, n_front), message(100 + k, 200_000)

            def find(front: bytes = front, values: bytes = values) -> list[Any]:
                room = group.room(len(values))
                assert group.room(1) is None, "there is one place"
                if room is None:
                    return [front, values]
                room[...] = np.frombuffer(values, np.uint8)
                return [front, room.data]

            told = group.begin(asked(), find)
            assert told[:n_front] == front and told[n_front:] == values
            group.agree(None)
        comm.sent.clear()
        group.begin(asked(), find)
        return sum(comm.sent)

    assert on_ranks(3, work) == [4096] * 3, "the values were sent, not only where they are"


def test_what_was_read_and_is_not_sent_harms_nothing() -> None:
    """Wrong if other bytes of the same length were taken for those that were read."""

    def work(group: OneMachine, comm: Counting) -> bool:
        group.begin(asked(), lambda: [b"x", message(0, 200_000)])  # makes the memory
        group.agree(None)

        def find() -> list[Any]:
            room = group.room(100_000)
            assert room is not None
            room[...] = 255
            return [b"front", message(1, 100_000)]

        assert bytes(group.begin(asked(), find)) == b"front" + message(1, 100_000)
        return True

    assert on_ranks(2, work) == [True] * 2


@pytest.mark.parametrize("root", [0, 1])
def test_what_was_told_stays_to_the_end_of_the_call(root: int) -> None:
    """Wrong if the next long message of the same call lay over it: a slow rank would still read the one before."""

    def work(group: OneMachine, comm: Counting) -> bool:
        for k in range(4):
            told = [group.begin(asked(), lambda k=k: [message(k, 50_000)])]  # type: ignore[misc]
            told += [group.tell(lambda k=k, j=j: [message(10 * k + j, 60_000)], root) for j in range(3)]  # type: ignore[misc]
            assert [bytes(one) for one in told] == [message(k, 50_000), *(message(10 * k + j, 60_000) for j in range(3))]
            group.agree(None)
        return True

    assert on_ranks(3, work) == [True] * 3


def test_nobody_can_write_to_it() -> None:
    def work(group: OneMachine, comm: Counting) -> bool:
        for k in range(2):
            told = group.begin(asked(), lambda k=k: [message(k, 50_000)])  # type: ignore[misc]
            group.agree(None)
        assert told.readonly
        return True

    assert on_ranks(2, work) == [True] * 2


@pytest.mark.parametrize("why", ["SHARDLOAD_SHARED_MEMORY", "two machines", "cannot"])
def test_without_shared_memory_it_is_a_message(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a rank waited for memory that another one does not have."""
    if why == "SHARDLOAD_SHARED_MEMORY":
        monkeypatch.setenv(why, "0")
    elif why == "two machines":
        monkeypatch.setenv("SHARDLOAD_RANKS_PER_NODE", "2")
    else:

        def fails(*_: Any) -> None:
            raise OSError("no more memory")

        monkeypatch.setattr("shardload.comm.node_memory.Segment.create", fails)

    def work(group: OneMachine, comm: Counting) -> bool:
        for k in range(3):
            assert bytes(group.begin(asked(), lambda k=k: [message(k, 50_000)])) == message(k, 50_000)  # type: ignore[misc]
            group.agree(None)
        return max(comm.sent) > 50_000

    assert on_ranks(4, work) == [True] * 4


def test_an_error_is_told_though_there_is_a_shelf() -> None:
    def work(group: OneMachine, comm: Counting) -> str:
        group.begin(asked(), lambda: [message(0, 50_000)])
        group.agree(None)

        def fail() -> list[Any]:
            group.room(1000)
            raise OSError("x" * 10_000)

        with pytest.raises(Exception, match="xxx") as caught:
            group.begin(asked(), fail)
        return str(caught.value)

    assert len({*on_ranks(3, work)}) == 1


def test_an_exchange_that_ended_badly_does_not_end_it() -> None:
    """Wrong if a rank that drops the memory of its exchange could not see what another one puts here."""

    def work(group: OneMachine, comm: Counting) -> bool:
        for k in range(4):
            if k == 2 and group.rank == 1:
                group.forget_shared_memory()
            told = group.begin(asked(), lambda k=k: [message(k, 50_000)])  # type: ignore[misc]
            assert bytes(told) == message(k, 50_000)
            group.agree(None)
        return True

    assert on_ranks(2, work) == [True] * 2


def test_no_more_than_it_may_take() -> None:
    shelf = Shelf(0, [0, 1], None)  # type: ignore[arg-type]
    assert shelf.may_make(1 << 20) and not shelf.may_make(1 << 24)
    assert shelf.room(1) is None and shelf.lay([b"x"]) is None
