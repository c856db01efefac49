"""How is an existing array stored, so that a new one can be stored like it? Rank 0 reads that; the others get it as text."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from shardload.errors import ConfigError
from shardload.formats.base import some
from shardload.formats.diagnosis import in_path
from shardload.formats.labels import from_plain, to_plain
from shardload.formats.likeness import attrs_for, is_empty_text
from shardload.formats.lookup import find_array, open_file, read_labels
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
            known[path] = {
                "kind": kind,
                "attrs": {key: told for key, value in attrs.items() if (told := _told(value)) is not None},
                "shape": info.shape,
                "chunks": info.chunks,
                "shards": info.shards,
                "codec": info.codec,
                "labels": to_plain(read_labels(path, info)),
            }
        found[name] = known[path]
    return json.dumps(found)


def apply_like(asked: SaveArguments, text: str) -> SaveArguments:
    """The arguments, with what existing arrays have where the caller passed nothing; and their coordinates.

    Every rank calls this.

    Raises
    ------
    ConfigError
        If an array's codec cannot be written.
    """
    found, arrays, more, left_out = json.loads(text), [], dict[str, ToSave](), dict[str, str]()
    names = {one.name for one in asked.arrays}
    for one in asked.arrays:
        if one.name not in found:
            arrays.append(one)
            continue
        made = _like(one, found[one.name], asked)
        arrays.append(made)
        for name, coordinate in _coordinates(made, found[one.name]).items():
            if name in names:
                continue
            if isinstance(coordinate, str):
                left_out.setdefault(name, coordinate)
            else:
                more.setdefault(name, coordinate)
    missing = {name: why for name, why in left_out.items() if name not in more}
    told = ""
    if missing:
        first = next(iter(missing)).lstrip("/")
        how = f"Pass the values, too, such as '{first}', with dims={{'{first}': ('{first.rpartition('/')[2]}',)}}"
        told = f"coordinates that are not saved: {some(list(missing.values()))}. {how}"
    return replace(asked, arrays=[*arrays, *more.values()], left_out=told)


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


def _coordinates(one: ToSave, known: Mapping[str, Any]) -> dict[str, ToSave | str]:
    """The coordinates of the axes of an array, from the one that it is like, by their new names; or why it cannot have one."""
    labels = from_plain(known["labels"], len(known["shape"]))
    found: dict[str, ToSave | str] = {}
    group = one.name.rpartition("/")[0]
    for dim, coordinate in ({} if labels is None else labels.coords).items():
        if one.dims is None or coordinate.dims != (dim,) or dim not in one.dims:
            continue
        name, length = f"{group}/{dim}", one.shape[one.dims.index(dim)]
        if coordinate.values is None:
            found[name] = f"'{coordinate.dataset}' in like= is long, or holds no numbers"
            continue
        values = np.asarray(coordinate.values)
        if values.shape != (length,):
            found[name] = (
                f"'{coordinate.dataset}' in like= has shape {values.shape}, and axis '{dim}' of '{one.name}' {length} elements"
            )
            continue
        is_packed = not PACKING.isdisjoint(coordinate.attrs)  # these values were decoded
        without = _OF_PACKED if is_packed else {"_FillValue"}
        attrs = {key: value for key, value in coordinate.attrs.items() if key not in without}
        found[name] = ToSave(name, values, values.shape, values.dtype, None, None, None, (dim,), attrs)
    return found
