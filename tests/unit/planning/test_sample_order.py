"""Is each sample given once an epoch, in an order that follows from integers alone, never changes, and mixes well?"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.sample_order import Readings, SampleOrder, block_steps, spread_in
from tests.tiers import examples

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(word: int) -> int:
    """SplitMix64's last step, in Python's integers."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def word_of(seed: int, epoch: int, sequence: int, counter: int) -> int:
    """The random word of a counter, in Python's integers."""
    key = 0
    for number in (seed, epoch, sequence):
        key = mixed((key ^ number) + GOLDEN & MASK)
    return mixed(counter * GOLDEN + key & MASK)


def brute_anchors(order: SampleOrder) -> list[int]:
    """The samples whose steps are all there, on one side of each gap, and in one block if they must be."""
    found = []
    for anchor in range(order.n_steps):
        window = range(anchor + order.first, anchor + order.last + 1)
        if window[0] < 0 or window[-1] >= order.n_steps:
            continue
        if any(window[0] < gap <= window[-1] for gap in order.breaks.tolist()):
            continue
        if not order.crosses_blocks and len({(step + order.phase) // order.block for step in window}) > 1:
            continue
        found.append(anchor)
    return found


def brute_epoch(order: SampleOrder, number: int) -> list[int]:
    """The order of an epoch, as its definition says it."""
    anchors = brute_anchors(order)
    if order.seed is None:
        return anchors
    seed, n_blocks = order.seed, len({(step + order.phase) // order.block for step in range(order.n_steps)})
    if order.spread >= n_blocks:
        return sorted(anchors, key=lambda anchor: (word_of(seed, number, 2, anchor), anchor))
    by_word = sorted(range(n_blocks), key=lambda block: (word_of(seed, number, 1, block), block))
    place = {block: k for k, block in enumerate(by_word)}

    def key(anchor: int) -> int:
        u = word_of(seed, number, 2, anchor) >> 32  # of 2 ** 32
        return (place[(anchor + order.first + order.phase) // order.block] << 32) + order.spread * u

    return sorted(anchors, key=lambda anchor: (key(anchor), anchor))


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    n_steps, block = draw(st.integers(1, 60)), draw(st.integers(1, 12))
    first = draw(st.integers(-5, 4))
    gaps = draw(st.sets(st.integers(1, n_steps), max_size=3))
    return SampleOrder(
        n_steps=n_steps,
        first=first,
        last=draw(st.integers(first, first + 6)),
        block=block,
        phase=draw(st.integers(0, block - 1)),
        seed=draw(st.none() | st.integers(0, 2**64 - 1)),
        spread=draw(st.integers(1, 8) | st.just(1 << 31)),
        breaks=np.array(sorted(gaps), dtype=np.int64),
        crosses_blocks=draw(st.booleans()),
    )


@examples(80)
@given(orders(), st.integers(0, 2**40))
def test_the_order_is_its_definition(order: SampleOrder, epoch: int) -> None:
    """Wrong if a window crossed the end, a gap or (where it must not) a block, or NumPy counted in another way."""
    assert order.anchors.tolist() == brute_anchors(order)
    assert order.epoch(epoch).tolist() == brute_epoch(order, epoch)
    assert sorted(order.epoch(epoch).tolist()) == order.anchors.tolist()


# What these say never changes: a state that was written with one release goes on with the next.
ORDERS: list[tuple[SampleOrder, int, list[int]]] = [
    (SampleOrder(12, 0, 0, 3), 7, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
    (SampleOrder(14, -1, 1, 4, phase=3), 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
    (SampleOrder(16, 0, 0, 1, seed=0, spread=1 << 31), 0, [11, 12, 9, 8, 15, 4, 13, 7, 5, 3, 0, 2, 14, 10, 6, 1]),
    (SampleOrder(16, 0, 0, 1, seed=0, spread=1 << 31), 1, [6, 3, 9, 7, 15, 10, 1, 4, 11, 2, 14, 12, 8, 0, 5, 13]),
    (SampleOrder(16, 0, 0, 4, seed=0, spread=1), 0, [11, 9, 8, 10, 12, 15, 13, 14, 3, 0, 2, 1, 4, 7, 5, 6]),
    (SampleOrder(20, 0, 0, 4, seed=1, spread=2), 0, [15, 12, 13, 14, 17, 16, 19, 10, 18, 9, 8, 7, 11, 4, 5, 6, 2, 0, 1, 3]),
    (SampleOrder(20, 0, 0, 4, seed=1, spread=2), 5, [17, 18, 19, 10, 8, 11, 16, 7, 9, 1, 0, 6, 4, 5, 3, 2, 14, 12, 15, 13]),
    (
        SampleOrder(24, -2, 1, 5, phase=3, seed=20261126, spread=2),
        1,
        [13, 10, 11, 9, 7, 12, 8, 5, 6, 4, 18, 15, 16, 14, 17, 3, 2, 22, 19, 21, 20],
    ),
    (SampleOrder(24, -2, 1, 5, phase=3, seed=20261126, spread=2, crosses_blocks=False), 1, [10, 9, 5, 4, 15, 14, 19, 20]),
    (
        SampleOrder(24, -2, 1, 5, seed=2**63 + 1, spread=3, breaks=np.array([6, 17])),
        8589934592,
        [11, 8, 22, 10, 15, 9, 20, 19, 12, 21, 13, 14, 2, 4, 3],
    ),
]


@pytest.mark.parametrize("number", range(len(ORDERS)))
def test_pinned_orders(number: int) -> None:
    """Wrong if anything of the order changed: resumed runs would see samples twice, and others never."""
    order, epoch, expected = ORDERS[number]
    assert order.epoch(epoch).tolist() == expected


def test_length_of_a_block() -> None:
    """Wrong if a window made no block longer: with chunks of 40 and (-1, 0, 1) each would be read twice."""
    for chunk, first, last in itertools.product((1, 3, 40), range(-45, 3, 4), range(-2, 50, 5)):
        steps = block_steps(chunk, min(first, last), max(first, last))
        assert steps % chunk == 0
        first, last = min(first, last), max(first, last)
        n_read = len({step // chunk for step in range(steps + last - first)})  # of samples that begin in a block
        assert n_read <= 1.5 * steps / chunk
        n_of_less = len({step // chunk for step in range(steps - chunk + last - first)})
        assert steps == chunk or n_of_less > 1.5 * (steps / chunk - 1), "no shorter block would do"


def most_held(order: SampleOrder, chunk: int, batch: int) -> int:
    """Most steps that are in memory at a time, if chunks are read when they are first needed."""
    window = tuple(range(order.first, order.last + 1))
    readings = Readings(order.epoch(0), batch=batch, offsets=window, chunk=chunk, horizon=order.horizon(batch, chunk))
    change = np.zeros(len(order.anchors) // batch + 3, dtype=np.int64)
    for k in range(len(readings)):
        _, steps, of_samples = readings.uses(k, k + 1)
        last = {step: sample // batch for step, sample in zip(steps.tolist(), of_samples.tolist(), strict=True)}
        change[readings.batches[k]] += len(last)
        np.subtract.at(change, np.array(list(last.values())) + 1, 1)
    return int(np.cumsum(change).max())


@pytest.mark.parametrize("n_blocks", [3, 6, 12])
@pytest.mark.parametrize(("chunk", "first", "last"), [(40, 0, 0), (10, 5, 5), (40, -1, 1), (12, 0, 4), (1, 0, 0)])
def test_the_pool_holds_what_an_order_keeps(chunk: int, first: int, last: int, n_blocks: int) -> None:
    """Wrong if more blocks were open than the pool has room for, or so few that much of it stays empty."""
    block = block_steps(chunk, first, last)
    pool = n_blocks * block
    order = SampleOrder(8000, first, last, block, seed=1, spread=spread_in(pool, block, chunk, 8000))
    held = most_held(order, chunk, 8)
    assert held <= pool + 8 * (last - first + 1), held / block
    assert held > 0.7 * pool or chunk == 1, held / block
