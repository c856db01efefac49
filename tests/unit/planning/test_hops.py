"""Does each part find its way over the relays, for any number of nodes, and do both ends of each hop know of each other?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.hops import NODES, TWO_HOPS, EvenNodes, Hops, ListedNodes, NodeMap, node_map

WAYS = (NODES, TWO_HOPS)


def leaders_of(nodes: list[int]) -> list[int]:
    """For each rank the lowest rank of its node, from each rank's node."""
    return [nodes.index(node) for node in nodes]


JOBS = {
    "one node": [0] * 3,
    "even": [r // 2 for r in range(14)],
    "a last node with fewer ranks": [r // 3 for r in range(20)],
    "round robin": [r % 5 for r in range(17)],
    "ragged and permuted": [3, 0, 1, 1, 3, 2, 0, 1, 4, 4, 5, 3, 1, 6, 6, 2],
    "one rank a node": [*range(11)],
}


def maps() -> list[tuple[str, NodeMap]]:
    return [(name, node_map(leaders_of(nodes))) for name, nodes in JOBS.items()]


@pytest.mark.parametrize("name", JOBS)
def test_nodes_and_members_are_those_that_were_given(name: str) -> None:
    """Wrong if the formula and the arrays disagreed, or members were counted in another order."""
    nodes, ranks = JOBS[name], node_map(leaders_of(JOBS[name]))
    for made in (ranks, ListedNodes(leaders_of(nodes))):
        assert made.n_nodes == len(set(nodes)) and made.n_ranks == len(nodes)
        for rank, node in enumerate(nodes):
            mates = [other for other, there in enumerate(nodes) if there == node]
            found = made.node(rank)
            assert [made.rank(found, k) for k in range(made.n_members(found))] == mates
            assert made.member(rank) == mates.index(rank)
        assert made.nodes(np.arange(len(nodes))).tolist() == [made.node(rank) for rank in range(len(nodes))]


def walk(hops: Hops, sender: int, receiver: int) -> list[int]:
    """The relays of a part."""
    node = hops.ranks.node(receiver)
    path = [hops.first_relay(sender, hops.column(node))]
    if hops.ranks.node(path[0]) != node:
        path.append(hops.relay(path[0], node))
    return path


def check(ranks: NodeMap, way: str) -> None:
    """Every pair of ranks on different nodes, against a list of all first and second hops."""
    hops = Hops.of(ranks, way)
    n = ranks.n_ranks
    first: dict[int, set[int]] = {rank: set() for rank in range(n)}
    second: dict[int, set[int]] = {rank: set() for rank in range(n)}
    for sender in range(n):
        for receiver in range(n):
            if ranks.node(sender) == ranks.node(receiver):
                continue
            path = walk(hops, sender, receiver)
            assert ranks.node(path[-1]) == ranks.node(receiver) and len(path) <= (1 if way == NODES else 2)
            first[sender].add(path[0])
            if len(path) > 1:
                assert hops.column(ranks.node(path[0])) == hops.column(ranks.node(receiver)), (
                    "the second hop goes down a column"
                )
                second[path[0]].add(path[1])
    for rank in range(n):
        relays, onward = hops.first_relays(rank), hops.second_relays(rank)
        assert first[rank] <= set(relays) and len(set(relays)) == len(relays)
        assert second[rank] <= set(onward) and len(set(onward)) == len(onward)
        assert sorted(hops.first_senders(rank)) == [s for s in range(n) if rank in hops.first_relays(s)]
        assert sorted(hops.second_senders(rank)) == [s for s in range(n) if rank in hops.second_relays(s)]
        if way == TWO_HOPS:
            side = int(np.ceil(np.sqrt(ranks.n_nodes)))
            assert len(relays) <= side and len(onward) <= side
        else:
            assert not onward


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", JOBS)
def test_every_part_comes_to_the_node_of_its_receiver(name: str, way: str) -> None:
    """Wrong if a relay did not know a sender, which would be a hang, or a part went round."""
    check(node_map(leaders_of(JOBS[name])), way)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=24), st.sampled_from(WAYS))
def test_any_placing_of_ranks(nodes: list[int], way: str) -> None:
    """Wrong for some number of nodes whose last row is shorter."""
    check(node_map(leaders_of(nodes)), way)


def test_senders_are_spread_over_the_relays_of_a_node() -> None:
    """Wrong if one rank of a node relayed for all: with one reader on each node, too."""
    ranks = EvenNodes(64 * 4, 4)
    for stride in (1, 4):
        load = np.bincount([Hops.of(ranks, NODES).relay(s, 5) for s in range(0, 256, stride)], minlength=24)[20:24]
        assert load.min() == load.max()


class Counted(EvenNodes):
    """Counts the ranks that it is asked about."""

    asked: ClassVar[set[int]] = set()

    def rank(self, node: int, member: int) -> int:
        found = super().rank(node, member)
        Counted.asked.add(found)
        return found


def test_a_rank_of_many_asks_about_its_partners_only() -> None:
    """65,536 ranks on 16,384 nodes. Wrong if a rank listed all ranks, or had more than some sqrt(nodes) partners."""
    ranks = Counted(65_536, 4)
    hops = Hops.of(ranks, TWO_HOPS)
    Counted.asked.clear()
    for rank in (0, 40_001, 65_535):
        Counted.asked.clear()
        tables = hops.first_relays(rank), [*hops.first_senders(rank)], hops.second_relays(rank), hops.second_senders(rank)
        assert [len(table) for table in tables] == [128, 128, 127, 127]
        assert len(Counted.asked) <= sum(map(len, tables))
