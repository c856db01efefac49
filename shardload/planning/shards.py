"""Which rank holds which shard?

1. A mesh of ranks gives the rank of the device at each place of the mesh (`rank_tables`).
2. `plan_shards` puts the mesh axes into the order of the array axes that they cut. Each place is then a shard and a replica.
3. `Shards` answers for one shard (`holders`) or one rank (`shards_of`), at a cost proportional to the answer.

What the schedule moves into a shard are its *sections*: regions of the array in the file that lie in the shard as they are.
Here each shard is one section, with the same number and the same coordinates; with a halo it is not so (`halo.HaloShards`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardload.planning.grid import Grid, IntArray, unravel
from shardload.planning.rank_tables import RankBoxes, RankTable, table_of
from shardload.planning.region import Region, padding_of

__all__ = ["Content", "RankBoxes", "Shards", "plan_shards"]


@dataclass(frozen=True, slots=True)
class Content:
    """What one region of a shard must hold.

    Attributes
    ----------
    place : Region
        The region, in the coordinates of the jax.Array.
    source : Region or None
        The elements of the array in the file that it holds; None if it holds a value.
    is_repeated : bool
        True if `source` has one element along some axis, which is repeated along `place`.
    fill : object
        The value, if there is no source; None: that of the padding.
    """

    place: Region
    source: Region | None
    is_repeated: bool = False
    fill: Any = None

    def places(self, region: Region) -> Iterator[Region]:
        """Where a region of `source` lies in the jax.Array: once, or in several places if it is repeated.

        >>> content = Content(Region((0, 5), (2, 8)), Region((0, 0), (1, 3)), is_repeated=True)
        >>> [str(place) for place in content.places(Region((0, 1), (1, 3)))]
        ['[0:1, 6:8]', '[1:2, 6:8]']
        """
        if self.source is None:
            return
        place, source = self.place, self.source
        steps = [p - s for p, s in zip(place.start, source.start, strict=True)]
        first = region.moved(steps)
        if not self.is_repeated:
            yield first
            return
        again = [range(n if m == 1 else 1) for n, m in zip(place.shape, source.shape, strict=True)]
        for more in itertools.product(*again):
            yield first.moved(more)


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
    ranks: IntArray | RankBoxes

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

    @property
    def halo_widths(self) -> tuple[int, ...]:
        """Rows that each shard has on either side in addition to its own: none."""
        return (0,) * len(self.cuts)

    @property
    def has_halo(self) -> bool:
        """True if shards have more rows than their own."""
        return False

    @property
    def halo_text(self) -> str:
        """The halo as text: empty, because there is none."""
        return ""

    @cached_property
    def grid(self) -> Grid:
        """The sections as a grid (of an array that is not empty)."""
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

    # --- sections

    @property
    def core_shape(self) -> tuple[int, ...]:
        """Elements of a shard along each axis, without its halo."""
        return self.shard_shape

    def along(self, axis: int, shape: tuple[int, ...]) -> tuple[IntArray, IntArray, IntArray]:
        """Along one axis, for each section: its first element, the one after its last, and the place of its shard.

        `shape` is that of the array in the file.
        """
        place: IntArray = np.arange(self.cuts[axis], dtype=np.int64)
        low = np.minimum(place * self.core_shape[axis], shape[axis])
        return low, np.minimum(low + self.core_shape[axis], shape[axis]), place

    @property
    def section_shape(self) -> tuple[int, ...]:
        """Elements of the largest section along each axis."""
        return self.shard_shape

    @property
    def sections_held(self) -> int:
        """Largest number of sections that one rank holds."""
        return self.most_held

    def section(self, number: int) -> Region:
        """The elements of a section in the array in the file, padding included."""
        return self.region(number)

    def place_of(self, section: int) -> Region:
        """Where a section lies in the jax.Array."""
        return self.region(section)

    def sections_of(self, rank: int) -> tuple[int, ...]:
        """The sections of a rank's shards, ascending."""
        return self.shards_of(rank)

    def shard_of(self, section: int) -> int:
        """The shard that a section lies in."""
        return section

    @property  # a function, so that asking for each of a million parts is not dearer than asking the table
    def section_holders(self) -> Callable[[int], tuple[int, ...]]:
        """From a section to the ranks that hold its shard, ascending, each once."""
        return self.table.holders

    @property
    def section_holder(self) -> Callable[[int, int], int]:
        """From a section and `k` to the rank at index `k` of `section_holders`."""
        return self.table.holder

    def own(self, section: int, region: Region) -> Region | None:
        """The elements of a region of a section that are the shard's own. Each element is so in one section of one shard."""
        return region

    def contents(self, shard: int, shape: tuple[int, ...]) -> Iterator[Content]:
        """What each region of a shard must hold, each element once; `shape` is that of the array in the file."""
        region = self.region(shard)
        true = region.intersect(Region.whole(shape))
        if true is not None:
            yield Content(true, true)
        for tail in padding_of(region, true):
            yield Content(tail, None)

    def core_in(self, shard: int, shape: tuple[int, ...]) -> tuple[Region, Region] | None:
        """A shard's own elements, in the array in the file and in the jax.Array; None if it has none."""
        true = self.region(shard).intersect(Region.whole(shape))
        return None if true is None else (true, true)

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
