"""Does each step of a round reach each shard that needs it once, from the one rank that reads it, and nothing else?"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.batch_flow import BatchFlow, BatchSchedule, Runs, SharedFlow
from shardload.planning.grid import Grid
from shardload.planning.schedule import Owners
from shardload.planning.shards import plan_shards
from tests.tiers import examples


@dataclass(frozen=True)
class Case:
    """An array, its columns that are read, and the (column, step, sample) that batches need of them."""

    schedule: BatchSchedule
    columns: tuple[int, ...]
    uses: tuple[tuple[int, int, int], ...]
    batch: int
    most: int

    def flow(self) -> BatchFlow:
        column, step, sample = np.array(self.uses, dtype=np.int64).reshape(-1, 3).T
        part = self.schedule.part_of_samples(sample % self.batch)
        of_part = [part == number for number in range(self.schedule.n_parts)]
        runs = [Runs.of(column[is_of], step[is_of], sample[is_of], self.most) for is_of in of_part]
        return BatchFlow(self.schedule, self.columns, runs)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    axes: list[tuple[int, ...]] = [(), (), ()]
    for of_mesh in draw(st.permutations(range(len(mesh)))):
        k = draw(st.integers(0, 3))
        if k < 3:
            axes[k] = (*axes[k], of_mesh)
    parts = [math.prod(mesh[m] for m in cut) for cut in axes]
    n_ranks = draw(st.integers(1, 5))
    ranks = draw(st.lists(st.integers(0, n_ranks - 1), min_size=math.prod(mesh), max_size=math.prod(mesh)))
    batch = parts[0] * draw(st.integers(1, 3))
    rest = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    held = tuple(-(-n // p) * p for n, p in zip(rest, parts[1:], strict=True))
    axis, n_steps = draw(st.integers(0, 2)), draw(st.integers(1, 20))
    shape = (*rest[:axis], n_steps, *rest[axis:])
    cell = tuple(draw(st.integers(1, n)) for n in shape)
    phase = tuple(draw(st.integers(0, c - 1)) for c in cell)
    blocks = Grid(shape, cell, phase)
    n_readers = draw(st.integers(1, n_ranks))
    owners = Owners(root=draw(st.integers(0, n_ranks - 1))) if n_readers == 1 else Owners(n_readers)
    shards = plan_shards((batch, *held), axes, np.array(ranks).reshape(mesh))
    schedule = BatchSchedule(blocks, axis, shards, n_ranks, owners)
    columns = tuple(draw(st.lists(st.integers(0, blocks.counts[axis] - 1), min_size=1, max_size=4)))  # one may be read twice
    uses = []
    for place, column in enumerate(columns):
        start = column * cell[axis] - phase[axis]
        steps = range(max(0, start), min(n_steps, start + cell[axis]))
        samples = st.integers(0, 3 * batch - 1)
        pairs = draw(st.sets(st.tuples(st.sampled_from(steps), samples), min_size=1, max_size=12))
        uses += [(place, step, sample) for step, sample in sorted(pairs)]
    return Case(schedule, columns, tuple(uses), batch, draw(st.sampled_from([1, 2, 1 << 30])))


def slices_of(region: Any, origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - z, b - z) for a, b, z in zip(region.start, region.stop, origin, strict=True))


@examples(150)
@given(cases())
def test_each_step_reaches_each_shard_that_needs_it(case: Case) -> None:
    """Wrong if a part were sent twice, to another shard or with other steps, or the two ends of a message disagreed on it."""
    schedule, flow = case.schedule, case.flow()
    shape, axis = schedule.blocks.shape, schedule.axis
    data = np.arange(math.prod(shape)).reshape(shape)
    ranks = range(schedule.n_ranks)
    pieces = [{number: np.full(flow.target(number).shape, -1) for number in flow.targets(rank)} for rank in ranks]  # type: ignore[union-attr]
    sent: list[dict[int, list[Any]]] = [{} for _ in ranks]
    for rank in ranks:
        for block in flow.outgoing(rank):
            assert flow.around(rank).contains(block.region)  # type: ignore[union-attr]
            assert block.parts, "a block that nobody needs would be read"
            for part in block.parts:
                target = flow.target(part.target)
                assert target is not None and target.contains(part.region) and block.region.contains(part.region)
                into = pieces[part.rank][part.target][slices_of(part.region, target.start)]
                assert (into == -1).all(), "sent twice"
                into[...] = data[part.region.slices()]
                if part.rank != rank:
                    sent[part.rank].setdefault(rank, []).append((part.region, part.target))
    for rank in ranks:
        promised = {peer: [(part.region, part.target) for part in parts] for peer, parts in flow.incoming(rank).items()}
        assert promised == sent[rank]
        for number, piece in pieces[rank].items():
            np.testing.assert_array_equal(piece, data[flow.target(number).slices()])  # type: ignore[union-attr]
        # What has come is what samples in the shards of this rank need, step by step.
        for shard in schedule.shards.shards_of(rank):
            lower, upper = schedule.shards.region(shard).start, schedule.shards.region(shard).stop
            needed = {(p, step) for p, step, sample in case.uses if lower[0] <= sample % case.batch < upper[0]}
            runs = flow.runs[schedule.part_of_batch(shard)]
            came = [
                (int(place), step)
                for place, start, stop in zip(runs.column, runs.start, runs.stop, strict=True)
                for step in range(start, stop)
            ]
            assert sorted(came) == sorted(needed)
            if schedule.held(shard) is not None:
                assert [flow.target(flow.number(shard, k)).start[axis] for k in range(len(runs))] == runs.start.tolist()  # type: ignore[union-attr]


@examples(80)
@given(cases(), st.data())
def test_a_block_that_several_cuts_share(case: Case, data: st.DataObject) -> None:
    """Wrong if a cut's parts went to another one's targets, a block were read twice, or the ends of a message disagreed."""
    schedule, flow = case.schedule, case.flow()
    n_ranks, rest = schedule.n_ranks, schedule.shards.shape_global[1:]
    parts = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    ranks = data.draw(st.lists(st.integers(0, n_ranks - 1), min_size=math.prod(parts), max_size=math.prod(parts)))
    shape = case.batch * parts[0], rest[0], -(-rest[1] // parts[1]) * parts[1]
    shards = plan_shards(shape, [(0,), (), (1,)], np.array(ranks).reshape(parts))
    other = BatchSchedule(schedule.blocks, schedule.axis, shards, n_ranks, schedule.owners)
    shared = SharedFlow([flow, Case(other, case.columns, case.uses, shape[0], case.most).flow()])
    array = np.arange(math.prod(schedule.blocks.shape)).reshape(schedule.blocks.shape)
    sent: list[dict[int, list[Any]]] = [{} for _ in range(n_ranks)]
    pieces: dict[tuple[int, int], Any] = {}
    for rank in range(n_ranks):
        assert shared.targets(rank) == sorted(shared.targets(rank), key=lambda number: number % 2)
        for number in shared.targets(rank):
            target = shared.target(number)
            assert target == shared.flows[number % 2].target(number // 2) and target is not None
            pieces[rank, number] = np.full(target.shape, -1)
    for rank in range(n_ranks):
        regions = [block.region for block in shared.outgoing(rank)]
        needed = {block.region for each in shared.flows for block in each.outgoing(rank)}
        assert set(regions) == needed
        for block in shared.outgoing(rank):
            for part in block.parts:
                target = shared.target(part.target)
                assert target is not None and block.region.contains(part.region)
                into = pieces[part.rank, part.target][slices_of(part.region, target.start)]
                assert (into == -1).all(), "sent twice"
                into[...] = array[part.region.slices()]
                if part.rank != rank:
                    sent[part.rank].setdefault(rank, []).append((part.region, part.target))
    for rank in range(n_ranks):
        promised = {peer: [(part.region, part.target) for part in parts] for peer, parts in shared.incoming(rank).items()}
        assert promised == sent[rank]
    for (_, number), piece in pieces.items():
        np.testing.assert_array_equal(piece, array[shared.target(number).slices()])  # type: ignore[union-attr]


@examples(80)
@given(cases())
def test_each_block_has_one_reader(case: Case) -> None:
    """Wrong if two ranks decoded a chunk, nobody did, or one rank had all blocks of a round."""
    flow = case.flow()
    ranks = range(case.schedule.n_ranks)
    n_blocks = len(case.columns) * case.schedule.rest.n_cells
    owned = [flow.blocks_of(rank) for rank in ranks]
    assert sorted(itertools.chain(*owned)) == list(range(n_blocks))
    assert all(flow.owner(block) == rank for rank in ranks for block in owned[rank])
    busy = [len(blocks) for blocks in owned if blocks]
    assert len(busy) == min(case.schedule.owners.n, n_blocks) == flow.n_readers
    assert max(busy) - min(busy) <= 1
    if case.schedule.owners.n == 1:
        assert owned[case.schedule.owners.root]


@examples(80)
@given(st.data(), st.sampled_from([1, 2, 3, 1 << 30]))
def test_runs(data: st.DataObject, most: int) -> None:
    """Wrong if a run went over the border of a column or a gap, was longer than it may, or ended before its last sample."""
    pairs = st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 30))
    uses = sorted(data.draw(st.sets(pairs, max_size=40)))
    column, step_of, sample_of = np.array(uses, dtype=np.int64).reshape(-1, 3).T
    runs = Runs.of(column, step_of, sample_of, most)
    spans = list(zip(runs.column.tolist(), runs.start.tolist(), runs.stop.tolist(), runs.last.tolist(), strict=True))
    assert len(runs) == len(spans)
    assert spans == sorted(spans)
    covered = Counter((column, step) for column, start, stop, _ in spans for step in range(start, stop))
    assert covered == Counter({(column, step) for column, step, _ in uses})
    for column, start, stop, last in spans:
        assert stop - start <= most
        assert last == max(sample for c, step, sample in uses if c == column and start <= step < stop)
    steps = {(column, step) for column, step, _ in uses}
    n_least = sum(1 for column, step in steps if (column, step - 1) not in steps)
    assert len(runs) >= n_least
    if most >= 10:
        assert len(runs) == n_least
