"""Which rank holds which shard?

1. `plan_shards` puts the axes of a mesh of ranks into the order of the array axes that they cut. Each place is then a shard and
   a replica.
2. `Shards` answers for one shard (`holders`) or one rank (`shards_of`), at a cost proportional to the answer. For that it makes
   two tables as long as the mesh, once, by NumPy: 2 MB for a quarter of a million devices.

What the schedule moves into a shard are its *sections*: regions of the array in the file that lie in the shard as they are.
Without a halo each shard is one section, with the same number and the same coordinates; with one it is not so (`halo`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shardload.planning.grid import IntArray, ravel, strides, unravel
from shardload.planning.halo import Content, Halo, SectionGrid, contents_of
from shardload.planning.region import Region


class HeldShard(NamedTuple):
    """A shard that a rank holds.

    Attributes
    ----------
    number : int
        Its number.
    region : Region
        Its elements in the jax.Array.
    sections : tuple of (int, Region, Region)
        The number of each of its sections, its elements in the array in the file, and its place in the jax.Array.
    contents : tuple of Content
        What each region of it must hold.
    """

    number: int
    region: Region
    sections: tuple[tuple[int, Region, Region], ...]
    contents: tuple[Content, ...]


@dataclass(frozen=True, eq=False)
class Shards:
    """Which rank holds which shard: the sharding as plain integers.

    Parameters
    ----------
    shape_global : tuple of int
        The jax.Array, including padding and halos.
    cuts : tuple of int
        Number of shards along each axis.
    ranks : ndarray of int, shape (prod(cuts), n_replicas)
        For each shard (C order over `cuts`) a row with the ranks of the devices that hold it.
    halo : Halo, optional
        What each shard has beside its core. Sections are in the coordinates of the array in the file, which has no halos.
    """

    shape_global: tuple[int, ...]
    cuts: tuple[int, ...]
    ranks: IntArray
    halo: Halo = field(default=None)  # type: ignore[assignment]
    grid: SectionGrid = field(init=False)
    """The sections."""

    def __post_init__(self) -> None:
        if any(n % c for n, c in zip(self.shape_global, self.cuts, strict=True)):
            raise ValueError(f"shape {self.shape_global} is not divided by cuts {self.cuts}")
        if self.ranks.shape[:-1] != (self.n_shards,):
            raise ValueError(f"rank table of shape {self.ranks.shape} does not fit cuts {self.cuts}")
        if self.ranks.min(initial=0) < 0:
            raise ValueError("rank table has a negative rank")
        halo = Halo.none(len(self.cuts)) if self.halo is None else self.halo
        core = tuple(n // c - 2 * h for n, c, h in zip(self.shape_global, self.cuts, halo.widths, strict=True))
        object.__setattr__(self, "halo", halo)
        object.__setattr__(self, "grid", SectionGrid(core, self.cuts, halo))

    def with_halo(self, halo: Halo) -> Shards:
        """The same shards with a halo. ValueError if it is wider than a shard."""
        if halo.is_none:
            return self
        axes = zip(self.shape_global, self.cuts, halo.widths, strict=True)
        return replace(self, shape_global=tuple(n + 2 * c * h for n, c, h in axes), halo=halo)

    @property
    def n_shards(self) -> int:
        """Number of shards."""
        return math.prod(self.cuts)

    @property
    def n_replicas(self) -> int:
        """Number of devices that hold each shard."""
        return int(self.ranks.shape[1])

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Elements of one shard along each axis."""
        return tuple(n // c for n, c in zip(self.shape_global, self.cuts, strict=True))

    @property
    def has_halo(self) -> bool:
        """True if shards have more rows than their own."""
        return not self.halo.is_none

    def region(self, shard: int) -> Region:
        """The elements of a shard, padding and halo included."""
        start = tuple(i * n for i, n in zip(unravel(shard, self.cuts), self.shard_shape, strict=True))
        return Region(start, tuple(a + n for a, n in zip(start, self.shard_shape, strict=True)))

    # --- ranks

    @cached_property
    def _by_shard(self) -> tuple[IntArray, IntArray, IntArray]:
        """All pairs of a shard and a rank that holds it, each once, ascending; and where each shard begins among them."""
        rows = np.sort(self.ranks, axis=1)
        shard, replica = np.nonzero(np.diff(rows, axis=1, prepend=-1))
        return shard, rows[shard, replica], np.searchsorted(shard, np.arange(self.n_shards + 1))

    @cached_property
    def _by_rank(self) -> tuple[IntArray, IntArray]:
        """The same pairs ascending by rank, and where each rank begins among them."""
        shard, rank, _ = self._by_shard
        order = np.argsort(rank, kind="stable")
        return shard[order], np.concatenate([[0], np.cumsum(np.bincount(rank))])

    def holders(self, shard: int) -> tuple[int, ...]:
        """The ranks that hold a shard, ascending, each once."""
        _, rank, first = self._by_shard
        return tuple(rank[first[shard] : first[shard + 1]].tolist())

    def holder(self, shard: int, k: int) -> int:
        """The rank at index `k` of `holders`."""
        _, rank, first = self._by_shard
        return int(rank[first[shard] + k])

    def holder_of(self, shards: IntArray, turns: IntArray) -> IntArray:
        """A rank that holds each of some shards: of several each in its turn."""
        _, rank, first = self._by_shard
        found: IntArray = rank[first[shards] + turns % np.diff(first)[shards]]
        return found

    def shards_of(self, rank: int) -> tuple[int, ...]:
        """The shards that a rank holds, ascending, each once."""
        shard, first = self._by_rank
        return tuple(shard[first[rank] : first[rank + 1]].tolist()) if 0 <= rank < len(first) - 1 else ()

    @cached_property
    def most_holders(self) -> int:
        """Largest number of ranks that hold a shard."""
        return int(np.diff(self._by_shard[2]).max())

    @cached_property
    def n_holders(self) -> int | None:
        """Number of ranks that hold a shard, if it is the same for all shards; else None."""
        return self.most_holders if self.most_holders * self.n_shards == len(self._by_shard[0]) else None

    @cached_property
    def n_holding(self) -> int:
        """Number of ranks that hold any shard."""
        return int(np.count_nonzero(np.diff(self._by_rank[1])))

    @cached_property
    def most_held(self) -> int:
        """Largest number of shards that one rank holds."""
        return int(np.diff(self._by_rank[1]).max(initial=0))

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """Along each axis, the number of shards from the first to the last one of a rank; the maximum over the ranks."""
        shard, first = self._by_rank
        first = np.unique(first[:-1][np.diff(first) > 0])
        places = [shard // stride % n for stride, n in zip(strides(self.cuts), self.cuts, strict=True)]
        return tuple(1 + int((np.maximum.reduceat(i, first) - np.minimum.reduceat(i, first)).max()) for i in places)

    def describe_ranks(self) -> str:
        """A short text that is equal on two ranks if their tables are equal."""
        return f"{zlib.crc32(np.ascontiguousarray(self.ranks).data):08x}"

    # --- sections

    @property
    def core_shape(self) -> tuple[int, ...]:
        """Elements of a shard along each axis, without its halo."""
        return self.grid.core

    @cached_property
    def section_shape(self) -> tuple[int, ...]:
        """Elements of the largest section along each axis."""
        axes = zip(self.core_shape, self.cuts, self.halo.widths, strict=True)
        return tuple(min(c * n, n + 2 * h) for n, c, h in axes)

    @property
    def sections_held(self) -> int:
        """Largest number of sections that one rank holds: an upper bound."""
        wrapped = [c for axis, c in enumerate(self.cuts) if self.halo.wraps(axis)]
        return self.most_held * math.prod(2 if c > 1 else 3 for c in wrapped)

    def section(self, number: int) -> Region:
        """The elements of a section in the array in the file, padding included."""
        return self.grid.region(number)

    def place_of(self, section: int) -> Region:
        """Where a section lies in the jax.Array."""
        shard, inside = self.region(self.shard_of(section)), self.grid.place_in_shard(section)
        start = tuple(a + k for a, k in zip(shard.start, inside, strict=True))
        return Region(start, tuple(a + n for a, n in zip(start, self.section(section).shape, strict=True)))

    def sections_of(self, rank: int) -> tuple[int, ...]:
        """The sections of a rank's shards, ascending."""
        shards = self.shards_of(rank)
        return shards if not self.has_halo else tuple(sorted(n for shard in shards for n in self._sections_at(shard)))

    def _sections_at(self, shard: int) -> Iterator[int]:
        return self.grid.sections_at(unravel(shard, self.cuts)) if self.has_halo else iter((shard,))

    def shard_of(self, section: int) -> int:
        """The shard that a section lies in."""
        return ravel(self.grid.places(section), self.cuts) if self.has_halo else section

    def own(self, section: int, region: Region) -> Region | None:
        """The elements of a region of a section that are the shard's own. Each element is so in one section of one shard."""
        if not self.has_halo:
            return region
        return region.intersect(self._core(self.grid.places(section))) if self.grid.is_middle(section) else None

    def _core(self, place: Sequence[int]) -> Region:
        start = tuple(i * n for i, n in zip(place, self.core_shape, strict=True))
        return Region(start, tuple(a + n for a, n in zip(start, self.core_shape, strict=True)))

    def contents(self, shard: int, shape: tuple[int, ...]) -> Iterator[Content]:
        """What each region of a shard must hold, each element once; `shape` is that of the array in the file."""
        return contents_of(self.grid, unravel(shard, self.cuts), self.region(shard).start, shape)

    def held_by(self, rank: int, shape: tuple[int, ...]) -> tuple[HeldShard, ...]:
        """The shards of a rank, ascending, for an array of this shape in the file. Many arrays may have these shards."""
        key = rank, shape
        if key not in self._held:
            self._held[key] = tuple(
                HeldShard(
                    shard,
                    self.region(shard),
                    tuple((section, self.section(section), self.place_of(section)) for section in self._sections_at(shard)),
                    tuple(self.contents(shard, shape)),
                )
                for shard in self.shards_of(rank)
            )
        return self._held[key]

    @cached_property
    def _held(self) -> dict[tuple[int, tuple[int, ...]], tuple[HeldShard, ...]]:
        return {}

    def core_in(self, shard: int, shape: tuple[int, ...]) -> tuple[Region, Region] | None:
        """A shard's own elements, in the array in the file and in the jax.Array; None if it has none."""
        core = self._core(unravel(shard, self.cuts))
        true = core.intersect(Region.whole(shape))
        if true is None:
            return None
        steps = zip(self.region(shard).start, self.halo.widths, core.start, strict=True)
        return true, true.moved([a + h - b for a, h, b in steps])

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Along each axis, the elements from the first to the last one that a rank holds; the maximum over the ranks.

        All of an axis that wraps around: its ends may be in one shard.
        """
        axes = enumerate(zip(self.spans, self.core_shape, self.cuts, self.halo.widths, strict=True))
        return tuple(c * n if self.halo.wraps(axis) else min(c * n, span * n + 2 * h) for axis, (span, n, c, h) in axes)


def plan_shards(shape_global: Sequence[int], axes: Sequence[Sequence[int]], ranks: np.ndarray[Any, Any]) -> Shards:
    """Cut an array over a mesh.

    Parameters
    ----------
    shape_global : sequence of int
        The array, every axis a multiple of the product of its mesh axes.
    axes : sequence of sequence of int
        For each array axis the mesh axes that cut it, major axis first; empty for an axis that is not cut.
    ranks : ndarray of int, shape of the mesh
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
    turned = ranks.transpose((*used, *unused)).reshape(math.prod(cuts), -1)
    return Shards(tuple(shape_global), cuts, np.ascontiguousarray(turned, dtype=np.int64))
