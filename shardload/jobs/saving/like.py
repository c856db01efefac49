"""How is an existing array stored, so that a new one can be stored like it? Rank 0 reads that, and tells the others.

Layout, compression and attributes are found as for a copy (`formats.likeness`). Other arrays of that file are not saved: those
that belong to it, its coordinates and what its attributes name, are named in a warning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardload.errors import ConfigError
from shardload.formats.access import Access
from shardload.formats.contract.array import some
from shardload.formats.likeness import KEEP, Overrides, named_beside, spec_like
from shardload.formats.lookup import find_array, open_file
from shardload.jobs.described import Described, describe_array, take_along
from shardload.jobs.saving.arguments import SavedArray, SaveRequest
from shardload.options import AUTO
from shardload.planning.selection import select_axes
from shardload.values.decoding import OF_STORED, PACKING


@dataclass(frozen=True)
class Model:
    """An existing array; the names of the axes of each array that belongs to it; and notes of those that cannot be read."""

    array: Described
    beside: Mapping[str, tuple[str | None, ...]]
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
    array = described.pop(info.dataset)
    beside = {name: other.properties.dims for name, other in described.items() if not other.info.is_dimension}
    return Model(array._replace(info=replace(info, labels=None)), beside, notes)


def apply_like(request: SaveRequest, models: Mapping[str, Model]) -> SaveRequest:
    """The arguments, with what existing arrays have where the caller passed nothing. Every rank calls this. `models` is what
    `read_like` returned on rank 0.

    Raises
    ------
    ConfigError
        If an array cannot be stored like the other.
    """
    arrays, notes = list[SavedArray](), dict[str, None]()
    for array in request.arrays:
        if array.like is not None:
            model = models[array.like]
            array, lost = _like(array, model.array, request.format)
            notes |= dict.fromkeys([*model.notes, *lost, *_not_saved(array, model, request.names)])
        arrays.append(array)
    left_out_text = (
        f"not saved, of what like= names: {some(list(notes))}. Pass arrays that are missed, too, with like= or dims="
    )
    return replace(request, arrays=arrays, left_out=left_out_text if notes else "")


def _not_saved(array: SavedArray, model: Model, names: Collection[str]) -> list[str]:
    """What belongs to the model and is not among the new arrays; coordinates of axes that this array has not are not missed."""
    info, properties, _ = model.array
    named = {place for places in named_beside(info.dataset, properties.attrs) for place in places}
    gone, group = {*properties.dims}.difference(array.dims or ()), array.name.rpartition("/")[0]
    return [
        f"'{place}'"
        for place, dims in model.beside.items()
        if f"{group}/{place.rpartition('/')[2]}" not in names and (place in named or gone.isdisjoint(dims))
    ]


def _like(array: SavedArray, model: Described, kind: str) -> tuple[SavedArray, list[str]]:
    """The array, with what its model has where nothing was passed; and notes of what it cannot have."""
    info, properties, _ = model
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
    # Whatever way the format has to mark missing data, it is `_FillValue` among the attributes.
    has_marker = attrs.get("_FillValue") is not None and spec.dtype.kind == array.dtype.kind
    saved = replace(
        array,
        chunks=spec.chunks,
        shards=spec.shards,
        compression=spec.compression,
        checksum=spec.checksum,
        dims=dims,
        attrs={**spec.attrs, **({"_FillValue": attrs["_FillValue"]} if has_marker else {}), **array.attrs},
    )
    return saved, notes


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
