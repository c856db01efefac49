"""What of a copy was done by a job that was killed? Rank 0 looks which chunks are on disk, and tells all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardload.comm.group import Group
from shardload.formats.sink import ArraySpec, Sink
from shardload.planning.grid import Grid
from shardload.planning.region import Region

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class DoneChunks:
    """Which chunks of the target are there.

    Parameters
    ----------
    specs : sequence of ArraySpec
        The arrays.
    flags : list of ndarray
        Of each array which chunks are there; none are, if it is empty.
    """

    def __init__(self, specs: Sequence[ArraySpec], flags: Sequence[Bools] = ()) -> None:
        self._flags = flags
        self._grids = [
            Grid(spec.shape, tuple(max(1, n) for n in spec.chunks or spec.shape), (0,) * len(spec.shape)) for spec in specs
        ]

    def holds(self, array: int, region: Region) -> bool:
        """True if all chunks that meet a region are there."""
        if not self._flags:
            return False
        box = tuple(slice(axis.start, axis.stop) for axis in self._grids[array].meeting_axes(region))
        return bool(self._flags[array][box].all())

    @property
    def n(self) -> int:
        """How many."""
        return sum(int(flags.sum()) for flags in self._flags)

    @property
    def n_all(self) -> int:
        """Of how many."""
        return sum(grid.n_cells for grid in self._grids)


def find_done(group: Group, sink: Sink, names: Sequence[str], specs: Sequence[ArraySpec]) -> DoneChunks:
    """What another job has left of these arrays of a copy, which `sink` takes up. Collective.

    Raises
    ------
    ConfigError
        If what is left is of something else, another job is writing it, or files like this one begin anew.
    """
    group.watch.enter("look at what is there")

    def look() -> bytes:
        is_there = sink.take_up()
        if is_there is None:
            return b""
        return np.packbits(np.concatenate([is_there[name].reshape(-1) for name in names])).tobytes()

    told = group.tell(look, 0)
    if not len(told):
        return DoneChunks(specs)
    sizes = [math.prod(spec.grid) for spec in specs]
    bits = np.unpackbits(np.frombuffer(told, dtype=np.uint8), count=sum(sizes)).astype(bool)
    parts = np.split(bits, np.cumsum(sizes)[:-1])
    flags = [part.reshape(spec.grid) for part, spec in zip(parts, specs, strict=True)]
    return DoneChunks(specs, flags)
