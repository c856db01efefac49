"""What must be known of arrays of a file to make others like them, and what belongs to an array that was chosen?"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from shardload.errors import ConfigError, SourceError, printable
from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo, Properties, names_in
from shardload.formats.contract.format import OpenFile
from shardload.formats.diagnosis import as_source_error, check_loadable
from shardload.formats.likeness import as_text, named_beside
from shardload.formats.lookup import Finder
from shardload.jobs.consistency import State
from shardload.planning.region import Region

Array = np.ndarray[Any, Any]

Described = tuple[ArrayInfo, Properties, State]


def describe_array(file: OpenFile, name: str, expected: ArrayInfo | None = None) -> Described:
    """What must be known of an array of numbers, or of a short one of text. SourceError for another one."""
    with closing(file.open(name, expected)) as source:
        info = source.info if expected is None else expected
        with as_source_error(info.path, name):
            properties = source.properties()
        if properties.texts is None:
            check_loadable(source.info)
        return info, properties, source.opened_in()


def read_values(file: OpenFile, name: str, region: Region | None = None) -> Array:
    """Stored values of an array, or of a region of it, as the format's library reads them, in the machine's byte order."""
    with closing(file.open(name)) as source, as_source_error(source.info.path, name):
        region = Region.whole(source.info.shape) if region is None else region
        values = np.asarray(source.plain(region)).reshape(region.shape)
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def find_arrays(path: str, names: Iterable[str], access: Access) -> tuple[dict[str, ArrayInfo], dict[str, ConfigError]]:
    """The arrays of a file with these names, or below the groups of patterns; also those that hold no numbers. And the errors
    about groups below which there are none.
    """
    infos: dict[str, ArrayInfo] = {}
    empty: dict[str, ConfigError] = {}
    with Finder(access, tells=True) as finder:
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
    """What must be known of arrays, by name; and notes of those that hold neither numbers nor short text."""
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
        for places in _belonging(name, described[name][1]):
            if any(place in described for place in places):
                continue
            for place in places:
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


def found_by_name(
    kind: str, name: str, properties: Properties, there: Container[str], dropped: Container[int] = ()
) -> tuple[Properties, list[str]]:
    """With an attribute that names the coordinates which the new file's format does not find otherwise: those in other groups,
    all but one of an axis, and those of axes that a selection has dropped. HDF5 attaches all but the last ones. And notes of
    what else only HDF5 says of axes.
    """
    gone = {dim for axis, dim in enumerate(properties.dims) if dim and axis in dropped}
    if kind == "hdf5" and not gone:
        return properties, []
    own, last = name.rpartition("/")[::2]
    places = {
        place for places in named_beside(name, {"coordinates": properties.attrs.get("coordinates", "")}) for place in places
    }
    places = places if kind == "netcdf4" else {place for place in places if place.rpartition("/")[0] == own}
    for dim in [dim for dim in properties.dims if dim and dim not in gone]:
        above = own
        while kind == "netcdf4" and above and f"{above}/{dim}" not in there:
            above = above.rpartition("/")[0]
        places.add(f"{above}/{dim}")
    unnamed = [one for one in properties.coordinates if one in there and one not in {name, *places}]
    if kind == "hdf5":
        unnamed = [one for one in unnamed if one.rpartition("/")[2] in gone]
    words = [one.rpartition("/")[2] if one.rpartition("/")[0] == own else one for one in unnamed]
    notes = [f"the coordinate '{one}' of '{name}'" for one in words if len(one.split()) > 1]
    if words := [one for one in words if len(one.split()) == 1]:
        told = [*names_in(as_text(properties.attrs.get("coordinates"))), *words]
        properties = replace(properties, attrs={**properties.attrs, "coordinates": " ".join(told)})
    if kind == "hdf5":
        return properties, [f"{what} was left out" for what in notes]
    each = zip(properties.axis_labels, properties.dims, strict=False)
    notes += [f"the label {label!r} of axis {k} of '{name}'" for k, (label, dim) in enumerate(each) if label not in ("", dim)]
    if properties.scale_name not in (None, "", last, properties.stored_name):
        notes.append(f"the name {properties.scale_name!r} of '{name}' as a dimension scale")
    return properties, [f"{what} was left out" for what in notes]


def _belonging(name: str, properties: Properties) -> list[list[str]]:
    """What belongs to an array, each with the places where it may be: coordinates, and what attributes name."""
    return [*([one] for one in properties.coordinates), *named_beside(name, properties.attrs)]
