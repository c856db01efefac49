"""Which ranks share a machine, with how many cores, and do all of them share memory or none?"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from shardload.comm.group import Group, Topology
from shardload.comm.shared_memory import Segment
from tests.unit.ranks import on_ranks


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHARDLOAD_RANKS_PER_NODE", "SHARDLOAD_SHARED_MEMORY"):
        monkeypatch.delenv(name, raising=False)


def cores(monkeypatch: pytest.MonkeyPatch, those: set[int]) -> None:
    """Let every rank run on these cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: those, raising=False)


# --- machines


def test_alone_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, {0, 3, 5})
    alone = Group(None)
    assert alone.node.ranks == (0,)
    assert alone.machine == Topology((0,), 3) and alone.machine.n_nodes == 1
    assert alone.node.shared_memory(1000) == {}, "there is nobody to share with"


@pytest.mark.parametrize(
    ("n_cores", "per_node", "leaders", "n_threads"),
    [
        (8, "", (0, 0, 0, 0), 2),
        (2, "", (0, 0, 0, 0), 1),
        (1, "", (0, 0, 0, 0), 1),
        (8, "2", (0, 0, 2, 2), 4),
        (8, "3", (0, 0, 0, 3), 2),
        (8, "many", (0, 0, 0, 0), 2),
    ],
)
def test_ranks_that_may_run_on_the_same_cores_share_them(
    monkeypatch: pytest.MonkeyPatch, n_cores: int, per_node: str, leaders: Any, n_threads: int
) -> None:
    """Wrong if each of four ranks decoded with as many threads as the machine has cores."""
    cores(monkeypatch, set(range(n_cores)))
    monkeypatch.setenv("SHARDLOAD_RANKS_PER_NODE", per_node)
    assert on_ranks(4, lambda g: g.machine) == [Topology(leaders, n_threads)] * 4
    nodes = on_ranks(4, lambda g: g.node.ranks)
    assert nodes == [tuple(r for r in range(4) if leaders[r] == leaders[k]) for k in range(4)]


def test_ranks_that_are_bound_have_their_cores_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if two ranks with four cores each shared them out once more; the least of all ranks is everybody's."""

    bound: dict[int, set[int]] = {}  # the ranks are threads

    def work(group: Group) -> Topology:
        bound[threading.get_ident()] = [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}][group.rank]
        return group.machine

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: bound[threading.get_ident()], raising=False)
    assert on_ranks(3, work) == [Topology((0, 0, 0), 2)] * 3


# --- memory


def shared(group: Group, *wanted: int) -> list[dict[int, Segment]]:
    """What the ranks share, asked for one size after the other; each writes its rank and finds those of the others."""
    found = []
    for nbytes in wanted:
        segments = dict(group.node.shared_memory(nbytes))
        if segments:
            segments[group.rank].data[:1] = 10 + group.rank
        group.gather_int(0)  # all have written
        for rank, segment in segments.items():
            assert segment.data[0] == 10 + rank, "another rank's memory"
        group.gather_int(0)
        found.append(segments)
    return found


def test_machines_share_nothing_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLOAD_RANKS_PER_NODE", "2")
    found = on_ranks(5, lambda g: shared(g, 64))
    assert [sorted(f[0]) for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3], []]


def test_memory_is_forgotten_by_all_when_one_rank_was_interrupted() -> None:
    """Wrong if a rank went on with memory into which another still looks, or waited for one that does not ask."""

    def work(group: Group) -> list[dict[int, Segment]]:
        found = shared(group, 64)
        if group.rank == 2:
            group.forget_shared_memory()
        return found + shared(group, 64)

    for rank, (first, second) in enumerate(on_ranks(3, work)):
        assert sorted(second) == [0, 1, 2] and not any(second[k] is first[k] for k in range(3)), rank


@pytest.mark.parametrize("what", ["create", "attach"])
@pytest.mark.parametrize("failing", [0, 2])
def test_if_one_rank_cannot_then_none_does_and_it_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, what: str, failing: int
) -> None:
    """Wrong if ranks disagreed about the way that values travel: some would wait for messages, others for notes."""
    right = getattr(Segment, what)
    who: dict[int, int] = {}
    asked: list[int] = []

    def wrong(cls: type[Segment], argument: Any) -> Segment:
        asked.append(who[threading.get_ident()])
        if who[threading.get_ident()] == failing:
            raise OSError(1, "Operation not permitted")
        return right(argument)  # type: ignore[no-any-return]

    def work(group: Group) -> list[dict[int, Segment]]:
        who[threading.get_ident()] = group.rank
        return shared(group, 64, 64, 999)

    monkeypatch.setattr(Segment, what, classmethod(wrong))
    before = len(os.listdir("/proc/self/fd"))
    assert on_ranks(3, work) == [[{}, {}, {}]] * 3
    assert asked.count(failing) == 1
    assert len(os.listdir("/proc/self/fd")) == before, "what the others had made is still open"


def test_a_system_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert on_ranks(3, lambda g: shared(g, 64)) == [[{}]] * 3


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLOAD_SHARED_MEMORY", "0")
    assert on_ranks(3, lambda g: shared(g, 64)) == [[{}]] * 3


def test_freeing_a_group_gives_its_memory_back() -> None:
    def work(group: Group) -> int:
        shared(group, 64)
        group.free()
        return len(group.node.segments)

    assert on_ranks(2, work) == [0, 0]
