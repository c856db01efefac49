"""How is an existing array stored, so that a new one can be stored like it? Rank 0 reads that, and tells the others.

Layout, compression and attributes are found as for a copy (`formats.likeness`). What belongs to the array is taken with it: its
coordinates, and what its attributes name, or theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardload.errors import ConfigError, ShardloadError
from shardload.formats.access import Access
from shardload.formats.contract.array import Properties, some
from shardload.formats.labelling import COORDINATE_NBYTES
from shardload.formats.likeness import KEEP, Overrides, named_beside, spec_like
from shardload.formats.lookup import find_array, open_file
from shardload.formats.netcdf import NETCDF_TYPES
from shardload.formats.sink import ArraySpec, units_of
from shardload.jobs.described import Described, describe_array, read_values, take_along
from shardload.jobs.saving.arguments import SavedArray, SaveRequest
from shardload.options import AUTO
from shardload.planning.selection import select_axes
from shardload.values.decoding import OF_STORED, PACKING

_MOST_NBYTES = 4 * COORDINATE_NBYTES  # of the values of all that belongs to an array


@dataclass(frozen=True)
class Model:
    """An existing array: its name; by name it and what belongs to it; and the values of that, if small."""

    name: str
    arrays: Mapping[str, Described]
    values: Mapping[str, np.ndarray[Any, Any]]
    notes: list[str]


def read_like(request: SaveRequest) -> dict[str, Model]:
    """What is taken from existing arrays, by their paths. Rank 0 calls it.

    Raises
    ------
    SourceError, ConfigError
        If there is no such array.
    """
    models: dict[str, Model] = {}
    access = Access(storage=request.options.storage)
    for array in request.arrays:
        if array.like is not None and array.like not in models:
            try:
                models[array.like] = _read(array.like, access)
            except ConfigError as error:
                raise ConfigError(f"like of '{array.name}': {error}") from None
    return models


def _read(path: str, access: Access) -> Model:
    info = find_array(path, None, access)
    with open_file(path, access) as file:  # not `info.path`: that of a URL lacks its signature
        described = {info.dataset: describe_array(file, info.dataset, info)}
        notes = take_along(file, described)
        values, room = {}, _MOST_NBYTES
        for name, array in described.items():
            nbytes = int(np.prod(array.info.shape)) * array.properties.dtype.itemsize
            if name == info.dataset or array.properties.texts is not None or nbytes > min(COORDINATE_NBYTES, room):
                continue
            try:
                values[name] = read_values(file, name)
            except ShardloadError as error:  # the array itself can be loaded all the same
                notes.append(f"'{name}' cannot be read: {error}")
            room -= nbytes
        arrays = {name: array._replace(info=replace(array.info, labels=None)) for name, array in described.items()}
        return Model(info.dataset, arrays, values, notes)


def apply_like(request: SaveRequest, models: Mapping[str, Model]) -> SaveRequest:
    """The arguments, with what existing arrays have where the caller passed nothing; and their coordinates.

    Every rank calls this. `models` is what `read_like` returned on rank 0.

    Raises
    ------
    ConfigError
        If an array cannot be stored like the other, or two arrays have different coordinates of one name.
    """
    arrays, coordinates, notes = list[SavedArray](), dict[str, SavedArray](), dict[str, None]()
    for array in request.arrays:
        if array.like is None:
            arrays.append(array)
            continue
        model = models[array.like]
        saved, lost = _like(array, model, request.format)
        arrays.append(saved)
        notes |= dict.fromkeys([*model.notes, *lost])
        for coordinate, left_out in _coordinates(saved, model, request.format, request.names):
            notes |= dict.fromkeys(left_out)
            if coordinate is not None and _is_other(coordinates.setdefault(coordinate.name, coordinate), coordinate):
                key = coordinate.name.lstrip("/")
                raise ConfigError(
                    f"the arrays in like= have different coordinates '{key}'. Pass its values, '{key}', with dims={{'{key}': "
                    f"{coordinate.dims}}}; or save '{array.name}' in a group of its own"
                )
    left_out_text = (
        f"not saved, of the arrays in like=: {some(list(notes))}. Pass arrays that are missed too, with dims=" if notes else ""
    )
    return replace(request, arrays=[*arrays, *coordinates.values()], left_out=left_out_text)


def _is_other(first: SavedArray, second: SavedArray) -> bool:
    """Whether two coordinates of one name are not the same: other values, in other units, or packed in another way."""
    is_float = first.dtype.kind in "fc" and second.dtype.kind in "fc"
    first_packing, second_packing = (
        {key: array.attrs[key] for key in PACKING & array.attrs.keys()} for array in (first, second)
    )
    return (
        first.dims != second.dims
        or not np.array_equal(first.x, second.x, equal_nan=is_float)
        or units_of(first.attrs) != units_of(second.attrs)
        or first_packing != second_packing
    )


def _like(array: SavedArray, model: Model, kind: str) -> tuple[SavedArray, list[str]]:
    """The array, with what its model has where nothing was passed; and notes of what it cannot have."""
    info, properties, _ = model.arrays[model.name]
    chunks = KEEP if array.chunks == AUTO else array.chunks
    if isinstance(chunks, str) and info.chunks is not None and len(info.shape) != len(array.shape):
        raise ConfigError(
            f"'{array.name}' has {len(array.shape)} axes, but like= names an array of {len(info.shape)} axes. Pass chunks= too"
        )
    attrs = {key: value for key, value in properties.attrs.items() if key not in array.attrs}
    if _is_decoded(array, properties.dtype.kind, attrs):  # they would be so a second time
        attrs = {key: value for key, value in attrs.items() if key not in PACKING.union(OF_STORED)}
    shards = KEEP if array.shards is None else array.shards
    overrides = Overrides(None, chunks, shards, array.compression if array.is_packing_told else KEEP)
    as_new = replace(properties, attrs=attrs, dtype=array.dtype)
    spec, notes = spec_like(info, as_new, select_axes(None, info.shape), kind, overrides)
    dims = array.dims
    if dims is None and len(properties.dims) == len(array.shape) and any(properties.dims):
        dims = properties.dims
    saved = replace(
        array,
        chunks=spec.chunks,
        shards=spec.shards,
        compression=spec.compression,
        checksum=spec.checksum,
        dims=dims,
        attrs=_with_marker(spec, as_new) | dict(array.attrs),
    )
    return saved, notes


def _with_marker(spec: ArraySpec, properties: Properties) -> dict[str, Any]:
    """The attributes, with the value that marks missing data as ``_FillValue``, in whatever way the format has it."""
    marker = {"_FillValue": properties.attrs.get("_FillValue")}
    has_marker = marker["_FillValue"] is not None and spec.dtype.kind == properties.dtype.kind
    return {**spec.attrs, **marker} if has_marker else dict(spec.attrs)


def _is_decoded(array: SavedArray, kind: str, attrs: Mapping[str, Any]) -> bool:
    """Whether the attributes say how numbers are packed that this array has as values.

    Raises
    ------
    ConfigError
        If the packed numbers are of floating point, too, so that nothing says which of the two it has.
    """
    packing = PACKING & attrs.keys()
    if not packing or array.is_decoded is not None:
        return bool(packing) and array.is_decoded is True
    if packing == {"_Unsigned"} and array.dtype.kind in "iu":
        return array.dtype.kind != kind
    if kind in "iu" or array.dtype.kind in "biu":
        return kind in "iu" and array.dtype.kind not in "biu"
    packed = [
        f"{key}={attrs[key]}" for key in sorted(packing & {"scale_factor", "add_offset"}) if attrs[key] != (key[0] == "s")
    ]
    if packed and PACKING.isdisjoint(array.attrs):
        raise ConfigError(
            f"'{array.name}' holds {array.dtype.name}, and the array in like= holds floating point numbers that are packed "
            f"({', '.join(packed)}), so nothing says whether yours are such numbers or decoded values. For values pass the "
            "plan that decoded them, plan=; for packed numbers pass the attributes yourself, in attrs="
        )
    return False


def _coordinates(
    array: SavedArray, model: Model, kind: str, passed: Collection[str]
) -> Iterator[tuple[SavedArray | None, list[str]]]:
    """What belongs to the model, as arrays in the group of this one; and notes of what is left out.

    What an attribute names is noted if it cannot be taken. A coordinate is not, if this array has not its axis.
    """
    lengths: dict[Any, int | None] = {dim: n for dim, n in zip(array.dims or (), array.shape, strict=False) if dim}
    todo, seen = [model.name], {model.name}
    for name in todo:  # grows
        of_name = model.arrays[name].properties
        named = [place for places in named_beside(name, of_name.attrs) for place in places]
        for place in dict.fromkeys([*of_name.coordinates, *named]):
            new_name = f"{array.name.rpartition('/')[0]}/{place.rpartition('/')[2]}"
            if place in seen or place not in model.arrays or new_name in passed:
                continue
            seen.add(place)
            info, properties, _ = model.arrays[place]
            is_text, has_axes = properties.texts is not None, lengths.keys() >= set(properties.dims)
            is_missed = place in named or has_axes or (is_text and not lengths.keys().isdisjoint(properties.dims))
            if info.is_dimension or not is_missed:
                continue
            axes: list[Any] = list(zip(properties.dims, info.shape, strict=True))
            model_dims = model.arrays[model.name].properties.dims  # it may have other axes, as bounds do
            expected = [lengths.get(dim, None if dim in (None, *model_dims) else n) for dim, n in axes]
            why = ""
            if is_text:
                why = "is text"
            elif expected != list(info.shape):
                why = f"does not fit the axes of '{array.name}'"
            elif place not in model.values:
                why = "is too large"
            elif kind == "netcdf4" and f"{properties.dtype.kind}{properties.dtype.itemsize}" not in (*NETCDF_TYPES, "b1"):
                why = "has a type that netCDF4 does not have"
            if why:
                yield None, [f"'{place}', with the axes {properties.dims} and shape {info.shape}, {why}"]
                continue
            todo.append(place)
            as_it_is = Overrides(chunks=None, shards=None, compression=None)
            spec, notes = spec_like(info, properties, select_axes(None, info.shape), kind, as_it_is)
            x = model.values[place].astype(spec.dtype, copy=False)
            yield (
                SavedArray(new_name, x, x.shape, spec.dtype, None, None, None, spec.dims, _with_marker(spec, properties)),
                notes,
            )
