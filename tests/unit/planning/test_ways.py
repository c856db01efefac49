"""Is the way that parts take to other nodes chosen by their number and size, the same on every rank, and counted as it is?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardload.planning.cost import Nodes, plan_cost
from shardload.planning.hops import MESSAGES, NODES, TWO_HOPS, WAYS, EvenNodes, Hops
from shardload.planning.parts import PartTable
from shardload.planning.presets import PRESETS
from shardload.planning.schedule import RankBoxes, Schedule, plan_shards
from shardload.planning.selection import select_axes
from shardload.planning.source_layout import SourceLayout
from shardload.planning.strategies import PARALLEL, plan_schedules
from shardload.planning.ways import Sending, choose_way, way_costs

PENCILS = ((), (0,), (1,))


def planned(
    shape: tuple[int, ...], chunks: tuple[int, ...], mesh: tuple[int, int], **how: int
) -> tuple[Schedule, SourceLayout]:
    f4 = np.dtype("f4")
    layout = SourceLayout.cut(select_axes(None, shape), chunks, f4, f4, "gzip")
    shards = plan_shards(shape, PENCILS, RankBoxes.in_order(mesh))  # type: ignore[arg-type]
    plans = plan_schedules(layout, shards, mesh[0] * mesh[1], max_nbytes=16 << 20, modes=(PARALLEL,), **how)
    return plans[PARALLEL], layout


def way_of(shape: tuple[int, ...], chunks: tuple[int, ...], mesh: tuple[int, int], per_node: int = 4, **how: int) -> str:
    schedule, layout = planned(shape, chunks, mesh, **how)
    return plan_cost(schedule, layout, Nodes(per_node, 64), machine=PRESETS["perlmutter"], ways=dict.fromkeys(WAYS, 0)).way


def test_many_small_parts_go_over_relays_and_few_large_ones_straight() -> None:
    """Wrong if a job of a few nodes did something else than before, or planes on 512 x 512 ranks were sent part by part."""
    assert way_of((512,) * 3, (1, 512, 512), (512, 512), n_owners=512) == TWO_HOPS
    assert way_of((4096,) * 3, (64, 64, 64), (128, 128)) == MESSAGES
    assert way_of((512,) * 3, (1, 512, 512), (2, 2), per_node=2) == MESSAGES
    assert way_of((512,) * 3, (1, 512, 512), (8, 8)) == MESSAGES
    assert way_of((512,) * 3, (1, 512, 512), (128, 128), n_owners=512) == TWO_HOPS
    assert way_of((512,) * 3, (1, 512, 512), (128, 128), per_node=128, n_owners=512) == NODES


def test_on_one_node_and_without_relays_a_plan_is_what_it_was() -> None:
    schedule, layout = planned((512,) * 3, (1, 512, 512), (512, 512), n_owners=512)
    plain = plan_cost(schedule, layout, Nodes(4, 64))
    assert plain == plan_cost(schedule, layout, Nodes(4, 64), ways={MESSAGES: 0}) and plain.way == MESSAGES
    one = plan_cost(schedule, layout, Nodes(None, None), ways=dict.fromkeys(WAYS, 0))
    assert (one.way, one.partners) == (MESSAGES, 0) and one.messages == plan_cost(schedule, layout).messages


@pytest.mark.parametrize(("n_nodes", "per_node"), [(4, 2), (9, 1), (16, 4), (7, 3)])
def test_counts_are_those_of_the_relays(n_nodes: int, per_node: int) -> None:
    """Planes as pencils, against a list of all first and second hops, with room for one bundle to each partner."""
    n = n_nodes * per_node
    rows = max(k for k in range(1, n + 1) if n % k == 0 and k * k <= n)
    schedule, _ = planned((n, 4 * n, 4 * n), (1, 4 * n, 4 * n), (rows, n // rows), n_owners=n)
    ranks = EvenNodes(n, per_node)
    parts = nbytes = 0
    first: dict[str, set[tuple[int, int]]] = {NODES: set(), TWO_HOPS: set()}
    second: set[tuple[int, int]] = set()
    for sender in range(n):
        for block in schedule.owned_blocks(sender):
            table = PartTable.of(block.parts)
            far = ranks.nodes(table.rank) != ranks.node(sender)
            parts, nbytes = parts + int(far.sum()), nbytes + int(table.sizes[far].sum()) * 4
            for way, pairs in first.items():
                hops = Hops.of(ranks, way)
                for receiver in table.rank[far].tolist():
                    relay = hops.first_relay(sender, hops.column(ranks.node(receiver)))
                    pairs.add((sender, relay))
                    if ranks.node(relay) != ranks.node(receiver):
                        second.add((relay, hops.relay(relay, ranks.node(receiver))))
    sending = Sending(parts, nbytes, n, n, 1, n, per_node)
    straight, by_node, hopped = way_costs(sending, WAYS)
    assert (straight.messages, straight.between_nbytes) == (parts, nbytes)
    assert by_node.messages == len(first[NODES]) and by_node.partners == n_nodes - 1
    # A ragged grid has nodes without a row of their own, and a rank with nothing to pass on says so: an upper bound.
    assert len(first[TWO_HOPS]) + len(second) <= hopped.messages <= 1.6 * (len(first[TWO_HOPS]) + len(second))
    most = max(np.bincount([s for s, _ in pairs]).max() for pairs in (first[TWO_HOPS], second or {(0, 0)}))
    assert most <= hopped.partners <= 2 * np.sqrt(n_nodes) + 1


def test_a_way_is_taken_only_if_it_is_clearly_faster() -> None:
    """Wrong if relays were taken for a few milliseconds, or for parts that are large anyway."""
    small = Sending(1e8, 4e8, 512, 1 << 18, 1, 1 << 18, 4)
    best, why = choose_way(way_costs(small, WAYS))
    assert best.way == TWO_HOPS and "in place of 100,000,000 messages of 4 B" in why
    for other in (replace(small, parts=1e4), replace(small, parts=1e6, nbytes=1e12), replace(small, n_ranks=4, n_receivers=4)):
        assert choose_way(way_costs(other, WAYS))[0].way == MESSAGES
    only = choose_way(way_costs(small, [NODES]))
    assert only[0].way == NODES and "partners" in only[1]
