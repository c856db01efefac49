"""Is what a file says of itself true? Two checks that HDF5 does not make; without them it would give wrong values.

1. `Whole`: is the file still as long as when it was opened? HDF5 compares its size with the header only at opening. If the file
   is cut later, HDF5 gives zeros for the end.
2. `Sizes`: can each chunk's filters produce the number of bytes that are stored for it?
"""

from __future__ import annotations

import math
import os
from typing import Any

import h5py
from h5py._objects import phil

from shardload.formats.hdf5.chunk_order import is_over_edge, true_place
from shardload.formats.hdf5.opened import OpenDataset, creation_of, kind_of
from shardload.formats.hdf5.raw_file import plain_descriptor
from shardload.formats.hdf5.unwrapped import are_edges_plain

__all__ = ["Sizes", "Whole"]

_LIST_AT_ONCE, _MOST_LISTED = 1 << 10, 1 << 21  # chunks


class Sizes:
    """Checks the stored size of each chunk that HDF5 is to decode.

    If a chunk is too long, HDF5's gzip filter takes memory as long as the stream goes on, up to a thousand times the stored
    bytes. If a chunk without compression is too short, HDF5 fills the rest with whatever is in its memory, and its Fletcher-32
    filter reads past the end of memory if there is no room for the checksum. The sizes of all chunks are listed once (a
    microsecond each), unless all chunks together are as short as a single chunk may be.
    """

    def __init__(self, dataset: h5py.Dataset) -> None:
        identifier, creation = dataset.id, creation_of(dataset)
        self._wrong = ""
        if creation.get_layout() != h5py.h5d.CHUNKED:
            return
        self._nbytes = math.prod(creation.get_chunk()) * kind_of(dataset).get_size()
        self._most = self._nbytes + self._nbytes // 2 + 4096  # no filter makes a chunk longer than this
        self._filters = [creation.get_filter(k)[0] for k in range(creation.get_nfilters())]
        self._every_filter = (1 << creation.get_nfilters()) - 1
        self._fitting: dict[int, range | tuple[int, ...]] = {}  # by filter mask
        self._chunk, self._shape = creation.get_chunk(), dataset.shape
        self._has_plain_edges = self._every_filter > 0 and bool(are_edges_plain(creation))
        self._put_right = true_place(dataset) if self._has_plain_edges else None
        n_chunks, nbytes = identifier.get_num_chunks(), identifier.get_storage_size()
        if not self._every_filter:
            if nbytes != n_chunks * self._nbytes:
                self._wrong = f"{n_chunks} chunks of {self._nbytes} bytes without a filter, in {nbytes} bytes"
        elif n_chunks <= _LIST_AT_ONCE or (
            (self._most < nbytes or 3 in self._filters or set(self._filters) <= {2} or self._has_plain_edges)
            and n_chunks <= _MOST_LISTED
        ):
            with phil:
                identifier.chunk_iter(self._keep)

    def _keep(self, stored: Any) -> None:
        mask = self._every_filter if self._is_plain(stored) else stored.filter_mask & self._every_filter
        if mask not in self._fitting:
            self._fitting[mask] = self._fitting_sizes(mask)
        if stored.size not in self._fitting[mask]:
            fits = self._fitting[mask]
            expected = f"{fits.start} to {fits.stop - 1}" if isinstance(fits, range) else " or ".join(map(str, fits))
            self._wrong = f"a stored chunk of {stored.size} bytes; expected {expected}"

    def _is_plain(self, stored: Any) -> bool:
        """True for a chunk over the array's edge that HDF5 was asked not to filter."""
        if not self._has_plain_edges:
            return False
        place = stored.chunk_offset if self._put_right is None else self._put_right(stored.chunk_offset)
        return is_over_edge(place, self._chunk, self._shape)

    def _fitting_sizes(self, mask: int) -> range | tuple[int, ...]:
        """The sizes that a chunk may have if the filters in `mask` were not applied to it."""
        applied = [number for k, number in enumerate(self._filters) if not mask >> k & 1]
        n_checksums = applied.count(3)
        if not set(applied) <= {2, 3}:
            return range(4 * n_checksums, self._most + 1)
        # Chunks over the array's edge may be stored without filters (H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS).
        return tuple(sorted({self._nbytes, self._nbytes + 4 * n_checksums}))

    def check(self) -> None:
        """Raise ValueError if a stored size is impossible: too long, or too short without compression."""
        if self._wrong:
            raise ValueError(f"the file declares {self._wrong}: its index is damaged")


class Whole:
    """Checks that an open HDF5 file is still as long as when HDF5 opened it.

    Parameters
    ----------
    descriptor : int or None
        HDF5's own descriptor; None if it has none.
    nbytes : int
        Size when it was opened.
    """

    def __init__(self, descriptor: int | None, nbytes: int) -> None:
        self._descriptor, self._nbytes = descriptor, nbytes

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> Whole:
        """For the file that holds `dataset`."""
        file = dataset.file
        if isinstance(dataset, OpenDataset):
            return cls(dataset.facts.descriptor, file.id.get_filesize())
        return cls(plain_descriptor(file), file.id.get_filesize())  # none of a file that is written: it may still grow

    def check(self) -> None:
        """Raise OSError if it was cut. Call it after a read, while the file is open."""
        if self._descriptor is not None and (found := os.fstat(self._descriptor).st_size) < self._nbytes:
            raise OSError(f"the file was cut to {found} bytes from {self._nbytes} since it was opened")
