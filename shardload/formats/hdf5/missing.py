"""Which chunks of an HDF5 dataset are missing? The chunks that were never written; HDF5 gives the fill value for them.

Contiguous data is either complete, or missing as a whole.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil

from shardload.formats.contract.by_chunks import chunks_met
from shardload.formats.hdf5.chunk_index import MOST_ENTRIES, list_tree
from shardload.formats.hdf5.chunk_order import true_place
from shardload.formats.hdf5.opened import creation_of, header_of
from shardload.formats.hdf5.raw_file import RawFile
from shardload.planning.grid import numbers_in, unravel
from shardload.planning.region import Region

__all__ = ["MISSING_WORDS", "MissingChunks"]

_MOST_LISTED = 1 << 21  # chunks
MISSING_WORDS = ("not allocated", "address isn't defined")  # in HDF5's errors for missing chunks, by kind of index


class MissingChunks:
    """Finds the missing chunks of a dataset.

    The file's own index says which chunks are stored (0.1 microseconds each), and is compared with itself: HDF5 gives fill
    values for chunks that it does not find in a damaged one. If the index is of another kind, the stored chunks are counted
    (0.1 microseconds each): mostly none is missing. If some are, the stored ones are listed once (a microsecond each). Asking
    HDF5 for single chunks would be wrong: it takes a chunk that it made for a read as stored.

    Parameters
    ----------
    dataset : h5py.Dataset
        An open dataset.
    raw : RawFile, optional
        The file that holds it.
    """

    def __init__(self, dataset: h5py.Dataset, raw: RawFile | None = None) -> None:
        self._dataset, self._raw = dataset, raw
        creation = creation_of(dataset)
        self._layout = creation.get_layout()
        self._chunk: tuple[int, ...] = ()
        self._grid: tuple[int, ...] = ()
        self._is_unallocated = self._may_ask_index = False
        if self._layout == h5py.h5d.CHUNKED:
            self._chunk = tuple(creation.get_chunk())
            self._grid = tuple(-(-n // c) for n, c in zip(dataset.shape, self._chunk, strict=True))
            self._may_ask_index = raw is not None and header_of(dataset) is not None
        elif self._layout == h5py.h5d.CONTIGUOUS:
            self._is_unallocated = dataset.id.get_offset() is None and creation.get_external_count() == 0

    def meeting(self, region: Region) -> list[tuple[int, ...]]:
        """The missing chunks that meet a non-empty region; ``[()]`` if the dataset has no chunks and no stored values.

        DamagedIndexError if the index of chunks contradicts itself.
        """
        if self._layout != h5py.h5d.CHUNKED:
            return [()] if self._is_unallocated else []
        axes = chunks_met(region, self._chunk)
        found = self._by_index(axes)
        if found is not None or self._n_stored >= math.prod(self._grid):
            return found or []
        if self._n_stored == 0:
            return list(itertools.product(*axes))
        first = np.array([axis.start for axis in axes])
        is_stored = np.zeros([len(axis) for axis in axes], dtype=bool)
        if self._n_stored * len(axes) <= _MOST_LISTED:
            stored = self._stored
            met = np.logical_and.reduce([(stored[k] >= axis.start) & (stored[k] < axis.stop) for k, axis in enumerate(axes)])
            is_stored[tuple(stored[:, met].astype(np.intp) - first[:, None])] = True
        else:  # too many to keep: list them again each time

            def mark(at: list[int]) -> None:
                if all(k in axis for k, axis in zip(at, axes, strict=True)):
                    is_stored[tuple(k - axis.start for k, axis in zip(at, axes, strict=True))] = True

            self._go_through(mark)
        return list(map(tuple, (np.argwhere(~is_stored) + first).tolist()))

    def _by_index(self, axes: list[range]) -> list[tuple[int, ...]] | None:
        """The missing chunks of a box, by the file's own index; None if it cannot say it."""
        header = header_of(self._dataset) if self._may_ask_index else None
        if header is None or self._raw is None:
            return None
        missing: list[tuple[int, ...]] = []
        for box in _in_parts(axes, MOST_ENTRIES):
            some = None if tuple(map(len, box)) == self._grid else box
            found = list_tree(self._raw.read_at_most, header, self._chunk, self._grid, MOST_ENTRIES, some)
            if found is None:
                self._may_ask_index = False
                return None
            if len(found.numbers) < math.prod(map(len, box)):
                numbers = np.setdiff1d(numbers_in(box, self._grid), found.numbers, assume_unique=True)
                missing += [unravel(number, self._grid) for number in numbers.tolist()]
        return missing

    @functools.cached_property
    def _n_stored(self) -> int:
        return int(self._dataset.id.get_num_chunks())

    @functools.cached_property
    def _stored(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Positions of the stored chunks in the chunk grid: one row per axis."""
        places = array("q")
        self._go_through(places.extend)
        return np.frombuffer(places, dtype=np.int64).reshape(-1, len(self._grid)).T

    def _go_through(self, tell: Callable[[list[int]], None]) -> None:
        put_right = true_place(self._dataset)

        def keep(stored: Any) -> None:
            place = stored.chunk_offset if put_right is None else put_right(stored.chunk_offset)
            tell([offset // length for offset, length in zip(place, self._chunk, strict=True)])

        with phil:
            self._dataset.id.chunk_iter(keep)


def _in_parts(box: list[range], most: int) -> Iterator[list[range]]:
    """Cut a box of chunks, in C order, into boxes of at most about `most` chunks.

    >>> list(_in_parts([range(3), range(4)], 8)) == [[range(1), range(4)], [range(1, 3), range(4)]]
    True
    """
    n = math.prod(map(len, box))
    if n <= most:
        yield box
        return
    axis = next(k for k, one in enumerate(box) if len(one) > 1)
    half = box[axis].start + len(box[axis]) // 2
    for one in (range(box[axis].start, half), range(half, box[axis].stop)):
        yield from _in_parts([*box[:axis], one, *box[axis + 1 :]], most)
