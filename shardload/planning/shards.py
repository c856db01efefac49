"""Which rank holds which shard, and what does a shard hold if it comes with its neighbours' rows?

1. `plan_shards` puts the axes of a mesh of ranks into the order of the array axes that they cut. Each place is then a shard and
   a replica.
2. `Shards` answers for one shard (`holders`) or one rank (`shards_of`), at a cost proportional to the answer. For that it makes
   two tables as long as the mesh, once, by NumPy: 2 MB for a quarter of a million devices.

What the schedule moves into a shard are its *sections*: regions of the array in the file that lie in the shard as they are.
Without a halo each shard is one section, with the same number and the same coordinates.

A halo of width ``h`` along an axis gives each shard ``h`` more rows on either side: those of its neighbours and, at the ends of
the array, what the edge rule says (`Halo`). The global array is then the shards side by side, ``2 * h`` longer for each shard.
Each axis is independent of the others, so a shard is a product of *runs*: consecutive positions along one axis that are either
consecutive elements of the array, or one element repeated, or a value. Where all of them are elements of the array, the product
is a section. A shard has one section, and more at the ends of an axis that wraps around. The rest is filled in by the rank that
holds the shard.

The sections of all shards overlap. Along each axis they are numbered: number ``i`` is the section in the middle of the shards
at place ``i``, and on an axis that wraps two more follow: the last rows of the array at the first place, and the first rows at
the last place.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shardload.planning.region import Cells, IntArray, Region, numbers_of, ravel, strides, unravel

WRAP, EDGE = "wrap", "edge"


@dataclass(frozen=True)
class Halo:
    """How many rows of its neighbours each shard has, and what lies beyond the ends of the array.

    Parameters
    ----------
    widths : tuple of int
        Rows on either side of a shard, along each axis; 0: none.
    edges : tuple
        Along each axis: ``"wrap"`` (the array goes on at its other end), ``"edge"`` (its last row is repeated), or a value.
    """

    widths: tuple[int, ...]
    edges: tuple[Any, ...]

    @property
    def values(self) -> list[Any]:
        """The values that lie beyond the ends of the array."""
        return [edge for h, edge in zip(self.widths, self.edges, strict=True) if h and not isinstance(edge, str)]

    def wraps(self, axis: int) -> bool:
        """True if an axis has a halo that wraps around."""
        return self.widths[axis] > 0 and bool(self.edges[axis] == WRAP)

    def __str__(self) -> str:
        """Width and edge rule of each axis that has a halo; empty if none has.

        >>> str(Halo((2, 0, 1), ("wrap", "wrap", 0)))
        '2 on axis 0 (wrap), 1 on axis 2 (0)'
        """
        axes = [(axis, n, edge) for axis, (n, edge) in enumerate(zip(self.widths, self.edges, strict=True)) if n]
        return ", ".join(f"{n} on axis {axis} ({edge})" for axis, n, edge in axes)


@dataclass(frozen=True, slots=True)
class SectionGrid(Cells):
    """The sections of all shards: cells that overlap where there is a halo.

    Parameters
    ----------
    core : tuple of int
        Shape of a shard without its halo.
    cuts : tuple of int
        Number of shards along each axis.
    halo : Halo
        What each shard has beside its core.

    Examples
    --------
    Six elements over three shards, with a halo of one that wraps around:

    >>> g = SectionGrid((2,), (3,), Halo((1,), ("wrap",)))
    >>> [str(g.region(i)) for i in range(g.n_cells)]
    ['[0:3]', '[1:5]', '[3:6]', '[5:6]', '[0:1]']
    >>> list(g.meeting(Region((0,), (1,))))
    [0, 4]
    """

    core: tuple[int, ...]
    cuts: tuple[int, ...]
    halo: Halo
    counts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _axes: tuple[tuple[int, int, int, int, bool], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # For each axis: shards, width of the halo, core, size of the (padded) array, and whether it wraps.
        axes = enumerate(zip(self.core, self.cuts, self.halo.widths, strict=True))
        object.__setattr__(self, "_axes", tuple((c, h, n, c * n, self.halo.wraps(axis)) for axis, (n, c, h) in axes))
        object.__setattr__(self, "counts", tuple(c + 2 * wraps for c, _, _, _, wraps in self._axes))

    def bounds(self, number: int) -> list[tuple[int, int]]:
        """See `Cells`."""
        bounds = []
        for c, h, n, size, wraps in reversed(self._axes):
            number, i = divmod(number, c + 2 * wraps)
            if i >= c:
                bounds.append((size - h, size) if i == c else (0, h))
            else:
                bounds.append((max(0, i * n - h), min(size, (i + 1) * n + h)))
        bounds.reverse()
        return bounds

    def meeting_axes(self, region: Region) -> list[Sequence[int]]:
        """See `Cells`."""
        sections: list[Sequence[int]] = []
        for a, b, (c, h, n, size, wraps) in zip(region.start, region.stop, self._axes, strict=True):
            if b <= a or not n:
                sections.append(())
                continue
            along_axis: Sequence[int] = range(max(0, (a - h) // n), min(c, -(-(b + h) // n)))
            if wraps and (b > size - h or a < h):
                along_axis = [*along_axis, *[c] * (b > size - h), *[c + 1] * (a < h)]
            sections.append(along_axis)
        return sections

    def places(self, number: int) -> tuple[int, ...]:
        """The place of a section's shard along each axis."""
        index = zip(self.index(number), self.cuts, strict=True)
        return tuple(i if i < c else 0 if i == c else c - 1 for i, c in index)

    def sections_of(self, shard: int) -> Iterator[int]:
        """Numbers of the sections of a shard, ascending."""
        along = [
            [i, *[c] * (wraps and i == 0), *[c + 1] * (wraps and i == c - 1)]
            for i, (c, _, _, _, wraps) in zip(unravel(shard, self.cuts), self._axes, strict=True)
        ]
        return numbers_of(along, self.counts)

    def along(self, axis: int, n_true: int) -> tuple[IntArray, IntArray, IntArray]:
        """Along one axis, for each section: its first element, the one after its last, and the place of its shard.

        `n_true` is the length of the array in the file, which has no padding.
        """
        c, h, n, size, wraps = self._axes[axis]
        place: IntArray = np.arange(c, dtype=np.int64)
        low, high = np.maximum(0, place * n - h), np.minimum(size, (place + 1) * n + h)
        if wraps:
            low, high, place = np.append(low, [size - h, 0]), np.append(high, [size, h]), np.append(place, [0, c - 1])
        return np.minimum(low, n_true), np.minimum(high, n_true), place


# --- what a shard holds


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
        first = region.moved([p - s for p, s in zip(place.start, source.start, strict=True)])
        is_repeated = self.is_repeated
        repeats = [range(n if is_repeated and m == 1 else 1) for n, m in zip(place.shape, source.shape, strict=True)]
        for steps in itertools.product(*repeats):
            yield first.moved(steps)


class _Run(NamedTuple):
    """Positions of a shard along one axis. `source` is the first element of the array there, None for a value (`fill`)."""

    start: int
    stop: int
    source: int | None
    is_repeated: bool = False
    fill: Any = None


def _runs(grid: SectionGrid, axis: int, i: int, n_true: int) -> Iterator[_Run]:
    c, h, n, size, _ = grid._axes[axis]
    if not h:
        n_kept = min(n, max(0, n_true - i * n))
        yield _Run(0, n_kept, i * n)
        yield _Run(n_kept, n, None)
        return
    yield from [] if i else [_beyond(grid.halo, axis, 0, h, size - h, 0)]
    low, high = max(0, i * n - h), min(size, (i + 1) * n + h)
    yield _Run(low - i * n + h, high - i * n + h, low)
    yield from [] if i < c - 1 else [_beyond(grid.halo, axis, n + h, n + 2 * h, 0, size - 1)]


def _beyond(halo: Halo, axis: int, start: int, stop: int, other_end: int, last: int) -> _Run:
    """The positions of a shard beyond one end of the array. `last` is the element at that end."""
    if halo.wraps(axis):
        return _Run(start, stop, other_end)
    if halo.edges[axis] == EDGE:
        return _Run(start, stop, last, is_repeated=True)
    return _Run(start, stop, None, fill=halo.edges[axis])


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
    _held_shards: dict[Any, tuple[HeldShard, ...]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        ndim = len(self.cuts)
        halo = Halo((0,) * ndim, (WRAP,) * ndim) if self.halo is None else self.halo
        core = tuple(n // c - 2 * h for n, c, h in zip(self.shape_global, self.cuts, halo.widths, strict=True))
        object.__setattr__(self, "halo", halo)
        object.__setattr__(self, "grid", SectionGrid(core, self.cuts, halo))

    def with_halo(self, halo: Halo) -> Shards:
        """The same shards with a halo. ValueError if it is wider than a shard."""
        if not any(halo.widths):
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
        return any(self.halo.widths)

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

    def holder_of(self, shards: IntArray, turns: IntArray) -> IntArray:
        """A rank that holds each of some shards: of several each in its turn."""
        _, rank, first = self._by_shard
        holders: IntArray = rank[first[shards] + turns % np.diff(first)[shards]]
        return holders

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

    @cached_property
    def section_shape(self) -> tuple[int, ...]:
        """Elements of the largest section along each axis."""
        axes = zip(self.grid.core, self.cuts, self.halo.widths, strict=True)
        return tuple(min(c * n, n + 2 * h) for n, c, h in axes)

    def place_of(self, section: int) -> Region:
        """Where a section lies in the jax.Array."""
        shard, region = self.region(self.shard_of(section)), self.grid.region(section)
        axes = zip(shard.start, self.grid.index(section), region.start, self.grid._axes, strict=True)
        start = tuple(s + (a - (i * n - h) if i < c else 0 if i == c else n + h) for s, i, a, (c, h, n, _, _) in axes)
        return Region(start, tuple(a + n for a, n in zip(start, region.shape, strict=True)))

    def sections_of(self, rank: int) -> tuple[int, ...]:
        """The sections of a rank's shards, ascending."""
        shards = self.shards_of(rank)
        return shards if not self.has_halo else tuple(sorted(n for shard in shards for n in self.grid.sections_of(shard)))

    def shard_of(self, section: int) -> int:
        """The shard that a section lies in."""
        return ravel(self.grid.places(section), self.cuts) if self.has_halo else section

    def own(self, section: int, region: Region) -> Region | None:
        """The elements of a region of a section that are the shard's own. Each element is so in one section of one shard."""
        if not self.has_halo:
            return region
        place = self.grid.index(section)
        if any(i >= c for i, c in zip(place, self.cuts, strict=True)):  # another section has the shard's own elements
            return None
        start = tuple(i * n for i, n in zip(place, self.grid.core, strict=True))
        return region.intersect(Region(start, tuple(a + n for a, n in zip(start, self.grid.core, strict=True))))

    def contents(self, shard: int, shape: tuple[int, ...]) -> Iterator[Content]:
        """What each region of a shard must hold, each element once; `shape` is that of the array in the file."""
        places = enumerate(zip(unravel(shard, self.cuts), shape, strict=True))
        # Empty runs go before the product: of 64 axes with one of them each there are 2**64 products.
        axes = [[run for run in _runs(self.grid, axis, i, n) if run.stop > run.start] for axis, (i, n) in places]
        for runs in itertools.product(*axes):
            region = Region(tuple(run.start for run in runs), tuple(run.stop for run in runs)).moved(self.region(shard).start)
            if any(run.source is None for run in runs):
                fills = [run.fill for run, h in zip(runs, self.halo.widths, strict=True) if run.source is None and h]
                yield Content(region, None, fill=fills[-1] if fills else None)
                continue
            start = tuple(run.source or 0 for run in runs)
            stop = tuple(a + (1 if run.is_repeated else run.stop - run.start) for a, run in zip(start, runs, strict=True))
            yield Content(region, Region(start, stop), is_repeated=any(run.is_repeated for run in runs))

    def held_by(self, rank: int, shape: tuple[int, ...]) -> tuple[HeldShard, ...]:
        """The shards of a rank, ascending, for an array of this shape in the file. Many arrays may have these shards."""
        key = rank, shape
        if key not in self._held_shards:
            self._held_shards[key] = tuple(
                HeldShard(
                    shard,
                    self.region(shard),
                    tuple((k, self.grid.region(k), self.place_of(k)) for k in self.grid.sections_of(shard)),
                    tuple(self.contents(shard, shape)),
                )
                for shard in self.shards_of(rank)
            )
        return self._held_shards[key]

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Along each axis, the elements from the first to the last one that a rank holds; the maximum over the ranks.

        All of an axis that wraps around: its ends may be in one shard.
        """
        axes = enumerate(zip(self.spans, self.grid.core, self.cuts, self.halo.widths, strict=True))
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
