"""How does the HDF5 library make a file whose chunks others write? It writes to an object of ours, which keeps metadata.

1. h5py gives every read and write of the library to a Python object: the `Ledger`.
2. A chunk is written to it from memory that no one has ever touched. The library hands on its address and length,
   and does not look at its bytes.
3. So a write from that address is a chunk: the ledger notes where it should go. Every other write is metadata, and is kept in
   pages, of which only those exist that were written to.
4. At the end `write_to` puts the metadata into the real file: the superblock after everything else.
"""

from __future__ import annotations

import io
import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

__all__ = ["HEAD_NBYTES", "Ledger"]

HEAD_NBYTES = 512  # what is written last: the superblock lies there
_PAGE = 1024  # a node of the index has 3 KiB and lies anywhere: larger pages would be half empty


class Ledger(io.RawIOBase):
    """A file for the HDF5 library. For one thread at a time.

    Attributes
    ----------
    nbytes : int
        Length of the file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._at = 0
        self._pages: dict[int, bytearray] = {}
        self._spans: dict[int, list[tuple[int, int]]] = {}  # of each page: which bytes were written, in order, not touching
        self._end = 0  # of the last metadata
        self._blank = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._view, self._address = memoryview(self._blank), _address(self._blank)
        self._expected: int | None = None
        self._noted: int | None = None

    # --- chunks

    def place(self, write: Callable[[Any], None], nbytes: int) -> int:
        """Where the library puts a chunk of `nbytes` bytes, which `write` writes from the memory that it is given.

        Raises
        ------
        RuntimeError
            If the library did not write the chunk from there, once.
        """
        if nbytes > len(self._view):
            self._view = memoryview(b"")
            self._blank = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE * 2, prot=mmap.PROT_READ)
            self._view, self._address = memoryview(self._blank), _address(self._blank)
        self._expected, self._noted = nbytes, None
        try:
            write(self._view[:nbytes])
        finally:
            self._expected = None
        return self._found(nbytes)

    def _found(self, nbytes: int) -> int:
        if self._noted is None:
            raise RuntimeError(f"HDF5 did not write a chunk of {nbytes} bytes from the memory that it was given")
        return self._noted

    def _note(self, nbytes: int) -> None:
        if self._noted is not None:
            raise RuntimeError(f"HDF5 wrote a chunk of {nbytes} bytes twice, at {self._noted} and {self._at}")
        self._noted = self._at
        if self._at < self._end:  # the library may use freed space again: what was metadata there is none now
            self._forget(self._at, self._at + nbytes)

    # --- what h5py calls

    def write(self, data: Any) -> int:
        """Note a chunk, or keep metadata."""
        nbytes = len(data)
        if nbytes == self._expected and _address(data) == self._address:
            self._note(nbytes)
        else:
            self._keep(memoryview(data).cast("B"))
        self._at += nbytes
        self.nbytes = max(self.nbytes, self._at)
        return nbytes

    def readinto(self, out: Any) -> int:
        """Give metadata back. What was never written is zeros: the library sometimes reads more than it needs."""
        room, at = memoryview(out).cast("B"), self._at
        for number, a, b in _pages(at, at + len(room)):
            page = self._pages.get(number)
            start = number * _PAGE + a - at
            room[start : start + b - a] = bytes(b - a) if page is None else page[a:b]
        self._at += len(room)
        return len(room)

    def read(self, size: int = -1) -> bytes:
        """The next bytes, as files give them."""
        room = bytearray(max(0, self.nbytes - self._at) if size < 0 else size)
        self.readinto(room)
        return bytes(room)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.nbytes}[whence]
        return self._at

    def tell(self) -> int:
        """The offset."""
        return self._at

    def truncate(self, size: int | None = None) -> int:
        """Set the length."""
        self.nbytes = self._at if size is None else size
        return self.nbytes

    def flush(self) -> None:
        """Nothing is behind this object yet."""

    def readable(self) -> bool:
        """True."""
        return True

    def writable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    # --- metadata

    @property
    def kept_nbytes(self) -> int:
        """Bytes of memory that the metadata takes."""
        return len(self._pages) * _PAGE

    def _keep(self, data: memoryview) -> None:
        at = self._at
        for number, a, b in _pages(at, at + len(data)):
            page = self._pages.get(number)
            if page is None:
                page, self._spans[number] = bytearray(_PAGE), []
                self._pages[number] = page
            start = number * _PAGE + a - at
            page[a:b] = data[start : start + b - a]
            self._spans[number] = _joined(self._spans[number], a, b)
        self._end = max(self._end, at + len(data))

    def _forget(self, start: int, stop: int) -> None:
        for number, a, b in _pages(start, stop):
            if number in self._spans:
                rest = [part for c, d in self._spans[number] for part in ((c, min(d, a)), (max(c, b), d)) if part[0] < part[1]]
                self._spans[number] = rest

    def metadata(self) -> Iterator[tuple[int, bytes]]:
        """All metadata, in the order of the file: offset and bytes, in pieces that do not touch. Pieces beyond `nbytes` are not
        in the file.
        """
        start, pieces = 0, []  # type: tuple[int, list[bytes]]
        end = -1
        for number in sorted(self._pages):
            for a, b in self._spans[number]:
                offset, b = number * _PAGE + a, min(b, self.nbytes - number * _PAGE)
                if b <= a:
                    continue
                if offset != end and pieces:
                    yield start, b"".join(pieces)
                    pieces = []
                if not pieces:
                    start = offset
                pieces.append(bytes(self._pages[number][a:b]))
                end = offset + b - a
        if pieces:
            yield start, b"".join(pieces)

    def write_to(self, put: Callable[[bytes, int], None], resize: Callable[[int], None], sync: Callable[[], None]) -> None:
        """Put the metadata where it belongs: ``put(data, offset)``. The head comes last, after a `sync`."""
        head = bytearray(min(HEAD_NBYTES, self.nbytes))
        for offset, data in self.metadata():
            inside = max(0, len(head) - offset)
            head[offset : offset + min(inside, len(data))] = data[:inside]
            if len(data) > inside:
                put(data[inside:], offset + inside)
        resize(self.nbytes)
        sync()
        put(bytes(head), 0)
        sync()

    def overlap(self, offsets: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> tuple[int, int] | None:
        """Two offsets at which chunks, or a chunk and metadata, would lie on each other; None if there are none."""
        spans = [(offset, len(data)) for offset, data in self.metadata()]
        starts = np.concatenate([offsets, np.array([a for a, _ in spans], dtype=np.int64)])
        lengths = np.concatenate([sizes, np.array([n for _, n in spans], dtype=np.int64)])
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        order = np.argsort(starts, kind="stable")
        starts, lengths = starts[order], lengths[order]
        bad = np.flatnonzero(starts[:-1] + lengths[:-1] > starts[1:])
        return None if not len(bad) else (int(starts[bad[0]]), int(starts[bad[0] + 1]))


def _address(data: Any) -> int:
    """Where the bytes of a buffer lie in memory."""
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])


def _pages(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The pages that a range of bytes meets: number, first and last byte in it."""
    for number in range(start // _PAGE, -(-stop // _PAGE)):
        yield number, max(0, start - number * _PAGE), min(_PAGE, stop - number * _PAGE)


def _joined(spans: list[tuple[int, int]], a: int, b: int) -> list[tuple[int, int]]:
    """Sorted spans with one more; those that touch become one.

    >>> _joined([(0, 4), (10, 12)], 4, 9), _joined([(0, 4), (10, 12)], 2, 10)
    ([(0, 9), (10, 12)], [(0, 12)])
    """
    if not spans or spans[-1][1] < a:
        return [*spans, (a, b)]
    low = bisect_left(spans, a, key=lambda span: span[1])
    high = low
    while high < len(spans) and spans[high][0] <= b:
        a, b, high = min(a, spans[high][0]), max(b, spans[high][1]), high + 1
    return [*spans[:low], (a, b), *spans[high:]]
