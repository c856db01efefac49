"""How do several files become one, without a copy of their values? By a description of the file that they would be.

A simulation writes a snapshot in several files, a climate model a file for each year. `JoinedParts` says what they are
together: which of their arrays go on from part to part, in which order, and what is the same in all.

1. Each part is opened once: the shapes, types and attributes of its arrays, as a copy finds them (`_Member`).
2. An array that has the axis goes on from part to part: there must be no doubt that its parts belong together. Types, the other
   axes, units and packing are the same; an array is in all parts that others of its group are in.
3. Every other array is the same in all parts, value for value.
   What belongs to an array that is named (coordinates, bounds, CF's grid mapping) is joined with it.
4. The values of the coordinate of the axis are kept. It goes on in one direction: else parts are twice there, or in another
   order. If parts count time from different days, it is counted from the first one's.
5. `JoinedParts.describe` and `JoinedParts.file` say all of that as an HDF5 file with virtual datasets: what it has itself,
   and what lies in which part.

`join` writes that file; a load of what `concat` returns reads it from memory.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from shardload.errors import ConfigError, LeftOutWarning, SourceError, printable
from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo, Properties, nbytes_of, some
from shardload.formats.contract.format import OpenFile
from shardload.formats.diagnosis import as_source_error
from shardload.formats.likeness import Overrides, as_text, attrs_for, bounds_of, same_value, spec_like
from shardload.formats.lookup import Finder, split_path
from shardload.formats.sink import ArraySpec
from shardload.jobs.described import describe_arrays, find_arrays, read_values, take_along, with_coordinates_named
from shardload.jobs.joining.request import PartsRequest, Row
from shardload.jobs.progress import progress_of
from shardload.planning.region import Region
from shardload.planning.selection import direction_of, first_break, select_axes
from shardload.storage.local import state_of
from shardload.storage.remote import is_remote, open_remote, without_secrets
from shardload.system.caller import warn_once
from shardload.system.thread_pool import call_together
from shardload.values.dates import in_other_units
from shardload.values.decoding import ATTRIBUTES

if TYPE_CHECKING:
    from shardload.formats.hdf5.joined import JoinedFile, PlacedPart
    from shardload.formats.hdf5.tiles import PartMetadata

_STORED_NBYTES = 1 << 20  # an array that is the same in all parts is stored in the new file up to this size
_MOST_KEPT = 128  # files at URLs that stay open: of each the first MiB
_AT_ONCE_NBYTES = 16 << 20  # of values, when parts are compared
_UNITS = ("units", "unit", "Units", "Unit", "UNITS", "UNIT")
_FLAGS = ("flag_values", "flag_masks", "flag_meanings")
_MEANING = {*ATTRIBUTES, *_UNITS, "calendar", *_FLAGS}  # attributes without which numbers mean nothing
_TIME = {"units", "calendar"}
_MISSING = {"_FillValue", "missing_value"}  # numbers that are no times

Array = np.ndarray[Any, Any]


@dataclass(eq=False)
class _Member:
    """One array, over the parts.

    Attributes
    ----------
    info, properties : ArrayInfo, Properties
        In the first part that has it.
    shapes, attrs : dict
        Its shape and its attributes in each part that has it, by the number of the part.
    texts : dict
        Values of an array of text, in the same way.
    codecs : set of str
        How parts have encoded its chunks (`ArrayInfo.codec`).
    values : dict
        All values of a part, if they were read.
    is_stacked : bool
        Whether it gets a new first axis.
    """

    info: ArrayInfo
    properties: Properties
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    attrs: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    texts: dict[int, Array] = field(default_factory=dict)
    codecs: set[str] = field(default_factory=set)
    values: dict[int, Array] = field(default_factory=dict)
    is_stacked: bool = False

    @property
    def name(self) -> str:
        """Its full name."""
        return self.info.dataset

    def shape_in_part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that it has in a part: without the new axis."""
        return shape[1:] if self.is_stacked else shape

    def axis_of(self, axis: str | int) -> int | None:
        """The number of the axis that is joined; None if the array does not have it."""
        if isinstance(axis, str):
            dims = self.properties.dims
            return dims.index(axis) if axis in dims else None
        return axis if axis < len(self.info.shape) else None

    def is_coordinate_of(self, axis: str | int | None) -> bool:
        """Whether it is the coordinate of an axis with a name."""
        return len(self.info.shape) == 1 and self.name.rpartition("/")[2] == axis and not self.texts

    def regions(self, axis: int) -> dict[int, Region]:
        """What of the joined array lies in each part."""
        regions, start = {}, 0
        for part, shape in self.shapes.items():
            begin = tuple(start * (k == axis) for k in range(len(shape)))
            regions[part] = Region(begin, tuple(first + n for first, n in zip(begin, shape, strict=True)))
            start += shape[axis]
        return regions


class JoinedParts:
    """Some files: `look` at them, `check` that they belong together, `describe` the file that they are together.

    Attributes
    ----------
    paths : tuple of str
        The parts as the caller named them, in their order; those of a pattern in the order of the numbers in their names.
    versions : dict of str to tuple of int
        Size and time of each part, before it was opened for the first time.
    axis : str or int
        The axis along which they follow each other.
    specs : dict of str to ArraySpec
        The arrays of the file that they are together, by their full names.
    places : dict
        Where the values of an array lie in parts (`PlacedPart.path` is one of `paths`), if they do.
    values : dict
        The values that it has itself.
    rows : list of Row
        What became of each array.
    nbytes : int
        Bytes of all values.
    """

    def __init__(self, request: PartsRequest) -> None:
        self._request = request
        self.paths = request.find()  # by the number of the part
        self._access = request.options.access
        self._kind = "hdf5"
        self._members: dict[str, _Member] = {}
        self._groups: dict[str, dict[int, Mapping[str, Any]]] = {}  # attributes of each group, by the number of the part
        self._notes: dict[str, None] = {}
        self._usual_notes: dict[str, None] = {}  # of which nobody is warned: history differs, a dimension is not used
        self.axis: str | int = 0
        self._joined: dict[str, int] = {}  # arrays that go on from part to part, with the number of the axis
        self._stored: dict[str, Array] = {}  # values of arrays along the axis that the new file has itself
        self.versions: dict[str, tuple[int, ...] | None] = {}
        self.specs: dict[str, ArraySpec] = {}
        self.places: dict[str, list[PlacedPart]] = {}
        self.values: dict[str, list[tuple[Region, Array]]] = {}
        self.rows: list[Row] = []
        self._group_attrs: dict[str, dict[str, Any]] = {}
        self.nbytes = 0
        self.in_store: dict[tuple[str, str], PartMetadata] = {}  # see `Concatenation`
        self._arrays_in_store: dict[tuple[str, str], PartMetadata] = {}  # of all arrays at URLs, by their full names
        self._kept: dict[str, Finder] = {}  # of files at URLs, which stay open

    def close(self) -> None:
        """Close what was kept open."""
        while self._kept:
            self._kept.popitem()[1].close()

    def _open_next(self, k: int) -> None:
        """Before part k is looked at: have it and the next ones at URLs opened together; close those before, but the first."""
        if k and k % _MOST_KEPT != 1:
            return
        # The first one is opened before, alone: it does not take minutes to hear that a server does not answer.
        urls = [path for path in self.paths[k : k + _MOST_KEPT] if is_remote(path)] if k else []
        kept = [*filter(is_remote, self.paths[:1]), *urls]
        for path in self._kept.keys() - kept if k else ():
            self._kept.pop(path).close()
        self._kept |= {path: Finder(self._access, tells=True) for path in kept if path not in self._kept}
        call_together([partial(self._kept[url].expect, [(url, None)]) for url in urls], "shardload-open")

    def _finder(self, path: str) -> AbstractContextManager[Finder]:
        """What opens a part."""
        kept = self._kept.get(path)
        return Finder(self._access, tells=True) if kept is None else nullcontext(kept)

    def warn(self, name: str) -> None:
        """Warn the caller of what was left out that is not usual."""
        if self._notes:
            warn_once(f"'{name}': {'; '.join(self._notes)}", LeftOutWarning, 0)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out."""
        return (*self._notes, *self._usual_notes)

    @property
    def _axis_text(self) -> str:
        return f"the axis {self.axis!r}" if isinstance(self.axis, str) else f"an axis {self.axis}"

    def _differs(
        self, aspect: str, member: _Member, k: int, values: tuple[Any, Any], first_k: int | None = None, fix: str = ""
    ) -> ConfigError:
        """The error about an array that is not the same in two parts."""
        first = self.paths[next(iter(member.shapes)) if first_k is None else first_k]
        fix = fix or "Join those that are alike, or name the arrays to join with dataset="
        return ConfigError(
            f"the {aspect} of '{printable(member.name)}' differs: {values[0]} in '{first}', {values[1]} in '{self.paths[k]}'. "
            f"{fix}"
        )

    # --- 1: what is in the parts

    def look(self, title: str) -> None:
        """Take in all parts. `title` says what they will be, for the progress bar."""
        self._check_apart()
        empty_groups: dict[str, list[ConfigError]] = {}  # with the errors of the parts that have no arrays in them
        progress = self._request.options.progress
        with progress_of(progress, f"parts of {title}", len(self.paths), is_bytes=False) as advance:
            for k, path in enumerate(self.paths):
                self._open_next(k)
                self.versions[path] = state_of(path)
                with self._finder(path) as finder:
                    infos, empty = find_arrays(finder, path, self._request.dataset or ("*",))
                    for group, error in empty.items():
                        if not group:
                            raise error
                        empty_groups.setdefault(group, []).append(error)  # a part may have no stars
                    names = self._take_file(k, path, finder.file(path), infos)
                    if is_remote(path):
                        self._note_places(path, finder, [infos.get(name) or finder.find(path, name).info for name in names])
                advance(1)
        for errors in empty_groups.values():
            if len(errors) == len(self.paths):
                raise errors[0]

    def _check_apart(self) -> None:
        seen: dict[str, str] = {}
        for path in self.paths:
            if "://" in path:
                self._check_url(path)
            if inside := split_path(path)[1]:
                what = f"names an array; pass dataset={inside!r} to join this one alone"
                raise ConfigError(f"'{path}' {what}. Parts are files in folders")
            place = path if "://" in path else os.path.realpath(path)
            if place in seen:
                raise ConfigError(f"'{path}' is among the parts twice{'' if path == seen[place] else f' (as {seen[place]!r})'}")
            seen[place] = path

    def _check_url(self, url: str) -> None:
        name = without_secrets(url)
        if self._request.word != "along":
            raise ConfigError(
                f"'{name}' is a URL, and the parts of a file are files in folders. shardload.concat takes URLs, and writes none"
            )
        if name != url:
            raise ConfigError(
                f"'{name}' has a query or a signature, which a part cannot have: pass keys in storage=, or download it"
            )
        if "*" in url:
            raise ConfigError(f"'{name}' is a pattern of URLs, for which nothing looks. Pass a list of URLs")

    def _note_places(self, path: str, finder: Finder, infos: Iterable[ArrayInfo]) -> None:
        """Keep what ranks that read parts at a URL must know, and the version of the object."""
        from shardload.formats.hdf5.joined import part_in_store

        file = finder.file(path)
        for info in infos:
            self._arrays_in_store[path, info.dataset] = part_in_store(file, path, info)
        self.versions[path] = file.state()

    def _take_file(self, k: int, path: str, file: OpenFile, infos: Mapping[str, ArrayInfo]) -> list[str]:
        """Take in one part. Returns the names of its arrays of numbers, some of which belong to others (`take_along`)."""
        for info in infos.values():
            if not info.format.startswith(("HDF5", "netCDF4")):
                raise ConfigError(
                    f"'{path}' is {info.format}; only HDF5 and netCDF4 files can be joined. Copy it first: `shardload copy "
                    f"{shlex.quote(path)} part.h5`"
                )
        described, notes = describe_arrays(file, infos)
        if self._request.dataset:
            notes += take_along(file, described)
        else:
            links = [name for name in file.links() if not any(f"{array}/".startswith(f"{name}/") for array in described)]
            notes += [f"'{printable(name)}' was left out: it is a link" for name in links]
        for name, (info, properties, _) in described.items():
            if not info.is_dimension:
                self._take(k, info, properties)
                if self._members[name].is_coordinate_of(self._request.axis or self._request.stack):  # else it is opened again
                    self._members[name].values[k] = read_values(file, name)
            elif not any(name.rpartition("/")[2] in array.properties.dims for key, array in described.items() if key != name):
                self._usual_notes[f"the dimension '{printable(name)}' was left out: no array has it"] = None
        groups, unread = file.groups()
        for group, attrs in groups.items():
            self._groups.setdefault(group, {})[k] = attrs
        self._note(*notes, *(f"{what} was left out" for what in unread))
        return [name for name, (info, _, _) in described.items() if info.refused is None]

    def _note(self, *texts: str) -> None:
        self._notes |= dict.fromkeys(texts)

    def _take(self, k: int, info: ArrayInfo, properties: Properties) -> None:
        """Take in one array of one part, as it is joined: with the new axis, if it gets one."""
        # In netCDF the coordinate of an axis of a group above is no scale of HDF5's.
        is_coordinate = info.is_coordinate or properties.dims == (info.dataset.rpartition("/")[2],)
        is_stacked = self._request.stack is not None and not is_coordinate and properties.texts is None
        if is_stacked:
            changed: dict[str, Any] = {"dims": (self._request.stack, *properties.dims), "unlimited": ()}
            changed["scales"] = ((), *properties.scales) if properties.scales else ()
            changed["axis_labels"] = ("", *properties.axis_labels) if properties.axis_labels else ()
            info, properties = replace(info, shape=(1, *info.shape)), replace(properties, **changed)
        member = self._members.setdefault(info.dataset, _Member(info, properties, is_stacked=is_stacked))
        first = member.properties
        for aspect, in_first, in_this in (
            ("type", first.dtype, properties.dtype),
            ("number of axes", len(member.info.shape), len(info.shape)),
            ("names of axes", first.dims, properties.dims),
        ):
            if in_first != in_this and first.texts is None:
                raise self._differs(aspect, member, k, (in_first, in_this))
        member.shapes[k], member.attrs[k] = info.shape, properties.attrs
        member.codecs.add(info.codec)
        if properties.texts is not None:
            member.texts[k] = np.asarray(properties.texts)

    # --- 2: what goes on from part to part

    def check(self) -> None:
        """Find the axis, and make sure that the parts belong together."""
        self.axis = self._find_axis()
        numbers = {name: member for name, member in self._members.items() if not member.texts}
        self._joined = {name: k for name, member in numbers.items() if (k := member.axis_of(self.axis)) is not None}
        if not self._joined:
            shapes = some([f"'{printable(name)}' {member.info.shape}" for name, member in numbers.items()])
            raise ConfigError(f"no array of '{self.paths[0]}' has {self._axis_text}: {shapes}")
        if len(self.paths) > 1 and not self._request.dataset and all(len(numbers[name].shapes) == 1 for name in self._joined):
            places = [f"'{printable(name)}' in '{self.paths[next(iter(numbers[name].shapes))]}'" for name in self._joined]
            raise ConfigError(
                f"no array is in two of the parts, so that nothing goes on from one to the next: {some(places)}. Pass the "
                "parts of one file; arrays of several files are loaded in one call: docs/many-arrays.md"
            )
        self._check_presence()
        lengths = {k: shape[axis] for name, axis in self._joined.items() for k, shape in numbers[name].shapes.items()}
        for name, axis in self._joined.items():
            self._check_shapes(numbers[name], axis, lengths)
        self._store_coordinates()
        for name, member in numbers.items():
            if name not in self._stored:
                self._check_meaning(member)
        self._check_same([member for name, member in numbers.items() if name not in self._joined])

    def _find_axis(self) -> str | int:
        axis, stack, word = self._request.axis, self._request.stack, self._request.word
        properties = [member.properties for member in self._members.values()]
        if stack is not None:
            for member in self._members.values():
                if member.properties.dims.count(stack) > (member.shape_in_part(member.info.shape) != member.info.shape):
                    raise ConfigError(
                        f"stack is {stack!r}, but '{printable(member.name)}' has an axis of that name: the parts go on along "
                        f"it. Pass {word}={stack!r} in its place"
                    )
            return stack
        names = dict.fromkeys(dim for array in properties for dim in array.dims if dim)
        choices = some([repr(name) for name in names]) or f"none with a name. Pass its number, such as {word}=0"
        if axis is None:
            grow = {dim for array in properties for k in array.unlimited if (dim := array.dims[k])}
            if names and len(grow) != 1:
                which = "several that can grow" if grow else "none that can grow"
                raise ConfigError(
                    f"along which axis do the parts follow each other? Pass {word}=, one of {choices} (there are {which})"
                )
            return next(iter(grow)) if grow else 0
        if isinstance(axis, str) and axis not in names:
            raise ConfigError(f"{word} is {axis!r}, which no array has; there are: {choices}")
        if isinstance(axis, int) and names:
            raise ConfigError(
                f"{word} is {axis}, but the axes have names, and one axis may be the first of one array and the second of "
                f"another. Pass one of {choices}"
            )
        return axis

    def _check_presence(self) -> None:
        """What belongs together is in the same parts. Without names of axes, an array belongs to those of its group."""
        expected: dict[str, tuple[str, set[int]]] = {}
        for name in self._joined:
            key = "" if isinstance(self.axis, str) else name.rpartition("/")[0]
            parts = set(self._members[name].shapes)
            first, first_parts = expected.setdefault(key, (name, parts))
            if parts != first_parts:
                lacking = min(parts ^ first_parts)
                absent, present = (first, name) if lacking in parts else (name, first)
                alone = [other for other in self._joined if list(self._members[other].shapes) == [lacking]]
                renamed = f", and {some([repr(printable(other)) for other in alone])}, which no other part has" if alone else ""
                raise ConfigError(
                    f"'{printable(absent)}' is not in '{self.paths[lacking]}', which has '{printable(present)}'{renamed}: "
                    "joined, they would no longer belong together, row by row. Leave that part out, or name the arrays to join "
                    "with dataset="
                )
        if isinstance(self.axis, str):
            ((first, first_parts),) = expected.values()
            if missing := set(range(len(self.paths))) - first_parts:
                raise ConfigError(f"'{self.paths[min(missing)]}' has no '{printable(first)}', and no array along {self.axis!r}")

    def _check_shapes(self, member: _Member, axis: int, expected: Mapping[int, int]) -> None:
        """All parts have the same other axes. A joined axis with a name is in each part as long as `expected` says."""
        first = next(iter(member.shapes.values()))
        for k, shape in member.shapes.items():
            if shape[:axis] != first[:axis] or shape[axis + 1 :] != first[axis + 1 :]:
                shapes = member.shape_in_part(first), member.shape_in_part(shape)
                only = f"They may differ along axis {axis} only"
                if self._request.stack is not None:
                    only = "With a new axis they may not differ"
                raise self._differs("shape", member, k, shapes, fix=f"{only}: name the arrays to join with dataset=")
            if isinstance(self.axis, str) and shape[axis] != expected[k]:
                raise ConfigError(
                    f"{self.axis!r} has {shape[axis]} elements in '{printable(member.name)}' of '{self.paths[k]}', and "
                    f"{expected[k]} in another array there: is the file whole? If these are two axes of one name, name the "
                    "arrays to join with dataset="
                )
        if isinstance(self.axis, str) and member.properties.dims.count(self.axis) > 1:
            raise ConfigError(
                f"'{printable(member.name)}' has the axis {self.axis!r} twice: what is between two parts is in neither. Name "
                "the arrays to join with dataset="
            )

    def _check_meaning(self, member: _Member, excepted: Collection[str] = ()) -> None:
        """Units, flags and packing must be the same in all parts: the new file has them once."""
        for key in sorted(_differing(member.attrs) & _MEANING - set(excepted)):
            values = {k: as_text(attrs.get(key)) for k, attrs in member.attrs.items()}
            if key in _MISSING and all(value is None or np.all(value != value) for value in values.values()):
                continue  # NaN is no value, also of a part that does not say so
            first_k = next(iter(values))
            k = next(k for k, value in values.items() if not same_value(value, values[first_k]))
            fix = "Joined, the numbers of one of them would mean something else. Load each file for itself: docs/many-files.md"
            raise self._differs(f"attribute {key!r}", member, k, (repr(values[first_k]), repr(values[k])), first_k, fix)

    # --- 3: what is the same in all parts

    def _check_same(self, members: Sequence[_Member]) -> None:
        fix = f"It does not have {self._axis_text}, so which are right? "
        if self._request.stack is None and self.axis != "time":  # which would send the caller back here
            fix += "If each part is one step, pass stack='time' for a new axis. "
        if not self._request.dataset:
            fix += "Name the arrays to join with dataset="
        else:
            fix += "It is named in dataset=, or belongs to what is: leave that out, or join the parts that have the same"
        for member in members:
            if missing := set(range(len(self.paths))) - set(member.shapes):
                path = self.paths[min(missing)]
                self._note(f"'{printable(member.name)}' is not in every part, such as '{path}'; it is that of the others")
            shape = next(iter(member.shapes.values()))
            for k, other_shape in member.shapes.items():
                if other_shape != shape:
                    raise self._differs("shape", member, k, (shape, other_shape), fix=fix)
        members = [member for member in members if len(member.shapes) > 1]
        first_digests: dict[str, bytes] = {}
        for k, path in enumerate(self.paths if members else ()):
            self._open_next(k)
            with self._finder(path) as finder:  # once for all arrays
                file = finder.file(path)
                for member in (member for member in members if k in member.shapes):
                    digest = _digest_of(file, member)
                    if first_digests.setdefault(member.name, digest) != digest:
                        raise self._differs("value", member, k, ("one", "another"), fix=fix)
            if k and path in self._kept:  # of what was read, up to 32 MiB are kept; of the first, some is read again
                self._kept.pop(path).close()

    # --- 4: coordinates along the axis

    def _store_coordinates(self) -> None:
        """Keep the values along the axis that the new file stores itself: its coordinate, its bounds, and single numbers."""
        for name, axis in self._joined.items():
            member = self._members[name]
            if member.is_coordinate_of(self.axis):
                blocks = self._counted(member, member)
                self._check_direction(member, blocks)
                self._stored[name] = np.concatenate(blocks)
                self._check_meaning(member, excepted=_TIME)
                for other in {other for attrs in member.attrs.values() for other in bounds_of(name, attrs)}:
                    bounds = self._members.get(other)
                    reference = bounds if bounds is not None and any("units" in a for a in bounds.attrs.values()) else member
                    if bounds is not None and other in self._joined and _differing(reference.attrs) & _TIME:
                        self._stored[other] = np.concatenate(self._counted(bounds, reference), axis=self._joined[other])
                        self._check_meaning(bounds, excepted=_TIME)
            elif name not in self._stored and not member.shape_in_part(member.info.shape):
                self._check_meaning(member)  # HDF5 has no virtual numbers without axes
                self._stored[name] = np.concatenate([self._read(k, member) for k in member.shapes], axis=axis)

    def _counted(self, member: _Member, reference: _Member) -> list[Array]:
        """The values of each part, counted as those of the first one by the units of `reference`: bounds may have none."""
        first = next(iter(reference.shapes))
        blocks = []
        for k in member.shapes:
            block = self._read(k, member)
            blocks.append(block)
            attrs, first_attrs = reference.attrs[k], reference.attrs[first]
            if all(same_value(attrs.get(key), first_attrs.get(key)) for key in _TIME):
                continue
            try:
                if packing := (attrs.keys() | first_attrs.keys() | member.attrs[k].keys()) & _MEANING - _TIME - _MISSING:
                    raise ValueError(f"it has {', '.join(sorted(packing))}, and is packed")
                marks = [number for key in _MISSING & member.attrs[k].keys() for number in np.ravel(member.attrs[k][key])]
                fill, dtype = member.properties.fill_value, member.properties.dtype
                if fill is not None and dtype.kind in "iu" and abs(int(fill)) >= np.iinfo(dtype).max - 1:
                    marks.append(fill)  # netCDF has one of its own for whole numbers that were never written
                is_time = ~np.isin(block, marks)
                units = ({key: as_text(of[key]) for key in _TIME & of.keys()} for of in (attrs, first_attrs))
                blocks[-1] = block.copy()
                blocks[-1][is_time] = in_other_units(block[is_time], *units)
            except ValueError as error:
                units_texts = (repr(as_text(first_attrs.get("units"))), repr(as_text(attrs.get("units"))))
                fix = f"They cannot be counted alike, because {error}"
                raise self._differs("units", reference, k, units_texts, fix=fix) from None
        return blocks

    def _read(self, k: int, member: _Member) -> Array:
        """The values of an array in a part that the new file stores itself; with the new axis, if it gets one."""
        if k not in member.values:
            with self._finder(self.paths[k]) as finder:
                member.values[k] = read_values(finder.file(self.paths[k]), member.name)
        return member.values[k].reshape(member.shapes[k])

    def _check_direction(self, member: _Member, blocks: Sequence[Array]) -> None:
        """ConfigError unless the coordinate goes on in the direction that it has in each part."""
        not_empty = [(k, block) for k, block in zip(member.shapes, blocks, strict=True) if len(block)]
        rises = direction_of([block for _, block in not_empty])
        if rises is None:
            directions = {direction_of([block]): k for k, block in not_empty if len(block) > 1}
            if True in directions and False in directions:
                raise ConfigError(
                    f"'{printable(member.name)}' rises in '{self.paths[directions[True]]}' and falls in "
                    f"'{self.paths[directions[False]]}': such parts do not go on from one to the next. Write one of them in "
                    "the other direction, or load each for itself"
                )
            return
        for (k, block), (k_next, after) in itertools.pairwise(not_empty):
            border = np.concatenate([block[-1:], after[:1]])
            if first_break(border, rises) is not None:
                fix = "Pass a list of the parts in their order, each once"
                if np.isnan(border).any():
                    fix = "Where it is NaN nobody can say whether the order is right: write its values into the files"
                raise ConfigError(
                    f"'{printable(member.name)}' does not go on from part to part: '{self.paths[k]}' ends with {block[-1]}, "
                    f"and '{self.paths[k_next]}', the next one, begins with {after[0]}. {fix}"
                )

    # --- 5: what they are together

    def describe(self, kind: str | None = None) -> None:
        """Say what is in the file that the parts are together: ``"netcdf4"`` or ``"hdf5"``, by default what the parts are."""
        from shardload.formats.hdf5.joined import PlacedPart

        is_netcdf = all(member.info.format.startswith("netCDF4") for member in self._members.values())
        self._kind = kind or ("netcdf4" if is_netcdf else "hdf5")
        for name, member in self._members.items():
            k, axis, full = next(iter(member.shapes)), self._joined.get(name), name if name != "/" else "/data"
            regions = {k: Region.whole(member.info.shape)} if axis is None else member.regions(axis)
            *_, last = regions.values()
            shape = last.stop
            n, whole = len(member.shapes), Region.whole(shape)
            where = "all parts" if n == len(self.paths) else f"{n} of {len(self.paths)} parts"
            if member.texts:
                is_same = all(np.array_equal(text, member.texts[k]) for text in member.texts.values())
                if not is_same or member.axis_of(self.axis) is not None:
                    why = f"has {self._axis_text}" if is_same else "differs from part to part"
                    self._note(f"'{printable(name)}' was left out: it is text, and {why}")
                    continue
                how = "stored here, the same in all parts"
            elif name in self._stored:
                self.values[full], how = [(whole, self._stored[name])], f"stored here, from {where}"
            elif axis is None and (nbytes_of(member.info, shape) <= _STORED_NBYTES or not shape):
                self.values[full], how = [(whole, self._read(k, member))], f"stored here, the same in {where}"
            else:
                if kind == "netcdf4" and any("lzf" in codec.split("+") for codec in member.codecs):
                    raise ConfigError(
                        f"a part has compressed '{printable(name)}' by lzf, which is h5py's own: the netCDF library would not "
                        "read it in the new file. Use the suffix .h5, or copy the parts first: `shardload copy PART NEW "
                        "--compression gzip`"
                    )
                last_name = member.properties.stored_name
                stored_name = name if last_name is None else f"{name.rpartition('/')[0]}/{last_name}"
                self.places[full] = [
                    PlacedPart(self.paths[k], stored_name, region, member.shape_in_part(region.shape))
                    for k, region in regions.items()
                ]
                for path in map(self.paths.__getitem__, regions):
                    if is_remote(path):
                        self.in_store[path, stored_name] = self._arrays_in_store[path, name]
                how = f"{'' if axis is not None else 'the same '}in {where}"
            self.specs[full] = self._spec(member, shape)
            self.nbytes += 0 if member.texts else nbytes_of(member.info, shape)
            self.rows.append(Row(name, shape, member.info.dtype, how))
        for group, attrs in self._groups.items():
            everywhere = {k: attrs.get(k, {}) for k in range(len(self.paths))}
            common = self._common("the file" if group == "/" else f"group '{group}'", everywhere)
            self._group_attrs[group], _, notes = attrs_for(self._kind, f"group '{group}'", common)
            self._note(*(f"{name} was left out" for name in notes))

    def file(self, path: str, names: Mapping[str, str], mode: str = "w-") -> JoinedFile:
        """The file at a path. `names` says by which name it refers to each part."""
        # Here, because nothing else of the package needs the writer.
        from shardload.formats.hdf5.joined import JoinedFile

        places = {name: [replace(part, path=names[part.path]) for part in placed] for name, placed in self.places.items()}
        is_netcdf = self._kind == "netcdf4"
        return JoinedFile(path, self.specs, places, mode=mode, is_netcdf=is_netcdf, group_attrs=self._group_attrs)

    def check_unchanged(self, title: str) -> None:
        """Raise SourceError if a part is not the one that was looked at: values that are kept of it may be old."""
        versions_now = call_together([partial(_version_at, path, self._access) for path in self.versions], "shardload-states")
        for (path, version), version_now in zip(self.versions.items(), versions_now, strict=True):
            if version_now != version:
                raise SourceError(
                    f"'{path}' has changed while it was joined, or was replaced. '{title}' was not made, because what it says "
                    "of that part may be old. Join the files again when nothing writes to them any more",
                    path=path,
                )

    def lengths(self) -> list[tuple[int, ...]]:
        """For each array along the axis, its length in each part."""
        return [tuple(shape[axis] for shape in self._members[name].shapes.values()) for name, axis in self._joined.items()]

    def _spec(self, member: _Member, shape: tuple[int, ...]) -> ArraySpec:
        of_first = next(iter(member.attrs.values()))  # as its times are counted
        times = {key: of_first[key] for key in _TIME & of_first.keys()} if member.name in self._stored else {}
        attrs = times | self._common(f"'{printable(member.name)}'", member.attrs, times)
        properties = replace(member.properties, attrs=attrs, unlimited=(), unread=())
        properties, left_out = with_coordinates_named(self._kind, member.name, properties, self._members)
        as_it_is = Overrides(chunks=None, shards=None, compression=None)
        info = replace(member.info, shape=shape)
        spec, notes = spec_like(info, properties, select_axes(None, shape), self._kind, as_it_is)
        self._note(*(f"{what} was left out" for what in member.properties.unread), *left_out, *notes)
        return spec

    def _common(self, owner: str, attrs: Mapping[int, Mapping[str, Any]], kept: Collection[str] = ()) -> dict[str, Any]:
        """The attributes that are the same in all parts that have an array or a group. The others are noted."""
        differing = _differing(attrs)
        if keys := ", ".join(map(repr, sorted(differing - set(kept)))):
            self._usual_notes[f"attributes of {owner} that differ from part to part were left out: {keys}"] = None
        return {key: value for key, value in next(iter(attrs.values())).items() if key not in differing}


def _version_at(path: str, access: Access) -> tuple[int, ...] | None:
    """The version of a file or an object now. SourceError if the store refuses that."""
    with as_source_error(path):
        return open_remote(path, access.storage).version("") if is_remote(path) else state_of(path)


def _digest_of(file: OpenFile, member: _Member) -> bytes:
    """A checksum of the stored values of an array in a part."""
    digest = blake2b()
    at_once = max(1, _AT_ONCE_NBYTES // max(1, member.properties.dtype.itemsize))
    for region in Region.whole(member.info.shape).split(at_once):
        digest.update(read_values(file, member.name, region).tobytes())
    return digest.digest()


def _differing(attrs: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """The names of attributes that are not the same in all parts."""
    first, *rest = attrs.values()
    keys = {key for part in attrs.values() for key in part}
    return {key for key in keys if not all(key in first and key in part and same_value(first[key], part[key]) for part in rest)}
