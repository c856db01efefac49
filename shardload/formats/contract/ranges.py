"""How are ranges of bytes read from an open file?"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

__all__ = ["Spans", "read_at", "state_of"]


def state_of(file: int | str) -> tuple[int, ...] | None:
    """The `Source.state` of a file, by its descriptor or path; None if the file does not exist.

    For a path the state has no inode, because some network file systems give a new one each time.
    """
    try:
        found = os.stat(file)
    except OSError:
        return None
    state = found.st_size, found.st_mtime_ns
    return (*state, found.st_ino, found.st_dev) if isinstance(file, int) else state


def read_at(descriptor: int, out: np.ndarray[Any, Any], offset: int) -> int:
    """Fill `out`, a C-contiguous array of bytes, from an open file at `offset`; returns the number of bytes read.

    The read is positional, so that threads do not share a file offset.
    """
    room, done = out.data, 0
    while done < len(room):  # one call reads 2 GiB at the most, and less on some file systems
        n = os.preadv(descriptor, [room[done:]], offset + done)
        if n == 0:
            break
        done += n
    return done


Ints = np.ndarray[Any, np.dtype[np.int64]]


class Spans:
    """Pieces of one file that are read with few calls: pieces that follow each other, or almost, are read together.

    Parameters
    ----------
    offsets, sizes : ndarray of int64
        Where each piece begins, and its bytes.

    Attributes
    ----------
    nbytes : int
        Bytes of memory that `read` needs.

    Examples
    --------
    >>> import tempfile
    >>> spans = Spans(np.array([40, 10, 20]), np.array([2, 10, 5]), most_gap=4)
    >>> spans.nbytes
    17
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.write(bytes(range(200)))
    ...     file.flush()
    ...     [one.tolist() for one in spans.read(file.fileno(), np.empty(17, np.uint8))]
    [[40, 41], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [20, 21, 22, 23, 24]]
    """

    def __init__(self, offsets: Ints, sizes: Ints, most_gap: int = 1 << 12) -> None:
        self._spans: list[tuple[int, int, int]]  # where each lies in memory, its bytes, where it begins in the file
        n, stops = len(offsets), offsets + sizes
        gaps = offsets[1:] - stops[:-1]
        if n and (n == 1 or int(gaps.min()) >= 0):
            self._join_in_order(offsets, sizes, gaps, most_gap)
        else:
            self._join_sorted(offsets, sizes, stops, most_gap)

    def _join_in_order(self, offsets: Ints, sizes: Ints, gaps: Ints, most_gap: int) -> None:
        """For pieces in the order of the file, as chunks mostly are: in a third of the time."""
        cuts = (gaps > most_gap).nonzero()[0]
        gaps[cuts] = 0
        at = np.zeros(len(offsets), dtype=np.int64)  # where each piece lies in memory
        np.cumsum(gaps + sizes[:-1], out=at[1:])
        starts, ends, last = at.tolist(), (at + sizes).tolist(), cuts.tolist()
        first = [0, *[k + 1 for k in last]]
        self._spans = [
            (starts[a], ends[b] - starts[a], offset)
            for a, b, offset in zip(first, [*last, len(starts) - 1], offsets[first].tolist(), strict=True)
        ]
        self._places, self.nbytes = list(map(slice, starts, ends)), ends[-1]

    def _join_sorted(self, offsets: Ints, sizes: Ints, stops: Ints, most_gap: int) -> None:
        """For pieces in any order, which may overlap."""
        n, order = len(offsets), np.argsort(offsets, kind="stable")
        start, stop = offsets[order], np.maximum.accumulate(stops[order])
        first = np.flatnonzero(np.concatenate([[True], start[1:] > stop[:-1] + most_gap])[:n])
        last = np.append(first[1:], n)[: len(first)] - 1
        length = stop[last] - start[first]
        begin = np.cumsum(length) - length
        at = np.empty(n, dtype=np.int64)
        at[order] = start - np.repeat(start[first] - begin, last - first + 1)
        self._spans = list(zip(begin.tolist(), length.tolist(), start[first].tolist(), strict=True))
        self._places, self.nbytes = list(map(slice, at.tolist(), (at + sizes).tolist())), int(length.sum())

    def read(self, descriptor: int, room: np.ndarray[Any, Any]) -> list[memoryview]:
        """The pieces, in the order in which they were given, read into `room`. OSError if the file ends before one of them."""
        whole = room.data
        for begin, length, offset in self._spans:
            if os.preadv(descriptor, [whole[begin : begin + length]], offset) < length:  # it may give less than was asked for
                done = read_at(descriptor, room[begin : begin + length], offset)
                if done < length:
                    raise OSError(f"the file ends at byte {offset + done}, but chunks are stored up to byte {offset + length}")
        return list(map(whole.__getitem__, self._places))
