"""Do a file's own statements fit what is there? Asked where HDF5 does not ask, and delivers something else.

1. `Whole`: is the file as long as it was when it was opened? HDF5 compares its size with what its header says only then; in the
   place of what was cut off since, it delivers zeros.
2. `Sizes`: is each chunk stored in as many bytes as its filters can make of it?
"""

from __future__ import annotations

import math
import os
from typing import Any

import h5py
from h5py._objects import phil

__all__ = ["Sizes", "Whole"]

_LIST_AT_ONCE, _MOST_LISTED = 1 << 10, 1 << 21  # chunks


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
