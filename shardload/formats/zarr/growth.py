"""How does a Zarr store grow along an axis, so that a reader sees the old arrays or the new ones, never a part?

1. `read_store` says how arrays of a store are stored: on one rank, which tells the others.
2. The appended rows are written as a small store of their own (`GrowthSink`), with the metadata of the old arrays but for the
   shape. It is beside the old store and is written as a save is: a mark, fsync, reading back by zarr-python. It begins with the
   first row of a file of the old store: the old rows in a file at the old edge are written again, with the new rows.
3. `commit` moves its files into the old store: those with new names first, which nobody reads; then those at the old edge,
   whose old values are the same; then the metadata, by renames, that of `dim`'s coordinate after the others, and what describes
   several arrays (consolidated metadata) last. If rows are replaced, the metadata first get the length of what stays.
4. All that time a lock beside the store says that an append is at work: `storage.changes.AppendLock`.

docs/design/save.md says what is on disk after a kill.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Access
from shardload.formats.contract.array import native_dtype, refusal
from shardload.formats.diagnosis import as_source_error
from shardload.formats.sink import ArraySpec, Compression, Growing, groups_above, meaning_of
from shardload.formats.zarr.metadata import Json, ZarrLayout, codec_of, metadata_key
from shardload.formats.zarr.nodes import ArrayNode
from shardload.formats.zarr.sink import ZarrEncoder, ZarrSink
from shardload.formats.zarr.store import WatchedStore, open_store
from shardload.planning.region import unravel
from shardload.storage.changes import changed_meanwhile
from shardload.storage.leftovers import ROOTS
from shardload.storage.new_folder import AddedFolder
from shardload.storage.target import GROWTH_MARK, as_write_error, sync_folder, sync_name
from shardload.system.undo import Undo

_log = logging.getLogger("shardload")

# --- what there is


def read_store(path: str, names: Iterable[str]) -> Json:
    """How the arrays of a store are stored: ``"arrays"`` by name. Of each: shape, names of the axes, and for each axis a text
    that all arrays with this axis have (``"scopes"``). Of the arrays in `names` also metadata, type and fill value.

    Raises
    ------
    ConfigError
        If `path` is a part of a larger store, its consolidated metadata differ from those of its arrays, or one of `names`
        cannot grow.
    """
    nodes, names = _read_nodes(os.path.realpath(path)), set(names)
    lengths = [_lengths(nodes, names, of_coordinates=of_coordinates) for of_coordinates in (False, True)]
    arrays = {}
    for name, node in nodes.items():
        with as_source_error(path, name):
            arrays[name] = _details(path, name, node) if name in names else {}
        scopes = [_scope(name, *axis, *lengths) for axis in zip(node.dims, node.shape, strict=True)]
        arrays[name] |= {"shape": node.shape, "dims": node.dims if any(node.dims) else None, "scopes": scopes}
    return {"arrays": arrays}


_Lengths = Mapping[str, set[int | None]]


def _lengths(nodes: Mapping[str, ArrayNode], names: set[str], *, of_coordinates: bool) -> _Lengths:
    """By group and axis, the lengths that the axis has there; also None, if one of `names` is among these arrays."""
    lengths: dict[str, set[int | None]] = {}
    for name, node in nodes.items():
        group, _, base = name.rpartition("/")
        for dim, length in zip(node.dims, node.shape, strict=True):
            if not of_coordinates or dim == base:
                lengths.setdefault(f"{group}/:{dim}", set()).update({length, None} if name in names else {length})
    return lengths


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


def _read_nodes(path: str) -> dict[str, ArrayNode]:
    """All arrays of a store, by name."""
    above = os.path.dirname(path)
    if any(os.path.lexists(os.path.join(above, name)) for name in ROOTS):
        raise ConfigError(
            f"'{path}' is a part of the Zarr store '{above}', whose metadata may describe it too. Pass the path of the whole "
            "store, and names with groups"
        )
    nodes: dict[str, ArrayNode] = {}
    store = open_store(path, Access(allow_external=True))
    for name, node in store.nodes():
        if isinstance(node, Exception):
            raise SourceError(f"'{name}' in '{path}' cannot be read: {node}", path=path, dataset=name) from node
        if isinstance(node, ArrayNode):
            nodes[name] = node
    for key, document in _shared_documents(store, nodes):
        for name, shape in _shapes_in(key, document, nodes):
            if tuple(shape) != nodes[name].shape:
                folder = os.path.join(path, name.strip("/"))
                raise ConfigError(
                    f"in '{path}' the consolidated metadata give '{name}' the shape {tuple(shape)}, its own metadata "
                    f"{nodes[name].shape}. If an append was killed, bring back the old length: "
                    f'python -c "import zarr; zarr.open_array({folder!r}).resize({tuple(shape)})". If its own metadata are '
                    "right: "
                    f'python -c "import zarr; zarr.consolidate_metadata({os.path.dirname(os.path.join(path, key))!r})"'
                )
    return nodes


def _details(path: str, name: str, node: ArrayNode) -> Json:
    """Metadata, type, fill value and meaning of one array."""
    folder = os.path.join(os.path.realpath(path), name.strip("/")).rstrip("/")
    if os.path.realpath(folder) != folder:
        raise ConfigError(
            f"'{name}' in '{path}' cannot grow: '{folder}' is a link to '{os.path.realpath(folder)}'. Append to that store "
            "itself"
        )
    if "\\" in name:
        raise ConfigError(f"'{name}' in '{path}' cannot grow: zarr-python takes the backslash in its name for a slash")
    if refusal(node.dtype) is not None:
        raise ConfigError(f"'{name}' in '{path}' holds {node.dtype}; arrays of numbers can be appended to")
    dtype = native_dtype(node.dtype)
    fill = np.zeros((), dtype) if node.fill is None else np.asarray(node.fill, dtype=dtype)
    meaning = meaning_of(node.dtype, node.attributes)
    return {"metadata": node.document, "dtype": dtype.name, "fill": fill.tobytes().hex(), **meaning}


def _shared_documents(store: WatchedStore, arrays: Iterable[str]) -> Iterator[tuple[str, Json]]:
    """The documents that describe several arrays, the root's last: name in the store, and content."""
    groups = {"", *(group.strip("/") for name in arrays for group in groups_above(name))}
    for group in sorted(groups, key=lambda group: (-len(group.split("/")) if group else 0, group)):
        for file in ("zarr.json", ".zmetadata"):
            key = os.path.join(group, file)
            text = store.read(key)
            document = None if text is None else json.loads(text)
            if document is not None and (file == ".zmetadata" or document.get("consolidated_metadata")):
                yield key, document


def _shapes_in(key: str, document: Json, arrays: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """The name and shape of each array that consolidated metadata describe. The shapes are the document's own lists."""
    group, file = os.path.split(key)
    is_2 = file == ".zmetadata"
    documents = (document if is_2 else document.get("consolidated_metadata") or {}).get("metadata") or {}
    prefix = f"{group}/" if group else ""
    for name in arrays:
        below = name.strip("/").removeprefix(prefix)
        array_document = documents.get(f"{below}/.zarray".lstrip("/") if is_2 else below)
        shape = array_document.get("shape") if isinstance(array_document, dict) else None
        if name.strip("/").startswith(prefix) and isinstance(shape, list):
            yield name, shape


# --- what comes


class GrowthEncoder(ZarrEncoder, Growing):
    """See `Encoder` and `Growing`. Its array begins at a file of the old one."""

    def __init__(self, path: str, name: str, details: Json, axis: int, n_new: int) -> None:
        document, dtype = details["metadata"], np.dtype(details["dtype"])
        try:
            layout = ZarrLayout.of(document, dtype)
            _ = layout.steps  # made now, for the error
            if layout.per_shard is not None and (layout.is_index_first or not layout.has_index_checksum):
                raise ValueError("shards whose index is not at the end, with a CRC-32C")
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"'{name}' in '{path}' is stored with {error}, which append does not write. Append with zarr-python "
                "(array.append), or save to a new store with shardload.save"
            ) from error
        self._per_file = (layout.shards or layout.chunk_shape)[axis]
        shape = self.begin(details, axis, self._per_file, n_new)
        fill = np.frombuffer(bytes.fromhex(details["fill"]), dtype=dtype)[0]
        packed = Compression(codec_of(document)) if layout.chain else None
        spec = ArraySpec(shape, layout.dtype, layout.chunk_shape, layout.shards, packed, fill_value=fill)
        super().__init__(path, name, spec, document | {"shape": list(shape)})
        self.old_document = document

    def old_chunks_with(self, index: tuple[int, ...]) -> list[tuple[int, ...]]:
        """See `Growing`: a shard is written as a whole."""
        per = self.layout.per_shard
        if per is None:
            return []
        if any(k % n for axis, (k, n) in enumerate(zip(index, per, strict=True)) if axis != self.axis):
            return []  # not the first chunk of its shard that has a new row
        counts = [min(n, m - k) for k, n, m in zip(index, per, self.spec.grid, strict=True)]
        counts[self.axis] = index[self.axis]
        start = [0 if axis == self.axis else k for axis, k in enumerate(index)]
        return [tuple(a + k for a, k in zip(start, offset, strict=True)) for offset in np.ndindex(*counts)]

    def files_behind(self) -> Iterator[str]:
        """The key of each file in the old store that has rows behind the new end alone."""
        new, stored = (-(-shape[self.axis] // self._per_file) for shape in (self.new_shape, self.stored_shape))
        grid = [max(0, stored - new) if k == self.axis else n for k, n in enumerate(self.shard_grid)]
        for index in np.ndindex(*grid):
            yield self.key_at(tuple(k + new * (axis == self.axis) for axis, k in enumerate(index)))

    def files(self, at_edge: bool) -> Iterator[tuple[str, str]]:
        """Of each file its key here, and its key in the old store: of those that are there already, with values that stay, or
        of all others.
        """
        first = self.base // self._per_file
        for number in range(math.prod(self.shard_grid)):
            index = unravel(number, self.shard_grid)
            if at_edge == (self.base < self.old and index[self.axis] == 0):
                yield self.key_at(index), self.key_at(tuple(k + first * (axis == self.axis) for axis, k in enumerate(index)))


class GrowthSink(ZarrSink):
    """What is added to a store: see this module.

    Parameters
    ----------
    path : str
        The store.
    details : mapping
        The result of `read_store`.
    axes : mapping of str to int
        Along which axis each array grows.
    n_new : mapping of str to int
        By how much.
    """

    arrays: dict[str, GrowthEncoder]  # type: ignore[assignment]
    folder: AddedFolder

    def __init__(self, path: str, details: Json, axes: Mapping[str, int], n_new: Mapping[str, int]) -> None:
        arrays = {name: array for name, array in details["arrays"].items() if name in axes}
        self.path, self.mode = path, "w"
        self.group_attrs, self._texts, self._about = {}, {}, None
        self.version = next(iter(arrays.values()))["metadata"]["zarr_format"]
        self.arrays = {name: GrowthEncoder(path, name, array, axes[name], n_new[name]) for name, array in arrays.items()}
        self.folder = AddedFolder(path)
        self._short_keys = dict[str, str]()  # of metadata with the length of what stays, if rows are replaced

    def create(self) -> Self:
        """See `Sink`."""
        super().create()
        with Undo(self.abandon):
            self._documents = self._read_documents()
            for name, array in self.arrays.items():
                document = array.old_document | json.loads(self._documents[metadata_key(name, self.version)][0])
                if json.dumps(document) != json.dumps(array.old_document):  # as text, because NaN is not equal to itself
                    raise changed_meanwhile(self.path)
        return self

    def _read_documents(self) -> dict[str, tuple[bytes, Any]]:
        """The metadata that will change, in that order: coordinates after other arrays, what describes several arrays last. Of
        each the content in the store, and the state of its file: another store in this place may have the same content.
        """
        store, arrays, documents = open_store(self.folder.old, Access(allow_external=True)), self.arrays, {}
        names = sorted(arrays, key=lambda name: (len(arrays[name].old_shape) == 1, name))
        keys = [key for key, _ in _shared_documents(store, arrays)]
        with as_write_error(self.path):
            for key in [*(metadata_key(name, self.version) for name in names), *keys]:
                state, text = store.state(key), store.read(key)
                if text is None:
                    raise changed_meanwhile(self.path)
                documents[key] = (text, state)
        return documents

    def finish(self) -> None:
        """See `Sink`. The new metadata are then beside the store, too: `commit` only renames them."""
        super().finish()
        with as_write_error(self.path):
            self._new_keys = self._put_documents("", {name: array.new_shape for name, array in self.arrays.items()})
            if any(array.old_shape != array.stored_shape for array in self.arrays.values()):
                short_shapes = {name: array.old_shape for name, array in self.arrays.items()}
                self._short_keys = self._put_documents("short-", short_shapes)
            self.folder.sync()

    def _put_documents(self, kind: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Put the metadata with these shapes beside the store. Returns from their key in the store to their key here."""
        keys, names = {}, {metadata_key(name, self.version): name for name in shapes}
        for k, (key, (text, _)) in enumerate(self._documents.items()):
            document = json.loads(text)
            if key in names:
                document["shape"] = list(shapes[names[key]])
            for name, shape in _shapes_in(key, document, shapes):
                shape[:] = shapes[name]
            keys[key] = f"{GROWTH_MARK}-{kind}{k}"
            self.folder.put(keys[key], json.dumps(document, indent=2).encode())
        return keys

    def commit(self) -> None:
        """See `Sink`. If rows are replaced, the store first gets the length of the rows that stay."""
        folder = self.folder
        with as_write_error(self.path):
            self._refuse_changed()
            folder.replace(self._short_keys, {key: text for key, (text, _) in self._documents.items()})
            try:
                if self._short_keys:
                    for path in folder.folders_of(self._short_keys):
                        sync_folder(path)
                    self._documents = self._read_documents()
                folder.add(self._moves(at_edge=False), self._moves(at_edge=True))
                self._refuse_changed()
                folder.replace(self._new_keys, {key: text for key, (text, _) in self._documents.items()})
            except OSError as error:
                if not self._short_keys:
                    raise
                n = max(array.old for array in self.arrays.values())
                raise SourceError(
                    f"rows of '{self.path}' could not be replaced ({error.strerror or error}). It now has the first {n:,} "
                    "alone, those before the ones to replace. Append the others again, without at=",
                    path=self.path,
                ) from error
        # From here on the store has its new rows. No error may deny that.
        for path in folder.folders_of(self._new_keys):
            sync_name(path, self.path)
        try:
            for array in self.arrays.values():
                folder.remove(array.files_behind())
        except OSError as error:
            _log.warning("'%s' has its new rows, but files of old ones behind its end cannot be removed: %s", self.path, error)
        self.abandon()

    def _moves(self, at_edge: bool) -> Iterator[tuple[str, str]]:
        """`GrowthEncoder.files` of all arrays."""
        return itertools.chain.from_iterable(array.files(at_edge) for array in self.arrays.values())

    def _refuse_changed(self) -> None:
        if self._read_documents() != self._documents:
            raise changed_meanwhile(self.path)
