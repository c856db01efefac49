"""In which order does an epoch of a stream give its samples, and when is each chunk read for them?

A sample is named by its anchor, a step along the stream's axis. The order is a function of integers alone: it is the same on
any mesh, with any number of ranks, and for any size of a batch.

    order = argsort(place of the sample's block + spread * u(anchor))

Blocks of steps, aligned to the chunks of the file, are put into a random order. A sample is in the block of its first step, and
moves on from there by up to `spread` blocks. So at most `spread` + 1 blocks are in memory at a time, and a batch has samples of
about as many. With a spread of all blocks each order of all samples is as likely as any other.

The random numbers are a hash of a counter (SplitMix64, Steele, Lea and Flood 2014), not those of a library, whose releases may
change them. A seed and an epoch are hashed one after the other: a sum would make epoch 1 of seed 0 the same as epoch 0 of
seed 1.

Examples
--------
>>> order = SampleOrder(n_steps=8, first=-1, last=0, block=2, seed=1)
>>> order.anchors.tolist()
[1, 2, 3, 4, 5, 6, 7]
>>> order.epoch(0).tolist(), order.epoch(1).tolist()
([7, 5, 6, 4, 3, 2, 1], [7, 3, 4, 5, 6, 1, 2])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shardload.planning.region import IntArray

Words = np.ndarray[Any, np.dtype[np.uint64]]

ORDER_VERSION = 1  # a state of another version belongs to another order

_GOLDEN = 0x9E3779B97F4A7C15
_OF_BLOCKS, _OF_SAMPLES = 1, 2  # two sequences of random numbers
ALL_BLOCKS = 1 << 31  # a spread over all blocks of any array


def _mixed(words: Words) -> Words:
    """A permutation of the 64-bit words: the last step of SplitMix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def random_words(seed: int, epoch: int, sequence: int, counters: IntArray) -> Words:
    """A random word of 64 bits for each counter.

    >>> [hex(word) for word in random_words(7, 3, 1, np.arange(2)).tolist()]
    ['0x42ef86bee6213ad0', '0x98d418404b511c72']
    """
    key = np.zeros(1, dtype=np.uint64)
    for number in (seed, epoch, sequence):
        key = _mixed((key ^ np.uint64(number & (2**64 - 1))) + np.uint64(_GOLDEN))
    return _mixed(counters.astype(np.uint64) * np.uint64(_GOLDEN) + key)


@dataclass(frozen=True, eq=False)
class SampleOrder:
    """The order of the samples of each epoch.

    Parameters
    ----------
    n_steps : int
        Steps along the axis.
    first, last : int
        The window: offsets from the anchor to the first and to the last step of a sample.
    block : int
        Steps of a block.
    phase : int
        Steps of the first block that lie before the first step (a selection may begin inside a chunk); less than `block`.
    seed : int or None
        None: samples ascend.
    spread : int
        By how many blocks a sample may move.
    breaks : ndarray of int, optional
        Steps before which there is a gap. No window reaches over one.
    crosses_blocks : bool
        Whether windows may reach over the borders of blocks. If not, such samples are left out.
    """

    n_steps: int
    first: int
    last: int
    block: int
    phase: int = 0
    seed: int | None = None
    spread: int = 1
    breaks: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    crosses_blocks: bool = True

    @cached_property
    def anchors(self) -> IntArray:
        """The anchors of all samples, ascending."""
        anchors: IntArray = np.arange(max(0, -self.first), min(self.n_steps, self.n_steps - self.last), dtype=np.int64)
        begin, end = anchors + self.first, anchors + self.last
        is_kept = np.searchsorted(self.breaks, begin, side="right") == np.searchsorted(self.breaks, end, side="right")
        if not self.crosses_blocks:
            is_kept &= self.block_of(begin) == self.block_of(end)
        anchors = anchors[is_kept]
        anchors.setflags(write=False)
        return anchors

    def block_of(self, steps: IntArray) -> IntArray:
        """The number of the block of each step."""
        return (steps + self.phase) // self.block

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return -(-(self.n_steps + self.phase) // self.block)

    def epoch(self, number: int) -> IntArray:
        """The anchors of all samples of an epoch, in the order in which they are given."""
        if self.seed is None or not len(self.anchors):
            return self.anchors
        keys = words = random_words(self.seed, number, _OF_SAMPLES, self.anchors)
        if self.spread < self.n_blocks:
            # The place of each sample's block among the shuffled blocks, with the sample's own word behind it.
            shuffled = np.argsort(random_words(self.seed, number, _OF_BLOCKS, np.arange(self.n_blocks)), kind="stable")
            place = np.empty(self.n_blocks, dtype=np.uint64)
            place[shuffled] = np.arange(self.n_blocks, dtype=np.uint64)
            places = place[self.block_of(self.anchors + self.first)]
            keys = (places << np.uint64(32)) + np.uint64(self.spread) * (words >> np.uint64(32))
        anchors: IntArray = self.anchors[np.argsort(keys, kind="stable")]
        return anchors

    def horizon(self, batch: int, chunk: int) -> int:
        """Batches that a step waits in memory at most between two of its samples, if chunks have so many steps.

        >>> SampleOrder(n_steps=100, first=0, last=0, block=10, seed=1, spread=2).horizon(batch=8, chunk=10)
        6
        """
        n_steps = chunk if self.seed is None else (self.spread + 2) * self.block
        return -(-(self.last - self.first + n_steps) // batch) + 1


def block_steps(chunk: int, first: int, last: int) -> int:
    """Steps of a block: whole chunks, so many that windows which reach over its end have at most half as many more read.

    >>> block_steps(40, 0, 0), block_steps(40, -1, 1), block_steps(1, 0, 1), block_steps(40, 24, 24)
    (40, 80, 2, 40)
    """
    n_more = -((first - last) // chunk)
    return chunk * max(1, 2 * n_more)


def spread_in(pool: int, block: int, chunk: int, n_steps: int) -> int:
    """By how many blocks a sample may move if `pool` steps of `n_steps` may be in memory.

    Blocks that are open have been given by half, on average, so that nearly twice as many fit. Those of several chunks are for
    windows over their borders, whose steps wait longer. A block of one step does not wait at all.

    >>> spread_in(400, 40, 40, 4000), spread_in(800, 80, 40, 4000), spread_in(40, 40, 40, 4000)
    (17, 9, 1)
    >>> spread_in(4000, 40, 40, 4000) == spread_in(2, 1, 1, 4000) == ALL_BLOCKS
    True
    """
    if pool >= n_steps or block == 1:
        return ALL_BLOCKS
    return max(1, 2 * (pool // block) - 3 if block == chunk else pool // block - 1)


class Readings:
    """The chunks that are read for some samples, in the order in which they are read.

    A chunk here is all of the array between two borders of chunks along the stream's axis. All samples of an epoch are known
    before it begins, so this is exact: no step is let go too early, and none is kept for nothing. A chunk is read for the first
    batch that needs a step of it. Its other steps stay in memory until their last sample is given, as long as no step waits
    more than `horizon` batches; for later samples the chunk is read again.

    Parameters
    ----------
    anchors : ndarray of int
        The anchors of the samples, in the order in which they are given.
    batch : int
        Samples of a batch.
    offsets : sequence of int
        Steps of a sample, from its anchor.
    chunk : int
        Steps of a chunk.
    horizon : int
        Batches that a step waits in memory at most between two samples.
    phase : int
        Steps of the first chunk that lie before step 0.

    Attributes
    ----------
    chunks : ndarray of int
        Which chunk each reading reads.
    batches : ndarray of int
        The batch for which each reading is needed; they ascend.
    of_use : ndarray of int, shape (samples, offsets)
        The reading that brings each step of each sample.

    Examples
    --------
    Chunks of 4 steps, batches of 2 samples, and each sample is a step and the step before it.

    >>> readings = Readings(np.arange(1, 8), batch=2, offsets=(-1, 0), chunk=4, horizon=3)
    >>> readings.chunks.tolist(), readings.batches.tolist()
    ([0, 1], [0, 1])
    >>> places, steps, samples = readings.uses(1, 2)
    >>> places.tolist(), steps.tolist(), samples.tolist()
    ([0, 0, 0, 0, 0, 0, 0], [4, 4, 5, 5, 6, 6, 7], [3, 4, 4, 5, 5, 6, 6])
    """

    def __init__(
        self, anchors: IntArray, *, batch: int, offsets: Sequence[int], chunk: int, horizon: int, phase: int = 0
    ) -> None:
        n_samples, n_offsets = len(anchors), len(offsets)
        # Half the memory of int64; an epoch of 2^31 uses would take tens of GiB even so.
        kind = np.int32 if max(n_samples * n_offsets, int(anchors.max(initial=0)) + max(offsets)) < 1 << 31 else np.int64
        steps = (anchors.astype(kind)[:, None] + np.array(offsets, dtype=kind)).reshape(-1)
        samples = np.repeat(np.arange(n_samples, dtype=kind), n_offsets)
        order = np.lexsort((samples, steps)).astype(kind)
        steps, samples = steps[order], samples[order]
        batch_of_use = samples // batch
        # A stay is the time that a step is in memory without being read again.
        is_first = np.ones(len(steps), dtype=bool)
        is_first[1:] = (np.diff(steps) != 0) | (np.diff(batch_of_use) > horizon)
        begin = batch_of_use[is_first].astype(np.int64)
        chunk_of_stay = (steps[is_first] + phase) // chunk
        read_for = _first_of_each(chunk_of_stay, begin, horizon)
        n_chunks = int(chunk_of_stay.max(initial=0)) + 1
        keys, reading_of_stay = np.unique(read_for * n_chunks + chunk_of_stay, return_inverse=True)
        self.batches, self.chunks = keys // n_chunks, keys % n_chunks
        lengths = np.diff(np.append(np.flatnonzero(is_first), len(steps)))
        reading = np.repeat(reading_of_stay.astype(kind), lengths)
        of_use = np.empty_like(reading)
        of_use[order] = reading
        self.of_use = of_use.reshape(n_samples, n_offsets)
        by_reading = np.argsort(reading, kind="stable")
        self._steps, self._samples = steps[by_reading], samples[by_reading]
        self._starts = np.searchsorted(reading[by_reading], np.arange(len(keys) + 1))

    def __len__(self) -> int:
        return len(self.chunks)

    def uses(self, first: int, stop: int) -> tuple[IntArray, IntArray, IntArray]:
        """The uses of steps in readings `first` to `stop`: the place of the reading among these, the step, and its sample.

        They ascend by place, then step, then sample.
        """
        pairs = slice(self._starts[first], self._starts[stop])
        places = np.repeat(np.arange(stop - first), np.diff(self._starts[first : stop + 1]))
        return places, self._steps[pairs], self._samples[pairs]


def _first_of_each(chunk: IntArray, begin: IntArray, horizon: int) -> IntArray:
    """The batch for which the chunk of each stay is read: the first one of its stays, up to `horizon` batches before it."""
    read_for = np.empty_like(begin)
    waiting = np.arange(len(begin))
    while len(waiting):  # as often as one chunk is read
        of, inverse = np.unique(chunk[waiting], return_inverse=True)
        first = np.full(len(of), np.iinfo(np.int64).max)
        np.minimum.at(first, inverse, begin[waiting])
        is_served = begin[waiting] <= first[inverse] + horizon
        read_for[waiting[is_served]] = first[inverse][is_served]
        waiting = waiting[~is_served]
    return read_for
