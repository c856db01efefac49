"""What must be known of arrays of a file to make others like them, and what belongs to an array that is copied or joined?"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardload.errors import ConfigError, SourceError, printable
from shardload.formats.contract.array import ArrayInfo, Properties, names_in
from shardload.formats.contract.format import OpenFile
from shardload.formats.diagnosis import as_source_error, check_loadable
from shardload.formats.likeness import as_text, named_beside
from shardload.formats.lookup import Finder
from shardload.jobs.consistency import State
from shardload.planning.region import Region
from shardload.planning.selection import Between, Near, Selection, positional_index, select_axes
from shardload.values.dates import has_dates, in_numbers

Array = np.ndarray[Any, Any]


def selection_of(select: Any, info: ArrayInfo, dims: Sequence[str | None] | None = None) -> Selection:
    """The elements that a selection means in an array. ConfigError if the array has no such elements.

    `dims` are the names of its axes, by default those among its labels, which have the coordinates, too.
    """
    try:
        dims = info.dims if dims is None else dims
        return select_axes(_index_of(select, info, dims) if isinstance(select, Mapping) else select, info.shape, dims)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{error} ({info} has shape {info.shape})") from None


def _index_of(select: Mapping[Any, Any], info: ArrayInfo, dims: Sequence[str | None]) -> tuple[Any, ...]:
    """The NumPy-style index of an array for a selection by names of its axes. ValueError if there is none."""
    # Of that axis alone: an array that has its name may lie along another one.
    coords = {name: coord for name, coord in info.coords.items() if coord.dims in ((name,), (None,))}
    parts = dict(select)
    for name, part in parts.items():
        values = coords[name].values if name in coords else None
        if isinstance(part, Near | Between) and values is not None and values.dtype.kind in "iuf" and has_dates(part):
            parts[name] = in_numbers(part, name, coords[name].attrs, values.dtype)
    return positional_index(parts, dims, {name: coord.values for name, coord in coords.items()}, info.shape)


class Described(NamedTuple):
    """What must be known of an array: its metadata, what else the file says of it, and the state of the file."""

    info: ArrayInfo
    properties: Properties
    state: State


def describe_array(file: OpenFile, name: str, planned: ArrayInfo | None = None) -> Described:
    """What must be known of an array of numbers, or of short text. SourceError if it holds something else.

    `planned` are its metadata, if they are known already: they are returned as they are.
    """
    with closing(file.open(name, planned)) as source:
        info = source.info if planned is None else planned
        with as_source_error(info.path, name):
            properties = source.properties()
        if properties.texts is None:
            check_loadable(source.info)
        return Described(info, properties, source.opened_in)


def read_values(file: OpenFile, name: str, region: Region | None = None) -> Array:
    """Stored values of an array, or of a region of it, as the format's library reads them, in the machine's byte order."""
    with closing(file.open(name)) as source, as_source_error(source.info.path, name):
        region = Region.whole(source.info.shape) if region is None else region
        source.expect(region)
        values = np.asarray(source.plain(region)).reshape(region.shape)
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def find_arrays(finder: Finder, path: str, names: Iterable[str]) -> tuple[dict[str, ArrayInfo], dict[str, ConfigError]]:
    """The arrays of a file with these names, or below the groups of patterns, by full name; also those that hold no numbers.
    And of each group (``""`` or ``"/g"``) below which there are none, the error that says so.
    """
    infos: dict[str, ArrayInfo] = {}
    empty: dict[str, ConfigError] = {}
    for name in names:
        if name != "*" and not name.endswith("/*"):
            info = finder.find(path, name).info
            infos[info.dataset] = info
            continue
        group = "" if name == "*" else "/" + name[:-2].strip("/")
        try:
            below, left_out = finder.find_below(path, group, with_dimensions=True)
        except ConfigError as error:
            empty[group] = error
            continue
        infos |= {info.dataset: info for info in [*(array.info for array in below), *left_out]}
    return infos, empty


def describe_arrays(file: OpenFile, infos: Mapping[str, ArrayInfo]) -> tuple[dict[str, Described], list[str]]:
    """The arrays by name; and notes of those that hold neither numbers nor short text."""
    described: dict[str, Described] = {}
    notes = []
    for name, info in infos.items():
        try:
            described[name] = describe_array(file, info.dataset, info)
        except SourceError:
            if info.refused is None:
                raise
            notes.append(f"'{printable(name)}' was left out: it holds {info.refused}")
    return described, notes


def take_along(file: OpenFile, described: dict[str, Described]) -> list[str]:
    """Add what belongs to arrays that were chosen: coordinates, and what attributes name. Returns notes of what is lost."""
    notes, todo = [], list(described)
    for name in todo:  # grows
        properties = described[name].properties
        # Each is a list of full names that one thing may have: the first one that is there is meant.
        for candidates in (*([place] for place in properties.coordinates), *named_beside(name, properties.attrs)):
            if any(place in described for place in candidates):
                continue
            for place in candidates:
                try:
                    described[place] = describe_array(file, place)
                except KeyError:  # there is none: many axes have a name only
                    continue
                except SourceError as error:
                    notes.append(f"'{place}', which belongs to '{name}', was left out: {error}")
                else:
                    todo.append(place)
                break
    return notes


def with_coordinates_named(
    kind: str, name: str, properties: Properties, names: Container[str], dropped: Container[int] = ()
) -> tuple[Properties, list[str]]:
    """The properties, with an attribute ``coordinates`` that names those which the new file's format does not find by itself;
    and notes of what else is lost.

    By itself netCDF4 finds a coordinate that is called as an axis, in the array's group or those above; Zarr in the array's
    group alone; HDF5 all that are attached to an axis, but not those of an axis that a selection has dropped.

    `names` are the arrays of the new file, `dropped` the numbers of the axes.
    """
    gone = {dim for axis, dim in enumerate(properties.dims) if dim and axis in dropped}
    if kind == "hdf5" and not gone:
        return properties, []
    group = name.rpartition("/")[0]
    places = set[str]().union(*named_beside(name, {"coordinates": properties.attrs.get("coordinates", "")}))
    places = places if kind == "netcdf4" else {place for place in places if place.rpartition("/")[0] == group}
    for dim in [dim for dim in properties.dims if dim and dim not in gone]:
        above = group
        while kind == "netcdf4" and above and f"{above}/{dim}" not in names:
            above = above.rpartition("/")[0]
        places.add(f"{above}/{dim}")
    unnamed = [place for place in properties.coordinates if place in names and place not in {name, *places}]
    if kind == "hdf5":
        unnamed = [place for place in unnamed if place.rpartition("/")[2] in gone]
    words = [place.rpartition("/")[2] if place.rpartition("/")[0] == group else place for place in unnamed]
    notes = [f"the coordinate '{word}' of '{name}'" for word in words if len(word.split()) > 1]
    if words := [word for word in words if len(word.split()) == 1]:
        coordinates = [*names_in(as_text(properties.attrs.get("coordinates"))), *words]
        properties = replace(properties, attrs={**properties.attrs, "coordinates": " ".join(coordinates)})
    if kind != "hdf5":  # which alone has more than names of axes: labels, and a name as a dimension scale
        labels = enumerate(zip(properties.axis_labels, properties.dims, strict=False))
        notes += [f"the label {label!r} of axis {k} of '{name}'" for k, (label, dim) in labels if label not in ("", dim)]
        if properties.scale_name not in (None, "", name.rpartition("/")[2], properties.stored_name):
            notes.append(f"the name {properties.scale_name!r} of '{name}' as a dimension scale")
    return properties, [f"{note} was left out" for note in notes]
