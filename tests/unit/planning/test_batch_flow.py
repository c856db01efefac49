"""Does each step of a round reach each shard that needs it once, from the one rank that reads it, and nothing else?"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.batch_flow import BatchFlow, BatchSchedule, CutFlow, Runs, share_blocks
from shardload.planning.region import Grid
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

    def cut(self) -> CutFlow:
        column, step, sample = np.array(self.uses, dtype=np.int64).reshape(-1, 3).T
        part = sample % self.batch // self.schedule.shards.shard_shape[0]
        runs = Runs.of(column, part, step, sample, self.most)
        return CutFlow(self.schedule, self.columns, runs, share_blocks(self.schedule, runs, len(self.columns)))

    def cut_otherwise(self, draw: Any) -> CutFlow:
        """The same blocks with another sharding of the batch."""
        n_ranks, rest = self.schedule.n_ranks, self.schedule.shards.shape_global[1:]
        parts = draw(st.integers(1, 2)), draw(st.integers(1, 3))
        ranks = draw(st.lists(st.integers(0, n_ranks - 1), min_size=math.prod(parts), max_size=math.prod(parts)))
        shape = self.batch * parts[0], rest[0], -(-rest[1] // parts[1]) * parts[1]
        shards = plan_shards(shape, [(0,), (), (1,)], np.array(ranks).reshape(parts))
        other = replace(self.schedule, shards=shards)
        return replace(Case(other, self.columns, self.uses, shape[0], self.most).cut(), owners=self.cut().owners)


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


@examples(150)
@given(cases(), st.data())
def test_each_step_reaches_each_shard_that_needs_it(case: Case, data: st.DataObject) -> None:
    """Wrong if a part were sent twice, to another shard or cut or with other steps, a block were read twice, or the two ends of
    a message disagreed on it; or if a round in which something is sent were taken for one in which nothing is.
    """
    schedule, cuts = case.schedule, [case.cut()]
    if data.draw(st.booleans()):
        cuts = [replace(cuts[0], n_cuts=2), replace(case.cut_otherwise(data.draw), cut=1, n_cuts=2)]
    flow, axis, ranks = BatchFlow(cuts), schedule.axis, range(schedule.n_ranks)
    array = np.arange(math.prod(schedule.blocks.shape)).reshape(schedule.blocks.shape)
    targets = {(rank, number): flow.target(number) for rank in ranks for number in flow.targets(rank)}
    pieces = {key: np.full(target.shape, -1) for key, target in targets.items()}  # type: ignore[union-attr]
    sent: list[dict[int, list[Any]]] = [{} for _ in ranks]
    for rank in ranks:
        for block in flow.outgoing(rank):
            assert flow.around(rank).contains(block.region)  # type: ignore[union-attr]
            assert block.parts, "a block that nobody needs would be read"
            for part in block.parts:
                target = targets[part.rank, part.target]
                assert target is not None and target.contains(part.region) and block.region.contains(part.region)
                into = pieces[part.rank, part.target][part.region.slices(target.start)]
                assert (into == -1).all(), "sent twice"
                into[...] = array[part.region.slices()]
                if part.rank != rank:
                    sent[part.rank].setdefault(rank, []).append((part.region, part.target))
    for rank in ranks:
        promised = {peer: [(part.region, part.target) for part in parts] for peer, parts in flow.incoming(rank).items()}
        assert promised == sent[rank]
    assert not (any(sent) and all(cut.stays for cut in cuts))
    for key, piece in pieces.items():
        np.testing.assert_array_equal(piece, array[targets[key].slices()])  # type: ignore[union-attr]
    # What has come is what samples in the shards of a rank need, step by step.
    cut, runs = cuts[0], cuts[0].runs
    for rank in ranks:
        for shard in schedule.shards.shards_of(rank):
            lower, upper = schedule.shards.region(shard).start, schedule.shards.region(shard).stop
            needed = {(p, step) for p, step, sample in case.uses if lower[0] <= sample % case.batch < upper[0]}
            of_shard = cut.runs_of(shard)
            came = [(int(runs.column[k]), step) for k in of_shard for step in range(runs.start[k], runs.stop[k])]
            assert sorted(came) == sorted(needed)
            if schedule.held(shard) is not None:
                starts = [targets[rank, cut.number(shard, k)].start[axis] for k in of_shard.tolist()]  # type: ignore[union-attr]
                assert starts == runs.start[of_shard].tolist()


@examples(80)
@given(cases())
def test_each_block_has_one_reader(case: Case) -> None:
    """Wrong if two ranks decoded a chunk, nobody did, or one rank had all blocks of a round."""
    flow = BatchFlow([case.cut()])
    ranks = range(case.schedule.n_ranks)
    n_blocks = len(case.columns) * case.schedule.rest.n_cells
    owned = [flow.blocks_of(rank) for rank in ranks]
    assert sorted(itertools.chain(*owned)) == list(range(n_blocks))
    busy = [len(blocks) for blocks in owned if blocks]
    assert len(busy) == min(case.schedule.owners.n, n_blocks)
    assert max(busy) - min(busy) <= 1
    if case.schedule.owners.n == 1:
        assert owned[case.schedule.owners.root]


@pytest.mark.parametrize("n_ranks", [1, 3, 4])
def test_a_block_that_one_rank_needs_is_read_by_it(n_ranks: int) -> None:
    """Wrong if samples that go to one rank, in whatever order, were read by another one, or all by one of their replicas."""
    for n_replicas in (1, 2):
        ranks = np.random.default_rng(n_ranks).permutation(n_ranks * n_replicas).reshape(n_ranks, n_replicas)
        shards = plan_shards((2 * n_ranks, 5), [(0,), ()], ranks)
        schedule = BatchSchedule(Grid((99, 5), (1, 5), (0, 0)), 0, shards, ranks.size, Owners(ranks.size))
        steps = np.random.default_rng(1).permutation(99)[: 4 * n_ranks]
        uses = tuple((k, int(step), int(np.flatnonzero(steps == step)[0])) for k, step in enumerate(np.sort(steps)))
        flow = BatchFlow([Case(schedule, tuple(np.sort(steps).tolist()), uses, 2 * n_ranks, 1 << 30).cut()])
        holders = [shards.holders(sample % (2 * n_ranks) // 2) for _, _, sample in uses]
        n_read_by_holder = sum(int(owner) in holder for owner, holder in zip(flow.cuts[0].owners, holders, strict=True))
        if n_replicas == 1:
            assert n_read_by_holder == len(uses) and not any(flow.incoming(rank) for rank in range(n_ranks))
            assert flow.cuts[0].stays
        assert n_read_by_holder >= len(uses) / 2


@examples(80)
@given(st.data(), st.sampled_from([1, 2, 3, 1 << 30]))
def test_runs(data: st.DataObject, most: int) -> None:
    """Wrong if a run went over the border of a column or a gap, was longer than it may, or ended before its last sample."""
    pairs = st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 9), st.integers(0, 30))
    uses = data.draw(st.permutations(sorted(data.draw(st.sets(pairs, max_size=40)))))
    columns, parts, steps_used, samples = np.array(uses, dtype=np.int64).reshape(-1, 4).T
    runs = Runs.of(columns, parts, steps_used, samples, most)
    spans = list(zip(*(each.tolist() for each in (runs.column, runs.part, runs.start, runs.stop, runs.last)), strict=True))
    assert len(runs) == len(spans)
    assert spans == sorted(spans)
    covered = Counter((column, part, step) for column, part, start, stop, _ in spans for step in range(start, stop))
    assert covered == Counter({use[:3] for use in uses})
    for column, part, start, stop, last in spans:
        assert stop - start <= most
        assert last == max(sample for c, p, step, sample in uses if (c, p) == (column, part) and start <= step < stop)
    steps = {use[:3] for use in uses}
    n_least = sum(1 for column, part, step in steps if (column, part, step - 1) not in steps)
    assert len(runs) >= n_least
    if most >= 10:
        assert len(runs) == n_least
