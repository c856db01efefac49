"""What does a shard hold if it comes with its neighbours' rows?

A halo of width ``h`` along an axis gives each shard ``h`` more rows on either side: those of its neighbours and, at the ends of
the array, what the edge rule says (`Halo`). The global array is then the shards side by side, ``2 * h`` longer for each shard.

Each axis is independent of the others, so a shard is a product of *runs*: consecutive positions along one axis that are either
consecutive elements of the array, or one element repeated, or a value. Where all of them are elements of the array, the product
is a `section`: a region of the array that lies in the shard as it is. A shard has one section, and more at the ends of an axis
that wraps around. Sections are what the schedule moves; the rest is filled in by the rank that holds the shard.

The sections of all shards overlap. Along each axis they are numbered: number ``i`` is the section in the middle of the shards
at place ``i``, and on an axis that wraps two more follow: the last rows of the array at the first place, and the first rows at
the last place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shardload.planning.grid import IntArray, ravel, strides, unravel
from shardload.planning.region import Region
from shardload.planning.shards import Content, Shards

__all__ = ["EDGE", "WRAP", "Halo", "HaloShards", "SectionGrid"]

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
    def is_none(self) -> bool:
        """True if no axis has a halo."""
        return not any(self.widths)

    @property
    def values(self) -> list[Any]:
        """The values that lie beyond the ends of the array."""
        return [edge for h, edge in zip(self.widths, self.edges, strict=True) if h and not isinstance(edge, str)]

    def wraps(self, axis: int) -> bool:
        """True if an axis has a halo that wraps around."""
        return self.widths[axis] > 0 and self._is(axis, WRAP)

    def repeats(self, axis: int) -> bool:
        """True if an axis has a halo in which the last row is repeated."""
        return self.widths[axis] > 0 and self._is(axis, EDGE)

    def _is(self, axis: int, word: str) -> bool:
        return isinstance(self.edges[axis], str) and self.edges[axis] == word

    def __str__(self) -> str:
        """Width and edge rule of each axis that has a halo.

        >>> str(Halo((2, 0, 1), ("wrap", "wrap", 0)))
        '2 on axis 0 (wrap), 1 on axis 2 (0)'
        """
        axes = [(axis, n, edge) for axis, (n, edge) in enumerate(zip(self.widths, self.edges, strict=True)) if n]
        return ", ".join(f"{n} on axis {axis} ({edge})" for axis, n, edge in axes) or "none"


@dataclass(frozen=True)
class SectionGrid:
    """The sections of all shards. The same questions as to a `Grid`, but its cells overlap.

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
    """Number of sections along each axis."""
    _axes: tuple[tuple[int, int, int, int, bool], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # For each axis: cells, width of the halo, core, size of the (padded) array, and whether it wraps.
        axes = []
        for axis, (n, c, h) in enumerate(zip(self.core, self.cuts, self.halo.widths, strict=True)):
            if h > n:
                raise ValueError(f"a halo of {h} on axis {axis} is wider than a shard, which has {n} elements")
            wraps = self.halo.wraps(axis)
            axes.append((c + 2 * wraps, h, n, c * n, wraps))
        object.__setattr__(self, "_axes", tuple(axes))
        object.__setattr__(self, "counts", tuple(axis[0] for axis in axes))

    @property
    def n_cells(self) -> int:
        """Number of sections."""
        return math.prod(self.counts)

    def bounds(self, number: int) -> list[tuple[int, int]]:
        """Where a section starts and stops in the array, along each axis, by its number in C order."""
        bounds = []
        for count, h, n, size, wraps in reversed(self._axes):
            number, i = divmod(number, count)
            if wraps and i >= count - 2:
                bounds.append((size - h, size) if i == count - 2 else (0, h))
            else:
                bounds.append((max(0, i * n - h), min(size, (i + 1) * n + h)))
        bounds.reverse()
        return bounds

    def region(self, number: int) -> Region:
        """The elements of a section."""
        bounds = self.bounds(number)
        return Region(tuple([a for a, _ in bounds]), tuple([b for _, b in bounds]))

    def meeting_axes(self, region: Region) -> list[Sequence[int]]:
        """The sections that share an element with a region, along each axis, ascending."""
        found: list[Sequence[int]] = []
        for a, b, (count, h, n, size, wraps) in zip(region.start, region.stop, self._axes, strict=True):
            if b <= a or not n:
                found.append(())
                continue
            cut = count - 2 * wraps
            met: Sequence[int] = range(max(0, (a - h) // n), min(cut, -(-(b + h) // n)))
            if wraps and (b > size - h or a < h):
                met = [*met, *[cut] * (b > size - h), *[cut + 1] * (a < h)]
            found.append(met)
        return found

    def meeting(self, region: Region) -> Iterator[int]:
        """Numbers of the sections that share an element with a region, ascending."""
        steps = [[i * s for i in axis] for axis, s in zip(self.meeting_axes(region), strides(self.counts), strict=True)]
        return map(sum, itertools.product(*steps))

    def places(self, number: int) -> tuple[int, ...]:
        """The place of a section's shard along each axis."""
        found = []
        for i, count, (_, _, _, _, wraps) in zip(unravel(number, self.counts), self.counts, self._axes, strict=True):
            last = count - 1 - 2 * wraps
            found.append(i if i <= last else 0 if i == last + 1 else last)
        return tuple(found)

    def is_middle(self, number: int) -> bool:
        """True if a section is the one in the middle of its shard, which has all the shard's own elements."""
        return all(
            i < count - 2 * axis[4]
            for i, count, axis in zip(unravel(number, self.counts), self.counts, self._axes, strict=True)
        )

    def sections_at(self, place: Sequence[int]) -> Iterator[int]:
        """Numbers of the sections of the shard at a place, ascending."""
        steps = []
        for i, (count, _, _, _, wraps), s in zip(place, self._axes, strides(self.counts), strict=True):
            cut = count - 2 * wraps
            along = [i, *[cut] * (wraps and i == 0), *[cut + 1] * (wraps and i == cut - 1)]
            steps.append([k * s for k in along])
        return map(sum, itertools.product(*steps))


class _Run(NamedTuple):
    """Positions of a shard along one axis. `source` is the first element of the array there, None for a value (`fill`)."""

    start: int
    stop: int
    source: int | None
    is_repeated: bool = False
    fill: Any = None


@dataclass(frozen=True, eq=False)
class HaloShards(Shards):
    """Shards that come with their neighbours' rows.

    `shape_global`, `shard_shape` and `region` are those of the array with halos, as JAX has it. Sections are in the coordinates
    of the array in the file.

    Parameters
    ----------
    halo : Halo
        What each shard has beside its core.
    """

    halo: Halo

    @classmethod
    def around(cls, shards: Shards, halo: Halo) -> HaloShards:
        """The same shards with a halo. ValueError if it is wider than a shard."""
        axes = zip(shards.shape_global, shards.cuts, halo.widths, strict=True)
        return cls(tuple(n + 2 * c * h for n, c, h in axes), shards.cuts, shards.ranks, halo)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.grid  # raises ValueError if the halo is too wide

    @property
    def halo_widths(self) -> tuple[int, ...]:
        """Rows that each shard has on either side in addition to its own."""
        return self.halo.widths

    @property
    def has_halo(self) -> bool:
        """See `Shards`."""
        return not self.halo.is_none

    @property
    def halo_text(self) -> str:
        """The halo as text."""
        return str(self.halo)

    @cached_property
    def core_shape(self) -> tuple[int, ...]:
        """See `Shards`."""
        return tuple(n - 2 * h for n, h in zip(self.shard_shape, self.halo.widths, strict=True))

    @cached_property
    def grid(self) -> SectionGrid:  # type: ignore[override]
        """The sections."""
        return SectionGrid(self.core_shape, self.cuts, self.halo)

    @cached_property
    def section_shape(self) -> tuple[int, ...]:
        """See `Shards`."""
        axes = zip(self.core_shape, self.cuts, self.halo.widths, strict=True)
        return tuple(min(c * n, n + 2 * h) for n, c, h in axes)

    @property
    def sections_held(self) -> int:
        """See `Shards`. An upper bound."""
        most = 1
        for axis, c in enumerate(self.cuts):
            most *= 1 if not self.halo.wraps(axis) else 2 if c > 1 else 3
        return self.most_held * most

    def section(self, number: int) -> Region:
        """See `Shards`."""
        return self.grid.region(number)

    def place_of(self, section: int) -> Region:
        """See `Shards`."""
        held = self.section(section)
        places, core, widths = self.grid.places(section), self.core_shape, self.halo.widths
        index = unravel(section, self.grid.counts)
        start = []
        for axis, (i, place, n, h, c) in enumerate(zip(index, places, core, widths, self.cuts, strict=True)):
            inside = held.start[axis] - (i * n - h) if i < c else 0 if i == c else n + h
            start.append(place * (n + 2 * h) + inside)
        return Region(tuple(start), tuple(a + n for a, n in zip(start, held.shape, strict=True)))

    def sections_of(self, rank: int) -> tuple[int, ...]:
        """See `Shards`."""
        shards = self.shards_of(rank)
        return tuple(sorted(n for shard in shards for n in self.grid.sections_at(unravel(shard, self.cuts))))

    def shard_of(self, section: int) -> int:
        """See `Shards`."""
        return ravel(self.grid.places(section), self.cuts)

    @property
    def section_holders(self) -> Callable[[int], tuple[int, ...]]:
        """See `Shards`."""
        return lambda section: self.table.holders(self.shard_of(section))

    @property
    def section_holder(self) -> Callable[[int, int], int]:
        """See `Shards`."""
        return lambda section, k: self.table.holder(self.shard_of(section), k)

    def own(self, section: int, region: Region) -> Region | None:
        """See `Shards`."""
        if not self.grid.is_middle(section):
            return None
        return region.intersect(self._core(self.grid.places(section)))

    def _core(self, place: Sequence[int]) -> Region:
        start = tuple(i * n for i, n in zip(place, self.core_shape, strict=True))
        return Region(start, tuple(a + n for a, n in zip(start, self.core_shape, strict=True)))

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """See `Shards`. All of an axis that wraps around: its ends may be in one shard."""
        axes = enumerate(zip(self.table.spans(), self.core_shape, self.cuts, self.halo.widths, strict=True))
        return tuple(c * n if self.halo.wraps(axis) else min(c * n, span * n + 2 * h) for axis, (span, n, c, h) in axes)

    def contents(self, shard: int, shape: tuple[int, ...]) -> Iterator[Content]:
        """See `Shards`."""
        place = unravel(shard, self.cuts)
        origin = self.region(shard).start
        for runs in itertools.product(*(self._runs(axis, i, shape[axis]) for axis, i in enumerate(place))):
            held = Region(
                tuple(o + run.start for o, run in zip(origin, runs, strict=True)),
                tuple(o + run.stop for o, run in zip(origin, runs, strict=True)),
            )
            if not held.size:
                continue
            fills = [run.fill for axis, run in enumerate(runs) if run.source is None and self.halo.widths[axis]]
            if any(run.source is None for run in runs):
                yield Content(held, None, fill=fills[-1] if fills else None)
                continue
            start = tuple(run.source or 0 for run in runs)
            stop = tuple(a + (1 if run.is_repeated else run.stop - run.start) for a, run in zip(start, runs, strict=True))
            yield Content(held, Region(start, stop), is_repeated=any(run.is_repeated for run in runs))

    def core_in(self, shard: int, shape: tuple[int, ...]) -> tuple[Region, Region] | None:
        """See `Shards`."""
        true = self._core(unravel(shard, self.cuts)).intersect(Region.whole(shape))
        if true is None:
            return None
        start = tuple(o + h for o, h in zip(self.region(shard).start, self.halo.widths, strict=True))
        return true, Region(start, tuple(a + n for a, n in zip(start, true.shape, strict=True)))

    def _runs(self, axis: int, i: int, n_true: int) -> Iterator[_Run]:
        n, h, size = self.core_shape[axis], self.halo.widths[axis], self.cuts[axis] * self.core_shape[axis]
        if not h:
            kept = min(n, max(0, n_true - i * n))
            yield _Run(0, kept, i * n)
            if kept < n:
                yield _Run(kept, n, None)
            return
        low, high = max(0, i * n - h), min(size, (i + 1) * n + h)
        place = low - (i * n - h)
        if place:
            yield self._beyond(axis, 0, h, size - h, 0)
        yield _Run(place, place + high - low, low)
        if place + high - low < n + 2 * h:
            yield self._beyond(axis, n + h, n + 2 * h, 0, size - 1)

    def _beyond(self, axis: int, start: int, stop: int, other_end: int, last: int) -> _Run:
        """The positions of a shard beyond one end of the array. `last` is the element at that end."""
        if self.halo.wraps(axis):
            return _Run(start, stop, other_end)
        if self.halo.repeats(axis):
            return _Run(start, stop, last, is_repeated=True)
        return _Run(start, stop, None, fill=self.halo.edges[axis])

    def along(self, axis: int, shape: tuple[int, ...]) -> tuple[IntArray, IntArray, IntArray]:
        """See `Shards`."""
        count, h, n, size, wraps = self.grid._axes[axis]
        cut = count - 2 * wraps
        place: IntArray = np.arange(cut, dtype=np.int64)
        low, high = np.maximum(0, place * n - h), np.minimum(size, (place + 1) * n + h)
        if wraps:
            low, high, place = np.append(low, [size - h, 0]), np.append(high, [size, h]), np.append(place, [0, cut - 1])
        return np.minimum(low, shape[axis]), np.minimum(high, shape[axis]), place
