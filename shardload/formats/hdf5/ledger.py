"""How does the HDF5 library make a file whose chunks others write? It writes to an object of ours, which keeps metadata.

1. h5py gives every read and write of the library to a Python object: the `Ledger`.
2. A chunk is written to it from memory that no one has ever touched. The library hands on its address and length,
   and does not look at its bytes.
3. So a write from that address is a chunk: the ledger notes where it should go. Every other write is metadata, and is kept in
   pages, of which only those exist that were written to.
4. If they get too many, they are put into the real file early, where they belong, and read from there when HDF5 asks.
5. At the end `write_to` puts the rest of the metadata into the real file: the superblock after everything else.
"""

from __future__ import annotations

import io
import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

__all__ = ["HEAD_NBYTES", "MOST_NBYTES", "Ledger", "Store"]

HEAD_NBYTES = 512  # what is written last: the superblock lies there
MOST_NBYTES = 4 << 20  # of pages: HDF5 has a cache of its own, so that what was put into the file is seldom asked for
_PAGE = 1024  # a node of the index has 3 KiB and lies anywhere: larger pages would be half empty
_AT_ONCE = 1 << 16  # chunks that are looked at together
Int64s = np.ndarray[Any, np.dtype[np.int64]]


class Store(Protocol):
    """The real file, in which others write chunks meanwhile."""

    def put(self, data: bytes, offset: int) -> None:
        """Write all of `data`, and no other byte. OSError if it cannot be written."""

    def get(self, nbytes: int, offset: int) -> bytes:
        """Read what was put. OSError if it cannot be read."""


class Ledger(io.RawIOBase):
    """A file for the HDF5 library. For one thread at a time.

    Parameters
    ----------
    store : Store, optional
        Where metadata may be put early. Never the head.
    most_nbytes : int
        Bytes of pages that may be put early, if there is a store.
    old_nbytes : int
        Bytes that the store has already: those of a file that is to be changed. They are read from there, and nothing is put
        over them early.

    Attributes
    ----------
    nbytes : int
        Length of the file.
    failed : OSError or None
        The first error of the store. It is not raised while HDF5 calls: after a write that failed HDF5 can not close its file,
        and the process crashes when it ends. Whoever calls HDF5 looks here afterwards.
    """

    def __init__(self, store: Store | None = None, most_nbytes: int = MOST_NBYTES, old_nbytes: int = 0) -> None:
        super().__init__()
        self.nbytes = old_nbytes
        self.failed: OSError | None = None
        self._store, self.most_nbytes = store, most_nbytes
        self._put_early = _Ranges()  # metadata in the store. Where a page has bytes too, those are newer
        self._put_early.add([(0, old_nbytes)] if old_nbytes else [])
        self._first_put, self._n_stay = max(1, -(-old_nbytes // _PAGE)), 0  # pages from this number on; how many are before
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
        self.nbytes = max(self.nbytes, self._at + nbytes)
        if nbytes == self._expected and _address(data) == self._address:
            self._note(nbytes)
        else:
            self._keep(memoryview(data).cast("B"))
        self._at += nbytes
        return nbytes

    def readinto(self, out: Any) -> int:
        """Give metadata back. What was never written is zeros: the library sometimes reads more than it needs."""
        room, at = memoryview(out).cast("B"), self._at
        room[:] = bytes(len(room))
        for start, stop in self._put_early.within(at, at + len(room)):
            room[start - at : stop - at] = self._fetched(start, stop)
        for number, a, b in _pages(at, at + len(room)):
            base = number * _PAGE - at
            for c, d in self._spans.get(number, ()):
                if max(a, c) < min(b, d):
                    room[base + max(a, c) : base + min(b, d)] = self._pages[number][max(a, c) : min(b, d)]
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
        if (len(self._pages) - self._n_stay) * _PAGE > self.most_nbytes and self._store is not None and self.failed is None:
            self._put_pages(self._store)

    def _put_pages(self, store: Store) -> None:
        """Put all pages into the store but that of the head, and those with old bytes. If that fails they stay."""
        spans = []
        try:
            for offset, data in self._kept(self._first_put):
                store.put(data, offset)
                spans.append((offset, offset + len(data)))
        except OSError as error:
            self.failed = error
            return
        self._put_early.add(spans)
        self._pages = {number: page for number, page in self._pages.items() if number < self._first_put}
        self._spans = {number: spans for number, spans in self._spans.items() if number < self._first_put}
        self._n_stay = len(self._pages)

    def _fetched(self, start: int, stop: int) -> bytes:
        """What was put early; zeros, in which HDF5 finds no metadata, if it cannot be read."""
        if self._store is not None and self.failed is None:
            try:
                return self._store.get(stop - start, start)
            except OSError as error:
                self.failed = error
        return bytes(stop - start)

    def _forget(self, start: int, stop: int) -> None:
        self._put_early.remove(start, stop)
        for number, a, b in _pages(start, stop):
            if number in self._spans:
                rest = [part for c, d in self._spans[number] for part in ((c, min(d, a)), (max(c, b), d)) if part[0] < part[1]]
                self._spans[number] = rest

    def _kept(self, first: int = 0) -> Iterator[tuple[int, bytes]]:
        """What is in pages, from page `first` on: see `metadata`."""
        start, pieces = 0, []  # type: tuple[int, list[bytes]]
        end = -1
        for number in sorted(self._pages):
            for a, b in self._spans[number] if number >= first else ():
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

    def metadata(self) -> Iterator[tuple[int, bytes]]:
        """The metadata that is not yet in the store, in the order of the file: offset and bytes, in pieces that do not touch.
        Pieces beyond `nbytes` are not in the file.
        """
        return self._kept()

    def write_to(self, put: Callable[[bytes, int], None], resize: Callable[[int], None], sync: Callable[[], None]) -> None:
        """Put the metadata that is not yet in the store where it belongs: ``put(data, offset)``. The head comes last, after a
        `sync`.
        """
        head = bytearray(min(HEAD_NBYTES, self.nbytes))
        for offset, data in self._kept():
            inside = max(0, len(head) - offset)
            head[offset : offset + min(inside, len(data))] = data[:inside]
            if len(data) > inside:
                put(data[inside:], offset + inside)
        resize(self.nbytes)
        sync()
        put(bytes(head), 0)
        sync()

    def overlap(self, offsets: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> tuple[int, int] | None:
        """Two offsets at which chunks, or a chunk and metadata, would lie on each other; None if there are none.

        Looks at some chunks at a time: a copy of everything would take more memory than the metadata.
        """
        metadata = _Ranges()
        metadata.add([(offset, offset + len(data)) for offset, data in self._kept()])
        metadata.add(self._put_early.within(0, self.nbytes))
        order = np.argsort(offsets)
        end, before = -1, -1  # of the chunk before
        for at in range(0, len(order), _AT_ONCE):
            some = order[at : at + _AT_ONCE]
            some = some[sizes[some] > 0]
            starts = offsets[some].astype(np.int64)
            stops = starts + sizes[some]
            if not len(starts):
                continue
            ends = np.concatenate([[end], stops[:-1]])
            bad = np.flatnonzero(ends > starts)
            if len(bad):
                return (int(starts[bad[0] - 1]) if bad[0] else before), int(starts[bad[0]])
            clash = metadata.clash(starts, stops)
            if clash is not None:
                return clash
            end, before = int(stops[-1]), int(starts[-1])
        return None


class _Ranges:
    """Ranges of bytes that do not touch each other, as arrays: a pair of Python objects for each would take twenty times as
    much memory.

    >>> ranges = _Ranges()
    >>> ranges.add([(4, 8), (0, 2), (8, 9)])
    >>> ranges.remove(5, 6)
    >>> ranges.within(1, 7)
    [(1, 2), (4, 5), (6, 7)]
    """

    def __init__(self) -> None:
        self.starts, self.stops = np.empty(0, np.int64), np.empty(0, np.int64)

    def add(self, ranges: list[tuple[int, int]]) -> None:
        """Add ranges in any order; they may overlap, and those that touch become one."""
        if not ranges:
            return
        more = np.array(ranges, dtype=np.int64)
        starts, stops = np.concatenate([self.starts, more[:, 0]]), np.concatenate([self.stops, more[:, 1]])
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], np.maximum.accumulate(stops[order])
        first = np.flatnonzero(np.concatenate([[True], starts[1:] > stops[:-1]]))
        self.starts, self.stops = starts[first], stops[np.append(first[1:], len(stops)) - 1]

    def remove(self, start: int, stop: int) -> None:
        """Take a range out."""
        low, high = self._met(start, stop)
        if low == high:
            return
        rest = [(self.starts[low], start), (stop, self.stops[high - 1])]
        parts = np.array([part for part in rest if part[0] < part[1]], dtype=np.int64).reshape(-1, 2)
        self.starts = np.concatenate([self.starts[:low], parts[:, 0], self.starts[high:]])
        self.stops = np.concatenate([self.stops[:low], parts[:, 1], self.stops[high:]])

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of the ranges that lie between two bytes."""
        low, high = self._met(start, stop)
        found = zip(self.starts[low:high].tolist(), self.stops[low:high].tolist(), strict=True)
        return [(max(a, start), min(b, stop)) for a, b in found]

    def clash(self, starts: Int64s, stops: Int64s) -> tuple[int, int] | None:
        """The first of some other ranges that meets one of these: where both begin, the lower one first."""
        low = np.searchsorted(self.stops, starts, side="right")
        bad = np.flatnonzero(low < np.searchsorted(self.starts, stops, side="left"))
        if not len(bad):
            return None
        pair = sorted((int(starts[bad[0]]), int(self.starts[low[bad[0]]])))
        return pair[0], pair[1]

    def _met(self, start: int, stop: int) -> tuple[int, int]:
        """Which ranges have bytes between two: the first, and the one after the last."""
        if start >= stop or not len(self.starts):
            return 0, 0
        low = int(np.searchsorted(self.stops, start, side="right"))
        return low, max(low, int(np.searchsorted(self.starts, stop, side="left")))


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
