"""How is an existing array stored, so that a new one can be stored like it? Rank 0 reads that; the others get it as text.

What belongs to an array is taken with it: its coordinates, and what its attributes name, or theirs (`NAMING`). All of it is
taken as it is stored, with the types of its attributes.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardload.errors import ConfigError, is_unread
from shardload.formats.access import STRICT
from shardload.formats.contract.array import ArrayInfo, some
from shardload.formats.contract.dtypes import dtype_text, native_dtype
from shardload.formats.contract.format import OpenFile, Source
from shardload.formats.diagnosis import as_source_error
from shardload.formats.growing import units_of
from shardload.formats.labelling import SMALL_NBYTES
from shardload.formats.likeness import NAMING, attrs_for, is_empty_text, named_beside, named_by
from shardload.formats.lookup import find_array, format_of
from shardload.formats.netcdf import NETCDF_TYPES
from shardload.formats.sink import Compression
from shardload.jobs.saving.arguments import SaveArguments, ToSave
from shardload.options import AUTO
from shardload.planning.region import Region
from shardload.values.decoding import OF_STORED, PACKING

__all__ = ["apply_like", "read_like"]

Json = dict[str, Any]

_MOST_BESIDE, _MOST_BESIDE_NBYTES = 256, 1 << 20  # of what belongs to an array: variables, and bytes of their values
_CHECKSUMS = ("fletcher32", "crc32c")
_OF_PACKED = PACKING.union(OF_STORED)  # of the packed values
_AS_IT_IS = ("", "none", "bytes", "raw")


def read_like(like: Mapping[str, str]) -> str:
    """What is taken from existing arrays, by the names of the new ones. Not collective: rank 0 calls it.

    Raises
    ------
    SourceError, ConfigError
        If there is no such array.
    """
    found, known = {}, dict[str, Any]()
    for name, path in like.items():
        if path not in known:
            try:
                info = find_array(path)
            except ConfigError as error:
                raise ConfigError(f"like of '{name}': {error}") from None
            with as_source_error(info.path, info.dataset), format_of(info.path).open_file(info.path, STRICT) as file:
                known[path] = _array(file, info)
        found[name] = known[path]
    return json.dumps(found)


def _array(file: OpenFile, info: ArrayInfo) -> Json:
    with closing(file.open(info.dataset)) as source:
        told = _described(source)
        layout = {"chunks": info.chunks, "shards": info.shards, "codec": info.codec}
        return told | layout | {"kind": source.dtype.kind, "beside": _beside(file, source, told)}


def _described(source: Source) -> Json:
    """The shape, the axes and the attributes of an array."""
    labels = source.labels()
    attrs = {} if source.info.refused is not None else source.properties().attrs
    return {
        "shape": source.info.shape,
        "dims": labels.dims,
        "attrs": {key: told for key, value in attrs.items() if (told := _told(value)) is not None},
        "coords": list(labels.coords),
    }


def _beside(file: OpenFile, source: Source, told: Json) -> Json:
    """What belongs to an array, by its name, if it is in the file."""
    own, room = source.info.dataset, _MOST_BESIDE_NBYTES
    todo = [(name, [one.dataset]) for name, one in source.labels().coords.items()]
    todo += _places(own, told)
    found: Json = {}
    while todo and len(found) < _MOST_BESIDE:
        name, places = todo.pop(0)
        other = None if name in found or own in places else _opened(file, places)
        if other is None:
            continue
        with closing(other):
            one = found[name] = _described(other) | {"dataset": other.info.dataset}
            one |= _values(other, min(SMALL_NBYTES, room))
            room -= len(one.get("values", ()))
        todo += _places(other.info.dataset, one)
    return found


def _places(dataset: str, told: Json) -> list[tuple[str, list[str]]]:
    """Names of variables that the attributes of an array name, and where they may be."""
    named = named_beside(dataset, {key: _typed(one) for key, one in told["attrs"].items() if key in NAMING})
    return [(places[0].rpartition("/")[2], places) for places in named]


def _opened(file: OpenFile, places: Iterable[str]) -> Source | None:
    """The first array that is there. None if there is none, or it is only a dimension of netCDF."""
    for place in places:
        try:
            found = file.open(place)
        except (KeyError, OSError, ValueError, RuntimeError) as error:
            if is_unread(error):
                raise
            continue
        if not found.info.is_dimension:
            return found
        found.close()
    return None


def _values(source: Source, most_nbytes: int) -> Json:
    """The values of an array as they are stored, if they are small; else why there are none."""
    info, whole = source.info, Region.whole(source.info.shape)
    if info.refused is not None:
        return {"no numbers": info.refused}
    if whole.size * source.dtype.itemsize > most_nbytes:
        return {"why": "has more than 64 KiB" if most_nbytes == SMALL_NBYTES else "has, with the others, more than 1 MiB"}
    try:
        values = np.empty(info.shape, source.dtype)
        source.read_into(whole, values)
    except (ConfigError, OSError, ValueError, RuntimeError) as error:  # the array itself can be loaded all the same
        if is_unread(error):
            raise
        return {"why": f"cannot be read ({error})"}
    return {"dtype": native_dtype(values.dtype).name, "values": b64encode(values.tobytes()).decode()}


def apply_like(asked: SaveArguments, text: str) -> SaveArguments:
    """The arguments, with what existing arrays have where the caller passed nothing; and their coordinates.

    Every rank calls this.

    Raises
    ------
    ConfigError
        If an array's codec cannot be written, or two arrays have different coordinates of one name.
    """
    found, arrays, more, left_out = json.loads(text), [], dict[str, ToSave](), dict[str, _LeftOut]()
    names = {one.name for one in asked.arrays}
    for one in asked.arrays:
        if one.name not in found:
            arrays.append(one)
            continue
        made = _like(one, found[one.name], asked)
        arrays.append(made)
        for name, coordinate in _coordinates(made, found[one.name], asked.format, names).items():
            if isinstance(coordinate, _LeftOut):
                left_out.setdefault(name, coordinate)
            elif _is_other(more.setdefault(name, coordinate), coordinate):
                key = name.lstrip("/")
                raise ConfigError(
                    f"the arrays in like= have different coordinates '{key}'. Pass its values, '{key}', with dims={{'{key}': "
                    f"{coordinate.dims}}}; or save '{one.name}' in a group of its own"
                )
    missing = {name: one for name, one in left_out.items() if name not in more}
    told = f"variables that are not saved: {some([one.why for one in missing.values()])}" if missing else ""
    to_pass = next(((name.lstrip("/"), one.dims) for name, one in missing.items() if one.dims is not None), None)
    if to_pass is not None:
        told += f". Pass the values, too, such as '{to_pass[0]}', with dims={{'{to_pass[0]}': {to_pass[1]}}}"
    if any(one.dims is None for one in missing.values()):
        told += ". Only numbers are saved: add other values afterwards, by h5py or zarr-python"
    held, lost = _with_attrs_held(more, asked.format)
    if lost:
        told += f"{'. ' if told else ''}attributes that are not saved: {some(lost)}"
    return replace(asked, arrays=[*arrays, *held], left_out=told)


def _is_other(first: ToSave, second: ToSave) -> bool:
    """Whether two coordinates of one name are not the same: other values, in other units, or packed in another way."""
    is_float = first.dtype.kind in "fc" and second.dtype.kind in "fc"
    packing, other = ({key: value for key, value in one.attrs.items() if key in PACKING} for one in (first, second))
    return (
        first.dims != second.dims
        or not np.array_equal(first.x, second.x, equal_nan=is_float)
        or units_of(first.attrs) != units_of(second.attrs)
        or packing != other
    )


def _with_attrs_held(coordinates: Mapping[str, ToSave], kind: str) -> tuple[list[ToSave], list[str]]:
    """Coordinates with the attributes that a format holds, and which it does not hold."""
    made, lost = [], list[str]()
    for name, one in coordinates.items():
        held, more = _held(f"'{name}'", one.attrs, kind)
        made.append(replace(one, attrs=held))
        lost += more
    return made, lost


def _held(name: str, attrs: Mapping[str, Any], kind: str) -> tuple[dict[str, Any], list[str]]:
    """The attributes that a format holds, and which it does not hold. What marks missing data is left to `marked`."""
    if not kind.startswith("zarr"):  # JSON's null, which says nothing
        attrs = {key: value for key, value in attrs.items() if value is not None}
    found, _, lost = attrs_for(kind, name, {key: value for key, value in attrs.items() if key != "_FillValue"})
    return found | {key: attrs[key] for key in ("_FillValue",) if key in attrs}, lost


def _like(one: ToSave, known: Mapping[str, Any], asked: SaveArguments) -> ToSave:
    chunks, compression, checksum, shards = one.chunks, one.compression, False, one.shards
    if chunks == AUTO:
        chunks = None if known["chunks"] is None else tuple(known["chunks"])
        if chunks is not None and len(chunks) != len(one.shape):
            raise ConfigError(
                f"'{one.name}' has {len(one.shape)} axes, but like= names an array of {len(chunks)} axes. Pass chunks= too"
            )
        if known["shards"] is not None and shards is None and asked.format == "zarr":
            shards = tuple(known["shards"])
        if not one.is_packing_told:
            compression, checksum = _packing(one.name, known["codec"])
    dims = one.dims
    if dims is None and len(known["dims"]) == len(one.shape) and any(known["dims"]):
        dims = tuple(known["dims"])
    return replace(
        one,
        chunks=chunks,
        shards=shards,
        compression=compression,
        checksum=checksum,
        dims=dims,
        attrs=_attrs(one, known, asked.format) | dict(one.attrs),
    )


def _attrs(one: ToSave, known: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The attributes of the array that this one is like, without those that its values do not have."""
    attrs = {key: _typed(told) for key, told in known["attrs"].items() if key not in one.attrs}
    if _is_decoded(one, known["kind"], attrs):  # they would be so a second time
        attrs = {key: value for key, value in attrs.items() if key not in _OF_PACKED}
    found, lost = _held(f"'{one.name}'", attrs, kind)
    if lost:
        raise ConfigError(f"{lost[0]} cannot be taken from the array in like=. Pass another value for it in attrs=")
    return found


def _is_decoded(one: ToSave, kind: str, attrs: Mapping[str, Any]) -> bool:
    """Whether the attributes say how numbers are packed that this array has as values.

    Raises
    ------
    ConfigError
        If the packed numbers are of floating point, too, so that nothing says which of the two it has.
    """
    how = PACKING & attrs.keys()
    if not how or one.is_decoded is not None:
        return bool(how) and one.is_decoded is True
    if how == {"_Unsigned"} and one.dtype.kind in "iu":
        return one.dtype.kind != kind
    if kind in "iu" or one.dtype.kind in "biu":
        return kind in "iu" and one.dtype.kind not in "biu"
    packed = [f"{key}={attrs[key]}" for key in sorted(how & {"scale_factor", "add_offset"}) if attrs[key] != (key[0] == "s")]
    if packed and PACKING.isdisjoint(one.attrs):
        raise ConfigError(
            f"'{one.name}' holds {one.dtype.name}, and the array in like= holds floating point numbers that are packed "
            f"({', '.join(packed)}), so nothing says whether yours are such numbers or decoded values. For values pass the "
            "plan that decoded them, plan=; for packed numbers pass the attributes yourself, in attrs="
        )
    return False


def _told(value: Any) -> Any:
    """An attribute with its type, as JSON; None for numbers of which there are none."""
    if value is None or is_empty_text(value):
        return {"is": None if value is None else ""}
    try:
        found = np.asarray(value)
    except ValueError:  # lists of different lengths, in JSON
        return {"is": value}
    if found.dtype.kind in "biufcS":
        return [dtype_text(found.dtype), found.shape, b64encode(found.tobytes()).decode()]
    if isinstance(value, (bytes, str, int, list, tuple, dict)) or found.dtype.kind == "U" or found.ndim:
        return {"texts": found.tolist()} if isinstance(value, np.ndarray) else {"is": value}
    return None


def _typed(told: Any) -> Any:
    """The inverse of `_told`."""
    if isinstance(told, dict):  # an array, because netCDF has one text as an array of one
        return np.array(told["texts"], dtype=object) if "texts" in told else told["is"]
    name, shape, data = told
    return np.frombuffer(b64decode(data), np.dtype(name)).reshape(shape)[()]


def _packing(name: str, codec: str) -> tuple[Compression | None, bool]:
    """Compression and checksum from the text of an `ArrayInfo.codec`."""
    parts = [part for part in codec.split("+") if part not in _AS_IT_IS]
    checksum = any(part in _CHECKSUMS for part in parts)
    shuffle = "shuffle" in parts
    rest = [part for part in parts if part not in _CHECKSUMS and part != "shuffle"]
    if len(rest) > 1:
        raise ConfigError(f"'{name}' cannot be stored like an array with the codec {codec}: pass compression=, such as 'gzip'")
    if not rest and not shuffle:
        return None, checksum
    return Compression(rest[0] if rest else "none", shuffle=shuffle or rest == ["blosc"]), checksum


@dataclass(frozen=True)
class _LeftOut:
    """A variable that a new array cannot have: why, and the names of its axes if the caller can pass it."""

    why: str
    dims: tuple[str | None, ...] | None


def _coordinates(one: ToSave, known: Json, kind: str, passed: set[str]) -> dict[str, ToSave | _LeftOut]:
    """What belongs to an array that this one is like, by its new names; or why this one cannot have it.

    What an attribute names is told if it cannot be had. A coordinate is not, if it belongs to an axis that is not there.
    """
    found: dict[str, ToSave | _LeftOut] = {}
    group = one.name.rpartition("/")[0]
    lengths = {dim: n for dim, n in zip(one.dims or (), one.shape, strict=False) if dim}
    named = set(named_by(one.attrs))
    todo, seen = [*known["coords"], *named], set[str]()
    while todo:
        path = todo.pop(0)
        key = path.rpartition("/")[2]
        name, other = f"{group}/{key}", known["beside"].get(key)
        if key in seen or other is None or name in passed:
            continue
        seen.add(key)
        made = _taken(name, other, one, lengths, kind, set(known["dims"]), path in named)
        if made is not None:
            found[name] = made
        if isinstance(made, ToSave):
            more = named_by(made.attrs)
            named.update(more)
            todo += more
    return found


def _taken(
    name: str, other: Json, one: ToSave, lengths: Mapping[str, int], kind: str, dims_like: set[Any], is_named: bool
) -> ToSave | _LeftOut | None:
    """A variable that belongs to an array, as an array of its own; or why it cannot be had, or None if nobody misses it."""
    where, dims = f"'{other['dataset']}' in like=", tuple(other["dims"])
    text, absent = other.get("no numbers"), [dim for dim in dims if dim not in lengths and (dim is None or dim in dims_like)]
    if text is not None and (is_named or not dims or not lengths.keys().isdisjoint(dims)):  # texts may have an axis of letters
        return _LeftOut(f"{where} holds {text}", None)
    if not is_named and not lengths.keys() >= set(dims):
        return None
    if absent:
        axis = "an axis without a name" if None in absent else f"the axis '{absent[0]}', which '{one.name}' does not have"
        return _LeftOut(f"{where} has {axis}", None if None in absent else dims)
    if "values" not in other:
        return _LeftOut(f"{where} {other['why']}", dims)
    shape, dtype = tuple(other["shape"]), np.dtype(other["dtype"])
    if wrong := [dim for dim, n in zip(dims, shape, strict=True) if lengths.get(dim, n) != n]:
        why = f"has shape {shape}, and axis '{wrong[0]}' of '{one.name}' {lengths[wrong[0]]} elements"
        return _LeftOut(f"{where} {why}", dims)
    values = np.frombuffer(b64decode(other["values"]), dtype).reshape(shape)
    attrs = {key: _typed(told) for key, told in other["attrs"].items()}
    if kind == "netcdf4" and dtype.kind == "b":  # which has no booleans: as xarray writes them
        values, attrs = values.astype("int8"), attrs | {"dtype": "bool"}
    if kind == "netcdf4" and f"{values.dtype.kind}{values.dtype.itemsize}" not in NETCDF_TYPES:
        return _LeftOut(f"{where} holds {values.dtype}, which netCDF4 does not have", None)
    return ToSave(name, values, values.shape, values.dtype, None, None, None, dims, attrs)
