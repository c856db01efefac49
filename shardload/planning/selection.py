"""Which elements of a file's array did the caller ask for, also by values of a coordinate?

A `Selection` converts regions of the selected array to regions of the file. `select_axes` makes one from a NumPy-style index.
`positional_index` makes such an index from a selection by names of axes: ``{"time": -1, "lat": near(52.5)}``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fractions import Fraction
from numbers import Integral, Real
from types import EllipsisType
from typing import Any, SupportsIndex

import numpy as np

from shardload.planning.region import Region
from shardload.units import scalar_of, shown


@dataclass(frozen=True, slots=True)
class Selection:
    """The elements of a file's array that make up the selected array.

    Parameters
    ----------
    region : Region
        The selected box, in the coordinates of the file's array.
    kept : tuple of int
        The file's axes that the selected array keeps, in order; an axis that is indexed by an integer is dropped.
    """

    region: Region
    kept: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the selected array."""
        shape = self.region.shape
        return tuple(shape[k] for k in self.kept)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the selected array starts in the file, along each kept axis."""
        return tuple(self.region.start[k] for k in self.kept)

    def to_file(self, region: Region) -> Region:
        """The same elements in the file's coordinates (dropped axes come back with length 1).

        >>> s = select_axes((slice(10, 20), 3), (100, 8))
        >>> s.to_file(Region((0,), (5,)))
        Region(start=(10, 3), stop=(15, 4))
        """
        start, stop = list(self.region.start), list(self.region.stop)
        for k, a, b, offset in zip(self.kept, region.start, region.stop, self.offset, strict=True):
            start[k], stop[k] = a + offset, b + offset
        return Region(tuple(start), tuple(stop))


Index = slice | SupportsIndex | EllipsisType


def select_axes(
    index: Index | tuple[Index, ...] | None, shape: Sequence[int], dims: Sequence[str | None] | None = None
) -> Selection:
    """Make a selection from a NumPy-style basic index (slices with step 1, integers, one ``...``) of an array of `shape`.

    As in NumPy, negative numbers count from the end, a slice that reaches past the end stops there, and an integer out of range
    is an error. Other NumPy indices (steps, masks, lists, new axes) are refused. `dims` are the names of the axes, for errors.

    Raises
    ------
    ValueError, IndexError
        If the index is not supported. The text names the axis, what was found and what is possible.

    Examples
    --------
    >>> s = select_axes((-1, ..., slice(2, None)), (5, 6, 7))
    >>> s.shape, s.region, s.kept
    ((6, 5), Region(start=(4, 0, 2), stop=(5, 6, 7)), (1, 2))
    """
    if index is None:
        parts: list[Index] = []
    elif isinstance(index, tuple):
        parts = list(index)
    else:
        parts = [index]
    if sum(p is Ellipsis for p in parts) > 1:
        raise ValueError("select has more than one '...'; one stands for all the axes that are not named")
    n_named = sum(p is not Ellipsis for p in parts)
    if n_named > len(shape):
        raise IndexError(f"select names {n_named} axes, but the array has {len(shape)}: shape {tuple(shape)}")
    whole_axes: list[Index] = [slice(None)] * (len(shape) - n_named)
    where = next((i for i, p in enumerate(parts) if p is Ellipsis), None)
    parts = parts + whole_axes if where is None else parts[:where] + whole_axes + parts[where + 1 :]

    start, stop, kept_axes = [], [], []
    for axis, (part, size) in enumerate(zip(parts, shape, strict=True)):
        name = axis if dims is None or dims[axis] is None else f"{axis}, {dims[axis]!r}"
        if isinstance(part, slice) and part.step not in (None, 1):
            raise ValueError(f"select has step {part.step} on axis {name}; only step 1 is possible: load all and slice")
        try:
            if isinstance(part, slice):
                low, high, _ = part.indices(size)
                kept_axes.append(axis)
            else:
                low = operator.index(None if isinstance(part, bool) else part)  # type: ignore[arg-type]
                if not -size <= low < size:
                    raise IndexError(f"select has {part!r} on axis {name}, which has {size} elements")
                low, high = low % size, low % size + 1
        except TypeError:
            dim = dims[axis] if dims else None
            raise ValueError(
                f"select has {shown(part)} on axis {name}; each axis takes a slice with step 1 or an integer, as in "
                f"select=np.s_[0, 10:20]. For coordinates and dates pass select={{{dim or 'lat'!r}: shardload.near(VALUE)}} or "
                "shardload.between(LOW, HIGH). For several positions pass a slice around them, and pick of the result (of a "
                "stream: leave batches out), or load each as an array of its own, in one call: "
                f"dataset=[NAME, NAME], select=[{{{dim or 'lat'!r}: 3}}, {{{dim or 'lat'!r}: 17}}]"
            ) from None
        start.append(low)
        stop.append(max(low, high))
    return Selection(Region(tuple(start), tuple(stop)), tuple(kept_axes))


@dataclass(frozen=True, repr=False)
class Near:
    """The position whose coordinate is nearest to `value`; an error if it is farther away than `within`. See `near`.

    The rest is for dates that were turned into numbers (`values.dates`): what was typed, how a coordinate is shown, and
    distances that count as the same, of which the later coordinate is taken.
    """

    value: Any
    within: Any = None
    typed: str = ""
    to_text: Callable[[Any], str] = field(default=str, compare=False)
    tie: Any = None

    def __repr__(self) -> str:
        """As it is typed."""
        within = "" if self.within is None else f", within={self.within!r}"
        return self.typed or f"near({self.value!r}{within})"


@dataclass(frozen=True, repr=False)
class Between:
    """All positions whose coordinates are from `low` to `high`, both included. See `between`; the rest is as in `Near`."""

    low: Any
    high: Any
    typed: str = ""
    to_text: Callable[[Any], str] = field(default=str, compare=False)

    def __repr__(self) -> str:
        """As it is typed."""
        return self.typed or f"between({self.low!r}, {self.high!r})"


def near(value: Any, within: Any = None) -> Near:
    """For ``select={"lat": near(52.5)}``: the one position whose coordinate is nearest to a value. It drops the axis.

    Collective: no.

    Parameters
    ----------
    value : float or date
        The coordinate, in the units of the file's coordinate variable. Or, for an axis of time, a date: text such as
        ``"2001-06-15"`` (0:00) or ``"2001-06-15T12:30"``, or an object of `datetime`, `numpy.datetime64` or cftime. Of two
        dates that are equally near the later one is taken, as xarray does.
    within : float or timedelta, optional
        An error if the nearest coordinate is farther away than this.

    Examples
    --------
    >>> import h5py, jax, numpy as np, shardload
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> with h5py.File("t.h5", "w") as file:
    ...     file["lat"] = np.array([55.0, 52.5, 50.0])
    ...     file["lat"].make_scale("lat")
    ...     file["t"] = np.arange(6, dtype="f4").reshape(2, 3)
    ...     file["t"].dims[1].attach_scale(file["lat"])
    >>> mesh = Mesh(np.array(jax.devices()), "a")
    >>> shardload.load("t.h5:/t", mesh, P(), select={"lat": shardload.near(52.4)})
    Array([1., 4.], dtype=float32)
    """
    return Near(scalar_of(value), scalar_of(within))


def between(low: Any, high: Any) -> Between:
    """For ``select={"lat": between(30, 60)}``: all positions whose coordinates are in a range, both ends included.

    Collective: no.

    Parameters
    ----------
    low, high : float or date
        The range, in the units of the file's coordinate variable. Coordinates may ascend or descend. Or, for an axis of time,
        dates as in `near`. Text may be a month or a year, and is taken whole: ``between("2001-06", "2001-08")`` is
        three months. An object is an instant (a `datetime.date` is 0:00 of its day).

    Examples
    --------
    >>> import h5py, jax, numpy as np, shardload
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> with h5py.File("t.h5", "w") as file:
    ...     file["lat"] = np.array([55.0, 52.5, 50.0])
    ...     file["lat"].make_scale("lat")
    ...     file["t"] = np.arange(6, dtype="f4").reshape(2, 3)
    ...     file["t"].dims[1].attach_scale(file["lat"])
    >>> mesh = Mesh(np.array(jax.devices()), "a")
    >>> shardload.load("t.h5:/t", mesh, P(), select={"lat": shardload.between(50, 53)})
    Array([[1., 2.],
           [4., 5.]], dtype=float32)
    """
    return Between(scalar_of(low), scalar_of(high))


def needs_coordinates(select: Any) -> bool:
    """True if a selection names values of coordinates."""
    return isinstance(select, Mapping) and any(isinstance(part, Near | Between) for part in select.values())


def named_coordinates(select: Any) -> set[str]:
    """The axes of which a selection, or a tree of selections, needs the coordinate: its values, or how many it has.

    >>> named_coordinates({"time": 3, "lat": near(52.5)}), named_coordinates({"x": {"lon": -1}})
    ({'lat'}, {'lon'})
    """
    if isinstance(select, Mapping):
        names = {str(name) for name, part in select.items() if isinstance(part, Near | Between) or _counts_from_end(part)}
        return names.union(*map(named_coordinates, select.values()))
    return set[str]().union(*map(named_coordinates, select)) if isinstance(select, list | tuple) else set()


def positional_index(
    select: Mapping[str, Any],
    dims: Sequence[str | None],
    coordinates: Mapping[str, np.ndarray[Any, Any] | None],
    shape: Sequence[int] | None = None,
) -> tuple[Any, ...]:
    """The NumPy-style index for a selection by names of axes. Axes that are not named are taken whole.

    Parameters
    ----------
    select : mapping
        For each named axis an integer, a slice, `near` or `between`.
    dims : sequence of str or None
        The names of the axes.
    coordinates : mapping
        The coordinates of the axes that have some, by name.
    shape : sequence of int, optional
        The lengths of the axes, to compare with those of the coordinates.

    Raises
    ------
    ValueError
        If there is no such axis, no such coordinate, it has no such values, or, where that counts, another length than its
        axis. The text says what there is.
    """
    index: list[Any] = [slice(None)] * len(dims)
    for name, part in select.items():
        axes = [axis for axis, dim in enumerate(dims) if dim == name]
        if len(axes) != 1:
            raise ValueError(f"select names the axis {name!r}, but the array {axes_text(name, len(axes), dims)}")
        if isinstance(part, (str, Real)) and not isinstance(part, Integral):
            raise ValueError(
                f"select has {part!r} on the axis {name!r}; a position is an integer or a slice with step 1. For coordinates "
                f"pass shardload.near({part!r}), the nearest one, or shardload.between({part!r}, {part!r}), all of a range; "
                "for dates see docs/values.md"
            )
        values, needs = coordinates.get(name), isinstance(part, Near | Between) or _counts_from_end(part)
        if needs and shape is not None and values is not None and values.ndim == 1 and values.size != shape[axes[0]]:
            # For netCDF an axis that can grow is as long as its longest array, and -1 is the last of that.
            raise ValueError(
                f"select has {part} on the axis {name!r}, which has {shape[axes[0]]} elements in the array, but its coordinate "
                f"{values.size}: the file is not complete or is being written, or the coordinate is of edges. Pass positions "
                "from the beginning"
            )
        index[axes[0]] = _position(name, part, values) if isinstance(part, Near | Between) else part
    return tuple(index)


def _counts_from_end(part: Any) -> bool:
    """True for positions that depend on how long an axis is taken to be."""
    ends = (part.start, part.stop) if isinstance(part, slice) else (part,)
    return any(isinstance(end, Integral) and end < 0 for end in ends)


def axes_text(name: Any, n_found: int, dims: Sequence[str | None], instead: str = "positions, as NumPy would index it") -> str:
    """Which axes an array has, and what to pass instead of a name that is not one of them."""
    names = [dim for dim in dims if dim]
    if n_found or not names:
        problem = f"has {n_found} axes of that name" if n_found else "has no names of axes"
        return f"{problem}; pass {instead}"
    similar = get_close_matches(str(name), names, 1)
    hint = f". Did you mean {similar[0]!r}?" if similar else f"; pass one of these, or {instead}"
    return f"has the {'axis' if len(names) == 1 else 'axes'} {', '.join(map(repr, names))}{hint}"


def _position(name: str, part: Near | Between, values: np.ndarray[Any, Any] | None) -> int | slice:
    """The position, or range of positions, of a coordinate."""
    selected = f"select has {part} on the axis {name!r}"
    if values is None or values.ndim != 1 or not values.size or values.dtype.kind not in "iuf":
        raise ValueError(f"{selected}, which has no coordinate of that name with numbers that can be searched; pass a position")
    numbers = (part.low, part.high) if isinstance(part, Between) else (part.value, 0 if part.within is None else part.within)
    if not all(isinstance(number, Real) and not isinstance(number, np.timedelta64) for number in numbers):
        raise ValueError(
            f"{selected}; expected numbers in the units of the coordinate (shardload.open(path) shows units and values; for "
            "dates see docs/values.md)"
        )
    if isinstance(part, Near):
        return _nearest_position(part, values, selected)
    if part.low > part.high and not part.typed:  # of dates that was said before
        raise ValueError(f"{selected}: the lower end comes first, however the coordinate is sorted")
    # In float64, 0.3 is less than the 0.3 of float32, and leaves it out.
    low, high = _plain(part.low), _plain(part.high)
    if values.dtype.kind in "iu":  # compared as integers, exactly
        low = math.ceil(low) if math.isfinite(low) else low
        high = math.floor(high) if math.isfinite(high) else high
    with np.errstate(over="ignore"):  # 1e300 is beyond all float32 coordinates
        inside = np.flatnonzero((values >= low) & (values <= high))
    if not inside.size:
        raise ValueError(f"{selected}, but no coordinate is in that range; {_ends_text(part, values)}")
    if inside[-1] - inside[0] + 1 != inside.size:
        raise ValueError(f"{selected}, but the coordinates in that range are not beside each other")
    return slice(int(inside[0]), int(inside[-1]) + 1)


def _nearest_position(part: Near, values: np.ndarray[Any, Any], selected: str) -> int:
    """The position of the nearest coordinate. ValueError, which begins with `selected`, if it is too far away."""
    if part.within is not None and part.within < 0:
        raise ValueError(f"{selected}: within is a distance, 0 or more")
    # As plain numbers, which take the coordinates' type; of dates exactly.
    nearest = _nearest(values, part.value if part.typed else _plain(part.value), part.tie)
    if nearest is None:
        raise ValueError(f"{selected}, but none of its coordinates is a number near it")
    position, distance = nearest
    if part.within is not None and not distance <= _plain(part.within):
        coordinate = f"{part.to_text(values[position])} (position {position})"
        raise ValueError(f"{selected}, but the nearest coordinate is {coordinate}; {_ends_text(part, values)}")
    return position


def _ends_text(part: Near | Between, values: np.ndarray[Any, Any]) -> str:
    return f"it goes from {part.to_text(values[0])} to {part.to_text(values[-1])}"


def _plain(number: Any) -> int | float:
    """A number as Python's; one that float64 does not have is infinite."""
    try:
        plain = int(number) if isinstance(number, Integral) else float(number)
        float(plain)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
    return plain


def _nearest(values: np.ndarray[Any, Any], value: Any, tie: Any = None) -> tuple[int, Any] | None:
    """The position of the coordinate nearest to a value, and its distance; None if there is none.

    Of several that are equally near, the first; with `tie`, the largest: in floating point, of all whose distances differ by no
    more than that.
    """
    if not math.isfinite(value):
        return None
    if values.dtype.kind == "f":
        distance = np.abs(values.astype("f8") - float(value))
        if np.isnan(distance).all():
            return None
        position = int(np.nanargmin(distance))
        if tie is not None:
            near_by = np.where(distance <= distance[position] + float(tie), values, -np.inf)
            position = int(np.argmax(near_by))
        return position, distance[position]
    # Exactly: float64 does not tell large integers (identifiers, nanoseconds) from their neighbours.
    below, above = values[values <= math.floor(value)], values[values >= math.ceil(value)]
    sides = [*([int(below.max())] if below.size else []), *([int(above.min())] if above.size else [])]
    distances = [abs(side - Fraction(value)) for side in sides]
    places = [int(np.argmax(values == side)) for side, far in zip(sides, distances, strict=True) if far == min(distances)]
    return places[-1] if tie is not None else min(places), min(distances)


# --- does a coordinate go on in one direction? Searches, and whoever joins files or adds rows, rely on it


def direction_of(blocks: Sequence[np.ndarray[Any, Any]]) -> bool | None:
    """True if the values of each block rise, False if they fall, None if they have no direction in common.

    Blocks of one value each go from the first to the second.

    >>> direction_of([np.array([1, 2]), np.array([3])]), direction_of([np.array([3]), np.array([2])])
    (True, False)
    """
    blocks = [block for block in blocks if len(block)]
    if any(block.dtype.kind not in "iuf" for block in blocks) or not blocks:
        return None
    if all(len(block) == 1 for block in blocks):
        return len(blocks) < 2 or bool(blocks[1][0] > blocks[0][0])
    for rises in (True, False):
        if all(first_break(block, rises) is None for block in blocks):
            return rises
    return None


def first_break(values: np.ndarray[Any, Any], rises: bool) -> int | None:
    """The position of the first value that does not lie beyond the one before it; None if all do.

    >>> first_break(np.array([0.28, 0.30, 0.28]), True)
    2
    """
    goes_on = values[1:] > values[:-1] if rises else values[1:] < values[:-1]
    return None if goes_on.all() else int(np.argmin(goes_on)) + 1
