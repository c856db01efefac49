"""What does HDF5 not say about a dataset? What is not in the file, in whose place it delivers something, and what is too long.

1. `Unwritten`: chunks that were never written, and contiguous data that never was. HDF5 delivers the fill value.
2. `Whole`: what was behind the end of a file that was cut since it was opened. HDF5 compares the file's size with what its
   header says only when it opens the file; later it delivers zeros.
3. `Sizes`: chunks that are stored in more bytes than their filters can make of them, or in fewer.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from array import array
from collections.abc import Callable, Collection, Iterable
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil

from shardload.formats.hdf5.filters import NAMES, SURVIVED, is_counted
from shardload.planning.region import Region

__all__ = ["SIZED", "UNWRITTEN_WORDS", "Sizes", "Unwritten", "Whole", "is_stacked", "n_compressors"]

_LIST_AT_ONCE, _MOST_LISTED = 1 << 10, 1 << 21  # chunks
SIZED = {2, 3, 5, 6}  # filters that give as much as follows from their parameters; what any other gives is for the data to say
UNWRITTEN_WORDS = ("not allocated", "address isn't defined")  # HDF5's words for it, by kind of index


class Unwritten:
    """Which chunks of a dataset were never written?

    Counting the chunks that are there takes 0.1 microseconds each, and mostly they all are. If not, those that are there are
    listed once, a microsecond each. (Asked for single chunks, HDF5 takes one that it made for a read for one that is there.)

    Parameters
    ----------
    dataset : h5py.Dataset
        Open.
    """

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._identifier = dataset.id
        creation = dataset.id.get_create_plist()
        self._layout = creation.get_layout()
        self._chunk: tuple[int, ...] = ()
        self._grid: tuple[int, ...] = ()
        self._none = self._all = False
        self._n_written = 0
        if self._layout == h5py.h5d.CHUNKED:
            self._chunk = tuple(creation.get_chunk())
            self._grid = tuple(-(-n // c) for n, c in zip(dataset.shape, self._chunk, strict=True))
            n_written = dataset.id.get_num_chunks()
            self._none, self._all = n_written >= math.prod(self._grid), n_written == 0
            self._n_written = n_written
        elif self._layout == h5py.h5d.CONTIGUOUS:
            self._all = dataset.id.get_offset() is None and creation.get_external_count() == 0

    def meeting(self, region: Region) -> list[tuple[int, ...]]:
        """Those that meet `region`, which is not empty; ``[()]`` for data without chunks that was never written."""
        if self._layout != h5py.h5d.CHUNKED:
            return [()] if self._all else []
        if self._none:
            return []
        axes = [range(a // c, -(-b // c)) for a, b, c in zip(region.start, region.stop, self._chunk, strict=True)]
        if self._all:
            return list(itertools.product(*axes))
        first = np.array([axis.start for axis in axes])
        is_there = np.zeros([len(axis) for axis in axes], dtype=bool)
        if self._n_written * len(axes) <= _MOST_LISTED:
            found = self._written
            met = np.logical_and.reduce([(found[k] >= axis.start) & (found[k] < axis.stop) for k, axis in enumerate(axes)])
            is_there[tuple(found[:, met].astype(np.intp) - first[:, None])] = True
        else:  # too many to keep: gone through each time

            def mark(at: list[int]) -> None:
                if all(k in axis for k, axis in zip(at, axes, strict=True)):
                    is_there[tuple(k - axis.start for k, axis in zip(at, axes, strict=True))] = True

            self._go_through(mark)
        return list(map(tuple, (np.argwhere(~is_there) + first).tolist()))

    @functools.cached_property
    def _written(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where the chunks that were are in the grid: a row for each axis."""
        places = array("q")
        self._go_through(places.extend)
        return np.frombuffer(places, dtype=np.int64).reshape(-1, len(self._grid)).T

    def _go_through(self, tell: Callable[[list[int]], None]) -> None:
        def keep(stored: Any) -> None:
            tell([offset // length for offset, length in zip(stored.chunk_offset, self._chunk, strict=True)])

        with phil:
            self._identifier.chunk_iter(keep)


def is_stacked(dataset: h5py.Dataset, allow: Collection[str] = ()) -> bool:
    """Whether its chunks are compressed more than once: each time, a thousand bytes can be made of one.

    What the caller allows is not always counted: see `hdf5_filters.is_counted`.
    """
    creation = dataset.id.get_create_plist()
    return n_compressors((creation.get_filter(k)[0] for k in range(creation.get_nfilters())), allow) > 1


def n_compressors(numbers: Iterable[int], allow: Collection[str] = ()) -> int:
    """How many of these filters count as compressors."""
    return sum(
        number not in SIZED and is_counted((str(number), NAMES.get(number, str(number))), number in SURVIVED, allow)
        for number in numbers
    )


class Sizes:
    """Whether a chunk that HDF5 is to decode is stored in no more bytes than it can have.

    HDF5's gzip filter takes memory as long as the stream goes on, up to a thousand times the stored bytes. All chunks' sizes
    are listed once, a microsecond each, unless all of them together are as short as one may be. And of a chunk that is too
    short, though no filter made it so, HDF5 delivers what was in its memory for the rest; its Fletcher-32 filter reads past the
    end of memory if there is no room for the checksum.
    """

    def __init__(self, dataset: h5py.Dataset) -> None:
        identifier, creation = dataset.id, dataset.id.get_create_plist()
        self._wrong = ""
        if creation.get_layout() != h5py.h5d.CHUNKED:
            return
        self._nbytes = math.prod(creation.get_chunk()) * identifier.get_type().get_size()
        self._most = self._nbytes + self._nbytes // 2 + 4096  # no filter makes a chunk longer than that
        self._filters = [creation.get_filter(k)[0] for k in range(creation.get_nfilters())]
        self._every_filter = (1 << creation.get_nfilters()) - 1
        self._fitting: dict[int, range | tuple[int, ...]] = {}  # by filter mask
        n_chunks, nbytes = identifier.get_num_chunks(), identifier.get_storage_size()
        if not self._every_filter:
            if nbytes != n_chunks * self._nbytes:
                self._wrong = f"{n_chunks} chunks of {self._nbytes} bytes without a filter, in {nbytes} bytes"
        elif n_chunks <= _LIST_AT_ONCE or (
            (self._most < nbytes or 3 in self._filters or set(self._filters) <= {2}) and n_chunks <= _MOST_LISTED
        ):
            with phil:
                identifier.chunk_iter(self._keep)

    def _keep(self, stored: Any) -> None:
        mask = stored.filter_mask & self._every_filter
        if mask not in self._fitting:
            self._fitting[mask] = self._fitting_sizes(mask)
        if stored.size not in self._fitting[mask]:
            fits = self._fitting[mask]
            expected = f"{fits.start} to {fits.stop - 1}" if isinstance(fits, range) else " or ".join(map(str, fits))
            self._wrong = f"a stored chunk of {stored.size} bytes; expected {expected}"

    def _fitting_sizes(self, mask: int) -> range | tuple[int, ...]:
        """The sizes that a chunk may have to which the filters in `mask` were not applied."""
        applied = [number for k, number in enumerate(self._filters) if not mask >> k & 1]
        n_checksums = applied.count(3)
        if not set(applied) <= {2, 3}:
            return range(4 * n_checksums, self._most + 1)
        # Chunks over the array's edge may be stored without filters (H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS).
        return tuple(sorted({self._nbytes, self._nbytes + 4 * n_checksums}))

    def check(self) -> None:
        """Raise ValueError if one is longer, or shorter though no filter was applied to it."""
        if self._wrong:
            raise ValueError(f"the file declares {self._wrong}: its index is damaged")


class Whole:
    """Whether a file that HDF5 has open is still as long as it was when HDF5 opened it.

    Parameters
    ----------
    descriptor : int or None
        HDF5's own; None where it has none.
    nbytes : int
        How long it was.
    """

    def __init__(self, descriptor: int | None, nbytes: int) -> None:
        self._descriptor, self._nbytes = descriptor, nbytes

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> Whole:
        """The file that `dataset` is in."""
        file = dataset.file
        plain = file.id.get_access_plist().get_driver() == h5py.h5fd.SEC2
        reading = file.id.get_intent() == h5py.h5f.ACC_RDONLY  # a writer's file may yet have to grow
        return cls(file.id.get_vfd_handle() if plain and reading else None, file.id.get_filesize())

    def check(self) -> None:
        """Raise OSError if it was cut. Call it after a read, while the file is open."""
        if self._descriptor is not None and (found := os.fstat(self._descriptor).st_size) < self._nbytes:
            raise OSError(f"the file was cut to {found} bytes from {self._nbytes} since it was opened")
