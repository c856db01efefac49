"""Is each chunk read when it is first needed, kept as long as it should be, and no more often?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.sample_order import Readings, SampleOrder, block_steps
from tests.tiers import examples


@dataclass(frozen=True)
class Case:
    anchors: list[int]
    batch: int
    offsets: tuple[int, ...]
    chunk: int
    horizon: int
    phase: int

    def readings(self) -> Readings:
        return Readings(
            np.array(self.anchors, dtype=np.int64),
            batch=self.batch,
            offsets=self.offsets,
            chunk=self.chunk,
            horizon=self.horizon,
            phase=self.phase,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    offsets = tuple(sorted(draw(st.sets(st.integers(-4, 4), min_size=1, max_size=3))))
    n_steps = draw(st.integers(1, 30))
    anchors = [a for a in range(n_steps) if a + offsets[0] >= 0 and a + offsets[-1] < n_steps]
    if draw(st.booleans()):
        anchors = draw(st.permutations(anchors))
    anchors = anchors[draw(st.integers(0, 3)) :]  # resumed
    chunk = draw(st.integers(1, 9))
    return Case(anchors, draw(st.integers(1, 5)), offsets, chunk, draw(st.integers(0, 12)), draw(st.integers(0, chunk - 1)))


def brute(case: Case) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """What is read: batch, chunk, and the pairs of step and sample for which it is."""
    needed: dict[int, list[int]] = {}  # samples that need each step, as they come
    for sample, anchor in enumerate(case.anchors):
        for offset in case.offsets:
            needed.setdefault(anchor + offset, []).append(sample)
    stays: dict[int, list[tuple[int, int, list[int]]]] = {}  # of each chunk: the first batch, the step and its samples
    for step, samples in needed.items():
        groups = [[samples[0]]]
        for sample in samples[1:]:
            if sample // case.batch - groups[-1][-1] // case.batch > case.horizon:
                groups.append([])
            groups[-1].append(sample)
        for group in groups:
            stays.setdefault((step + case.phase) // case.chunk, []).append((group[0] // case.batch, step, group))
    found = []
    for chunk, waiting in stays.items():
        left = waiting
        while left:
            batch = min(begin for begin, _, _ in left)
            served = [stay for stay in left if stay[0] <= batch + case.horizon]
            left = [stay for stay in left if stay[0] > batch + case.horizon]
            found.append((batch, chunk, sorted((step, sample) for _, step, group in served for sample in group)))
    return sorted(found)


@examples(150)
@given(cases())
def test_readings_are_what_they_should_be(case: Case) -> None:
    """Wrong if a step went to another reading, was let go too early, or a chunk were read for a batch that does not need it."""
    readings = case.readings()
    assert len(readings) == len(readings.chunks) == len(readings.batches)
    found = []
    for k in range(len(readings)):
        _, steps, samples = readings.uses(k, k + 1)
        found.append(
            (int(readings.batches[k]), int(readings.chunks[k]), list(zip(steps.tolist(), samples.tolist(), strict=True)))
        )
    assert found == brute(case)
    assert readings.of_use.shape == (len(case.anchors), len(case.offsets))
    for sample, anchor in enumerate(case.anchors):
        for k, offset in enumerate(case.offsets):
            reading = int(readings.of_use[sample, k])
            assert (anchor + offset, sample) in found[reading][2]
            assert found[reading][1] == (anchor + offset + case.phase) // case.chunk
            assert found[reading][0] <= sample // case.batch


@pytest.mark.parametrize("batch", [1, 3, 8, 50])
@pytest.mark.parametrize("offsets", [(0,), (-1, 0, 1), (-24, 0), (0, 7)])
@pytest.mark.parametrize(("chunk", "phase"), [(1, 0), (10, 3), (40, 0)])
def test_in_sequence_each_chunk_is_read_once(batch: int, offsets: tuple[int, ...], chunk: int, phase: int) -> None:
    """Wrong if a window had chunks read again at each border, because the horizon is too short for it."""
    order = SampleOrder(200, offsets[0], offsets[-1], block_steps(chunk, offsets[0], offsets[-1]), phase)
    horizon = order.horizon(batch, chunk)
    readings = Readings(order.epoch(0), batch=batch, offsets=offsets, chunk=chunk, horizon=horizon, phase=phase)
    assert sorted(readings.chunks.tolist()) == sorted(set(readings.chunks.tolist()))
