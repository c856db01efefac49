"""When does a stream read each chunk, and to which samples does each step of it go?

All samples of an epoch are known before it begins, so this is exact: no step is let go too early, and none is kept for nothing.
A chunk is read for the first batch that needs a step of it. Its other steps stay in memory until their last sample is given, as
long as no step waits more than `horizon` batches; for later samples the chunk is read again.

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

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Readings:
    """The chunks that are read for some samples, in the order in which they are read.

    A chunk here is all of the array between two borders of chunks along the stream's axis.

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
    """

    def __init__(self, anchors: Ints, *, batch: int, offsets: Sequence[int], chunk: int, horizon: int, phase: int = 0) -> None:
        n_samples, n_offsets = len(anchors), len(offsets)
        steps = (anchors[:, None] + np.array(offsets, dtype=np.int64)).reshape(-1)
        samples = np.repeat(np.arange(n_samples, dtype=np.int64), n_offsets)
        order = np.lexsort((samples, steps))
        steps, samples = steps[order], samples[order]
        batch_of_use = samples // batch
        # A stay is the time that a step is in memory without being read again.
        is_first = np.ones(len(steps), dtype=bool)
        is_first[1:] = (np.diff(steps) != 0) | (np.diff(batch_of_use) > horizon)
        begin = batch_of_use[is_first]
        chunk_of_stay = (steps[is_first] + phase) // chunk
        read_for = _first_of_each(chunk_of_stay, begin, horizon)
        key = read_for * (int(chunk_of_stay.max(initial=0)) + 1) + chunk_of_stay
        keys, reading_of_stay = np.unique(key, return_inverse=True)
        n_chunks = int(chunk_of_stay.max(initial=0)) + 1
        self.batches, self.chunks = keys // n_chunks, keys % n_chunks
        reading = np.repeat(reading_of_stay, np.diff(np.append(np.flatnonzero(is_first), len(steps))))
        of_use = np.empty(len(steps), dtype=np.int64)
        of_use[order] = reading
        self.of_use = of_use.reshape(n_samples, n_offsets)
        by_reading = np.argsort(reading, kind="stable")
        self._steps, self._samples = steps[by_reading], samples[by_reading]
        self._starts = np.searchsorted(reading[by_reading], np.arange(len(keys) + 1))

    def __len__(self) -> int:
        return len(self.chunks)

    def uses(self, first: int, stop: int) -> tuple[Ints, Ints, Ints]:
        """Of some readings that follow each other: the place of each among them, a step, and a sample for which it is kept.

        They ascend by place, then step, then sample.
        """
        pairs = slice(self._starts[first], self._starts[stop])
        places = np.repeat(np.arange(stop - first), np.diff(self._starts[first : stop + 1]))
        return places, self._steps[pairs], self._samples[pairs]

    def stays(self) -> tuple[Ints, Ints]:
        """The reading of each step that is kept, and the last sample for which it is."""
        reading = np.repeat(np.arange(len(self)), np.diff(self._starts))
        first = np.flatnonzero((np.diff(self._steps, prepend=-1) != 0) | (np.diff(reading, prepend=-1) != 0))
        return reading[first], np.maximum.reduceat(self._samples, first) if len(first) else first


def _first_of_each(chunk: Ints, begin: Ints, horizon: int) -> Ints:
    """For which batch each stay's chunk is read: the first one that begins at most `horizon` batches before it."""
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
