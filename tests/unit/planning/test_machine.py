"""Do the figures of a machine limit an estimate, and is what each way of reading fetches counted as it is fetched?"""

from __future__ import annotations

import json
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
from shardload.planning.machine import ASSUMED, GIVEN, MEASURED, WORKSTATION, Machine
from shardload.planning.presets import PRESETS
from shardload.planning.readers import numbers_of_readers, pick_readers
from shardload.planning.schedule import RankBoxes, Schedule, plan_shards
from shardload.planning.selection import select_axes
from shardload.planning.source_layout import SourceLayout
from shardload.planning.strategies import DIRECT, MODES, PARALLEL, ROOT, plan_schedules
from shardload.planning.traffic import count_direct_of_nodes
from tests.tiers import examples
from tests.unit.brute_force import Case, cases, chunks_read, elements_read, held_regions

PENCIL = ((), (0,), (1,))
F4 = np.dtype("f4")
RATES = st.floats(1e-3, 1e3)


SLOW = Machine("slow", fs_rate=1.0, read_ahead_nbytes=1)
# Four chunks for six owners on a node of five ranks and one of one rank: three of the four that read are on the first.
UNEVEN = Case((6,), ((),), np.zeros(3, dtype=np.int64), 6, (2,), (1,), 6, itemsize=1, block_nbytes=1)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Slow ones, so that another resource limits each plan."""
    rates = ("memory_rate", "network_rate", "fs_rate", "node_rate", "stream_rate", "operations_rate")
    figures: dict[str, Any] = {name: draw(RATES) for name in rates}
    figures |= {name: draw(st.floats(0, 10)) for name in ("open_seconds", "read_seconds", "network_latency")}
    return Machine("random", **figures, read_ahead_nbytes=1, page_cache_nbytes=draw(st.sampled_from([0, 1 << 40])))


@st.composite
def storages(draw: st.DrawFn) -> OnDisk:
    """All chunks in one file, each in its own, or several in each of many."""
    kind = draw(st.sampled_from(["one", "own", "shards"]))
    if kind == "one":
        return OnDisk()
    per_file = draw(st.lists(st.integers(1, 3), min_size=4, max_size=4)) if kind == "shards" else []
    return OnDisk(1.0, 1 / math.prod(per_file), tuple(per_file))


def by_node(of_rank: list[set[int]], per_node: int) -> list[set[int]]:
    return [set().union(*of_rank[k : k + per_node]) for k in range(0, len(of_rank), per_node)]


@examples(80)
@given(cases(), machines(), st.integers(1, 5), storages())
@example(UNEVEN, replace(SLOW, node_rate=1e-3), 5, OnDisk())
def test_no_estimate_beats_a_resource_that_ranks_share(case: Case, machine: Machine, per_node: int, stored: OnDisk) -> None:
    """What each rank reads and sends is counted element by element, and the least time for it compared with the estimate."""
    plan, layout = case.plan(), case.layout()
    stored = replace(stored, file_chunks=stored.file_chunks[: len(case.shape)])
    if stored.file_chunks:
        stored = replace(stored, files_per_chunk=1 / math.prod(stored.file_chunks))
    nodes_ = Nodes(per_node, min(per_node, case.n_ranks))  # a thread per rank
    cost = plan_cost(plan, layout, nodes_, machine=machine, stored=stored)
    if math.prod(case.shape) == 0:
        assert cost.seconds >= 0
        return
    of_rank = [{c for read in chunks_read(plan, case.chunks, rank) for c in read} for rank in range(case.n_ranks)]
    nodes = by_node(of_rank, per_node)
    chunk_nbytes, enough = layout.chunk_nbytes, cost.seconds * (1 + 1e-9)
    fetched = sum(map(len, nodes if machine.page_cache_nbytes else of_rank)) * chunk_nbytes
    assert enough >= fetched / machine.fs_rate
    assert enough >= fetched / machine.operations_rate, "a byte is one operation where nothing is read ahead"
    assert enough >= max(map(len, nodes)) * chunk_nbytes / machine.node_rate
    assert enough >= max(map(len, of_rank)) * chunk_nbytes / machine.stream_rate
    crosses = sum(
        part.region.size * case.itemsize
        for rank in range(case.n_ranks)
        for read in plan.owned_blocks(rank)
        for part in read.parts
        if part.rank // per_node != rank // per_node
    )
    assert enough >= crosses / len(nodes) / machine.network_rate
    assert cost.fs_nbytes >= fetched and cost.operations >= fetched
    if stored.files_per_chunk:  # direct counts the files of each rank, the others each file once at least
        counts, per_file = case.chunks.counts, stored.file_chunks or (1,) * len(case.shape)
        files = [
            {tuple(k // f for k, f in zip(np.unravel_index(c, counts), per_file, strict=True)) for c in mine}
            for mine in of_rank
        ]
        alone = files if stored.file_chunks else by_node(files, per_node)  # type: ignore[arg-type]
        opened = sum(map(len, alone)) if plan.is_direct and not case.is_merged else len(set().union(*files))
        assert cost.operations >= opened
        assert enough >= opened / machine.operations_rate
    held = [sum(region.size for region in mine) * case.itemsize for mine in held_regions(case)]
    assert enough >= max(sum(held[k : k + per_node]) for k in range(0, case.n_ranks, per_node)) / machine.memory_rate


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


def test_without_room_in_the_page_cache_every_rank_fetches_for_itself() -> None:
    case = Case((64, 8), ((), (0,)), np.arange(4), 4, (1, 8), (0, 0), 0)
    least = Machine("m", fs_rate=1e6)
    found = [
        plan_cost(case.plan(), case.layout(), Nodes(2), machine=replace(least, page_cache_nbytes=n)).fs_nbytes
        for n in (0, 64 * 32 - 1, 64 * 32)
    ]
    assert found == [4 * 64 * 32, 4 * 64 * 32, 2 * 64 * 32]


def test_strided_runs_are_operations_and_gaps_between_near_ones_are_bytes() -> None:
    """A quarter of each row. Rows of 2 KiB are read whole; of rows of 2 MiB the quarter, each in a read of its own."""
    machine = Machine("m", fs_rate=1e9, read_ahead_nbytes=1 << 22)
    for shape, nbytes, reads in (
        ((512, 512, 512), 4 * 512 * 512 * 512 * 4, 4 * 128),  # all of the file on each of four nodes, in one go
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
    machine = Machine("m", fs_rate=1e6, operations_rate=1e9, open_seconds=1.0)
    one = plan_cost(case.plan(), case.layout(), Nodes(2), machine=machine, stored=OnDisk(0.25))
    many = plan_cost(case.plan(), case.layout(), Nodes(2), machine=machine, stored=OnDisk(0.25, 1.0))
    assert one.fs_nbytes == many.fs_nbytes == 64 * 32 // 4
    # Sixteen chunks that follow each other are read ahead; a file of its own is opened and read. Before that each rank opens
    # the array, three times in one file and twice in a store, and the first of a node reads its metadata.
    assert one.operations == 4 + 4 * 3 + 2 * 5 and many.operations == 64 + 64 + 4 * 2 + 2 * 1
    assert many.seconds == pytest.approx(one.seconds + 16 - 2, rel=1e-3), "rank 0 opens the array first, then the readers do"


def test_a_reader_opens_the_files_that_its_chunks_lie_in() -> None:
    """Shards of 2 x 2 x 2 chunks of a cube of 4^3, counted chunk by chunk. Wrong if a shard were opened once in the job."""
    shape, stored = (32, 32, 32), OnDisk(1.0, 1 / 8, (2, 2, 2))
    machine = Machine("m", operations_rate=1e6)
    layout = SourceLayout.cut(select_axes(None, shape), (8, 8, 8), F4, F4)
    numbers = np.arange(64).reshape(4, 4, 4)
    for axes, mesh in ((((0,), (1,), ()), (2, 4)), (PENCIL, (2, 4)), (((0,), (1,), ()), (1, 1))):
        n = math.prod(mesh)
        shards = plan_shards(shape, axes, np.arange(n).reshape(mesh))
        for owners in (1, 2, 4, 8, None):
            if owners is not None and owners > n:
                continue
            mode = DIRECT if owners is None else PARALLEL
            plan = plan_schedules(layout, shards, n, max_nbytes=1 << 24, n_owners=owners, modes=(mode,))[mode]
            opened = 0
            for rank in range(n):
                regions = [block.region for block in plan.owned_blocks(rank)]
                met = [numbers[tuple(slice(a // 8, -(-b // 8)) for a, b in zip(r.start, r.stop, strict=True))] for r in regions]
                chunks = np.concatenate([m.ravel() for m in met]) if met else np.zeros(0, int)
                opened += len({tuple(int(i) // 2 for i in np.unravel_index(c, (4, 4, 4))) for c in chunks})
            cost = plan_cost(plan, layout, Nodes(1), machine=machine, stored=stored)
            assert cost.operations == 64 + 2 * opened + cost.n_readers * 3, (axes, mesh, owners, opened)


def test_reading_and_sending_overlap_but_for_a_block() -> None:
    """Wrong if the slower of the two were all: the first block is read before anything is sent. Or if it were their sum."""
    shape = (64, 8, 8)
    layout = SourceLayout.cut(select_axes(None, shape), (1, 8, 8), F4, F4)
    shards = plan_shards(shape, PENCIL, np.arange(4).reshape(2, 2))
    plan = plan_schedules(layout, shards, 4, max_nbytes=1 << 20, n_owners=1, modes=(PARALLEL,))[PARALLEL]
    nbytes = math.prod(shape) * 4
    machine = Machine("m", fs_rate=nbytes / 10, network_rate=nbytes * 3 / 4 / 8)
    cost = plan_cost(plan, layout, Nodes(1), machine=machine)
    assert plan.blocks.n_cells == 4 and cost.limit == "file system"
    assert cost.seconds == pytest.approx(10 + 8 / 4)


def test_latency_is_waited_for_once_in_chunks_that_follow_each_other() -> None:
    """Planes, which a rank reads on and on; columns, of which each is far from the next; and planes where nothing is kept."""
    shape = (32, 64, 64)
    shards = plan_shards(shape, PENCIL, np.arange(4).reshape(2, 2))
    waits = {}
    machine = Machine("m", fs_rate=1e12, read_seconds=1.0, read_ahead_nbytes=1 << 20)
    for name, cell, one in (
        ("planes", (1, 64, 64), machine),
        ("columns", (32, 2, 64), machine),
        ("cubes", (32, 2, 2), machine),
        ("uncached", (1, 64, 64), replace(machine, page_cache_nbytes=0)),
    ):
        layout = SourceLayout.cut(select_axes(None, shape), cell, F4, F4)
        plan = plan_schedules(layout, shards, 4, max_nbytes=1 << 24, modes=(DIRECT,))[DIRECT]
        waits[name] = round(plan_cost(plan, layout, Nodes(1), machine=one).seconds) - 5  # of its metadata
    assert waits == {"planes": 1, "columns": 1, "cubes": 16, "uncached": 32}


def test_what_is_read_ahead_in_vain_takes_time() -> None:
    """Two chunks in a run and two in the gap: as much again is read ahead. Single chunks, and one run: nothing."""
    shape = (8, 8, 64)
    shards = plan_shards(shape, ((0,), (), (1,)), np.arange(4).reshape(2, 2))
    seconds = {}
    nbytes = math.prod(shape) * 4
    for name, cell, ahead in (("pairs", (1, 8, 16), 1 << 20), ("less", (1, 8, 16), 512), ("single", (1, 8, 32), 1 << 20)):
        layout = SourceLayout.cut(select_axes(None, shape), cell, F4, F4)
        plan = plan_schedules(layout, shards, 4, max_nbytes=1 << 24, modes=(DIRECT,))[DIRECT]
        cost = plan_cost(plan, layout, Nodes(1), machine=Machine("m", fs_rate=nbytes / 10, read_ahead_nbytes=ahead))
        seconds[name] = round(cost.seconds, 6)
        assert cost.fs_nbytes == nbytes
    # A chunk has 512 bytes, a run two of them, and so has a gap.
    assert seconds == {"pairs": 20, "less": 15, "single": 10}


def test_one_file_has_the_rate_of_its_storage_targets() -> None:
    machine = Machine("m", fs_rate=1e12, target_rate=1e9, target_nbytes=1e6, most_targets=4)
    assert [machine.file_rate(n) for n in (10, 1e6, 1e6 + 1, 1e9, math.inf)] == [1e9, 1e9, 2e9, 4e9, 1e12]


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
    nodes = Nodes(per_node, machine.cores_per_node)
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
@pytest.mark.parametrize("name", ["perlmutter", "jean-zay", "ibex"])
@pytest.mark.parametrize(
    ("shape", "cell", "mesh", "array_nbytes", "direct_nbytes"),
    [
        ((512,) * 3, (1, 512, 512), (512, 512), GIB // 2, 32 * TIB),  # each of 65,536 nodes the whole file
        ((4096,) * 3, (64,) * 3, (128, 128), 256 * GIB, 512 * GIB),  # each chunk on two nodes
        ((2048,) * 3, None, (128, 128), 32 * GIB, TIB),  # each row on 32 nodes, because of the gaps
    ],
)
def test_large_jobs_read_each_byte_once(
    name: str, shape: Any, cell: Any, mesh: Any, array_nbytes: int, direct_nbytes: int
) -> None:
    machine = PRESETS[name]
    found = costs(shape, cell, mesh, machine)
    assert found[DIRECT].fs_nbytes == direct_nbytes and found[PARALLEL].fs_nbytes == found[ROOT].fs_nbytes == array_nbytes
    mode, why = choose_mode(found, math.prod(mesh))
    assert mode == PARALLEL and "slowest of the former: " in why, why
    for cost in found.values():
        assert cost.seconds >= cost.fs_nbytes / machine.file_rate(array_nbytes)
        assert cost.seconds >= cost.operations / machine.operations_rate
    before = {m: plan_cost(*made, Nodes()) for m, made in schedules(shape, cell, mesh).items()}
    assert choose_mode(before, math.prod(mesh))[0] == (PARALLEL if cell == (64,) * 3 else DIRECT)


def test_fewer_readers_where_operations_are_dear_and_more_where_cores_are() -> None:
    """Wrong if all ranks read whatever the file system is."""
    shape, cell, mesh = (4096,) * 3, (64,) * 3, (32, 32)
    fast = replace(PRESETS["perlmutter"], target_rate=math.inf)
    slow = replace(fast, operations_rate=500.0, read_ahead_nbytes=1 << 30)
    assert costs(shape, cell, mesh, slow)[PARALLEL].n_readers < 256 <= costs(shape, cell, mesh, fast)[PARALLEL].n_readers


# --- the text form


@pytest.mark.parametrize("name", PRESETS)
def test_a_machine_as_text_is_the_same_machine(name: str) -> None:
    machine = PRESETS[name]
    again = Machine.from_table(json.loads(json.dumps(machine.to_table())), "told")
    assert again == machine and again.has_limits == (name != "workstation")
    for figure in machine.figures():
        assert machine.origin_of(figure) in (GIVEN, ASSUMED)
    assert machine.sources or name == "workstation", "a figure that is given has a source"


def test_where_each_figure_is_from() -> None:
    table = {
        "file_system": {"rate": {"value": 2e9, "origin": "measured"}, "open_seconds": 1e-3},
        "node": {"cores": {"value": 8, "origin": "assumed"}},
        "decode": {"gzip": {"value": 1e9, "origin": "measured"}},
    }
    machine = Machine.from_table(table, "a.toml", PRESETS["ibex"])
    origins = {name: machine.origin_of(name) for name in machine.figures()}
    assert origins["file_system.rate"] == origins["decode.gzip"] == MEASURED
    assert origins["file_system.open_seconds"] == GIVEN == origins["network.rate"]
    assert origins["node.cores"] == ASSUMED == origins["file_system.node_rate"]
    assert machine.decode_rate("shuffle+gzip", 5.0) == 1e9 and machine.decode_rate("zstd", 5.0) == 5.0
    assert (machine.cores_per_node, machine.network_rate, machine.fs_rate) == (8, 12.5e9, 2e9)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"disk": {}}, ("disk is a table or value that no machine has", "file_system")),
        ({"node": 4}, ("node is 4; expected a table: [node]",)),
        ({"node": {"gpus": 4}}, ("node.gpus is a figure that no machine has", "ranks, cores")),
        ({"node": {"cores": 1.5}}, ("node.cores is 1.5", "as an integer")),
        ({"node": {"cores": math.inf}}, ("node.cores is inf", "as an integer")),
        ({"file_system": {"rate": -1}}, ("file_system.rate is -1; expected bytes per second", "more than 0, such as 500e9")),
        ({"file_system": {"rate": 0}}, ("file_system.rate is 0",)),
        ({"file_system": {"rate": math.nan}}, ("file_system.rate is nan",)),
        ({"file_system": {"rate": True}}, ("file_system.rate is True",)),
        ({"file_system": {"rate": "5 GB/s"}}, ("file_system.rate is '5 GB/s'",)),
        ({"file_system": {"open_seconds": -1e-3}}, ("file_system.open_seconds is -0.001", "0 or more")),
        ({"network": {"rate": {"value": 1, "from": "me"}}}, ("network.rate is {", "origin")),
        ({"network": {"rate": {"value": 1, "origin": "guessed"}}}, ("network.rate.origin is 'guessed'", "'measured'")),
        ({"decode": {"gzip": -5}}, ("decode.gzip is -5",)),
        ({"name": 3}, ("name is 3",)),
        ({"sources": "here"}, ("sources is 'here'",)),
    ],
)
def test_wrong_figures(table: Any, says: tuple[str, ...]) -> None:
    """Each error names the file, the key, what was found, and what was expected."""
    with pytest.raises(ConfigError) as caught:
        Machine.from_table(table, "site.toml")
    for part in ("machine site.toml: ", *says):
        assert part in str(caught.value), caught.value
