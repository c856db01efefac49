"""How do several files become one, without a copy of their values? By a small HDF5 file that says where they are.

A simulation writes a snapshot in several files, a climate model a file for each year. The new file has the arrays that go on
from part to part as virtual datasets of HDF5, which every program reads.

1. Each part is opened once: the shapes, types and attributes of its arrays (`_Member`).
2. An array that has the axis goes on from part to part: there must be no doubt that its parts belong together. Types, the other
   axes, units and packing are the same; an array is in all parts that others of its group are in.
3. Every other array is the same in all parts, value for value.
   What belongs to an array that is named (coordinates, bounds, CF's grid mapping) is joined with it.
4. The coordinate of the axis is stored in the new file. It goes on in one direction: else parts are twice there, or in another
   order. If parts count time from different days, it is counted from the first one's.
5. The new file is written, each part is looked up in it, and it gets its name (`JoinedFile`).
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardload.errors import ConfigError, LeftOutWarning, SourceError, printable
from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo, Properties, nbytes_of, some
from shardload.formats.contract.format import OpenFile
from shardload.formats.diagnosis import as_source_error
from shardload.formats.likeness import Asked, as_text, attrs_for, bounds_of, same_value, spec_like
from shardload.formats.lookup import Finder, find_array, list_arrays, open_file, split_path
from shardload.formats.saving import format_for
from shardload.formats.sink import ArraySpec
from shardload.jobs.described import Described, describe_array, found_by_name, take_along
from shardload.jobs.joining.request import JoinReport, JoinRequest, Row
from shardload.jobs.progress import progress_over_files
from shardload.options import OPTIONS, Progress
from shardload.planning.region import Region
from shardload.planning.selection import select_axes
from shardload.storage.local import state_of
from shardload.system.caller import warn_once
from shardload.values.dates import recounted
from shardload.values.decoding import ATTRIBUTES

__all__ = ["join", "join_files"]

_STORED_NBYTES = 1 << 20  # an array that is the same in all parts is stored in the new file up to this size
_AT_ONCE_NBYTES = 16 << 20  # of values, when parts are compared
_UNITS = ("units", "unit", "Units", "Unit", "UNITS", "UNIT")
_FLAGS = ("flag_values", "flag_masks", "flag_meanings")
_MEANING = (*dict.fromkeys((*ATTRIBUTES, *_UNITS, "calendar", *_FLAGS)),)  # attributes without which numbers mean nothing
_TIME = {"units", "calendar"}
_MISSING = {"_FillValue", "missing_value"}  # numbers that are no times


@dataclass(eq=False)
class _Member:
    """One array, over the parts.

    Attributes
    ----------
    info, properties : ArrayInfo, Properties
        In the first part that has it.
    attrs : dict
        The attributes that are the same in all parts that have it.
    lengths : list of (int, tuple of int)
        The parts that have it, and its shape there.
    meanings : list of dict
        The attributes of each of them without which its numbers mean nothing.
    differing : dict of str to None
        The names of the other attributes that are not the same in all.
    """

    info: ArrayInfo
    properties: Properties
    attrs: dict[str, Any]
    lengths: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    meanings: list[dict[str, Any]] = field(default_factory=list)
    differing: dict[str, None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its full name."""
        return self.info.dataset

    @property
    def stored_name(self) -> str:
        """That which HDF5 knows."""
        own = self.properties.stored_name
        return self.name if own is None else f"{self.name.rpartition('/')[0]}/{own}"

    def axis_of(self, axis: str | int) -> int | None:
        """The number of the axis that is joined; None if it has it not."""
        if isinstance(axis, str):
            dims = self.properties.dims
            return dims.index(axis) if axis in dims else None
        return axis if axis < len(self.info.shape) else None

    def shape(self, axis: int | None) -> tuple[int, ...]:
        """Of the joined array."""
        if axis is None:
            return self.info.shape
        n = sum(shape[axis] for _, shape in self.lengths)
        return (*self.info.shape[:axis], n, *self.info.shape[axis + 1 :])

    def regions(self, axis: int) -> Iterator[tuple[int, Region]]:
        """Each part that has it, and what of the joined array lies there."""
        whole, at = Region.whole(self.shape(axis)), 0
        for part, shape in self.lengths:
            n = shape[axis]
            yield (
                part,
                Region(
                    (*whole.start[:axis], at, *whole.start[axis + 1 :]), (*whole.stop[:axis], at + n, *whole.stop[axis + 1 :])
                ),
            )
            at += n


def join(
    path: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]],
    *,
    axis: str | int | None = None,
    stack: str | None = None,
    dataset: str | Sequence[str] | None = None,
    mode: str = "w-",
    allow_external: bool = False,
    progress: Progress = None,
) -> JoinReport:
    """Join the arrays of several files, without a copy of their values: a small HDF5 file says where they are.

    Collective: no. Call it on one process, before the job, as ``shardload join`` does. The new file is an ordinary HDF5 or
    netCDF4 file with virtual datasets: `load`, h5py, xarray and the netCDF library read it, as long as the parts are where they
    were.

    Every array that has the axis goes on from part to part. It must have the same type, other axes, units, flags and packing in
    all of them; and it must be in all, or, without names of axes, in the same as the other arrays of its group (a part of a
    snapshot may have no stars). Every other array must be the same in all parts, value for value. The coordinate of the axis
    must go on in one direction. If parts count time from different days, it is counted from the day of the first. Attributes
    that differ are left out, and named in the report.

    Parameters
    ----------
    path : str or path-like
        The new file, ``.h5`` or ``.nc``. If the parts are in its folder or below, they may be moved with it; else they are
        noted by their absolute paths, and loads need ``allow_external=True``.
    parts : sequence of str or path-like
        HDF5 and netCDF4 files, in their order along the axis.
    axis : str or int, optional
        The axis by name; by number, from 0, if axes have no names. By default the axis that can grow (netCDF's unlimited
        dimension), or the first one if axes have no names.
    stack : str, optional
        In place of `axis`: the name of a new first axis, if each part is one step of it. Every array gets it, but the
        coordinates of other axes, which must be the same in all parts.
    dataset : str or sequence of str, optional
        Names of the arrays, and patterns such as ``"PartType1/*"``. By default all arrays. What belongs to one is joined with
        it: coordinates, and what its attributes name.
    mode : str
        ``"w-"``: `path` must not exist. ``"w"``: it is replaced, when the new file is whole.
    allow_external : bool
        Whether links in the parts may lead outside their folders.
    progress : bool or callable, optional
        True shows a progress bar; None shows it for a hundred parts and more, in a terminal or a notebook. Or a function
        ``f(n_done, n_parts)``.

    Returns
    -------
    JoinReport
        A row for each array, and what was left out. ``print`` shows it.

    Warns
    -----
    LeftOutWarning
        Names what else was left out, before the file is made.

    Raises
    ------
    ConfigError
        If the parts do not belong together, or are in another order. No file is made.
    SourceError
        If a part cannot be opened, or the file cannot be written.
    """
    how: dict[str, Any] = {"axis": axis, "stack": stack, "dataset": dataset, "mode": mode, "allow_external": allow_external}
    return _Join(JoinRequest.check(path, parts, **how), is_warned=True).run(OPTIONS["progress"].check(progress))


def join_files(request: JoinRequest, progress: Progress = None) -> JoinReport:
    """Join files. Not collective: one process does it.

    Parameters
    ----------
    request : JoinRequest
        What is asked for.
    progress : bool, callable or None
        As for `join`.

    Raises
    ------
    ConfigError
        If the parts do not belong together, or the axis is not theirs.
    SourceError
        If a part cannot be opened, or the new file cannot be written.
    """
    return _Join(request).run(progress)


class _Join:
    """One call."""

    def __init__(self, request: JoinRequest, *, is_warned: bool = False) -> None:
        self._ask, self._paths, self._is_warned = request, request.parts, is_warned
        self._access = Access(request.allow_external)
        self._kind = format_for(request.path)
        self._members: dict[str, _Member] = {}
        self._texts: dict[str, _Member] = {}  # arrays of text; None in place of values that differ
        self._groups: dict[str, dict[str, Any]] = {}
        self._differing: dict[str, dict[str, None]] = {}  # attributes of groups
        self._notes: dict[str, None] = {}
        self._expected: dict[str, None] = {}  # notes that are no news: history differs, a dimension is not used
        self._empty: dict[str, list[ConfigError]] = {}  # groups, and why parts have no arrays in them
        self._axis: str | int = 0
        self._versions: dict[str, tuple[int, ...] | None] = {}  # of the parts, before they were opened for the first time

    def run(self, progress: Progress) -> JoinReport:
        """Do it all."""
        self._check_apart()
        with progress_over_files(progress, f"parts of {self._ask.path}", len(self._paths)) as advance:
            for k, path in enumerate(self._paths):
                self._look_at(k, path)
                advance(1)
        if lost := [errors[0] for errors in self._empty.values() if len(errors) == len(self._paths)]:
            raise lost[0]
        self._axis = self._find_axis()
        joined = {name: axis for name, one in self._members.items() if (axis := one.axis_of(self._axis)) is not None}
        if not joined:
            raise ConfigError(f"no array of '{self._paths[0]}' has {self._axis_told}: {self._shapes(self._members)}")
        self._check_presence(joined)
        lengths = {k: shape[axis] for name, axis in joined.items() for k, shape in self._members[name].lengths}
        for name, axis in joined.items():
            self._check_shapes(self._members[name], axis, lengths)
        stored = self._coordinates(joined)
        for name, one in self._members.items():
            if name not in stored:
                self._check_meaning(one)
            if name not in joined:
                self._check_same(one)
        self._keep_values(joined.keys() - stored.keys())
        return self._write(joined, stored)

    @property
    def _axis_told(self) -> str:
        return f"the axis {self._axis!r}" if isinstance(self._axis, str) else f"an axis {self._axis}"

    @property
    def _advice(self) -> str:
        """What to do if an array that is not joined differs."""
        if not self._ask.dataset:
            return "Name the arrays to join with dataset="
        return "It is named in dataset=, or belongs to what is. Leave that out, or join the parts that have the same"

    # --- 1: what is in the parts

    def _check_apart(self) -> None:
        seen: dict[str, str] = {}
        for path in self._paths:
            if "://" in path:
                raise ConfigError(f"'{path}' is a URL; an HDF5 file leads to files in folders only. Join copies of them")
            inside = split_path(path)[1]
            if inside:
                raise ConfigError(
                    f"'{path}' names an array; the parts are files. Pass dataset={inside!r} to join this one alone"
                )
            place = os.path.realpath(path)
            if place in seen:
                raise ConfigError(f"'{path}' is among the parts twice{'' if path == seen[place] else f' (as {seen[place]!r})'}")
            seen[place] = path
        if os.path.realpath(self._ask.path) in seen:
            raise ConfigError(f"'{self._ask.path}' is the new file, and one of the parts. Choose another name")

    def _look_at(self, k: int, path: str) -> None:
        """Take in one part."""
        self._versions[path] = state_of(path)
        with open_file(path, self._access) as file:
            described: dict[str, Described] = {}
            for info in self._arrays_of(path):
                if not info.format.startswith(("HDF5", "netCDF4")):
                    raise ConfigError(
                        f"'{path}' is {info.format}; an HDF5 file leads to arrays of HDF5 and netCDF4 files only. Copy it "
                        f"first: `shardload copy {shlex.quote(path)} part.h5`"
                    )
                try:
                    described[info.dataset] = describe_array(file, info.dataset, info)
                except SourceError:
                    if info.refused is None:
                        raise
                    self._note(f"'{printable(info.dataset)}' was left out: it holds {info.refused}")
            if self._ask.dataset:
                self._note(*take_along(file, described))
            else:
                links = [name for name in file.links() if not any(f"{one}/".startswith(f"{name}/") for one in described)]
                self._note(*(f"'{printable(name)}' was left out: it is a link" for name in links))
            for info, properties, _ in described.values():
                if properties.texts is not None:
                    self._take_text(k, info, properties)
                elif not properties.is_dimension:
                    self._take(k, *self._stacked(info, properties))
                elif not any(info.dataset.rpartition("/")[2] in one[1].dims for one in described.values() if one[0] != info):
                    self._expected[f"the dimension '{printable(info.dataset)}' was left out: no array has it"] = None
            self._take_groups(k, file)

    def _stacked(self, info: ArrayInfo, properties: Properties) -> tuple[ArrayInfo, Properties]:
        """An array as it is joined: with the new axis, if there is one and it gets it."""
        if self._ask.stack is None or info.is_coordinate:
            return info, properties
        dims = (self._ask.stack, *properties.dims)
        return replace(info, shape=(1, *info.shape)), replace(properties, dims=dims, unlimited=())

    def _own_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an array in its part, from that with the new axis."""
        is_stacked = self._ask.stack is not None and not self._members[name].info.is_coordinate
        return shape[1:] if is_stacked else shape

    def _arrays_of(self, path: str) -> list[ArrayInfo]:
        with Finder(self._access) as finder:
            found: dict[str, ArrayInfo] = {}
            for name in self._ask.dataset or ("*",):
                if name == "*" or name.endswith("/*"):
                    group = "" if name == "*" else "/" + name[:-2].strip("/")
                    try:
                        below, left_out = finder.find_below(path, group, with_dimensions=True)
                    except ConfigError as error:
                        if not group:
                            raise
                        self._empty.setdefault(group, []).append(error)
                        continue  # a part may have no stars
                    found |= {one.info.dataset: one.info for one in below} | {one.dataset: one for one in left_out}
                else:
                    info = find_array(path, name, self._access)
                    found[info.dataset] = info
        return list(found.values())

    def _note(self, *texts: str) -> None:
        self._notes |= dict.fromkeys(texts)

    def _take(self, k: int, info: ArrayInfo, properties: Properties) -> None:
        one = self._members.get(info.dataset)
        attrs = dict(properties.attrs)
        meaning = {key: as_text(attrs[key]) for key in _MEANING if key in attrs}
        if one is None:
            one = self._members[info.dataset] = _Member(info, properties, attrs)
        else:
            first = self._paths[one.lengths[0][0]]
            for what, was, now in (
                ("type", one.properties.dtype, properties.dtype),
                ("number of axes", len(one.info.shape), len(info.shape)),
                ("names of axes", one.properties.dims, properties.dims),
            ):
                if was != now:
                    raise ConfigError(
                        f"the {what} of '{printable(info.dataset)}' differs: {was} in '{first}', {now} in '{self._paths[k]}'. "
                        "Join those that are alike, or name the arrays to join with dataset="
                    )
            for key in list(one.attrs):
                if key not in attrs or not same_value(one.attrs[key], attrs[key]):
                    del one.attrs[key]
                    if key not in _MEANING:
                        one.differing[key] = None
            one.differing |= dict.fromkeys(key for key in attrs if key not in one.attrs and key not in _MEANING)
        one.lengths.append((k, info.shape))
        one.meanings.append(meaning)

    def _take_text(self, k: int, info: ArrayInfo, properties: Properties) -> None:
        """An array of text is stored in the new file, if it is the same in all parts."""
        one = self._texts.setdefault(info.dataset, _Member(info, properties, dict(properties.attrs)))
        one.lengths.append((k, info.shape))
        first, attrs = one.properties, properties.attrs
        if first.dims != properties.dims or not np.array_equal(np.asarray(first.texts), np.asarray(properties.texts)):
            one.properties = replace(first, texts=None)
        one.differing |= {key: None for key in {**one.attrs, **attrs} if key not in one.attrs or key not in attrs}
        one.differing |= {key: None for key in one.attrs if key in attrs and not same_value(one.attrs[key], attrs[key])}
        one.attrs = {key: value for key, value in one.attrs.items() if key not in one.differing}

    def _take_groups(self, k: int, file: OpenFile) -> None:
        found = file.groups()
        self._note(*(f"{what} was left out" for what in file.unread()))
        for group in {**found, **(self._groups if k else {})}:
            attrs = dict(found.get(group, {}))
            if k == 0:
                self._groups[group] = attrs
                continue
            known, differing = self._groups.setdefault(group, {}), self._differing.setdefault(group, {})
            for key in {**known, **attrs}:
                if key in differing or (key in known and key in attrs and same_value(known[key], attrs[key])):
                    continue
                differing[key] = None
                known.pop(key, None)

    # --- 2: what goes on from part to part

    def _find_axis(self) -> str | int:
        asked, stack = self._ask.axis, self._ask.stack
        if stack is not None:
            own = {one.name: one.properties.dims[not one.info.is_coordinate :] for one in self._members.values()}
            with_it = [name for name, dims in own.items() if stack in dims]
            if with_it:
                raise ConfigError(
                    f"stack is {stack!r}, but '{printable(with_it[0])}' has an axis of that name: the parts go on along it. "
                    f"Pass axis={stack!r} in its place"
                )
            return stack
        names = dict.fromkeys(dim for one in self._members.values() for dim in one.properties.dims if dim)
        if asked is None and not names:
            return 0
        if asked is None:
            grow = {one.properties.dims[k]: None for one in self._members.values() for k in one.properties.unlimited}
            found = [dim for dim in grow if dim]
            if len(found) == 1:
                return found[0]
            which = "several that can grow" if found else "none that can grow"
            raise ConfigError(
                f"along which axis do the parts follow each other? Pass axis=, one of {some([repr(name) for name in names])} "
                f"(there are {which})"
            )
        if isinstance(asked, str):
            if asked not in names:
                there = some([repr(name) for name in names]) or "none with a name. Pass its number, such as axis=0"
                raise ConfigError(f"axis is {asked!r}, which no array has; there are: {there}")
            return asked
        if names:
            raise ConfigError(
                f"axis is {asked}, but the axes have names, and one axis may be the first of one array and the second of "
                f"another. Pass one of {some([repr(name) for name in names])}"
            )
        if asked < 0:
            raise ConfigError(
                f"axis is {asked}; expected a number from 0 on, because the arrays have different numbers of axes"
            )
        return asked

    @staticmethod
    def _shapes(members: Mapping[str, _Member]) -> str:
        return some([f"'{printable(name)}' {one.info.shape}" for name, one in members.items()])

    def _check_presence(self, joined: Mapping[str, int]) -> None:
        """What belongs together is in the same parts. Without names of axes, an array belongs to those of its group."""
        expected: dict[str, tuple[str, list[int]]] = {}
        for name in joined:
            key = "" if isinstance(self._axis, str) else name.rpartition("/")[0]
            parts = [k for k, _ in self._members[name].lengths]
            first, known = expected.setdefault(key, (name, parts))
            if parts != known:
                lacking = sorted(set(parts) ^ set(known))[0]
                absent, present = (first, name) if lacking in parts else (name, first)
                raise ConfigError(
                    f"'{printable(absent)}' is not in '{self._paths[lacking]}', which has '{printable(present)}': joined, they "
                    "would no longer belong together, row by row. Leave that part out, or name the arrays to join with dataset="
                )
        if isinstance(self._axis, str):
            (first, known), *_ = expected.values()
            if len(known) < len(self._paths):
                lacking = next(k for k in range(len(self._paths)) if k not in known)
                raise ConfigError(f"'{self._paths[lacking]}' has no '{printable(first)}', and no array along {self._axis!r}")

    def _check_shapes(self, one: _Member, axis: int, expected: Mapping[int, int]) -> None:
        """`expected` has the length of an axis with a name, by the number of the part."""
        k0, first = one.lengths[0]
        for k, shape in one.lengths:
            if shape[:axis] != first[:axis] or shape[axis + 1 :] != first[axis + 1 :]:
                were, are = (self._own_shape(one.name, found) for found in (first, shape))
                only = (
                    "they may differ along axis {axis} only"
                    if self._ask.stack is None
                    else "with a new axis they may not differ"
                )
                raise ConfigError(
                    f"'{printable(one.name)}' has shape {were} in '{self._paths[k0]}' and {are} in '{self._paths[k]}': "
                    f"{only.format(axis=axis)}. Join files of the same shape, or name the arrays to join with dataset="
                )
        if isinstance(self._axis, int):
            return
        if one.properties.dims.count(self._axis) > 1:
            raise ConfigError(
                f"'{printable(one.name)}' has the axis {self._axis!r} twice: what is between two parts is in neither. Name the "
                "arrays to join with dataset="
            )
        for k, shape in one.lengths:
            if shape[axis] != expected[k]:
                raise ConfigError(
                    f"{self._axis!r} has {shape[axis]} elements in '{printable(one.name)}' of '{self._paths[k]}', and "
                    f"{expected[k]} in another array there: is the file whole? If these are two axes of one name, name the "
                    "arrays to join with dataset="
                )

    def _check_meaning(self, one: _Member, but: Collection[str] = ()) -> None:
        """Units, flags and packing must be the same in all parts: the new file has them once."""
        for key in _MEANING:
            if key in but or key in one.attrs or not any(key in meaning for meaning in one.meanings):
                continue
            found = [meaning.get(key) for meaning in one.meanings]
            other = next(n for n, value in enumerate(found) if not same_value(value, found[0]))
            first, second = (f"{found[n]!r} in '{self._paths[one.lengths[n][0]]}'" for n in (0, other))
            raise ConfigError(
                f"the attribute {key!r} of '{printable(one.name)}' differs: {first}, {second}. Joined, the numbers of one of "
                "them would mean something else. Load each file for itself, and join the arrays: docs/many-arrays.md says how"
            )

    # --- 3: what is the same in all parts

    def _check_same(self, one: _Member) -> None:
        k0, first = one.lengths[0]
        if len(one.lengths) < len(self._paths):
            lacking = next(k for k in range(len(self._paths)) if k not in dict(one.lengths))
            self._note(
                f"'{printable(one.name)}' is not in every part, such as '{self._paths[lacking]}'; it is that of the others"
            )
        for k, shape in one.lengths[1:]:
            if shape != first:
                raise ConfigError(
                    f"'{printable(one.name)}' does not have {self._axis_told}, and has shape {first} in '{self._paths[k0]}' "
                    f"but {shape} in '{self._paths[k]}'. {self._advice}"
                )
        at_once = max(1, _AT_ONCE_NBYTES // max(1, one.properties.dtype.itemsize))
        with open_file(self._paths[k0], self._access) as file, closing(file.open(one.name)) as source:
            for k, _ in one.lengths[1:]:
                with open_file(self._paths[k], self._access) as other_file, closing(other_file.open(one.name)) as other:
                    for region in Region.whole(first).split(at_once):
                        mine, its = source.plain(region), other.plain(region)
                        if mine.tobytes() != its.astype(mine.dtype, copy=False).tobytes():
                            new = (
                                " If each part is one step, pass stack='time' for a new axis."
                                if self._ask.stack is None
                                else ""
                            )
                            raise ConfigError(
                                f"'{printable(one.name)}' does not have {self._axis_told}, but other values in "
                                f"'{self._paths[k]}' than in '{self._paths[k0]}': which are right?{new} {self._advice}"
                            )

    # --- 4: coordinates along the axis

    def _coordinates(self, joined: Mapping[str, int]) -> dict[str, np.ndarray[Any, Any]]:
        """The values that are stored: those of coordinates along the axis."""
        found: dict[str, np.ndarray[Any, Any]] = {}
        for name in joined:
            one = self._members[name]
            if len(one.info.shape) != 1 or name.rpartition("/")[2] != self._axis:
                continue
            blocks = self._counted(one, one)
            self._check_direction(one, blocks)
            found[name] = np.concatenate(blocks)
            for other in bounds_of(name, one.properties):
                beside = self._members.get(other)
                by = one if beside is None or not any("units" in its for its in beside.meanings) else beside
                if beside is not None and other in joined and self._is_recounted(by):
                    found[other] = np.concatenate(self._counted(beside, by), axis=joined[other])
                    self._keep_time(beside)
            self._keep_time(one)
        for name in joined:
            one = self._members[name]
            if name not in found and not self._own_shape(name, one.info.shape):  # HDF5 has no virtual numbers without axes
                self._check_meaning(one)
                found[name] = np.concatenate([self._read(k, name, shape) for k, shape in one.lengths])
        return found

    def _keep_time(self, one: _Member) -> None:
        """Its units and calendar are those of the first part, whatever the others have."""
        one.attrs |= {key: value for key, value in one.meanings[0].items() if key in _TIME}
        self._check_meaning(one, but=_TIME)

    @staticmethod
    def _is_recounted(one: _Member) -> bool:
        return any(key not in one.attrs for meaning in one.meanings for key in _TIME & meaning.keys())

    def _counted(self, one: _Member, by: _Member) -> list[np.ndarray[Any, Any]]:
        """The values of each part, counted as those of the first one. `by` has the units: bounds have none of their own."""
        blocks = [self._read(k, one.name, shape) for k, shape in one.lengths]
        if not self._is_recounted(by):
            return blocks
        for n, (meaning, block) in enumerate(zip(by.meanings, blocks, strict=True)):
            if all(same_value(meaning.get(key), by.meanings[0].get(key)) for key in _TIME):
                continue
            k0, k = by.lengths[0][0], by.lengths[n][0]
            units = [m.get("units") for m in (by.meanings[0], meaning)]
            told = (
                f"'{printable(by.name)}' has the units {units[0]!r} in '{self._paths[k0]}' and {units[1]!r} in "
                f"'{self._paths[k]}'"
            )
            if (meaning.keys() | by.meanings[0].keys() | one.meanings[n].keys()) - _TIME - _MISSING:
                raise ConfigError(f"{told}, and is packed. Unpack it first, or join files that count from one day")
            try:
                is_time = ~np.isin(block, self._no_times(one, n))
                block[is_time] = recounted(block[is_time], meaning, by.meanings[0])
            except ValueError as error:
                raise ConfigError(f"{told}, which cannot be counted alike, because {error}") from None
        return blocks

    @staticmethod
    def _no_times(one: _Member, n: int) -> list[Any]:
        """The numbers that stand for missing times; netCDF has one of its own for whole numbers that were never written."""
        found = [number for key, value in one.meanings[n].items() if key in _MISSING for number in np.ravel(value)]
        own, dtype = one.properties.fill_value, one.properties.dtype
        is_default = own is not None and dtype.kind in "iu" and abs(int(own)) >= np.iinfo(dtype).max - 1
        return [*found, own] if is_default else found

    def _read(self, k: int, name: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        path = self._paths[k]
        with open_file(path, self._access) as file, closing(file.open(name)) as source, as_source_error(path, name):
            found = np.asarray(source.plain(Region.whole(self._own_shape(name, tuple(shape))))).reshape(shape)
            return found.astype(found.dtype.newbyteorder("="), copy=False)

    def _check_direction(self, one: _Member, blocks: Sequence[np.ndarray[Any, Any]]) -> None:
        """ConfigError unless the coordinate goes on in the direction that it has in each part."""
        if any(block.dtype.kind not in "iuf" for block in blocks):
            return
        there = [(k, block) for (k, _), block in zip(one.lengths, blocks, strict=True) if len(block)]
        rises = all((block[1:] > block[:-1]).all() for _, block in there)
        if not rises and not all((block[1:] < block[:-1]).all() for _, block in there):
            return  # it has no direction
        if rises and all(len(block) == 1 for _, block in there):
            rises = len(there) < 2 or bool(there[1][1][0] > there[0][1][0])
        for (k, block), (k_next, after) in itertools.pairwise(there):
            if not (after[0] > block[-1] if rises else after[0] < block[-1]):
                raise ConfigError(
                    f"'{printable(one.name)}' does not go on from part to part: '{self._paths[k]}' ends with {block[-1]}, and "
                    f"'{self._paths[k_next]}', the next one, begins with {after[0]}. Pass the parts in their order, each once"
                )

    # --- 5: the new file

    def _keep_values(self, joined: Collection[str]) -> None:
        """ConfigError if a file of that name has values itself: it may be a part, taken for the new file."""
        path, lost = self._ask.path, ", which would be lost" * (self._ask.mode == "w")
        if not os.path.isfile(path):
            return
        try:
            own = [one.dataset for one in list_arrays(path, self._access) if one.dataset in joined and one.nbytes_stored]
        except SourceError as error:
            raise ConfigError(
                f"'{path}' exists, and cannot be read ({error}): it may be one of the parts, and is not replaced. Choose "
                "another name for the new file; if this file is not wanted, remove it first"
            ) from None
        if own:
            raise ConfigError(
                f"'{path}' exists, and has values of '{printable(own[0])}' itself{lost}: is it one of the parts? The new file "
                "comes in addition to them. Choose another name for it; if this file is not wanted, remove it first"
            )

    def _check_unchanged(self) -> None:
        """Raise SourceError if a part is not the one that was looked at: its coordinate, which is stored, may be old."""
        for path, version in self._versions.items():
            if state_of(path) != version:
                raise SourceError(
                    f"'{path}' has changed while it was joined, or was replaced. '{self._ask.path}' was not made, because what "
                    "it says of that part may be old. Join the files again when nothing writes to them any more",
                    path=path,
                )

    def _write(self, joined: Mapping[str, int], stored: Mapping[str, np.ndarray[Any, Any]]) -> JoinReport:
        # Here, because nothing else of the package needs the writer.
        from shardload.formats.hdf5.joined import JoinedFile, PlacedPart

        folder = os.path.dirname(os.path.realpath(self._ask.path))  # mode "w" replaces what a link leads to
        real = [os.path.realpath(path) for path in self._paths]
        inside = [path.startswith(folder.rstrip(os.sep) + os.sep) for path in real]
        places = [os.path.relpath(path, folder) if is_in else path for path, is_in in zip(real, inside, strict=True)]
        specs: dict[str, ArraySpec] = {}
        parts: dict[str, list[PlacedPart]] = {}
        values: dict[str, Iterator[tuple[Region, np.ndarray[Any, Any]]]] = {}
        rows, nbytes = [], 0
        for name, one in self._members.items():
            axis = joined.get(name)
            shape, full = one.shape(axis), name if name != "/" else "/data"
            specs[full] = self._spec(one, shape)
            size = nbytes_of(one.info, shape)
            nbytes += size
            n = f"{len(one.lengths)} of {len(self._paths)} parts" if len(one.lengths) < len(self._paths) else "all parts"
            if name in stored:
                values[full], how = iter([(Region.whole(shape), stored[name])]), f"stored here, from {n}"
            elif axis is not None:
                parts[full] = [
                    PlacedPart(places[k], one.stored_name, region, self._own_shape(name, region.shape))
                    for k, region in one.regions(axis)
                ]
                how = f"in {n}"
            elif size <= _STORED_NBYTES or not shape:
                k, how = one.lengths[0][0], f"stored here, the same in {n}"
                values[full] = iter([(Region.whole(shape), self._read(k, name, shape))])
            else:
                k, how = one.lengths[0][0], f"the same in {n}"
                parts[full] = [PlacedPart(places[k], one.stored_name, Region.whole(shape), shape)]
            rows.append(Row(name, shape, one.info.dtype, how))
        for name, one in self._texts.items():
            if one.properties.texts is None or one.axis_of(self._axis) is not None:
                why = "differs from part to part" if one.properties.texts is None else f"has {self._axis_told}"
                self._note(f"'{printable(name)}' was left out: it is text, and {why}")
                continue
            specs[name] = self._spec(one, one.info.shape)
            rows.append(Row(name, one.info.shape, one.info.dtype, "stored here, the same in all parts"))
        groups = self._group_attrs()
        is_netcdf = self._kind == "netcdf4"
        file = JoinedFile(
            self._ask.path,
            specs,
            parts,
            mode=self._ask.mode,
            is_netcdf=is_netcdf,
            attrs=groups.pop("/", {}),
            group_attrs=groups,
        )
        if self._is_warned and self._notes:
            warn_once(f"'{self._ask.path}': {'; '.join(self._notes)}", LeftOutWarning, 0)
        file.write(values, self._check_unchanged)
        used = {part.path for its in parts.values() for part in its}
        outside = any(place in used and not is_in for place, is_in in zip(places, inside, strict=True))
        return JoinReport(
            self._ask.path, len(self._paths), self._axis, tuple(rows), (*self._notes, *self._expected), nbytes, outside
        )

    def _spec(self, one: _Member, shape: tuple[int, ...]) -> ArraySpec:
        properties = replace(one.properties, attrs=one.attrs, unlimited=(), unread=())
        self._note(*(f"{what} was left out" for what in one.properties.unread))
        if one.differing:
            keys = ", ".join(map(repr, one.differing))
            self._expected[f"attributes of '{printable(one.name)}' that differ from part to part were left out: {keys}"] = None
        info = replace(one.info, shape=shape)
        properties, lost = found_by_name(self._kind, one.name, properties, {*self._members, *self._texts})
        self._note(*lost)
        as_it_is = Asked(chunks=None, shards=None, compression=None)
        spec, notes = spec_like(info, properties, select_axes(None, shape), self._kind, as_it_is)
        self._note(*notes)
        return spec

    def _group_attrs(self) -> dict[str, dict[str, Any]]:
        found = {}
        for group, attrs in self._groups.items():
            found[group], _, notes = attrs_for(self._kind, f"group '{group}'", attrs)
            self._note(*(f"{what} was left out" for what in notes))
            if differing := self._differing.get(group):
                keys = ", ".join(map(repr, differing))
                what = "the file" if group == "/" else f"group '{group}'"
                self._expected[f"attributes of {what} that differ from part to part were left out: {keys}"] = None
        return found
