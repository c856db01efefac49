"""Do the figures of a machine limit an estimate, and is what each way of reading fetches counted as it is fetched?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardload.errors import ConfigError
from shardload.planning.cost import Cost, Nodes, choose_mode, plan_cost
from shardload.planning.limits import OnDisk
from shardload.planning.machine import WORKSTATION, Machine
from shardload.planning.readers import numbers_of_readers, pick_readers
from shardload.planning.schedule import RankBoxes, Schedule, plan_shards
from shardload.planning.selection import select_axes
from shardload.planning.source_layout import SourceLayout
from shardload.planning.strategies import DIRECT, MODES, PARALLEL, ROOT, plan_schedules
from shardload.planning.traffic import count_direct_of_nodes
from tests.tiers import examples
from tests.unit.brute_force import Case, cases, chunks_read, elements_read

PENCIL = ((), (0,), (1,))
F4 = np.dtype("f4")
RATES = st.floats(1e-3, 1e3)


# Four chunks for six owners on a node of five ranks and one of one rank: three of the four that read are on the first.
UNEVEN = Case((6,), ((),), np.zeros(3, dtype=np.int64), 6, (2,), (1,), 6, itemsize=1, block_nbytes=1)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Slow ones, so that another resource limits each plan."""
    return Machine(draw(RATES), draw(RATES), draw(RATES))


@st.composite
def storages(draw: st.DrawFn) -> OnDisk:
    """All chunks in one file, each in its own, or several in each of many."""
    kind = draw(st.sampled_from(["one", "own", "shards"]))
    if kind == "one":
        return OnDisk()
    return OnDisk(1.0, tuple(draw(st.lists(st.integers(1, 3 if kind == "shards" else 1), min_size=4, max_size=4))))


def by_node(of_rank: list[set[int]], per_node: int) -> list[set[int]]:
    return [set().union(*of_rank[k : k + per_node]) for k in range(0, len(of_rank), per_node)]


@examples(80)
@given(cases(), machines(), st.integers(1, 5), storages())
@example(UNEVEN, Machine(1e-3), 5, OnDisk())
def test_no_estimate_beats_a_resource_that_ranks_share(case: Case, machine: Machine, per_node: int, stored: OnDisk) -> None:
    """What each rank reads and sends is counted element by element, and the least time for it compared with the estimate."""
    plan, layout = case.plan(), case.layout()
    if stored.file_chunks is not None:
        stored = replace(stored, file_chunks=stored.file_chunks[: len(case.shape)])
    nodes_ = Nodes(per_node, min(per_node, case.n_ranks))  # a thread per rank
    cost = plan_cost(plan, layout, nodes_, machine=machine, stored=stored)
    if math.prod(case.shape) == 0:
        assert cost.seconds >= 0
        return
    of_rank = [{c for read in chunks_read(plan, case.chunks, rank) for c in read} for rank in range(case.n_ranks)]
    nodes = by_node(of_rank, per_node)
    chunk_nbytes, enough = layout.chunk_nbytes, cost.seconds * (1 + 1e-9)
    assert cost.fs_nbytes >= sum(map(len, nodes)) * chunk_nbytes
    assert enough >= max(map(len, of_rank)) * chunk_nbytes / machine.read_rate
    assert enough >= cost.operations / machine.operations_rate
    crosses = sum(
        part.region.size * case.itemsize
        for rank in range(case.n_ranks)
        for read in plan.owned_blocks(rank)
        for part in read.parts
        if part.rank // per_node != rank // per_node
    )
    assert enough >= crosses / len(nodes) / machine.network_rate
    if stored.file_chunks is not None and layout.has_chunks:  # each file is opened once at least
        counts, per_file = case.chunks.counts, stored.file_chunks
        files = {
            tuple(k // f for k, f in zip(np.unravel_index(c, counts), per_file, strict=True)) for mine in of_rank for c in mine
        }
        assert cost.operations >= len(files)


@examples(50)
@given(cases(), st.integers(1, 5))
def test_what_ranks_of_a_node_share_is_fetched_once(case: Case, per_node: int) -> None:
    """Wrong if the page cache were forgotten, or if it served other nodes too."""
    case = replace(case, n_readers=0)
    plan, layout = case.plan(), case.layout()
    of_rank = [{c for read in chunks_read(plan, case.chunks, rank) for c in read} for rank in range(case.n_ranks)]
    nodes = by_node(of_rank, per_node)
    assert count_direct_of_nodes(plan, layout, per_node) == (sum(map(len, nodes)), max(map(len, nodes)))
    elements = [elements_read(plan, rank) for rank in range(case.n_ranks)]
    total, busiest = count_direct_of_nodes(plan, case.layout(has_chunks=False), per_node)
    assert total <= sum(elements) and busiest <= math.prod(case.shape)


@pytest.mark.each_value
@pytest.mark.parametrize("per_node", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("axes", [((0,), (1,), ()), ((), (0,), (1,)), ((1,), (), (0,)), ((0, 1), (), ()), ((1, 0), (), ())])
@pytest.mark.parametrize("devices", [1, 2])
def test_nodes_of_a_formula_are_those_of_its_table(axes: Any, per_node: int, devices: int) -> None:
    """Wrong if a node had other ranks in a formula than in the table that it stands for, in any order of the mesh."""
    boxes = RankBoxes.in_order((8, 8), devices)
    assert boxes is not None
    layout = SourceLayout.cut(select_axes(None, (64, 48, 64)), (5, 7, 9), F4, F4)
    found = []
    for ranks in (boxes, boxes.table()):
        shards = plan_shards((64, 48, 64), axes, ranks)
        n_ranks = 64 // devices
        plan = plan_schedules(layout, shards, n_ranks, max_nbytes=1 << 20, modes=(DIRECT,))[DIRECT]
        found.append(count_direct_of_nodes(plan, layout, min(per_node, n_ranks)))
    assert found[0] == found[1]


def test_strided_runs_are_operations_and_gaps_between_near_ones_are_bytes() -> None:
    """A quarter of each row. Rows of 2 KiB are read whole; of rows of 2 MiB the quarter, each in a read of its own."""
    machine = Machine(1e9)
    for shape, nbytes, reads in (
        ((512, 512, 512), 4 * 512 * 512 * 512 * 4, 4 * 512),  # all of the file on each of four nodes, in one go
        ((4, 64, 1 << 19), 4 * 64 * (1 << 19) * 4, 4 * 256),
    ):
        shards = plan_shards(shape, ((), (), (0,)), np.arange(4))
        layout = SourceLayout.cut(select_axes(None, shape), None, F4, F4)
        plan = plan_schedules(layout, shards, 4, max_nbytes=1 << 24, modes=(DIRECT,))[DIRECT]
        cost = plan_cost(plan, layout, Nodes(1), machine=machine)
        assert (cost.fs_nbytes, cost.operations) == (nbytes, reads + 4 * 8)


def test_stored_bytes_and_files_of_chunks() -> None:
    """Wrong if decoded bytes came from disk, or if a chunk in a file of its own were not opened."""
    case = Case((64, 8), ((0,), ()), np.arange(4), 4, (1, 8), (0, 0), 0)
    machine = Machine(1e6, 1e9)
    one = plan_cost(case.plan(), case.layout(), Nodes(2), machine=machine, stored=OnDisk(0.25))
    many = plan_cost(case.plan(), case.layout(), Nodes(2), machine=machine, stored=OnDisk(0.25, (1, 1)))
    assert one.fs_nbytes == many.fs_nbytes == 64 * 32 // 4
    # Sixteen chunks that follow each other are read ahead; a file of its own is opened and read. Before that each rank opens
    # the array, three times in one file and twice in a store, and the first of a node reads its metadata.
    assert one.operations == 4 + 4 * 3 + 2 * 5 and many.operations == 64 + 64 + 4 * 2 + 2 * 1


def test_a_workstation_changes_nothing() -> None:
    """The default: no file system limits, so that choices in the page cache are those of cores and messages."""
    for cell in (None, (1, 512, 512), (64, 64, 64)):
        for mode, (plan, layout) in schedules((512,) * 3, cell, (4, 4)).items():
            nodes = Nodes(4, 8)
            cost = plan_cost(plan, layout, nodes)
            assert cost == plan_cost(plan, layout, nodes, machine=WORKSTATION, stored=OnDisk(0.5)), mode
            assert (cost.limit, cost.fs_nbytes, cost.operations) == ("", 0, 0)


# --- large jobs


def schedules(shape: Any, cell: Any, mesh: tuple[int, ...], n_owners: int | None = None) -> dict[str, tuple[Schedule, Any]]:
    boxes = RankBoxes.in_order(mesh)
    assert boxes is not None
    layout = SourceLayout.cut(select_axes(None, shape), cell, F4, F4, "gzip" if cell else "none")
    shards = plan_shards(shape, PENCIL, boxes)
    plans = plan_schedules(layout, shards, math.prod(mesh), max_nbytes=16 << 20, n_owners=n_owners)
    return {mode: (plan, layout) for mode, plan in plans.items()}


def costs(shape: Any, cell: Any, mesh: tuple[int, ...], machine: Machine, per_node: int = 4) -> dict[str, Cost]:
    nodes = Nodes(per_node, 64)
    n_ranks = math.prod(mesh)
    found = {m: plan_cost(*made, nodes, machine=machine) for m, made in schedules(shape, cell, mesh).items() if m != PARALLEL}
    layout = schedules(shape, cell, mesh)[ROOT][1]
    _, found[PARALLEL] = pick_readers(
        numbers_of_readers(n_ranks, per_node, layout.chunks.n_cells),
        lambda n: schedules(shape, cell, mesh, n)[PARALLEL][0],
        lambda plan: plan_cost(plan, layout, nodes, machine=machine),
    )
    return {mode: found[mode] for mode in MODES}


GIB, TIB = 1 << 30, 1 << 40


@pytest.mark.each_value
@pytest.mark.parametrize("machine", [Machine(2e9, 1e6, 100e9), Machine(1.5e9, 5e5, 50e9), Machine(1.5e9, 2e5, 12.5e9)])
@pytest.mark.parametrize(
    ("shape", "cell", "mesh", "array_nbytes", "direct_nbytes"),
    [
        ((512,) * 3, (1, 512, 512), (512, 512), GIB // 2, 32 * TIB),  # each of 65,536 nodes the whole file
        ((4096,) * 3, (64,) * 3, (128, 128), 256 * GIB, 512 * GIB),  # each chunk on two nodes
        ((2048,) * 3, None, (128, 128), 32 * GIB, TIB),  # each row on 32 nodes, because of the gaps
    ],
)
def test_large_jobs_read_each_byte_once(
    machine: Machine, shape: Any, cell: Any, mesh: Any, array_nbytes: int, direct_nbytes: int
) -> None:
    found = costs(shape, cell, mesh, machine)
    assert found[DIRECT].fs_nbytes == direct_nbytes and found[PARALLEL].fs_nbytes == found[ROOT].fs_nbytes == array_nbytes
    mode, why = choose_mode(found, math.prod(mesh))
    assert mode == PARALLEL and "slowest of the former: " in why, why
    before = {m: plan_cost(*made, Nodes()) for m, made in schedules(shape, cell, mesh).items()}
    assert choose_mode(before, math.prod(mesh))[0] == (PARALLEL if cell == (64,) * 3 else DIRECT)


def test_fewer_readers_where_operations_are_dear_and_more_where_cores_are() -> None:
    """Wrong if all ranks read whatever the file system is."""
    shape, cell, mesh = (4096,) * 3, (64,) * 3, (32, 32)
    fast, slow = (costs(shape, cell, mesh, Machine(2e9, rate))[PARALLEL].n_readers for rate in (4e6, 500.0))
    assert slow < 256 <= fast


# --- what a caller gives


def test_a_machine_as_text_is_the_same_machine() -> None:
    machine = Machine.of({"read_rate": 2e9, "operations_rate": "1e6"})
    assert Machine.of(str(machine)) == Machine.of(machine) == machine == Machine(2e9, 1e6)
    assert machine.has_limits and machine.has_file_system and Machine.of(None) is WORKSTATION
    assert Machine.of("network_rate=25e9").has_limits and not Machine.of("network_rate=25e9").has_file_system


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"disk": 1}, "machine is {'disk': 1}; expected some of the figures read_rate, operations_rate, network_rate"),
        ("perlmutter", "machine is 'perlmutter'; expected some of the figures"),
        ({}, "machine is {}; expected some of the figures"),
        (3, "machine is 3; expected some of the figures"),
        ({"read_rate": -1}, "machine: read_rate is -1; expected a number per second, more than 0, such as machine={"),
        ({"read_rate": 0}, "read_rate is 0"),
        ({"read_rate": math.nan}, "read_rate is nan"),
        ({"read_rate": True}, "read_rate is True"),
        ("read_rate=5 GB/s", "read_rate is '5 GB/s'"),
    ],
)
def test_wrong_figures(given: Any, says: str) -> None:
    """Each error names the figure, what was found, and what was expected."""
    with pytest.raises(ConfigError) as caught:
        Machine.of(given)
    assert says in str(caught.value)
