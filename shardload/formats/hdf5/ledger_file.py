"""How does the HDF5 library write a file of which it keeps no byte? h5py opens a `Ledger`, and gives chunks their places there.

`LedgerFile` is a new file, or an old one that grows. `old_file` is an old one to read, with some bytes that are to be changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil

from shardload.formats.hdf5.ledger import Ledger
from shardload.formats.target import named, put_at

__all__ = ["UNLIMITED", "FileStore", "LedgerFile", "limit_cache", "old_file"]

UNLIMITED = 1 << 62
"""Of a ledger's ``most_nbytes``: nothing is put early."""

_CACHE_NBYTES = 1 << 20  # of HDF5's cache, counted as in the file: in memory a node of the index takes six times as much
_RENEWED_AFTER = 1 << 16  # chunks
Int64s = np.ndarray[Any, np.dtype[np.int64]]


class FileStore:
    """An open file, for the ledger: see `ledger.Store`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def put(self, data: bytes, offset: int) -> None:
        """See `Store`."""
        put_at(self.descriptor, data, offset)

    def get(self, nbytes: int, offset: int) -> bytes:
        """See `Store`."""
        parts: list[bytes] = []
        while nbytes:
            part = os.pread(self.descriptor, nbytes, offset)
            if not part:
                raise OSError(errno.EIO, "the file is shorter than what was written to it")
            parts.append(part)
            nbytes, offset = nbytes - len(part), offset + len(part)
        return b"".join(parts)


class LedgerFile:
    """An HDF5 file that the library writes to a ledger. For one thread at a time.

    Parameters
    ----------
    path : str
        Its path, for messages.
    ledger : Ledger
        Where its metadata go.
    alignment : int
        Chunks begin at multiples of this.
    """

    def __init__(self, path: str, ledger: Ledger, alignment: int) -> None:
        self._path, self._ledger, self._alignment = path, ledger, alignment
        self._file: h5py.File | None = None
        self._n_placed = 0

    @property
    def is_open(self) -> bool:
        """True between `open` and `close`."""
        return self._file is not None

    @property
    def file(self) -> h5py.File:
        """The open file."""
        if self._file is None:
            raise ValueError(f"'{self._path}' is closed")
        return self._file

    def open(self, mode: str, track_order: bool | None = None) -> h5py.File:
        """Begin a new file (``"w"``), or go on with one (``"r+"``)."""
        self._file = h5py.File(
            self._ledger,
            mode,
            libver="earliest",
            track_order=track_order,
            alignment_threshold=1,
            alignment_interval=self._alignment,
            meta_block_size=max(self._alignment, 2048),
        )
        limit_cache(self._file)
        return self._file

    def close(self) -> None:
        """Have the library write the rest of the metadata. May be called again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Around calls of HDF5: raises what the ledger could not write or read meanwhile."""
        try:
            yield
        except Exception:
            self._raise_failed()
            raise
        self._raise_failed()

    def _raise_failed(self) -> None:
        if self._ledger.failed is not None:
            with named(self._path):
                raise self._ledger.failed

    def place(self, name: str, starts: Int64s, sizes: Int64s, masks: Int64s) -> list[int]:
        """Have the library give some chunks of an array a place. Now and then the file is closed and opened again: HDF5
        remembers each gap between aligned chunks, 250 bytes each.

        Parameters
        ----------
        name : str
            The array.
        starts, sizes, masks : ndarray
            Of each chunk its first element, bytes, and filters that are left out.
        """
        write = _DirectWrite(self.file[name].id)
        offsets = [
            self._ledger.place(write.of(tuple(start), mask), size)
            for start, size, mask in zip(starts.tolist(), sizes.tolist(), masks.tolist(), strict=True)
        ]
        self._n_placed += len(offsets)
        if self._n_placed >= _RENEWED_AFTER and self._alignment > 1:
            self._n_placed = 0
            self.close()
            self.open("r+")
        return offsets


class _DirectWrite:
    """Has the library write one chunk, from memory that the ledger gives."""

    __slots__ = ("_dataset", "_mask", "_start")

    def __init__(self, dataset: h5py.h5d.DatasetID) -> None:
        self._dataset = dataset

    def of(self, start: tuple[int, ...], mask: int) -> _DirectWrite:
        """The same, for a chunk."""
        self._start, self._mask = start, mask
        return self

    def __call__(self, blank: Any) -> None:
        with phil:  # threads may be encoding by the library; raw writes did not always take the lock (h5py issue 2764)
            self._dataset.write_direct_chunk(self._start, blank, self._mask)


def limit_cache(file: h5py.File) -> None:
    """HDF5's cache of metadata may grow to 32 MiB, which are 180 in memory. The index is written and read in order."""
    config = file.id.get_mdc_config()
    config.max_size = _CACHE_NBYTES
    config.min_size = min(config.min_size, _CACHE_NBYTES)
    config.set_initial_size, config.initial_size = 1, _CACHE_NBYTES
    file.id.set_mdc_config(config)


@contextlib.contextmanager
def old_file(descriptor: int, changes: Iterable[tuple[int, bytes]] = ()) -> Iterator[h5py.File]:
    """An open file as the library reads it, with other bytes at some offsets. Takes no lock of HDF5."""
    ledger = Ledger(FileStore(descriptor), UNLIMITED, os.fstat(descriptor).st_size)
    for offset, data in changes:
        ledger.seek(offset)
        ledger.write(data)
    with h5py.File(ledger, "r") as file:
        limit_cache(file)
        yield file
