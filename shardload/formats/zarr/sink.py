"""How is a Zarr store written by many processes? Each puts whole chunk files, or chunks into shard files; metadata comes last.

1. Without shards a chunk is a file of its own: nobody is asked where it goes.
2. The chunks of a shard are encoded by anyone. The rank that created the store gives each its offset by a running sum, and at
   the end writes the index behind the last one, with its CRC-32C.
3. The store is a folder with a temporary name, or at its URL, without metadata. `ZarrSink.finish` writes that of the arrays,
   then that of the groups, the root's last.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np

from shardload.errors import ConfigError
from shardload.formats.access import Access
from shardload.formats.codecs.algorithms import encode_crc32c
from shardload.formats.codecs.table import ZARR_CODECS, has_own_shuffle
from shardload.formats.likeness import as_json
from shardload.formats.sink import (
    ArraySpec,
    Bools,
    Compression,
    Decode,
    Encoder,
    PlacedChunks,
    Sink,
    Ticket,
    Writer,
    groups_above,
    with_dims,
)
from shardload.formats.zarr.metadata import INDEX_CODECS, Json, ZarrLayout, codec_of, json_number, options_of
from shardload.planning.region import unravel
from shardload.storage.leftovers import METADATA
from shardload.storage.new_folder import NewFolder, NewRemoteFolder
from shardload.storage.objects import Ints, ObjectFolder, WritableFolder
from shardload.storage.remote import StorageOptions, is_remote
from shardload.storage.target import FOLDER_MARK, as_write_error
from shardload.system.steps import step_done, steps_of

_MISSING = np.uint64(2**64 - 1)

_MOST_NAME_NBYTES = 255  # of a file or folder
_TAKEN = {*METADATA, FOLDER_MARK}
_OF_3 = {name: codec for name, codec in ZARR_CODECS.items() if codec.word == name and "3" in codec.forms}
_NAMES = [name for name, codec in _OF_3.items() if codec.encoder and not codec.is_sized]  # the compressors of new arrays


class ZarrEncoder(Encoder):
    """See `Encoder`."""

    def __init__(self, path: str, name: str, spec: ArraySpec, document: Json) -> None:
        self.document, self.layout = document, ZarrLayout.of(document, spec.dtype)
        is_sharded, kind = self.layout.per_shard is not None, f"Zarr v{self.layout.version}"
        super().__init__(path, name, spec, kind, codec_of(document), self.layout.steps, is_placed_by_root=is_sharded)

    def shard_of(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """The shard of a chunk; the chunk's own position if there are no shards."""
        per = self.layout.per_shard
        return index if per is None else tuple(k // n for k, n in zip(index, per, strict=True))

    @property
    def shard_grid(self) -> tuple[int, ...]:
        """Shard files along each axis."""
        per = self.layout.per_shard or (1,) * len(self.spec.grid)
        return tuple(-(-n // m) for n, m in zip(self.spec.grid, per, strict=True))

    def key_at(self, position: tuple[int, ...]) -> str:
        """The key of the object at a position in the grid of shard files, or of chunks."""
        return os.path.join(self.name.strip("/"), self.layout.key(position))

    def key_of(self, number: int) -> str:
        """The key of the object that has a chunk."""
        return self.key_at(self.shard_of(unravel(number, self.spec.grid)))


class ZarrSink(Sink):
    """A new Zarr store in a folder.

    Parameters
    ----------
    path : str
        The name that it will have.
    specs : mapping of str to ArraySpec
        Its arrays, by their full names. The only array may be called ``"/"``: the store is then that array.
    mode : str
        See `Sink`.
    group_attrs : mapping
        Attributes of the root (``"/"``) and of groups, by their full names.
    about : mapping of str to str, optional
        What is written, of which source, if another job may go on with it after a kill. Ranks that do not call `create` may
        have an empty one. A store with shards always begins anew.
    storage : StorageOptions, optional
        How a store is reached, if `path` is a URL.

    Attributes
    ----------
    version : int
        Of the format: 3, or of an old store that grows 2.
    folder : WritableFolder
        That of the rank that creates it.
    taken_up : set of str
        The keys of the objects of another job, with which this one goes on.
    """

    taken_up: Set[str] = frozenset()
    version = 3

    def __init__(
        self,
        path: str,
        specs: Mapping[str, ArraySpec],
        *,
        mode: str = "w-",
        group_attrs: Mapping[str, Mapping[str, Any]] | None = None,
        about: Mapping[str, str] | None = None,
        storage: StorageOptions | None = None,
    ) -> None:
        self.path, self.mode, self._storage = path, mode, storage or StorageOptions()
        groups = {"/": {}, **(group_attrs or {})}
        self.group_attrs = {name.strip("/"): plain_attrs(name, group) for name, group in groups.items()}
        self.arrays: dict[str, ZarrEncoder] = {}
        self._texts: dict[str, ArraySpec] = {}
        for name, checked in with_dims({name: spec.checked(name) for name, spec in specs.items()}).items():
            if checked.texts is not None:
                self._texts[name] = checked
                continue
            if checked.chunks is None and checked.shape and 0 not in checked.shape:
                if math.prod(checked.shape) * checked.dtype.itemsize > 2**31 - 1:
                    raise ConfigError(
                        f"'{name}' has {checked.shape} elements and no chunks: one rank would have to hold it. Pass chunks="
                    )
                checked = replace(checked, chunks=checked.shape)  # one chunk
            self.arrays[name] = ZarrEncoder(path, name, checked, document_of(name, checked))
        sharded = [name for name, array in self.arrays.items() if array.is_placed_by_root]
        # (Several ranks write a shard, so that its file is whole at the end only.)
        self._about = None if sharded else about
        self.folder = self.new_folder()
        if sharded and is_remote(path):
            raise ConfigError(
                f"'{sharded[0]}' has shards, of which several ranks write each, and an object of a store is put as a whole. "
                "Leave out shards=, with chunks of some MiB; or save to a folder, and upload it"
            )
        for name in specs:
            if why := refused_name(name):
                raise ConfigError(f"an array is called '{name}', {why}. Rename it")

    def take_up(self) -> dict[str, Bools] | None:
        """See `Sink`."""
        if self._about is None or not isinstance(self.folder, NewFolder):
            return super().take_up()
        keys = self.folder.take_up()
        if keys is None:
            return None
        self.taken_up = keys
        return {
            name: np.array([array.key_of(number) in keys for number in range(math.prod(array.spec.grid))], bool)
            for name, array in self.arrays.items()
        }

    def writer(self, ticket: Ticket) -> Writer:
        """See `Sink`."""
        folder = self.new_folder()
        folder.join(ticket.temporary)

        def put(name: str, number: int, offset: int, data: Any) -> None:
            array = self.arrays[name]
            if array.is_placed_by_root:
                folder.write_at(array.key_of(number), data, offset)
            else:
                folder.put(array.key_of(number), data)

        return Writer(self, folder, put)

    def new_folder(self) -> WritableFolder:
        """A folder object to write with. Each rank, and each writer, has its own."""
        if is_remote(self.path):
            return NewRemoteFolder(self.path, self.mode, self._storage)
        return NewFolder(self.path, self.mode, self._about)

    def decoding(self, ticket: Ticket, name: str) -> AbstractContextManager[Decode] | None:
        """See `Sink`. At a URL, a store that is an array itself has no metadata before `commit`."""
        return self._decoding(name) if is_remote(self.path) else None

    @contextmanager
    def _decoding(self, name: str) -> Iterator[Decode]:
        from shardload.formats.zarr.source import FORMAT  # here, because it imports zarr

        access = Access(allow_filters=frozenset({"all"}), storage=self._storage)
        info = replace(self.arrays[name].info, parts={"document": self.arrays[name].document, "version": (0, 0)})
        with FORMAT.open_file(self.path, access) as file, closing(file.open(name, info if name == "/" else None)) as source:
            yield source.plain

    def stored(self, ticket: Ticket) -> ObjectFolder:
        """See `Sink`."""
        return self.folder.read_back(ticket.temporary)

    def key_of(self, ticket: Ticket, name: str, number: int) -> str:
        """See `Sink`."""
        return self.arrays[name].key_of(number)

    # --- on the rank that creates it

    def create(self) -> Self:
        """See `Sink`."""
        with as_write_error(self.path):
            address = self.folder.create()
        self._shards = {name: _Shards(array) for name, array in self.arrays.items() if array.is_placed_by_root}
        self.ticket = Ticket(address, {name: 0 for name in self.arrays if name not in self._shards})
        return self

    def allocate(self, name: str, numbers: Sequence[int] | Ints, nbytes: Sequence[int] | Ints, masks: Any = 0) -> Ints:
        """See `Sink`."""
        return self._shards[name].allocate(numbers, nbytes)

    def finish(self) -> None:
        """See `Sink`."""
        with as_write_error(self.path):
            for name in self.arrays:
                if name in self._shards:
                    self._write_indexes(self._shards[name])
                else:
                    self._check_keys(name)
            *documents, last = self.documents()
            for key, content in documents:
                if key not in self.taken_up:  # the values of an array of text
                    self.folder.put(key, content)
            self.folder.finish(*last)

    def _write_indexes(self, shards: _Shards) -> None:
        shards.check_complete()
        grid = shards.encoder.shard_grid
        for number in range(math.prod(grid)):
            position = unravel(number, grid)
            key = shards.encoder.key_at(position)
            if self.folder.version(key) is None:
                raise FileNotFoundError(errno.ENOENT, f"'{key}' is gone")
            self.folder.write_at(key, shards.index(position), int(shards.ends[number]))

    def _check_keys(self, name: str) -> None:
        """ValueError unless each chunk has an object."""
        step_done()
        n, n_here = math.prod(self.arrays[name].spec.grid), sum(1 for _ in self.folder.keys(name.strip("/")))
        if n_here != n:
            raise ValueError(f"'{name}' has {n_here} files in place of one for each of its {n} chunks")

    def commit(self) -> None:
        """See `Sink`."""
        self.folder.publish()

    def abandon(self, *, keeps: bool = False) -> None:
        """See `Sink`."""
        self.folder.discard(keeps=keeps)

    def documents(self) -> Iterator[tuple[str, bytes]]:
        """The files of metadata, in the order in which they are written: name in the store, and content. Arrays of text are
        among them, with their chunks.
        """
        names = [*self.arrays, *self._texts, *(f"/{group}/" for group in self.group_attrs)]
        groups = {"", *(group.strip("/") for name in names for group in groups_above(name))}
        if set(self.arrays) == {"/"}:
            groups = set()
        documents: dict[str, Any] = {}  # those of arrays, then of groups; "", the root, is the last
        for name, array in self.arrays.items():
            documents |= files_of(name.strip("/"), array.document)
        for name, spec in self._texts.items():
            for file, content in _written(spec).items():
                key = os.path.join(name.strip("/"), file)
                if file == "zarr.json":
                    documents[key] = json.loads(content)
                else:
                    yield key, content
        for folder in sorted(groups, reverse=True):
            kind = {"node_type": "group"} if self.version == 3 else {}
            document = {"zarr_format": self.version, **kind, "attributes": self.group_attrs.get(folder, {})}
            documents |= files_of(folder, document)
        if groups and self.version == 3:  # all in one, as zarr-python's `consolidate_metadata` has it
            last = next(reversed(documents))
            root = documents.pop(last)
            below = {os.path.dirname(key): document for key, document in sorted(documents.items())}
            documents[last] = root | {"consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": below}}
        for key, document in documents.items():  # token by token: that of the root has the metadata of all arrays
            yield key, "".join(steps_of(json.JSONEncoder(indent=2, allow_nan=False).iterencode(document))).encode()


def _written(spec: ArraySpec) -> dict[str, bytes]:
    """The files of an array of text, as zarr-python writes it."""
    import zarr  # here, because a save of numbers does not need it

    files: dict[str, Any] = {}
    array = zarr.create_array(
        zarr.storage.MemoryStore(files),
        shape=spec.shape,
        dtype="str",
        chunks=tuple(max(1, n) for n in spec.shape),
        attributes=plain_attrs("", spec.attrs),
        dimension_names=list(spec.dims or ()),
    )
    array[...] = np.asarray(spec.texts)
    return {key: content.to_bytes() for key, content in files.items()}


def refused_name(name: str) -> str | None:
    """Why no array or group of a store can have this name, in words that follow it; None if one can."""
    parts = name.split("/")
    if any(part in _TAKEN or "\\" in part for part in parts):  # (zarr-python makes another name of a backslash)
        return "and a Zarr store has files of such names itself"
    if any(len(part.encode(errors="replace")) > _MOST_NAME_NBYTES for part in parts):
        return "which is too long for a folder"
    return None


class _Shards(PlacedChunks):
    """Where the chunks of one sharded array are in their shard files."""

    def __init__(self, encoder: ZarrEncoder) -> None:
        super().__init__(encoder.name, encoder.spec.grid)
        self.encoder, self.ends = encoder, np.zeros(math.prod(encoder.shard_grid), dtype=np.int64)

    def allocate(self, numbers: Any, nbytes: Any) -> Ints:
        numbers, sizes = self.checked(numbers, nbytes)
        encoder, per = self.encoder, self.encoder.layout.per_shard or ()
        index = np.unravel_index(numbers, encoder.spec.grid)
        shard = np.ravel_multi_index([k // n for k, n in zip(index, per, strict=True)], encoder.shard_grid)
        # A running sum in each shard: of all chunks in the order of their shards, less the sum where the shard begins.
        order = np.argsort(shard, kind="stable")
        sorted_shards, sums = shard[order], np.cumsum(sizes[order]) - sizes[order]
        offsets = np.empty(len(numbers), dtype=np.int64)
        offsets[order] = self.ends[sorted_shards] + sums - sums[np.searchsorted(sorted_shards, sorted_shards)]
        np.add.at(self.ends, shard, sizes)
        self.offsets[numbers], self.sizes[numbers] = offsets, sizes
        return offsets

    def index(self, position: tuple[int, ...]) -> bytes:
        """The index of a shard: offset and length of each chunk in C order, then the CRC-32C. Chunks outside of the array are
        missing.
        """
        encoder, per = self.encoder, self.encoder.layout.per_shard or ()
        table = np.full((*per, 2), _MISSING, dtype="<u8")
        box = tuple(slice(k * n, min((k + 1) * n, m)) for k, n, m in zip(position, per, encoder.spec.grid, strict=True))
        sizes, offsets = self.sizes.reshape(encoder.spec.grid)[box], self.offsets.reshape(encoder.spec.grid)[box]
        part = table[tuple(slice(n) for n in sizes.shape)]
        part[..., 0], part[..., 1] = offsets, sizes
        return bytes(encode_crc32c()(table))


# --- what the metadata say: the same as zarr-python's would


def document_of(name: str, spec: ArraySpec) -> Json:
    """The metadata of an array with a checked spec. ConfigError if the format cannot say it."""
    chunks = spec.chunks or tuple(max(1, n) for n in spec.shape)
    codecs: list[Json] = [{"name": "bytes"}]
    if spec.dtype.itemsize > 1:
        is_little = spec.dtype.newbyteorder("<") == spec.dtype
        codecs[0]["configuration"] = {"endian": "little" if is_little else "big"}
    if spec.compression is not None:
        if spec.compression.shuffle and not has_own_shuffle(spec.compression.name):
            raise ConfigError(
                f"compression of '{name}' is {spec.compression.name!r} after a shuffle, which Zarr format 3 does not have. "
                "Pass compression='blosc', which shuffles, or 'gzip' alone"
            )
        options = _compressor(name, spec.compression, spec.dtype.itemsize)
        codecs.append({"name": spec.compression.name, "configuration": options})
    if spec.checksum:
        codecs.append({"name": "crc32c"})
    if spec.shards is not None:
        options = {"chunk_shape": list(chunks), "codecs": codecs, "index_codecs": INDEX_CODECS, "index_location": "end"}
        codecs = [{"name": "sharding_indexed", "configuration": options}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": spec.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(spec.shards or chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill(spec.fill),
        "codecs": codecs,
        "attributes": plain_attrs(name, spec.attrs),
        "dimension_names": list(spec.dims or ()),
    }


def _compressor(name: str, compression: Compression, itemsize: int) -> Json:
    """The options of a compressor in the metadata."""
    if compression.name not in _NAMES:
        is_lz4 = compression.name == "lz4"
        fix = "compression='blosc(lz4)', which has it inside" if is_lz4 else "compression='zstd', or another of these"
        raise ConfigError(f"compression of '{name}' is {compression.name!r}; Zarr has {', '.join(_NAMES)}. Pass {fix}")
    codec = ZARR_CODECS[compression.name]
    return options_of(codec, codec.parameters(name, compression, itemsize, "Zarr"))


def _fill(value: Any) -> Any:
    """A fill value as JSON."""
    if isinstance(value, np.complexfloating):
        return [_fill(value.real), _fill(value.imag)]
    number = value.item()
    return json_number(number) if isinstance(number, float) else number


def files_of(folder: str, document: Json) -> dict[str, Json]:
    """The files of metadata that say what a document of an array or group says, by their keys, in the order to write them."""
    if document["zarr_format"] == 3:
        return {os.path.join(folder, "zarr.json"): document}
    metadata = {key: value for key, value in document.items() if key != "attributes"}
    file = ".zarray" if "shape" in document else ".zgroup"
    return {os.path.join(folder, ".zattrs"): document["attributes"], os.path.join(folder, file): metadata}


def plain_attrs(name: str, attrs: Mapping[str, Any]) -> Json:
    """Attributes as JSON can hold them. ConfigError for others."""
    plain = {}
    for key, value in attrs.items():
        try:
            plain[key] = as_json(value)
        except ValueError as error:
            fix = "Pass text, finite numbers, or lists of them"
            raise ConfigError(f"the attribute {key!r} of '{name}' is {error}. {fix}") from None
    return plain
