"""What is fetched before it is needed, and in which requests? What a reader says that it will read.

1. `Ahead.expect` takes an iterator over what will be read (`Wanted`), in that order. It goes on while what was fetched and not
   yet read fits into 48 MiB of the process: so an index is searched, and memory taken, as the reading goes on.
2. Some 16 MiB of an object are taken together: sorted, small gaps closed, cut into pieces of 8 MiB (`plan_pieces`). The last
   piece waits for what is taken next: so the cuts depend on the expected reads alone, not on timing.
3. A reader that needs what was not fetched yet does not wait for its turn (`need`). Then up to 96 MiB are fetched ahead, and
   more where reads come in another order than expected.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from shardload.storage.objects import Ints

PIECE_NBYTES = 8 << 20  # of a request: one connection to S3 gives about 60 MB/s
MOST_AHEAD_NBYTES, _AT_ONCE_NBYTES = 48 << 20, 16 << 20
_MOST_GAP_NBYTES, _MOST_WASTE, _LEAST_WASTE_NBYTES = 1 << 20, 0.05, 1 << 15


def plan_pieces(offsets: Ints, sizes: Ints) -> list[tuple[int, int, int]]:
    """The requests for ranges of an object, in its order: first byte, the one after the last, and the bytes of ranges in it.

    Gaps of up to 1 MiB are closed, the smallest first, while they are less than 32 KiB, or 5 % of the ranges.

    >>> plan_pieces(np.array([100, 0]), np.array([100, 99]))
    [(0, 200, 199)]
    >>> plan_pieces(np.array([0, 50_000]), np.array([10, 10]))
    [(0, 10, 10), (50000, 50010, 10)]
    >>> plan_pieces(np.array([0, 5 << 20]), np.array([5 << 20, 5 << 20]))
    [(0, 8388608, 8388608), (8388608, 10485760, 2097152)]
    """
    order = np.argsort(offsets, kind="stable")
    start, size = offsets[order], sizes[order]
    before = np.concatenate([[0], np.cumsum(size)])  # bytes of ranges before each
    gaps = start[1:] - np.maximum.accumulate(start + size)[:-1]
    closed, by_size = gaps <= 0, np.argsort(gaps, kind="stable")
    small = by_size[(gaps[by_size] > 0) & (gaps[by_size] <= _MOST_GAP_NBYTES)]
    closed[small[np.cumsum(gaps[small]) <= max(_LEAST_WASTE_NBYTES, _MOST_WASTE * before[-1])]] = True
    first = np.flatnonzero(np.concatenate([[True], ~closed]))
    stops = np.maximum.accumulate(start + size)[np.append(first[1:], len(start)) - 1]
    pieces = []
    for a, b in zip(start[first].tolist(), stops.tolist(), strict=True):
        for begin in range(a, b, PIECE_NBYTES):
            end = min(b, begin + PIECE_NBYTES)
            last = np.searchsorted(start, [begin, end], side="right") - 1  # the ranges that begin before each, or there
            below = before[last] + np.minimum([begin, end] - start[last], size[last])
            pieces.append((begin, end, int(below[1] - below[0])))
    return pieces


class Wanted(NamedTuple):
    """What will be read of one object or folder, and about how many bytes that is.

    ``holder.fetch_ahead(arguments, has_more)`` begins to fetch a list of these `argument`s, and what waits in the holder. With
    `has_more`, what comes next may join the last request, which therefore waits.
    """

    holder: Any
    nbytes: int
    argument: Any


class Ahead:
    """Fetches ahead for all objects and folders of this process.

    Parameters
    ----------
    run : callable
        Calls a function in a thread that sends no requests: the function may wait for their answers (the index of a shard).
    """

    def __init__(self, run: Callable[[Callable[[], None]], Any]) -> None:
        # A garbage collection may close an object, which calls `add`, in a thread that has this lock.
        self._run, self._lock, self._pulling = run, threading.RLock(), threading.RLock()
        self._expected, self._nbytes, self._is_pulling = deque[Iterator[Wanted]](), 0, False
        self._waiting_holder: Any = None  # whose last request waits

    def expect(self, wanted: Iterator[Wanted]) -> None:
        """Say what will be read, in about this order, after all that was expected before."""
        with self._lock:
            self._expected.append(wanted)
        self._run(self._pull_all)

    def add(self, nbytes: int) -> None:
        """Count bytes that are being fetched; a negative number: that were read, or dropped, and leave room for others."""
        with self._lock:
            self._nbytes += nbytes
            has_room = nbytes < 0 and self._expected and self._nbytes + _AT_ONCE_NBYTES <= MOST_AHEAD_NBYTES
        if has_room:
            self._run(self._pull_all)

    def need(self, is_there: Callable[[], bool]) -> None:
        """Begin to fetch what comes next, though there is no room for it, until `is_there()`: what is needed is among it.

        Where a stream is read beside one that waits, it is what the stream expects, not the one that came first: of each a
        batch in turn, and whose batch it was stays the first.
        """
        if is_there():
            return
        with self._pulling:
            n_without = 0  # expectations, one after the other, from which nothing came
            while not self._is_pulling and not is_there():  # (finding out what comes next may take reads, too)
                n_without = 0 if self._pull(2 * MOST_AHEAD_NBYTES) else n_without + 1
                if n_without > len(self._expected):
                    self._settle([], None)
                    return
                if not is_there():
                    with self._lock:
                        self._expected.rotate(-1)

    def _pull_all(self) -> None:
        has_more = True
        while has_more:
            with self._pulling:
                has_more = self._pull(MOST_AHEAD_NBYTES)

    def _pull(self, most_nbytes: int) -> bool:
        """Begin to fetch what comes next. False if that is nothing, or too much."""
        with self._lock:
            if not self._expected or (self._nbytes and self._nbytes + _AT_ONCE_NBYTES > most_nbytes):
                return False
            wanted = self._expected[0]
        batch, nbytes, self._is_pulling = list[Wanted](), 0, True
        try:
            with suppress(Exception):  # who reads the same meets them again, and raises them
                for part in wanted:
                    batch.append(part)
                    nbytes += part.nbytes
                    if nbytes >= _AT_ONCE_NBYTES:
                        break
        finally:
            self._is_pulling = False
        has_more = nbytes >= _AT_ONCE_NBYTES
        if not has_more:
            with self._lock:
                self._expected.popleft()
        self._settle(batch, batch[-1].holder if has_more else None)
        return True

    def _settle(self, batch: list[Wanted], waiting_holder: Any) -> None:
        """Have all of a batch fetched, and what waits, but for the last request of `waiting_holder`."""
        holders = dict.fromkeys(filter(None, [self._waiting_holder, *(part.holder for part in batch)]))
        self._waiting_holder = waiting_holder
        for holder in holders:
            with suppress(Exception):  # who reads the same meets them again, and raises them
                holder.fetch_ahead([part.argument for part in batch if part.holder is holder], holder is waiting_holder)
