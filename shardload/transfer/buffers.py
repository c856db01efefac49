"""Which buffers hold values between the file and their piece?

A `Piece` is a shard's data on the host: where all values end. A `StagedBlock` is one block in memory, as one or
more tiles (decoded chunks lie as they are; putting them together would be one more copy). They wait in `Slots`: a few buffers,
used again and again, in memory that other processes can look into where there is any, else in this process's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.errors import ShardloadError
from shardload.planning.blocks import ALIGNMENT, aligned
from shardload.planning.region import Region, padding_of
from shardload.planning.schedule import Block

__all__ = ["ALIGNMENT", "Block", "Piece", "Slot", "Slots", "Tile", "aligned", "aligned_empty", "fill_padding", "view_of"]

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array on a 64-byte boundary, which JAX on CPU can use as it is instead of copying it."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def view_of(data: Array, region: Region, held: Region) -> Array:
    """The part of a buffer, which holds `held`, that is `region`."""
    # Ending the index in `...` keeps a 0-d view an array: `data[()]` would be a scalar, hence a copy.
    index: tuple[Any, ...] = (*region.slices(held.start), ...)
    view: Array = data[index]
    return view


@dataclass
class Piece:
    """A shard's data on the host: `region` in global coordinates and the buffer of exactly its shape."""

    region: Region
    data: Array

    def view(self, region: Region) -> Array:
        """The part of the buffer that holds `region`."""
        return view_of(self.data, region, self.region)


def fill_padding(piece: Piece, true: Region | None, value: Any) -> None:
    """Fill what of a piece the array does not have; `true` is what it has of it (`Schedule.true_region`).

    Raises
    ------
    ShardloadError
        If that leaves something out. Verifying looks at the same regions, so it would not be found there.
    """
    n_left = piece.region.size - (0 if true is None else true.size)
    for region in padding_of(piece.region, true):
        piece.view(region)[...] = value
        n_left -= region.size
    if n_left:
        raise ShardloadError(f"{n_left} elements of the padding of {piece.region} were not filled: a defect in shardload")


@dataclass
class Tile:
    """Values of `region`, which lie together; in the layout of the chunk that they come from."""

    region: Region
    data: Array

    def view(self, region: Region) -> Array:
        """The part of the values that is `region`."""
        return view_of(self.data, region, self.region)


@dataclass
class Slot:
    """One buffer for one block."""

    data: Bytes
    is_shared: bool


@dataclass
class StagedBlock:
    """One block in memory. The parts of this rank's own pieces have been delivered; `tiles` hold at least the others."""

    block: Block
    tiles: list[Tile] = field(default_factory=list)
    slot: Slot | None = None
    release: Callable[[], None] = lambda: None
    n_sending: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether other processes of this machine can look at the tiles."""
        return self.slot is not None and self.slot.is_shared

    def tile_of(self, region: Region) -> Tile | None:
        """The one tile that holds all of `region`; None where several do."""
        return next((tile for tile in self.tiles if tile.region.contains(region)), None)

    def views(self, region: Region) -> Iterator[tuple[Region, Array]]:
        """What the tiles hold of `region`: each part of it, and its values."""
        for tile in self.tiles:
            common = tile.region.intersect(region)
            if common is not None:
                yield common, tile.view(common)


class Slots:
    """A few equal buffers, handed out and taken back.

    Parameters
    ----------
    n : int
        How many there are.
    nbytes : int
        Size of each.
    shared : ndarray of uint8, optional
        Memory to cut them from; without it they are allocated when they are first needed.

    Attributes
    ----------
    n_taken : int
        How many are handed out.
    """

    def __init__(self, n: int, nbytes: int, shared: Bytes | None = None) -> None:
        self.nbytes = nbytes
        self._n_left = n if shared is None else 0
        self._free: list[Slot] = []
        self.n_taken = self._n_most = 0
        if shared is not None:
            size = aligned(nbytes)
            self._free = [Slot(shared[k * size : k * size + nbytes], True) for k in reversed(range(n))]

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that were handed out at a time."""
        return self._n_most * self.nbytes

    def has_room(self) -> bool:
        """Whether there is one to `take`."""
        return bool(self._free) or self._n_left > 0

    def take(self) -> Slot | None:
        """One that is free, the last used first (its memory is warm); None where there is none."""
        if not self.has_room():
            return None
        self.n_taken += 1
        self._n_most = max(self._n_most, self.n_taken)
        if self._free:
            return self._free.pop()
        self._n_left -= 1
        return Slot(aligned_empty((self.nbytes,), np.dtype(np.uint8)), False)

    def give(self, slot: Slot) -> None:
        """Take one back."""
        self.n_taken -= 1
        self._free.append(slot)
