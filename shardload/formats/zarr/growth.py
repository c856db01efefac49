"""How does a Zarr store grow along an axis, so that a reader sees the old arrays or the new ones, never a part?

1. `read_store` says how arrays of a store are stored: on one rank, which tells the others.
2. The rows that come are written as a small store of their own (`GrowthSink`), with the metadata of the old arrays but for the
   shape. It is beside the old store and has everything that a save has: a mark, fsync, reading back by zarr-python. Its first
   row is that of a file of the old store: what a file at the old edge has already is written again, with the new rows.
3. `commit` moves its files into the old store: those with new names first, which nobody reads; then those at the old edge,
   whose old values are the same; then the metadata, by renames, that of `dim`'s coordinate after the others, and what describes
   several arrays (consolidated metadata) last.
4. Before all that a file beside the store, made with O_EXCL, says that an append is at work: `formats.locks`.

docs/design/save.md says what is on disk after a kill.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from shardload.errors import ConfigError, SourceError
from shardload.formats.codecs.chains import EncodeChain, Step
from shardload.formats.codecs.table import BLOSC_CODES, ZARR_CODECS
from shardload.formats.containment import Fence
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.dtypes import native_dtype, refusal
from shardload.formats.growing import Growing, GrowingSink, meaning_of
from shardload.formats.leftovers import GROWTH_MARK, ROOTS
from shardload.formats.locks import AppendLock
from shardload.formats.sink import ArraySpec, Catalog, Compression
from shardload.formats.target import named, not_undone, sync_folder, sync_name
from shardload.formats.zarr.codecs import parameters_of
from shardload.formats.zarr.encodings import Layout
from shardload.formats.zarr.sink import ZarrCatalog, ZarrEncoder, ZarrSink, write_file
from shardload.formats.zarr.store import nodes_in, read_metadata
from shardload.planning.grid import unravel

__all__ = ["GrowthCatalog", "GrowthEncoder", "GrowthSink", "read_store"]

Json = dict[str, Any]
_INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


# --- what there is


def read_store(path: str, names: Iterable[str]) -> Json:
    """How the arrays of a store are stored: ``"arrays"`` by name. Of each: shape, names of the axes, and for each axis a text
    that others with the same axis have too (``"scopes"``). Of those in `names` also metadata, type and fill value.

    Raises
    ------
    ConfigError
        If `path` is a part of a larger store, its consolidated metadata differ from those of its arrays, or one of `names`
        cannot grow.
    """
    found, names = _read_arrays(path), set(names)
    lengths = [_lengths(found, names, of_coordinates=is_one) for is_one in (False, True)]
    for name in names & set(found):
        if "why" in found[name]:
            raise ConfigError(f"'{name}' in '{path}' cannot grow: {found[name]['why']}. Append to that store itself")
        found[name] |= _details(path, name)
    for name, one in found.items():
        one["scopes"] = [_scope(name, *axis, *lengths) for axis in _axes(one)]
        one["shape"] = one["metadata"]["shape"]
        if name not in names:
            del one["metadata"]
    return {"arrays": found}


def _axes(one: Json) -> list[tuple[str | None, int]]:
    """The name and length of each axis of an array."""
    shape = one["metadata"]["shape"]
    return list(zip(one["dims"] or [None] * len(shape), shape, strict=True))


_Lengths = Mapping[str, set[int | None]]


def _lengths(arrays: Mapping[str, Json], names: set[str], *, of_coordinates: bool) -> _Lengths:
    """The lengths that an axis has in a group, by group and axis; and None, if an array there is one of `names`."""
    found: dict[str, set[int | None]] = {}
    for name, one in arrays.items():
        group, _, own = name.rpartition("/")
        for dim, length in _axes(one):
            if not of_coordinates or dim == own:
                found.setdefault(f"{group}/:{dim}", set()).update({length, None} if name in names else {length})
    return found


def _scope(name: str, dim: str | None, length: int, lengths: _Lengths, coordinates: _Lengths) -> str | None:
    """Group and name of an axis, as xarray finds it: the nearest group with the coordinate; without one, the outermost group
    with an axis of that name.

    One of another length is another axis, unless both are appended to: an append that was killed may have left them so.
    """
    if not dim:
        return None
    parts = name.split("/")[:-1]
    above = [f"{'/'.join(parts[: k + 1])}/:{dim}" for k in range(len(parts))]
    scopes = [scope for scope in above if coordinates.get(scope, set()) & {length, None}][-1:]
    return next(iter(scopes or [scope for scope in above if lengths.get(scope, set()) & {length, None}]))


def _read_arrays(path: str) -> dict[str, Json]:
    """All arrays of a store: the metadata, and the names of the axes."""
    path = os.path.realpath(path)
    above = os.path.dirname(path)
    root = next((name for name in ROOTS if os.path.lexists(os.path.join(above, name))), None)
    if root is not None:
        raise ConfigError(
            f"'{path}' is a part of the Zarr store '{above}', whose metadata may describe it too. Pass the path of the whole "
            "store, and names with groups"
        )
    found: dict[str, Json] = {}
    for name, folder, is_array in nodes_in(path, Fence(), _refuse_unread):
        if is_array:
            found[name] = _read_array(folder)
            if os.path.realpath(folder) != folder:
                found[name]["why"] = f"'{folder}' is a link to '{os.path.realpath(folder)}'"
    for key, document in _groups_of(path, found):
        for name, described in _described(key, document, found):
            if list(described) != list(found[name]["metadata"]["shape"]):
                folder, shape = os.path.join(path, name.strip("/")), tuple(described)
                raise ConfigError(
                    f"in '{path}' the consolidated metadata give '{name}' the shape {shape}, its own metadata "
                    f"{tuple(found[name]['metadata']['shape'])}. If an append was killed, bring back the old length: "
                    f'python -c "import zarr; zarr.open_array({folder!r}).resize({shape})". If its own metadata are right: '
                    f'python -c "import zarr; zarr.consolidate_metadata({os.path.dirname(os.path.join(path, key))!r})"'
                )
    return found


def _details(path: str, name: str) -> Json:
    """Type, fill value and meaning of one array, as zarr-python has them."""
    group: Any = zarr.open(os.path.realpath(path), mode="r")
    one = group if name == "/" else group[name.strip("/")]
    dtype = np.dtype(one.dtype)
    if refusal(dtype) is not None:
        raise ConfigError(f"'{name}' in '{path}' holds {dtype}; arrays of numbers can be appended to")
    fill = one.fill_value
    value = np.zeros((), dtype) if fill is None else np.asarray(fill, dtype=dtype)
    return {
        "dtype": native_dtype(dtype).name,
        "fill": value.astype(native_dtype(dtype)).tobytes().hex(),
        **meaning_of(dtype, one.attrs),
    }


def _read_json(path: str) -> Json | None:
    try:
        read = read_metadata(path)
        found = {} if read is None else json.loads(read[0])
    except OSError as error:
        raise SourceError(f"'{path}' cannot be read: {error.strerror or error}", path=path) from error
    except ValueError as error:
        raise SourceError(f"'{path}' is no metadata of Zarr: {error}", path=path) from error
    if not isinstance(found, dict):
        raise SourceError(f"'{path}' is no metadata of Zarr: a {type(found).__name__}", path=path)
    return None if read is None else found


def _read_array(folder: str) -> Json:
    """The metadata of an array, and the names of its axes, if it has names."""
    metadata = _read_json(os.path.join(folder, "zarr.json"))
    if metadata is not None:
        dims = metadata.get("dimension_names")
    else:
        metadata = _read_json(os.path.join(folder, ".zarray")) or {}
        dims = (_read_json(os.path.join(folder, ".zattrs")) or {}).get("_ARRAY_DIMENSIONS")
    is_named = isinstance(dims, list) and len(dims) == len(metadata["shape"])
    return {"metadata": metadata, "dims": dims if is_named else None}


def _refuse_unread(name: str, error: OSError) -> None:
    path = error.filename or name
    raise SourceError(f"'{path}' cannot be read: {error.strerror or error}", path=path) from error


def _groups_of(root: str, arrays: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
    """The documents that describe several arrays, the root's last: name in the store, and content."""
    folders = {""}
    for name in arrays:
        above = name.strip("/").rpartition("/")[0]
        while above:
            folders.add(above)
            above = above.rpartition("/")[0]
    for folder in sorted(folders, key=lambda one: (-len(one.split("/")) if one else 0, one)):
        for file in ("zarr.json", ".zmetadata"):
            key = os.path.join(folder, file)
            document = _read_json(os.path.join(root, key))
            if document is not None and (file == ".zmetadata" or document.get("consolidated_metadata")):
                yield key, document


def _described(key: str, document: Json, arrays: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """The shapes in consolidated metadata, by the names of arrays. They are the document's own lists."""
    group, file = os.path.split(key)
    known = document.get("metadata") if file == ".zmetadata" else document["consolidated_metadata"].get("metadata")
    for name in arrays:
        below = name.strip("/")
        if group:
            if not below.startswith(group + "/"):
                continue
            below = below[len(group) + 1 :]
        one = (known or {}).get(f"{below}/.zarray".lstrip("/") if file == ".zmetadata" else below)
        if isinstance(one, dict) and isinstance(one.get("shape"), list):
            yield name, one["shape"]


# --- how it is stored


@dataclass(frozen=True)
class _Stored:
    """What of an array's metadata says how chunks are stored."""

    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    dtype: np.dtype[Any]
    steps: tuple[Step, ...]
    codec: str
    prefix: str
    separator: str


def _stored(where: str, metadata: Json, dtype: np.dtype[Any]) -> _Stored:
    if metadata.get("zarr_format") == 2:
        return _stored_2(where, metadata, dtype)
    grid = _named(metadata["chunk_grid"])
    key = _named(metadata["chunk_key_encoding"])
    if grid[0] != "regular" or key[0] not in ("default", "v2") or metadata.get("storage_transformers"):
        raise _unknown(where, f"the chunk grid {grid[0]!r}, the chunk keys {key[0]!r} or storage transformers")
    separator = str(key[1].get("separator", "/" if key[0] == "default" else "."))
    prefix = "c" + separator if key[0] == "default" else ""
    outer, shards = tuple(int(n) for n in grid[1]["chunk_shape"]), None
    codecs = metadata["codecs"]
    if len(codecs) == 1 and _named(codecs[0])[0] == "sharding_indexed":
        options = _named(codecs[0])[1]
        index = [_named(one) for one in options["index_codecs"]]
        if options.get("index_location", "end") != "end" or index != [_named(one) for one in _INDEX_CODECS]:
            raise _unknown(where, "shards whose index is not at the end, in little-endian order, with a CRC-32C")
        shards, outer, codecs = outer, tuple(int(n) for n in options["chunk_shape"]), options["codecs"]
    (name, options), *rest = [_named(one) for one in codecs]
    if name != "bytes":
        raise _unknown(where, f"the codec {name!r}")
    stored = dtype.newbyteorder(">" if options.get("endian") == "big" else "<")
    steps, texts = [], []
    for name, options in rest:
        step, text = _step(where, name, options, dtype.itemsize, ("gzip", "zstd", "blosc", "crc32c"))
        steps.append(step)
        texts.append(text)
    return _Stored(outer, shards, stored, tuple(steps), "+".join(texts), prefix, separator)


def _stored_2(where: str, metadata: Json, dtype: np.dtype[Any]) -> _Stored:
    if metadata.get("order", "C") != "C":
        raise _unknown(where, f"values in the order {metadata['order']!r}")
    chain = [*(metadata.get("filters") or ()), *filter(None, [metadata.get("compressor")])]
    steps, texts = [], []
    for entry in chain:
        options = {key: value for key, value in entry.items() if key != "id"}
        step, text = _step(where, entry["id"], options, dtype.itemsize, ("gzip", "zlib", "zstd", "blosc", "lz4", "shuffle"))
        steps.append(step)
        texts.append(text)
    stored = np.dtype(metadata["dtype"])
    if native_dtype(stored) != dtype:
        raise _unknown(where, f"the data type {metadata['dtype']!r}")
    chunks = tuple(int(n) for n in metadata["chunks"])
    separator = str(metadata.get("dimension_separator") or ".")
    return _Stored(chunks, None, stored, tuple(steps), "+".join(texts), "", separator)


def _step(where: str, name: str, options: Json, itemsize: int, known: Sequence[str]) -> tuple[Step, str]:
    """The step that encodes as a codec of the metadata decodes."""
    codec = ZARR_CODECS.get(name)
    if name in known and codec is not None and codec.encoder is not None:
        with contextlib.suppress(KeyError, ValueError, TypeError, IndexError, ConfigError):
            told = parameters_of(name, options, itemsize)
            if codec.levels:
                codec.checked_level(told.level, -(1 << 17) if name == "zstd" else None)
            if told.inner in BLOSC_CODES:
                return codec.encoder(told), name
    raise _unknown(where, f"the codec {name!r}" + (f" with {options}" if options else ""))


def _named(entry: Any) -> tuple[str, Json]:
    if isinstance(entry, str):
        return entry, {}
    return str(entry["name"]), dict(entry.get("configuration") or {})


def _unknown(where: str, what: str) -> ConfigError:
    return ConfigError(
        f"{where} is stored with {what}, which append does not write. Append with zarr-python (array.append), or save to a new "
        "store with shardload.save"
    )


# --- what comes


class GrowthEncoder(ZarrEncoder, Growing):
    """See `Encoder` and `Growing`. Its array begins at a file of the old one."""

    def __init__(self, path: str, name: str, known: Json, axis: int, n_new: int) -> None:
        metadata, dtype = known["metadata"], np.dtype(known["dtype"])
        stored = _stored(f"'{name}' in '{path}'", metadata, dtype)
        self._per_file = (stored.shards or stored.chunks)[axis]
        shape = self.begin(tuple(metadata["shape"]), axis, self._per_file, n_new)
        fill = np.frombuffer(bytes.fromhex(known["fill"]), dtype=dtype)[0]
        packed = Compression(stored.codec) if stored.steps else None
        self.name, self.path = name, path
        self.spec = ArraySpec(shape, stored.dtype, stored.chunks, shards=stored.shards, compression=packed)
        document = copy.deepcopy(metadata) | {"shape": list(shape)}
        per = None if stored.shards is None else tuple(s // c for s, c in zip(stored.shards, stored.chunks, strict=True))
        chain = EncodeChain(stored.steps, stored.chunks, stored.dtype, fill)
        self.layout = Layout(document, chain, stored.codec or "none", stored.prefix, stored.separator, per)
        self.metadata = metadata
        self._info = ArrayInfo(
            path=path,
            dataset=name,
            format=f"Zarr v{metadata['zarr_format']}",
            shape=shape,
            dtype=native_dtype(dtype).name,
            chunks=stored.chunks,
            codec=self.layout.codec,
            shards=stored.shards,
        )

    def beside(self, index: tuple[int, ...]) -> list[tuple[int, ...]]:
        """See `Growing`: a shard is written as a whole."""
        per = self.layout.per_shard
        if per is None:
            return []
        others = [k % n if axis != self.axis else 0 for axis, (k, n) in enumerate(zip(index, per, strict=True))]
        if any(others):
            return []
        counts = [min(n, m - k) for k, n, m in zip(index, per, self.spec.grid, strict=True)]
        counts[self.axis] = index[self.axis]
        start = [0 if axis == self.axis else k for axis, k in enumerate(index)]
        return [tuple(a + b for a, b in zip(start, more, strict=True)) for more in np.ndindex(*counts)]

    def files(self) -> Iterator[tuple[str, str, bool]]:
        """Each file: its name here, its name in the old store, and whether that has one of this name with values."""
        first = self.base // self._per_file
        for number in range(math.prod(self.shard_grid)):
            index = unravel(number, self.shard_grid)
            there = tuple(k + first * (axis == self.axis) for axis, k in enumerate(index))
            is_edge = self.base < self.old and index[self.axis] == 0
            yield self.layout.key(index), self.layout.key(there), is_edge


class GrowthSink(ZarrSink, GrowingSink):
    """What is added to a store: see this module.

    Parameters
    ----------
    path : str
        The store.
    known : mapping
        What `read_store` says.
    axes : mapping of str to int
        Along which axis each array grows.
    n_new : mapping of str to int
        By how much.
    """

    arrays: dict[str, GrowthEncoder]  # type: ignore[assignment]

    def __init__(self, path: str, known: Json, axes: Mapping[str, int], n_new: Mapping[str, int]) -> None:
        arrays = {name: one for name, one in known["arrays"].items() if name in axes}
        self.path, self.mode, self.attrs = path, "w", {}
        self.group_attrs, self._texts = {}, {}
        self.version = next(iter(arrays.values()))["metadata"]["zarr_format"]
        self.arrays = {name: GrowthEncoder(path, name, one, axes[name], n_new[name]) for name, one in arrays.items()}
        self.last = [name for name, one in arrays.items() if len(one["shape"]) == 1]  # coordinates

    def create(self) -> Catalog:
        """See `Sink`."""
        return GrowthCatalog(self)

    def metadata_key(self, name: str) -> str:
        """The file of an array's metadata."""
        return os.path.join(name.strip("/"), "zarr.json" if self.version == 3 else ".zarray")


def _is_same(first: Json, second: Json) -> bool:
    """As text, because NaN is not equal to itself."""
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


class GrowthCatalog(ZarrCatalog):
    """See `Catalog`."""

    def __init__(self, sink: GrowthSink) -> None:
        self._grows, self._store = sink, os.path.realpath(sink.path)
        self._lock = AppendLock(self._store)
        try:
            self._seen = self._look()
            self._before = {key: text for key, (text, _) in self._seen.items()}
            for name, one in sink.arrays.items():
                if not _is_same(json.loads(self._before[sink.metadata_key(name)]), one.metadata):
                    raise self._changed()
            super().__init__(sink)
        except BaseException:
            self._lock.release()
            raise
        try:
            with named(sink.path):
                write_file(os.path.join(self.ticket.temporary, GROWTH_MARK), b"")
        except BaseException:
            self.abandon()
            raise

    def _look(self) -> dict[str, tuple[bytes, int]]:
        """The metadata that will change, as they are in the store, and when they were written: a store that has taken the place
        of this one may have the same.
        """
        keys = [key for key, _ in _groups_of(self._store, self._grows.arrays)]
        found = {}
        with named(self._grows.path):
            for key in [*map(self._grows.metadata_key, self._grows.arrays), *keys]:
                read = read_metadata(os.path.join(self._store, key))
                if read is None:
                    raise self._changed()
                found[key] = read
        return found

    def _changed(self) -> ConfigError:
        return ConfigError(
            f"'{self._grows.path}' was changed by somebody else during this append. Nothing was appended; run it again"
        )

    def commit(self) -> None:
        """See `Catalog`."""
        if not self._is_finished:
            raise ValueError("finish the catalog first")
        with named(self._grows.path):
            documents = self._new_documents()
            moved: list[str] = []
            if self._look() != self._seen:
                raise self._changed()
            try:
                self._move(moved)
            except BaseException:
                for path in moved:  # beyond the old length: nobody reads them
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                raise
            if self._look() != self._seen:
                raise self._changed()
            self._publish(documents)
        self.abandon()

    def _move(self, moved: list[str]) -> None:
        """The files of chunks, to their names in the store: first those that nobody reads."""
        for is_edge in (False, True):
            folders: set[str] = set()
            for name, one in self._grows.arrays.items():
                here = os.path.join(self.ticket.temporary, name.strip("/"))
                there = os.path.normpath(os.path.join(self._store, name.strip("/")))  # "/" is the store itself
                for source, key, at_edge in one.files():
                    if at_edge != is_edge:
                        continue
                    target = os.path.join(there, key)
                    folder = os.path.dirname(target)
                    if folder not in folders:
                        os.makedirs(folder, exist_ok=True)
                        while folder not in folders and len(folder) >= len(there):
                            folders.add(folder)
                            folder = os.path.dirname(folder)
                    os.replace(os.path.join(here, source), target)
                    if not is_edge:
                        moved.append(target)
            for folder in sorted(folders, reverse=True):
                sync_folder(folder)

    def _new_documents(self) -> list[tuple[str, str]]:
        """The new metadata as files beside the store: name in the store, and path; in the order of their renames."""
        sink, shapes = self._grows, {name: list(one.new_shape) for name, one in self._grows.arrays.items()}
        names = sorted(sink.arrays, key=lambda name: (name in sink.last, name))
        made: dict[str, Json] = {}
        for name in names:
            key = sink.metadata_key(name)
            made[key] = json.loads(self._before[key]) | {"shape": shapes[name]}
        for key, _ in _groups_of(self._store, sink.arrays):
            document = made[key] if key in made else json.loads(self._before[key])
            for name, shape in _described(key, document, sink.arrays):
                shape[:] = shapes[name]
            made[key] = document
        found = []
        for k, (key, document) in enumerate(made.items()):
            path = os.path.join(self.ticket.temporary, f"{GROWTH_MARK}-{k}")
            write_file(path, json.dumps(document, indent=2).encode())
            found.append((key, path))
        return found

    def _publish(self, documents: Sequence[tuple[str, str]]) -> None:
        """The new metadata get their names. If one fails, those before it are put back."""
        done: list[str] = []
        try:
            for key, path in documents:
                os.replace(path, os.path.join(self._store, key))
                done.append(key)
        except BaseException as error:
            path = os.path.join(self.ticket.temporary, f"{GROWTH_MARK}-back")
            try:
                for key in reversed(done):
                    write_file(path, self._before[key])
                    os.replace(path, os.path.join(self._store, key))
            except OSError as found:
                raise not_undone(error, self._grows.path, found) from error
            raise
        for folder in sorted({os.path.dirname(os.path.join(self._store, key)) for key in done}):
            sync_name(folder, self._grows.path)

    def abandon(self) -> None:
        """See `Catalog`."""
        super().abandon()
        self._lock.release()
