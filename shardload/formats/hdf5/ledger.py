"""How does the HDF5 library make a file whose chunks other ranks write? It writes to an object of ours, which takes no chunk.

1. h5py gives every read and write of the library to a Python object: the `Ledger`.
2. Each chunk is written from memory that no one has ever touched. The library hands on the address and length of that memory,
   and does not look at its bytes. So a write from that address is a chunk: the ledger notes where it should go.
3. Every other write is metadata. What lies before a certain byte is kept in pages, all else goes into the real file at once.
   Of a new file the first bytes are kept, without which nobody takes it for an HDF5 file; of one that grows all old ones.

`old_file` opens an old file for reading as it will be with some bytes changed.
"""

from __future__ import annotations

import contextlib
import io
import mmap
from collections.abc import Iterable, Iterator
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil

from shardload.storage.local import LocalFile

HEAD_NBYTES = 512  # of a file, where its superblock lies: what is written last
_PAGE = 1024
_CACHE_NBYTES = 1 << 20  # of HDF5's cache, counted as in the file: in memory a node of the index takes six times as much


class Ledger(io.RawIOBase):
    """A file for the HDF5 library. For one thread at a time.

    Parameters
    ----------
    file : LocalFile
        The real file, in which other ranks write chunks meanwhile; a `WritableFile`, unless it is only read. The caller closes
        it.
    old_nbytes : int
        Bytes that an old file has for HDF5: all that is written is kept, until `put_from` is called. Of a new file (0) the
        first `HEAD_NBYTES` are kept.

    Attributes
    ----------
    file : LocalFile
        The real file.
    nbytes : int
        Length of the file.
    failed : OSError or None
        The first error of the real file. It is not raised while HDF5 calls: after a write that failed HDF5 cannot close its
        file, and the process crashes when it ends. Whoever calls HDF5 looks here afterwards.
    is_given_up : bool
        If the caller sets it, what HDF5 still writes goes nowhere.
    """

    def __init__(self, file: Any, old_nbytes: int = 0) -> None:
        super().__init__()
        self.nbytes = old_nbytes
        self.failed: OSError | None = None
        self.is_given_up = False
        self.file, self._old_nbytes = file, old_nbytes
        self._kept_nbytes = 1 << 62 if old_nbytes else HEAD_NBYTES
        self._pages: dict[int, bytearray] = {}  # by number
        self._old_pages: dict[int, bytes] = {}  # what each of them was
        self._position = 0
        self._blank = memoryview(b"")  # the memory from which chunks are written
        self._address = 0
        self._expected_nbytes: int | None = None  # of the chunk that is written now
        self._offsets: list[int] = []  # where the library wrote it

    # --- chunks

    def place(self, dataset: h5py.h5d.DatasetID, start: tuple[int, ...], nbytes: int, mask: int) -> int:
        """Where the library puts a chunk of `nbytes` bytes, which begins at element `start`, without the filters of `mask`.

        Raises
        ------
        RuntimeError
            If the library did not write the chunk from the memory that it was given, once.
        """
        if nbytes > len(self._blank):
            self._blank = memoryview(mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE * 2, prot=mmap.PROT_READ))
            self._address = _address(self._blank)
        self._expected_nbytes, self._offsets = nbytes, []
        try:
            with phil:  # threads may be encoding by the library; raw writes did not always take the lock (h5py issue 2764)
                dataset.write_direct_chunk(start, self._blank[:nbytes], mask)
        finally:
            self._expected_nbytes = None
        if (n := len(self._offsets)) != 1:
            raise RuntimeError(f"HDF5 wrote a chunk of {nbytes} bytes {n} times from the memory that it was given")
        return self._offsets[0]

    # --- what h5py calls

    def write(self, data: Any) -> int:
        """Note a chunk, or take metadata."""
        nbytes, start = len(data), self._position
        self._position += nbytes
        self.nbytes = max(self.nbytes, self._position)
        if nbytes == self._expected_nbytes and _address(data) == self._address:
            self._offsets.append(start)
            return nbytes
        data, n_kept = memoryview(data).cast("B"), max(0, min(nbytes, self._kept_nbytes - start))
        for number, a, b in _pages(start, start + n_kept):
            first = number * _PAGE + a - start
            self._page(number)[a:b] = data[first : first + b - a]
        self._put(data[n_kept:], start + n_kept)
        return nbytes

    def readinto(self, out: Any) -> int:
        """Give metadata back. What was never written is zeros: the library sometimes reads more than it needs."""
        room, start = memoryview(out).cast("B"), self._position
        self._position += len(room)
        stored = self._stored(start, self._position)
        room[: len(stored)], room[len(stored) :] = stored, bytes(len(room) - len(stored))
        for number, a, b in _pages(start, min(self._position, self._kept_nbytes)):
            if number in self._pages:
                first = number * _PAGE + a - start
                room[first : first + b - a] = self._pages[number][a:b]
        return len(room)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        return self._position

    def truncate(self, size: int | None = None) -> int:
        """Set the length for HDF5. The real file, to which other ranks write, gets it at the end."""
        self.nbytes = self._position if size is None else size
        return self.nbytes

    # --- metadata

    def _page(self, number: int) -> bytearray:
        page = self._pages.get(number)
        if page is None:
            self._old_pages[number] = self._stored(number * _PAGE, min((number + 1) * _PAGE, self._old_nbytes))
            page = self._pages[number] = bytearray(self._old_pages[number].ljust(_PAGE, b"\0"))
        return page

    def put_from(self, offset: int) -> None:
        """Put what is kept from this byte on, and what comes there, into the real file. Not what is below `HEAD_NBYTES`."""
        self._kept_nbytes = max(offset, HEAD_NBYTES)
        for number in [number for number in self._pages if (number + 1) * _PAGE > self._kept_nbytes]:
            first = max(0, self._kept_nbytes - number * _PAGE)
            self._put(self._pages[number][first : max(first, self.nbytes - number * _PAGE)], number * _PAGE + first)
            if not first:
                del self._pages[number], self._old_pages[number]

    def _put(self, data: Any, offset: int) -> None:
        if len(data) and self.failed is None and not self.is_given_up:
            try:
                self.file.write_at(data, offset)
            except OSError as error:
                self.failed = error

    def _stored(self, start: int, stop: int) -> bytes:
        """What the real file has there: less where it ends, and nothing, in which HDF5 finds no metadata, after an error."""
        if self.failed is None and start < stop:
            try:
                return bytes(self.file.read_at_most(start, stop - start))
            except OSError as error:
                self.failed = error
        return b""

    def changes(self) -> list[tuple[int, bytes]]:
        """What is kept and differs from the real file, in order: offset and bytes. The first `HEAD_NBYTES` are always the first
        of them.
        """
        end = min(self._kept_nbytes, self.nbytes)
        changed = [(0, bytes(self._page(0)[:HEAD_NBYTES]))]
        for number, page in sorted(self._pages.items()):
            first = HEAD_NBYTES if number == 0 else 0
            data = bytes(page[first : end - number * _PAGE])
            if data and data != self._old_pages[number][first : first + len(data)]:
                changed.append((number * _PAGE + first, data))
        return changed

    def is_as_before(self) -> bool:
        """True if what `changes` replaces is still in the real file."""
        try:
            return all(self.file.read_at_most(n * _PAGE, len(data)) == data for n, data in self._old_pages.items())
        except OSError:
            return False


def limit_cache(file: h5py.File) -> None:
    """HDF5's cache of metadata may grow to 32 MiB, which are 180 in memory. The index is written and read in order."""
    config = file.id.get_mdc_config()
    config.max_size = _CACHE_NBYTES
    config.min_size = min(config.min_size, _CACHE_NBYTES)
    config.set_initial_size, config.initial_size = 1, _CACHE_NBYTES
    file.id.set_mdc_config(config)


@contextlib.contextmanager
def old_file(stored: LocalFile, changes: Iterable[tuple[int, bytes]] = ()) -> Iterator[h5py.File]:
    """A file as the library reads it with `changes`: other bytes at some offsets. Takes no lock of HDF5."""
    ledger = Ledger(stored, stored.nbytes)
    for offset, data in changes:
        ledger.seek(offset)
        ledger.write(data)
    with h5py.File(ledger, "r") as file:
        limit_cache(file)
        yield file


def _address(data: Any) -> int:
    """Where the bytes of a buffer lie in memory."""
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])


def _pages(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The pages that a range of bytes meets: number, first and last byte in it."""
    for number in range(start // _PAGE, -(-stop // _PAGE) if start < stop else 0):
        yield number, max(0, start - number * _PAGE), min(_PAGE, stop - number * _PAGE)
