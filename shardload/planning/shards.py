"""Which rank holds which shard?

1. A mesh of ranks gives the rank of the device at each place of the mesh (`rank_tables`).
2. `plan_shards` puts the mesh axes into the order of the array axes that they cut. Each place is then a shard and a replica.
3. `Shards` answers for one shard (`holders`) or one rank (`shards_of`), at a cost proportional to the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardload.planning.grid import Grid, unravel
from shardload.planning.rank_tables import RankBoxes, RankTable, table_of
from shardload.planning.region import Region

__all__ = ["RankBoxes", "Shards", "plan_shards"]

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Shards:
    """Which rank holds which shard: the sharding as plain integers.

    Parameters
    ----------
    shape_global : tuple of int
        The global array, including padding, so that every cut divides its axis.
    cuts : tuple of int
        Number of shards along each axis.
    ranks : ndarray of int, shape (prod(cuts), n_replicas), or RankBoxes
        For each shard (C order over `cuts`) a row with the ranks of the devices that hold it. As RankBoxes: a mesh whose first
        axes, in C order, are the shards, and whose other axes are the replicas.
    """

    shape_global: tuple[int, ...]
    cuts: tuple[int, ...]
    ranks: np.ndarray[Any, np.dtype[np.int64]] | RankBoxes

    def __post_init__(self) -> None:
        if any(n % c for n, c in zip(self.shape_global, self.cuts, strict=True)):
            raise ValueError(f"shape {self.shape_global} is not divided by cuts {self.cuts}")
        _ = self.table  # raises ValueError if the ranks do not fit

    @cached_property
    def table(self) -> RankTable:
        """The table of ranks and shards."""
        return table_of(self.cuts, self.ranks)

    @property
    def n_shards(self) -> int:
        """Number of shards."""
        return math.prod(self.cuts)

    @property
    def n_replicas(self) -> int:
        """Number of devices that hold each shard."""
        return self.table.n_replicas

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Elements of one shard along each axis."""
        return tuple(n // c for n, c in zip(self.shape_global, self.cuts, strict=True))

    @cached_property
    def grid(self) -> Grid:
        """The cut as a grid (of an array that is not empty)."""
        return Grid(self.shape_global, tuple(max(1, n) for n in self.shard_shape), (0,) * len(self.cuts))

    def region(self, shard: int) -> Region:
        """The elements of a shard, padding included."""
        start = tuple(i * n for i, n in zip(unravel(shard, self.cuts), self.shard_shape, strict=True))
        return Region(start, tuple(a + n for a, n in zip(start, self.shard_shape, strict=True)))

    def holders(self, shard: int) -> tuple[int, ...]:
        """The ranks that hold a shard, ascending, each once."""
        return self.table.holders(shard)

    @property
    def most_held(self) -> int:
        """Largest number of shards that one rank holds."""
        return self.table.most_held

    def shards_of(self, rank: int) -> tuple[int, ...]:
        """The shards that a rank holds, ascending, each once."""
        return self.table.shards_of(rank)

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Along each axis, the elements from the first to the last one that a rank holds; the maximum over the ranks."""
        return tuple(n * e for n, e in zip(self.table.spans(), self.shard_shape, strict=True))


def plan_shards(shape_global: Sequence[int], axes: Sequence[Sequence[int]], ranks: np.ndarray[Any, Any] | RankBoxes) -> Shards:
    """Cut an array over a mesh.

    Parameters
    ----------
    shape_global : sequence of int
        The array, every axis a multiple of the product of its mesh axes.
    axes : sequence of sequence of int
        For each array axis the mesh axes that cut it, major axis first; empty for an axis that is not cut.
    ranks : ndarray of int, shape of the mesh, or RankBoxes
        The rank of the device at each place of the mesh.

    Examples
    --------
    A mesh of 2 x 3 whose first axis cuts nothing: each shard is held by the two ranks of a mesh column.

    >>> s = plan_shards((6,), [(1,)], np.arange(6).reshape(2, 3))
    >>> s.cuts, s.holders(2), str(s.region(2))
    ((3,), (2, 5), '[4:6]')
    """
    used = [m for cut in axes for m in cut]
    unused = [m for m in range(ranks.ndim) if m not in used]
    cuts = tuple(math.prod(ranks.shape[m] for m in cut) for cut in axes)
    # Mesh axes in the order of the array axes they cut, the rest last: then a row is a shard and a column a replica.
    turned = ranks.transpose((*used, *unused))
    if isinstance(turned, RankBoxes):
        return Shards(tuple(shape_global), cuts, turned)
    return Shards(tuple(shape_global), cuts, np.ascontiguousarray(turned.reshape(math.prod(cuts), -1), dtype=np.int64))
