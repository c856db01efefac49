"""What is to be copied, and what shall the new file be like? Rank 0 finds out, and tells the others all but the attributes.

Layout, attributes and names of axes are those of the source, unless the caller asks for others. Coordinates keep their types
and layouts; a selection by names of axes applies to them, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np

from shardload.comm.group import Invocation
from shardload.errors import ConfigError, printable
from shardload.formats.contract.array import ArrayInfo, some
from shardload.formats.contract.format import OpenFile
from shardload.formats.likeness import KEEP, Overrides, attrs_for, bounds_of, spec_like
from shardload.formats.lookup import Finder, split_path
from shardload.formats.saving import SUFFIXES, check_target, format_for, make_sink, refused_group
from shardload.formats.sink import ArraySpec, Compression, Sink, unopened_by_xarray
from shardload.jobs.consistency import State
from shardload.jobs.described import (
    Described,
    describe_arrays,
    find_arrays,
    read_values,
    selection_of,
    take_along,
    with_coordinates_named,
)
from shardload.options import CHECKSUM, FILE, FULL, INDEX, OPTIONS, CallOptions, Options, check_names, check_path, check_sizes
from shardload.planning.region import Region
from shardload.planning.saving import growing_chunks, page_nbytes
from shardload.planning.schedule import SourceLayout
from shardload.planning.selection import Between, Near, Selection, needs_coordinates, positional_index
from shardload.storage.remote import without_secrets
from shardload.values.dates import has_dates, in_numbers

_OF_CALL = ("staging", "verify", "timeout", "progress", "allow_external", "allow_filters", "untrusted", "storage")

Groups = Mapping[str, Mapping[str, Any]]  # attributes of groups, by name


@dataclass(frozen=True)
class CopyRequest:
    """What a caller asks for.

    Attributes
    ----------
    source, target : str
        Paths; the source may name an array (``"in.h5:/rho"``).
    dataset : tuple of str
        Names of arrays, and patterns; none for all arrays of the file.
    select : tuple, mapping or None
        As for a load; by names it applies to every array that has the axis.
    dtype : dtype or None
        Type of the new arrays; those of coordinates stay.
    chunks, shards : tuple of int, None or ``"keep"``
        Layout of the new arrays that have as many axes.
    compression : object
        As in `Overrides`; of the new arrays that have chunks.
    unlimited : tuple of str or int
        Axes that can grow, beside those that can in the source: by name, or by number in the new arrays that are no
        coordinates. Every array that has an axis of that name can grow along it, coordinates too. Contiguous arrays get
        chunks for it.
    format, mode : str
        As for `make_sink`.
    resume : bool
        True to go on with what a job that was killed has left. For a target in Zarr without shards.
    options : CallOptions
        ``staging``, ``verify``, ``timeout``, ``progress``, and what the source may do.
    """

    source: str
    target: str
    options: CallOptions
    dataset: tuple[str, ...] = ()
    select: Any = None
    dtype: np.dtype[Any] | None = None
    chunks: tuple[int, ...] | str | None = KEEP
    shards: tuple[int, ...] | str | None = KEEP
    compression: Any = KEEP
    unlimited: tuple[str | int, ...] = ()
    format: str | None = None
    mode: str = "w-"
    resume: bool = False

    @classmethod
    def check(cls, source: str | os.PathLike[str], target: str | os.PathLike[str], **keywords: Any) -> CopyRequest:
        """The request, with its options checked. ConfigError names what was found and what is expected."""
        options = Options.check(**{"verify": CHECKSUM} | {name: keywords.pop(name) for name in _OF_CALL if name in keywords})
        if options.verify == FILE:
            raise ConfigError(f"verify is {FILE!r}; expected one of {INDEX!r}, {CHECKSUM!r}, {FULL!r}")
        keywords["dataset"] = check_names(keywords.get("dataset"))
        for name in ("dtype", "unlimited", "mode"):
            keywords[name] = OPTIONS[name].check(keywords.get(name, OPTIONS[name].default))
        for name in ("chunks", "shards"):
            keywords[name] = check_sizes(name, (KEEP, None), keywords.get(name, KEEP))
        file = check_path("source", source, "the path of a file, or what shardload.concat returns of several")
        target = check_path("target", target, "the name of the new file, such as 'out.h5' or 'out.zarr'")
        return cls(file, os.path.expanduser(target), options, **keywords)

    def invocation(self, call: str, title: str) -> Invocation:
        """See `engine.call.begin_request`."""
        values = {name: repr(value) for name, value in vars(self).items() if name != "options"}
        values |= {"source": repr(without_secrets(self.source))}
        return Invocation(call, title, values | self.options.describe(*_OF_CALL))


@dataclass(frozen=True)
class SourceArray:
    """One array that is copied.

    Attributes
    ----------
    info : ArrayInfo
        In the source.
    selection : Selection
        What of it.
    name : str
        Full name in the target, as in `Sink.arrays`.
    spec : ArraySpec
        In the target; on other ranks than 0 without attributes. Arrays of text are on rank 0 alone.
    state : State
        Of the source's file, on rank 0.
    """

    info: ArrayInfo
    selection: Selection
    name: str
    spec: ArraySpec
    state: State

    def layout(self, slab: Region | None = None) -> SourceLayout:
        """How a slab of the new array, or all of it, lies in the source."""
        selection = self.selection if slab is None else Selection(self.selection.to_file(slab), self.selection.kept)
        dtype = self.spec.dtype.newbyteorder("=") if self.spec.dtype.kind != "V" else self.spec.dtype
        return SourceLayout.cut(selection, self.info.chunks, np.dtype(self.info.dtype), dtype, self.info.codec)

    @property
    def is_text(self) -> bool:
        """True for an array of text, which the new file's metadata have: no rank copies it."""
        return self.spec.texts is not None


def new_sink(request: CopyRequest, sources: Sequence[SourceArray], groups: Groups | None, n_nodes: int) -> Sink:
    """The sink of the new file; on other ranks than 0 without the attributes of groups, and without text."""
    about = {} if groups is None else describe(request, sources, groups)
    return make_sink(
        request.target,
        {array.name: array.spec for array in sources},
        format=request.format,
        mode=request.mode,
        alignment=page_nbytes(n_nodes),
        group_attrs=groups,
        about=about,
        storage=request.options.storage,
    )


def describe(request: CopyRequest, sources: Sequence[SourceArray], groups: Groups) -> dict[str, str]:
    """What a job that resumes must have in common with the one that was killed, by its name in messages. On rank 0."""
    path = split_path(request.source)[0]
    about = {
        "the source": os.path.realpath(path) if "://" not in path else without_secrets(path),
        "the format": format_for(request.target, request.format),
        "the digest of attributes of groups": _digest(sorted(groups.items(), key=str)),
    }
    for array in sources:
        name = array.info.dataset
        about[f"size and time of the source ('{name}')"] = repr(None if array.state is None else array.state[:2])
        if array.info.n_parts and array.info.parts is not None:
            about[f"the digest of sizes and times of the parts of '{name}'"] = _digest(array.info.parts["versions"])
        about[f"what is made of '{name}'"] = repr((array.selection, array.name, replace(array.spec, attrs={}, texts=None)))
        attrs = [(key, getattr(value, "dtype", type(value)), value) for key, value in array.spec.attrs.items()]
        texts = None if array.spec.texts is None else np.asarray(array.spec.texts).tolist()
        about[f"the digest of attributes and texts of '{array.name}'"] = _digest((attrs, texts))
    return about


def _digest(value: Any) -> str:
    return f"{crc32(repr(value).encode()):08x}"


def find(request: CopyRequest) -> tuple[list[SourceArray], Groups, list[str]]:
    """On rank 0: the arrays, the attributes of groups, and notes of what is left out."""
    _check_target(request)
    path, inside = split_path(request.source)
    _check_apart(path, request.target)
    names = list(request.dataset) or ([inside] if inside else ["*"])
    if inside and request.dataset:
        raise ConfigError(f"'{request.source}' names an array, and dataset={request.dataset[0]!r} names another. Leave one out")
    with Finder(request.options.access, tells=True) as finder:
        infos, empty = find_arrays(finder, path, names)
        file = finder.file(path)
        links = file.links() if "*" in names else {}
        for error in empty.values():
            notes = _links_notes(links, "")
            raise ConfigError(f"{error} ({notes[0]})") if notes else error
        followed = {link for link in links if any(f"{name}/".startswith(f"{link}/") for name in infos)}
        notes = _links_notes({link: to for link, to in links.items() if link not in followed})
        if copies := [f"'{printable(link)}' (to {printable(links[link])})" for link in sorted(followed)]:
            notes.append(f"links became copies of what they lead to: {some(copies)}")
        return _plan_arrays(request, file, infos, "*" in names, notes)


def _links_notes(links: Mapping[str, str], all_and: str = "'*', ") -> list[str]:
    """The note about links, which a copy of all arrays does not follow, with what to pass."""
    if not links:
        return []
    texts = ", ".join(f"'{printable(name)}' (to {printable(to)})" for name, to in links.items())
    name = printable(next(iter(links)).lstrip("/"))
    how = f"dataset=[{all_and}'{name}'], or '{name}/*' for a group"
    return [f"links were left out: {texts}. To copy what they lead to, name it, too: {how}"]


def _plan_arrays(
    request: CopyRequest, file: OpenFile, infos: dict[str, ArrayInfo], is_all: bool, notes: list[str]
) -> tuple[list[SourceArray], Groups, list[str]]:
    """What is made of each array, and the attributes of groups; and notes of what is left out."""
    kind = format_for(request.target, request.format)
    described, array_notes = describe_arrays(file, infos)
    notes += array_notes
    # Coordinates of other arrays, and their bounds, keep their own type and layout.
    coordinates = {name for name, array in described.items() if array.info.is_coordinate}
    for name, array in described.items():
        coordinates |= {*array.properties.coordinates, *bounds_of(name, array.properties.attrs)} - {name}
    numbers = [name for name, (info, p, _) in described.items() if p.texts is None and not info.is_dimension]
    main = [name for name in numbers if name not in coordinates] or numbers
    if not is_all:
        notes += take_along(file, described)
    valueless = {name for name, array in described.items() if array.info.is_dimension}
    described = {name: array for name, array in described.items() if name not in valueless}
    for info in (described[name].info for name in main):
        if request.dtype is not None and np.dtype(info.dtype).kind == "c" and request.dtype.kind != "c":
            raise ConfigError(f"{info} is {info.dtype}; as {request.dtype} its imaginary part would be lost. Leave dtype= out")
    by_name = _selection_by_name(_in_positions(request.select, file, described), {name: described[name] for name in main})
    selections = {}
    for name, (info, properties, _) in described.items():
        parts: Any = tuple(by_name.get(dim, slice(None)) for dim in properties.dims)
        is_by_position = name in main and request.select is not None and not isinstance(request.select, Mapping)
        selections[name] = selection_of(request.select if is_by_position else parts, info, properties.dims)
    dims = {name: [described[name].properties.dims[k] for k in selection.kept] for name, selection in selections.items()}
    growing = _growing_axes(request.unlimited, dims, main)
    numbers_first = sorted(described.items(), key=lambda item: item[1].properties.texts is not None)
    sources = []
    for name, (info, properties, state) in numbers_first:
        overrides = _overrides_of(request, info, selections[name], name in main, growing[name])
        dropped = set() if name in coordinates else set(range(len(properties.dims))) - set(selections[name].kept)
        properties, axis_notes = with_coordinates_named(kind, name, properties, described, dropped)
        try:
            spec, spec_notes = spec_like(info, properties, selections[name], kind, overrides)
        except ConfigError as error:
            if properties.texts is None:
                raise
            notes.append(f"{info} was left out: it holds {error}")
            continue
        notes += spec_notes + axis_notes
        if kind != "zarr" and not spec.unlimited and set(properties.unlimited) & set(selections[name].kept):
            notes.append(f"{info} can grow no longer: it has no chunks in the new file")
        target = "/data" if name == "/" and kind != "zarr" else name
        sources.append(SourceArray(info, selections[name], target, spec, state))
    if all(array.is_text for array in sources):
        raise ConfigError(f"'{request.source}' holds no arrays that could be copied")
    _check_layout(request, [array for array in sources if array.info.dataset in main and not array.is_text])
    if kind == "zarr":  # as of a netCDF file of a run that died: a copy has the rows that are there
        unopened = unopened_by_xarray({array.name: array.spec for array in sources})
        notes += [f"{problem}: xarray opens no group with both" for problem, _ in unopened]
    axes = {dim for array in sources for dim in array.spec.dims or ()}
    for name in sorted(valueless if is_all else ()):
        if name.rpartition("/")[2] not in axes:
            notes.append(f"the dimension '{name}' was left out: no array of the new file has it")
    groups, group_notes = _copied_groups(kind, file, described, [array.name for array in sources], axes, is_all)
    return sources, groups, notes + group_notes


def _copied_groups(
    kind: str, file: OpenFile, described: Iterable[str], arrays: list[str], axes: set[str | None], is_all: bool
) -> tuple[Groups, list[str]]:
    """The attributes of groups in the new file: of those above the copied arrays, or of all. And notes of what is left out."""
    used = {""} | {name.strip("/")[:k] for name in described for k, c in enumerate(name.strip("/")) if c == "/"}
    groups: dict[str, Mapping[str, Any]] = {}
    notes: list[str] = []
    attributes, unread = file.groups()
    for group, attrs in attributes.items():
        reason = None
        if group.strip("/") not in used:
            reason = refused_group(kind, group, arrays, axes) if is_all else ""
        if reason is None:
            groups[group], _, refused = attrs_for(kind, f"group '{group}'", attrs)
            notes += [f"{attribute} was left out" for attribute in refused]
        elif reason:
            what = f"the attributes of group {group!r}" if attrs else f"the group {group!r}"
            notes.append(f"{what}, {reason}, {'were' if attrs else 'was'} left out")
    return groups, notes + [f"{attribute} was left out" for attribute in unread]


def _in_positions(select: Any, file: OpenFile, described: Mapping[str, Described]) -> Any:
    """A selection with positions in place of values of coordinates. ConfigError if these say none, or coordinates differ."""
    if not needs_coordinates(select):
        return select
    positions = dict(select)
    for dim, part in select.items():
        if not isinstance(part, Near | Between):
            continue
        selected: list[Any] = []
        for name, (info, properties, _) in described.items():
            if name.rpartition("/")[2] != dim or properties.dims != (dim,) or properties.texts is not None:
                continue
            values = read_values(file, name)
            try:
                numbers = in_numbers(part, dim, properties.attrs, values.dtype) if has_dates(part) else part
                selected += positional_index({dim: numbers}, (dim,), {dim: values})
            except ValueError as error:
                raise ConfigError(f"{error} ({info})") from None
        if not selected or selected.count(selected[0]) < len(selected):
            what = "no coordinate of that name" if not selected else "several coordinates of that name, which differ"
            raise ConfigError(f"select has {part} on the axis {dim!r}, but among what is copied is {what}. Pass positions")
        positions[dim] = selected[0]
    return positions


def _selection_by_name(select: Any, main: Mapping[str, Described]) -> dict[Any, Any]:
    """The selection by names of axes: it applies to every array that has the axis."""
    if select is None:
        return {}
    if isinstance(select, Mapping):
        dims = {dim for _, properties, _ in main.values() for dim in properties.dims if dim}
        for name in select:
            if name not in dims:
                names = some([repr(dim) for dim in sorted(dims)]) or "none with a name. Pass positions, such as select=(0,)"
                raise ConfigError(f"select names the axis {name!r}, which no array has; there are: {names}")
        return dict(select)
    if len(main) > 1:
        raise ConfigError(
            f"select has positions, and there are {len(main)} arrays: {some(list(main))}. Name one with dataset=, or select by "
            "names of axes, such as select={'time': -1}"
        )
    ((info, properties, _),) = main.values()
    selection = selection_of(select, info, properties.dims)
    bounds = enumerate(zip(properties.dims, selection.region.start, selection.region.stop, strict=True))
    return {dim: slice(a, b) if axis in selection.kept else a for axis, (dim, a, b) in bounds if dim is not None}


def _growing_axes(
    unlimited: Sequence[str | int], dims: Mapping[str, Sequence[str | None]], main: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Which axes of each new array can grow. Numbers count the axes of the `main` arrays; a name means that axis of all arrays.

    Raises
    ------
    ConfigError
        If no array has one of the axes.
    """
    growing: set[tuple[str, int]] = set()
    for axis in unlimited:
        axes: set[tuple[str, int]] = set()
        dim_names: set[str | None] = {axis} if isinstance(axis, str) else set()
        if isinstance(axis, int):
            axes = {(name, axis % len(dims[name])) for name in main if -len(dims[name]) <= axis < len(dims[name])}
            dim_names = {dims[name][k] for name, k in axes}
        axes |= {(name, k) for name, of_array in dims.items() for k, dim in enumerate(of_array) if dim and dim in dim_names}
        if not axes:
            shapes_text = some([f"{name} ({', '.join(str(dim or '-') for dim in dims[name])})" for name in main])
            raise ConfigError(f"unlimited is {axis!r}, an axis that no array of the new file has: {shapes_text}")
        growing |= axes
    return {name: tuple(k for k in range(len(of_array)) if (name, k) in growing) for name, of_array in dims.items()}


def _overrides_of(
    request: CopyRequest, info: ArrayInfo, selection: Selection, is_main: bool, grows: tuple[int, ...]
) -> Overrides:
    """What the caller asks of one array: layout only if it has as many axes, compression only if it has chunks."""
    ndim = len(selection.shape)
    for_growth: Any = KEEP
    if info.chunks is None and grows and info.refused is None:  # text, which is no number, is stored as h5py does it
        for_growth = growing_chunks(selection.shape, grows[0], np.dtype(info.dtype).itemsize)
    chunks, shards = (request.chunks, request.shards) if is_main else (KEEP, KEEP)
    if isinstance(chunks, tuple) and len(chunks) != ndim:
        chunks = shards = KEEP
    if isinstance(shards, tuple) and len(shards) != ndim:
        shards = KEEP
    chunks = for_growth if isinstance(chunks, str) else chunks
    has_chunks = (info.chunks is not None if isinstance(chunks, str) else chunks is not None) and ndim > 0
    dtype = request.dtype if is_main else None
    return Overrides(dtype, chunks, shards, request.compression if has_chunks else KEEP, grows)


def _check_layout(request: CopyRequest, main: Sequence[SourceArray]) -> None:
    """ConfigError if something was asked for that no array can have."""
    for name, sizes in (("chunks", request.chunks), ("shards", request.shards)):
        if isinstance(sizes, tuple) and not any(len(array.spec.shape) == len(sizes) for array in main):
            shapes = some([f"{array.info.dataset} {array.spec.shape}" for array in main])
            raise ConfigError(f"{name} are {sizes}, but no array has {len(sizes)} axes: {shapes}. Pass one size for each axis")
    wants = request.compression != KEEP and Compression.of(request.compression) is not None
    in_one_piece = [array for array in main if array.spec.chunks is None and array.spec.shape]  # a number is not compressed
    if wants and in_one_piece and not any(array.spec.chunks is not None for array in main):
        example = tuple(min(n, 64) or 1 for n in in_one_piece[0].spec.shape)
        raise ConfigError(
            f"compression is of chunks, and {in_one_piece[0].info} is in one piece. Pass chunks= too, such as chunks={example}"
        )


def _check_target(request: CopyRequest) -> None:
    target = request.target
    check_target(target)
    if request.format is None and os.path.isdir(target) and not target.rstrip("/").lower().endswith(SUFFIXES):
        raise ConfigError(f"'{target}' is a folder. Pass the new file's name in it, such as '{os.path.join(target, 'out.h5')}'")


def _check_apart(source: str, target: str) -> None:
    """ConfigError if one of two paths is the other, or lies in it."""
    if "://" in source or not target or not os.path.lexists(source):
        return  # opening it says so
    first, second = os.path.realpath(source), os.path.realpath(target.rstrip("/") or "/")
    if first == second or (os.path.exists(second) and os.path.samefile(first, second)):
        raise ConfigError(f"'{target}' is the file that is to be copied. Choose another name, and rename it afterwards")
    if second.startswith(first + os.sep) or first.startswith(second + os.sep):
        raise ConfigError(
            f"one of '{target}' and '{source}' lies in the other, and would be part of it. Choose a name beside it"
        )
