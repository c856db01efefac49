"""How is an existing array stored, so that a new one can be stored like it? Rank 0 reads that; the others get it as text."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardload.errors import ConfigError
from shardload.formats.access import STRICT
from shardload.formats.base import some
from shardload.formats.diagnosis import as_source_error, in_path
from shardload.formats.growing import units_of
from shardload.formats.labels import Coordinate, from_plain, to_plain
from shardload.formats.likeness import attrs_for, is_empty_text
from shardload.formats.lookup import find_array, format_of, open_file, read_labels
from shardload.formats.netcdf import NETCDF_TYPES
from shardload.formats.sink import Compression
from shardload.jobs.saving.arguments import SaveArguments, ToSave
from shardload.options import AUTO
from shardload.values.decoding import OF_STORED, PACKING

__all__ = ["apply_like", "read_like"]

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
                raise ConfigError(f"like of '{name}': {in_path(str(error))}") from None
            with open_file(info.path) as file, closing(file.open(info.dataset)) as source:
                kind, attrs = source.dtype.kind, source.properties().attrs
            labels = to_plain(read_labels(path, info))
            known[path] = {
                "kind": kind,
                "attrs": {key: told for key, value in attrs.items() if (told := _told(value)) is not None},
                "shape": info.shape,
                "chunks": info.chunks,
                "shards": info.shards,
                "codec": info.codec,
                "labels": labels,
                "no numbers": _no_numbers(info.path, labels),
            }
        found[name] = known[path]
    return json.dumps(found)


def _no_numbers(path: str, labels: Mapping[str, Any] | None) -> dict[str, str]:
    """What the coordinates hold that are no numbers, by their names."""
    found = {}
    for name, (dataset, _, _, values) in ({} if labels is None else labels["coords"]).items():
        if values is None:
            with as_source_error(path, dataset), closing(format_of(path).open_path(path, dataset, STRICT)) as source:
                if source.info.refused is not None:
                    found[name] = source.info.refused
    return found


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
        for name, coordinate in _coordinates(made, found[one.name], asked.format).items():
            if name in names:
                continue
            if isinstance(coordinate, _LeftOut):
                left_out.setdefault(name, coordinate)
            elif _is_other(more.setdefault(name, coordinate), coordinate):
                key = name.lstrip("/")
                raise ConfigError(
                    f"the arrays in like= have different coordinates '{key}'. Pass its values, '{key}', with dims={{'{key}': "
                    f"{coordinate.dims}}}; or save '{one.name}' in a group of its own"
                )
    missing = {name: one for name, one in left_out.items() if name not in more}
    told = f"coordinates that are not saved: {some([one.why for one in missing.values()])}" if missing else ""
    to_pass = next(((name.lstrip("/"), one.dims) for name, one in missing.items() if one.dims is not None), None)
    if to_pass is not None:
        told += f". Pass the values, too, such as '{to_pass[0]}', with dims={{'{to_pass[0]}': {to_pass[1]}}}"
    if any(one.dims is None for one in missing.values()):
        told += ". Only numbers are saved: add other values afterwards, by h5py or zarr-python"
    held, lost = _with_attrs_held(more, asked.format)
    if lost:
        told += f"{'. ' if told else ''}attributes of coordinates that are not saved: {some(lost)}"
    return replace(asked, arrays=[*arrays, *held], left_out=told)


def _is_other(first: ToSave, second: ToSave) -> bool:
    """Whether two coordinates of one name are not the same: other values, or in other units."""
    is_float = first.dtype.kind in "fc" and second.dtype.kind in "fc"
    return (
        first.dims != second.dims
        or not np.array_equal(first.x, second.x, equal_nan=is_float)
        or units_of(first.attrs) != units_of(second.attrs)
    )


def _with_attrs_held(coordinates: Mapping[str, ToSave], kind: str) -> tuple[list[ToSave], list[str]]:
    """Coordinates with the attributes that a format holds, and which it does not hold."""
    made, lost = [], list[str]()
    for name, one in coordinates.items():
        attrs = {key: value for key, value in one.attrs.items() if value is not None or kind.startswith("zarr")}  # JSON's null
        held, _, more = attrs_for(kind, f"'{name}'", attrs)
        made.append(replace(one, attrs=held))
        lost += more
    return made, lost


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
        if one.name not in asked.packed:
            compression, checksum = _packing(one.name, known["codec"])
    labels = from_plain(known["labels"], len(known["shape"]))
    dims = one.dims
    if dims is None and labels is not None and len(labels.dims) == len(one.shape) and any(labels.dims):
        dims = tuple(labels.dims)
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
    if not kind.startswith("zarr"):  # JSON's null, which says nothing
        attrs = {key: value for key, value in attrs.items() if value is not None}
    if _is_decoded(one, known["kind"], attrs):  # they would be so a second time
        attrs = {key: value for key, value in attrs.items() if key not in _OF_PACKED}
    fill = {key: attrs.pop(key) for key in ("_FillValue",) if key in attrs}
    found, _, lost = attrs_for(kind, f"'{one.name}'", attrs)
    if lost:
        raise ConfigError(f"{lost[0]} cannot be taken from the array in like=. Pass another value for it in attrs=")
    return found | fill


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
        return [found.dtype.str, found.shape, b64encode(found.tobytes()).decode()]
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
    """A coordinate that a new array cannot have: why, and the names of its axes if the caller can pass it."""

    why: str
    dims: tuple[str | None, ...] | None


def _coordinates(one: ToSave, known: Mapping[str, Any], kind: str) -> dict[str, ToSave | _LeftOut]:
    """The coordinates of an array, from the one that it is like, by their new names; or why it cannot have one."""
    labels = from_plain(known["labels"], len(known["shape"]))
    found: dict[str, ToSave | _LeftOut] = {}
    group = one.name.rpartition("/")[0]
    lengths = {dim: n for dim, n in zip(one.dims or (), one.shape, strict=False) if dim}
    for key, coordinate in ({} if labels is None else labels.coords).items():
        name, where, dims = f"{group}/{key}", f"'{coordinate.dataset}' in like=", coordinate.dims
        text = known["no numbers"].get(key)
        if text is not None and (not dims or not lengths.keys().isdisjoint(dims)):  # texts may have an axis of letters
            found[name] = _LeftOut(f"{where} holds {text}", None)
        elif not lengths.keys() >= set(dims):  # of other axes
            continue
        elif coordinate.values is None:
            found[name] = _LeftOut(f"{where} has more than 64 KiB", dims)
        elif wrong := [dim for dim, n in zip(dims, coordinate.values.shape, strict=True) if dim and lengths[dim] != n]:
            why = f"has shape {coordinate.values.shape}, and axis '{wrong[0]}' of '{one.name}' {lengths[wrong[0]]} elements"
            found[name] = _LeftOut(f"{where} {why}", dims)
        else:
            found[name] = _coordinate(name, coordinate, kind)
    return found


def _coordinate(name: str, known: Coordinate, kind: str) -> ToSave | _LeftOut:
    """A coordinate as an array of its own."""
    values = np.asarray(known.values)
    is_packed = not PACKING.isdisjoint(known.attrs)  # these values were decoded
    without = _OF_PACKED if is_packed else {"_FillValue"}
    attrs = {key: value for key, value in known.attrs.items() if key not in without}
    if values.dtype.kind == "b":
        attrs.pop("dtype", None)
        if kind == "netcdf4":  # which has no booleans: as xarray writes them
            values, attrs = values.astype("int8"), attrs | {"dtype": "bool"}
    if kind == "netcdf4" and f"{values.dtype.kind}{values.dtype.itemsize}" not in NETCDF_TYPES:
        return _LeftOut(f"'{known.dataset}' in like= holds {values.dtype}, which netCDF4 does not have", None)
    return ToSave(name, values, values.shape, values.dtype, None, None, None, known.dims, attrs)
