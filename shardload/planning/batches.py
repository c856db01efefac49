"""Which small chunks are read and copied together, and how do the values of a region lie in chunks?

A batch is a box of chunks of the file's grid. Its values are decoded into one buffer, chunk after chunk. Along each axis a
region is cut at most into three stretches: what it has of its first chunk, whole chunks, and what it has of its last chunk. So
however many chunks there are, a few copies with strides move a region out of the buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some of the elements that a region has along one axis: from each of `n` chunks the same `length` elements.

    Attributes
    ----------
    chunk, n : int
        First chunk, counted from the first one in the buffer, and number of chunks.
    start, length : int
        First element inside each chunk, and number of elements.
    at : int
        First element, counted from the start of the region.
    """

    chunk: int
    n: int
    start: int
    length: int
    at: int


def stretches(start: int, stop: int, cell: int, first: int) -> list[Stretch]:
    """Cut the elements from `start` to `stop` of an axis with chunks of `cell` elements; the buffer begins with chunk `first`.

    >>> stretches(3, 14, 4, 0)  # doctest: +NORMALIZE_WHITESPACE
    [Stretch(chunk=0, n=1, start=3, length=1, at=0),
     Stretch(chunk=1, n=2, start=0, length=4, at=1),
     Stretch(chunk=3, n=1, start=0, length=2, at=9)]
    >>> stretches(5, 7, 4, 1)
    [Stretch(chunk=0, n=1, start=1, length=2, at=0)]
    """
    found, at = [], start
    while at < stop:
        chunk, inside = divmod(at, cell)
        n = 1 if inside or stop - at < cell else (stop - at) // cell
        length = cell if n > 1 else min(cell - inside, stop - at)
        found.append(Stretch(chunk - first, n, inside, length, at - start))
        at += n * length
    return found


def cut_box(axes: Sequence[range], most: int) -> Iterator[tuple[range, ...]]:
    """Cut a box of chunks into boxes of at most `most` chunks and about equal size, in C order.

    >>> list(cut_box([range(2), range(3, 6)], 2))
    [(range(0, 1), range(3, 5)), (range(0, 1), range(5, 6)), (range(1, 2), range(3, 5)), (range(1, 2), range(5, 6))]
    >>> [len(rows) * len(columns) for rows, columns in cut_box([range(4), range(5)], 12)]
    [10, 10]
    """
    steps, room = [1] * len(axes), max(1, most)
    for k in reversed(range(len(axes))):
        n = max(1, len(axes[k]))
        steps[k] = -(-n // -(-n // room))
        if steps[k] < n:
            break
        room //= n
    return itertools.product(
        *([axis[i : i + step] for i in range(0, len(axis), step)] for axis, step in zip(axes, steps, strict=True))
    )
