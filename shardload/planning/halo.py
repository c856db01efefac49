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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shardload.planning.grid import Cells, IntArray, numbers_of
from shardload.planning.region import Region

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

    @classmethod
    def none(cls, ndim: int) -> Halo:
        """No halo."""
        return cls((0,) * ndim, (WRAP,) * ndim)

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
        return self._is(axis, WRAP)

    def repeats(self, axis: int) -> bool:
        """True if an axis has a halo in which the last row is repeated."""
        return self._is(axis, EDGE)

    def _is(self, axis: int, word: str) -> bool:
        return self.widths[axis] > 0 and isinstance(self.edges[axis], str) and self.edges[axis] == word

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
        axes = []
        for axis, (n, c, h) in enumerate(zip(self.core, self.cuts, self.halo.widths, strict=True)):
            if h > n:
                raise ValueError(f"a halo of {h} on axis {axis} is wider than a shard, which has {n} elements")
            axes.append((c, h, n, c * n, self.halo.wraps(axis)))
        object.__setattr__(self, "_axes", tuple(axes))
        object.__setattr__(self, "counts", tuple(c + 2 * wraps for c, _, _, _, wraps in axes))

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
        found: list[Sequence[int]] = []
        for a, b, (c, h, n, size, wraps) in zip(region.start, region.stop, self._axes, strict=True):
            if b <= a or not n:
                found.append(())
                continue
            met: Sequence[int] = range(max(0, (a - h) // n), min(c, -(-(b + h) // n)))
            if wraps and (b > size - h or a < h):
                met = [*met, *[c] * (b > size - h), *[c + 1] * (a < h)]
            found.append(met)
        return found

    def places(self, number: int) -> tuple[int, ...]:
        """The place of a section's shard along each axis."""
        index = zip(self.index(number), self.cuts, strict=True)
        return tuple(i if i < c else 0 if i == c else c - 1 for i, c in index)

    def is_middle(self, number: int) -> bool:
        """True if a section is the one in the middle of its shard, which has all the shard's own elements."""
        return all(i < c for i, c in zip(self.index(number), self.cuts, strict=True))

    def sections_at(self, place: Sequence[int]) -> Iterator[int]:
        """Numbers of the sections of the shard at a place, ascending."""
        along = [
            [i, *[c] * (wraps and i == 0), *[c + 1] * (wraps and i == c - 1)]
            for i, (c, _, _, _, wraps) in zip(place, self._axes, strict=True)
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

    def place_in_shard(self, number: int) -> tuple[int, ...]:
        """Where a section begins in its shard, along each axis."""
        index = zip(self.index(number), self.bounds(number), self._axes, strict=True)
        return tuple(a - (i * n - h) if i < c else 0 if i == c else n + h for i, (a, _), (c, h, n, _, _) in index)


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
        again = [range(n if is_repeated and m == 1 else 1) for n, m in zip(place.shape, source.shape, strict=True)]
        for more in itertools.product(*again):
            yield first.moved(more)


class _Run(NamedTuple):
    """Positions of a shard along one axis. `source` is the first element of the array there, None for a value (`fill`)."""

    start: int
    stop: int
    source: int | None
    is_repeated: bool = False
    fill: Any = None


def contents_of(grid: SectionGrid, place: Sequence[int], origin: Sequence[int], shape: Sequence[int]) -> Iterator[Content]:
    """What each region of the shard at a place must hold, each element once.

    `origin` is where the shard begins in the jax.Array, `shape` is that of the array in the file.
    """
    # Empty runs go before the product: of 64 axes with one of them each there are 2**64 products.
    axes = [[run for run in _runs(grid, axis, i, shape[axis]) if run.stop > run.start] for axis, i in enumerate(place)]
    for runs in itertools.product(*axes):
        held = Region(tuple(run.start for run in runs), tuple(run.stop for run in runs)).moved(origin)
        if any(run.source is None for run in runs):
            fills = [run.fill for run, h in zip(runs, grid.halo.widths, strict=True) if run.source is None and h]
            yield Content(held, None, fill=fills[-1] if fills else None)
            continue
        start = tuple(run.source or 0 for run in runs)
        stop = tuple(a + (1 if run.is_repeated else run.stop - run.start) for a, run in zip(start, runs, strict=True))
        yield Content(held, Region(start, stop), is_repeated=any(run.is_repeated for run in runs))


def _runs(grid: SectionGrid, axis: int, i: int, n_true: int) -> Iterator[_Run]:
    c, h, n, size, _ = grid._axes[axis]
    if not h:
        kept = min(n, max(0, n_true - i * n))
        yield _Run(0, kept, i * n)
        yield _Run(kept, n, None)
        return
    yield from [] if i else [_beyond(grid.halo, axis, 0, h, size - h, 0)]
    low, high = max(0, i * n - h), min(size, (i + 1) * n + h)
    yield _Run(low - i * n + h, high - i * n + h, low)
    yield from [] if i < c - 1 else [_beyond(grid.halo, axis, n + h, n + 2 * h, 0, size - 1)]


def _beyond(halo: Halo, axis: int, start: int, stop: int, other_end: int, last: int) -> _Run:
    """The positions of a shard beyond one end of the array. `last` is the element at that end."""
    if halo.wraps(axis):
        return _Run(start, stop, other_end)
    if halo.repeats(axis):
        return _Run(start, stop, last, is_repeated=True)
    return _Run(start, stop, None, fill=halo.edges[axis])
