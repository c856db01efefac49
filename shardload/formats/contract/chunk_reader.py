"""How are the stored chunks of an array read and decoded? By a `ChunkReader`, a box of chunks at a time, in any thread."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np

from shardload.system.scratch import empty_bytes


def fresh(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """New memory."""
    return empty_bytes(nbytes)


Room = Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]]


class Scratch:
    """A `Room` that uses its memory again, because new memory is slow. For one thread at a time.

    Each call may give the same bytes as the call before, and so end the use of the earlier ones.
    """

    def __init__(self) -> None:
        self._memory = fresh(0)

    def __call__(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Memory of `nbytes` bytes, with any content."""
        if len(self._memory) < nbytes:
            self._memory = fresh(0)  # free the old memory before asking for more
            self._memory = fresh(nbytes)
        return self._memory[:nbytes]


@dataclass(slots=True)
class Encoded:
    """The chunks of a box as they are stored.

    Attributes
    ----------
    data : sequence of bytes-like or None
        The bytes of each chunk, in C order; None for a chunk that is missing.
    skipped : mapping of int to frozenset of int
        For chunks to which some stages of the decoding chain were not applied, by their number in the box: which stages.
    """

    data: Sequence[Any]
    skipped: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @property
    def has_missing(self) -> bool:
        """True if a chunk is missing. It takes no step of Python for each chunk."""
        return any(map(is_, self.data, itertools.repeat(None)))


class ChunkReader(abc.ABC):
    """Reads the chunks of one open array. Several threads may call all methods at once.

    If reading or decoding a box of several chunks fails, the caller reads the same chunks one by one, to name the one that is
    damaged.
    """

    @abc.abstractmethod
    def fetch(self, box: Sequence[range], room: Room = fresh) -> Encoded:
        """Read the chunks of a box of the file's grid of chunks as they are stored.

        `room` gives the memory to read into: memory that was used before is much faster than new memory. What was read is valid
        until it is called again. Errors in the file are OSError (also for a short read) or ValueError.
        """

    def expect(self, boxes: Iterator[Sequence[range]]) -> None:
        """Told which boxes will be fetched, in about this order, if the file is in a store. The default does nothing."""
        return None

    @abc.abstractmethod
    def decode(self, encoded: Encoded, out: np.ndarray[Any, Any]) -> None:
        """Decode what `fetch` returned into `out`, which is C-contiguous and has the source's `dtype`. The chunks lie in it one
        after the other, each with its full shape, also at the array's edge. Raises ValueError if one is damaged.
        """

    def read_plain(self, box: Sequence[range], out: np.ndarray[Any, Any]) -> bool:
        """Read a box of chunks that are stored as plain values, one after the other, straight into `out`, as for `decode`.

        False, and `out` may hold anything, if they must be fetched and decoded. The default is False.
        """
        return False


def box_of(index: Sequence[int]) -> tuple[range, ...]:
    """One chunk as a box."""
    return tuple([range(k, k + 1) for k in index])


def check_box(box: Sequence[range], counts: Sequence[int]) -> None:
    """Raise ValueError if some chunks of a box are not in a grid of so many chunks along each axis."""
    if len(box) != len(counts) or not all(0 <= axis.start < axis.stop <= n for axis, n in zip(box, counts, strict=True)):
        raise ValueError(f"there are no chunks {tuple(box)} in a grid of {tuple(counts)}")
