"""How are values read from Zarr, format 2 or 3? With zarr-python, or chunk by chunk without it.

1. `open_store` opens a folder, a set of references or a URL. `WatchedStore.nodes` finds the arrays in it (`nodes`).
2. `describe` turns an array's metadata into an `ArrayInfo`, without reading chunks.
3. `ZarrSource.chunk_reader` is for stores that are folders with the usual codecs: see `chunks`. If there is one, `read_into`
   uses it too.
4. Otherwise `read_into` is one selection per region: zarr-python fetches and decodes the chunks that meet it, each once, a few
   at a time (its setting ``async.concurrency``), and copies them into the caller's buffer.

The values of a missing chunk are the array's fill value: Zarr cannot distinguish a chunk that was never written from a lost
one. `ZarrSource.read_into` says which chunks were missing.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import zarr
import zarr.buffer

from shardload.errors import SourceError, is_unread
from shardload.formats.access import STRICT, Access
from shardload.formats.codecs.table import ZARR_CODECS, compression_keywords
from shardload.formats.contract.array import (
    MOST_KEPT,
    TOLD,
    ArrayInfo,
    Coordinate,
    Labels,
    Properties,
    check_request,
    is_added,
    json_value,
    names_in,
    native_dtype,
    refusal,
    unaddressable,
)
from shardload.formats.contract.chunk_reader import ChunkReader, a_few_chunks, chunks_met, index_in_parts, read_by_chunks
from shardload.formats.contract.format import Format, OpenFile, Source
from shardload.formats.likeness import float_of_base64
from shardload.formats.zarr.chunks import ZarrChunks, chunk_reader
from shardload.formats.zarr.metadata import (
    MOST_INDEX_NBYTES,
    chain_of,
    codec_of,
    grid_of,
    inner_chain,
    is_stacked,
    metadata_key,
    n_in_shard,
    names_of,
    parameters_of,
    refuse_codecs,
)
from shardload.formats.zarr.nodes import ArrayNode, GroupNode, MetadataError, bits_of, quiet
from shardload.formats.zarr.references import SUFFIXES, ReferenceFolder, is_references
from shardload.formats.zarr.store import WatchedStore, open_store, watch, watched
from shardload.planning.region import Region
from shardload.storage.leftovers import ROOTS
from shardload.storage.objects import NoListingError
from shardload.storage.remote import RemoteFolder, is_remote, without_secrets
from shardload.values.decoding import ATTRIBUTES, Packing, typed

_MARKS = (*ROOTS, ".zmetadata")
# A stored chunk may have so many times the bytes of its values if only zarr-python knows its codecs: some make 8 bytes of one.
_LONGEST, _HEAD_NBYTES = 8, 4096
_MOST_AT_ONCE = 1024  # chunks per call: zarr-python holds 2.5 KiB for each, however small it is
# Codecs from which numcodecs makes Python objects. A pickle is a program that runs when it is decoded.
_OBJECT_CODECS = {"pickle", "json2", "msgpack2", "categorize", "vlen-array", "vlen-bytes", "vlen-utf8"}

_MOST_TEXT_NBYTES = 1 << 20  # of the values of an array of text
_OF_TEXT = {"bytes", "vlen-utf8", *(name for name, codec in ZARR_CODECS.items() if codec.decoder is not None)}
_NOT_COPIED = ("bytes", "transpose", "sharding_indexed")  # how values lie, not how they are compressed


class ZarrSource(Source):
    """One open Zarr array.

    Parameters
    ----------
    node : ArrayNode
        Its metadata.
    array : zarr.Array
        The array, open, of a `WatchedStore`.
    info : ArrayInfo
        Its description, from `describe`.
    """

    def __init__(self, node: ArrayNode, array: Any, info: ArrayInfo) -> None:
        self._node, self._array, self.info = node, array, info
        self._store: WatchedStore = array.store
        self.dtype, self._is_closed = native_dtype(node.dtype), False
        self._metadata_key = metadata_key(array.path, node.version)
        planned_version = None if info.parts is None else tuple(info.parts["version"])
        self.opened_in = planned_version or self._store.state_before(self._metadata_key) or self.state()
        if info.chunks is not None:
            nbytes = math.prod(info.shards or info.chunks) * self.dtype.itemsize + 16 * n_in_shard(node.document)
            self._store.most_nbytes = _LONGEST * nbytes + _HEAD_NBYTES

    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> list[tuple[int, ...]]:
        """Decode the chunks that meet `region` into `out`; NumPy's assignment swaps bytes if necessary."""
        check_request(self.info, self.dtype, region, out)
        missing = list[tuple[int, ...]]()
        if region.size == 0:
            return missing
        if self._is_closed:  # zarr-python would open the store again
            raise ValueError(f"{self.info} was closed")
        if self._chunks is not None:
            return read_by_chunks(self._chunks, self.info.chunks or (), region, out)
        store, out = self._store, out.view(bits_of(self.dtype)) if is_added(self.dtype) else out
        for part in self._parts(region):
            store.missing.clear()
            index: Any = (*part.slices(region.start), ...)
            buffer = zarr.buffer.cpu.NDBuffer.from_numpy_array(out[index])
            self._array.get_basic_selection(part.slices(), out=buffer, prototype=zarr.buffer.cpu.buffer_prototype)
            if store.missing:
                missing += self._missing_in(part)
        return missing

    def _parts(self, region: Region) -> Iterator[Region]:
        """Cut a non-empty region into regions to read in one call: whole shards, unless they have too many chunks."""
        chunks, shards = self.info.chunks, self.info.shards
        if chunks is None:
            return iter((region,))
        per_shard = math.prod(-(-n // m) for n, m in zip(shards or chunks, chunks, strict=True))
        if per_shard > _MOST_AT_ONCE:
            return a_few_chunks(region, chunks, _MOST_AT_ONCE)
        return a_few_chunks(region, shards or chunks, _MOST_AT_ONCE // per_shard)

    def _missing_in(self, region: Region) -> list[tuple[int, ...]]:
        """The chunks in `region` whose file (or whose shard's file) the store did not have."""
        chunks = self.info.chunks or ()
        outer = self.info.shards or chunks
        prefix, missing = f"{self._array.path}/" if self._array.path else "", []
        for index in itertools.product(*chunks_met(region, chunks)):
            position = tuple(i * c // n for i, c, n in zip(index, chunks, outer, strict=True))
            if prefix + self._array.metadata.encode_chunk_key(position) in self._store.missing:
                missing.append(index)
        return missing

    @functools.cached_property
    def _chunks(self) -> ZarrChunks | None:
        return chunk_reader(self._array, self._node, self.info)

    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """The values as zarr-python's indexing gives them."""
        values = index_in_parts(self._array, region, self._parts)
        return values.view(self.dtype) if is_added(self.dtype) else values

    def labels(self) -> Labels:
        """``dimension_names``, or xarray's ``_ARRAY_DIMENSIONS``; coordinates are the arrays of those names beside this one. In
        format 2 the fill value is an attribute for xarray.
        """
        node = self._node
        attrs = {key: _attribute(node, key, MOST_KEPT) for key in node.attributes if key != "_ARRAY_DIMENSIONS"}
        if node.marker is not None and node.dtype.kind != "c":
            attrs["_FillValue"] = json_value(node.marker)
        dataset = "/" + self._array.path.strip("/")
        group = dataset.rpartition("/")[0]
        names = dict.fromkeys([*filter(None, node.dims), *names_in(attrs.get("coordinates"))])
        paths = {name.rpartition("/")[2]: name if name.startswith("/") else f"{group}/{name}" for name in names}
        coords = {name: Coordinate(path) for name, path in paths.items() if path != dataset}
        return Labels(node.dims, attrs, coords)

    def group_attrs(self) -> Mapping[str, Any]:
        """The attributes of the group above. In format 3 there may be no such node: a folder is enough."""
        path = self._array.path.strip("/")
        group = self._store.node(path.rpartition("/")[0]) if path else None  # else the store is the array
        attributes = group.attributes() if isinstance(group, GroupNode) else {}
        return {key: json_value(value, MOST_KEPT) for key, value in attributes.items()}

    @quiet()
    def properties(self) -> Properties:
        """Codecs with their options, and attributes as JSON has them."""
        node, labels = self._node, self.labels()
        attrs, dtype = {key: value for key, value in node.attributes.items() if key != "_ARRAY_DIMENSIONS"}, node.dtype
        if refusal(dtype) is not None or is_added(dtype):
            return Properties.of(labels, dtype, attrs, texts=_texts(node, self._array))
        if "_FillValue" in attrs:
            attrs["_FillValue"] = _marker(_attribute(node, "_FillValue"), native_dtype(dtype))
        if node.marker is not None:
            attrs["_FillValue"] = np.asarray(node.marker, native_dtype(dtype))[()]
        chain = inner_chain(node.document)
        is_big = any(name == "bytes" and options.get("endian") == "big" for name, options in chain)
        stored = dtype if node.version == 2 else dtype.newbyteorder(">" if is_big else "<")
        chain = [(name.removeprefix("numcodecs."), options) for name, options in chain if name not in _NOT_COPIED]
        compressors = [(name, options) for name, options in chain if name not in ("shuffle", "crc32c")]
        names = [name for name, _ in chain]
        words = [ZARR_CODECS[name].word if name in ZARR_CODECS else name for name, _ in compressors]
        compression = compression_keywords(words, "shuffle" in names, lambda: _options(*compressors[0], dtype.itemsize))
        return Properties.of(labels, stored, attrs, compression=compression, checksum="crc32c" in names, fill_value=node.fill)

    def chunk_reader(self) -> ChunkReader | None:
        """A reader of single chunks, for a local folder with an encoding that `chunks` knows; else None."""
        return self._chunks

    def state(self) -> tuple[int, ...] | None:
        """The state of the array's metadata file in a folder, here or at a URL; None for other stores.

        Another store under the same name has another state.
        """
        return self._store.state(self._metadata_key)

    def versions_read(self) -> Mapping[str, Sequence[Any]]:
        """Those of the objects to which references lead."""
        folder = self._store.folder
        return folder.versions_read() if isinstance(folder, ReferenceFolder) else {}

    def close(self) -> None:
        """Close the shards that its chunk reader keeps open."""
        chunks = self.__dict__.get("_chunks")
        if chunks is not None:
            chunks.close()
        self._is_closed = True


class ZarrFormat(Format):
    """Zarr stores of format 2 and 3: folders, sets of references, and URLs of object stores and HTTP servers."""

    name = "Zarr"

    def claims_path(self, path: str) -> bool:
        """True if the folder has Zarr metadata at its root, and for a set of references to chunks in other files."""
        if os.path.isdir(path):
            return any(os.path.exists(os.path.join(path, mark)) for mark in _MARKS)
        return is_references(path)

    def claims_url(self, url: str) -> bool:
        """True if the URL of a store has a name that Zarr stores and sets of references have."""
        return is_remote(url) and without_secrets(url).rstrip("/").lower().endswith((".zarr", *SUFFIXES))

    def claims_head(self, head: bytes) -> bool:
        """True: a store is no object, so any object may lie at its URL. Other formats are asked first."""
        return True

    def claims_object(self, obj: object) -> bool:
        """True if `obj` is a `zarr.Array`."""
        return isinstance(obj, zarr.Array)

    def open_file(self, path: str, access: Access = STRICT) -> OpenFile:
        """Open the store."""
        return _ZarrStore(open_store(path, access), without_secrets(path), access)

    def open_object(self, obj: Any, access: Access = STRICT) -> Source:
        """Make a source of an open `zarr.Array`."""
        paths = (getattr(obj.store, attribute, None) for attribute in ("root", "path"))
        path = next((str(path) for path in paths if isinstance(path, str | os.PathLike)), f"<{type(obj.store).__name__}>")
        node, array = ArrayNode.of(obj), watched(obj, access.allow_external)
        return ZarrSource(node, array, describe(node, path, obj.name, access))


FORMAT = ZarrFormat()


class _ZarrStore(OpenFile):
    """A store that is opened once; each array has a watch of its own."""

    def __init__(self, store: WatchedStore, path: str, access: Access) -> None:
        self._store, self._path, self._access = store, path, access

    def expect(self, datasets: Iterable[str]) -> None:
        """Of a store at a URL the metadata are fetched."""
        self._store.expect(datasets)

    def list_arrays(self, most: int | None = None, like: str = "", in_full: bool = True) -> list[ArrayInfo]:
        """Every array in the store, by name; chunks are not read."""
        try:
            return list(itertools.islice(self._describe_all(), None if most is None else most + 1))
        except NoListingError as error:
            if not like:
                raise
            raise SourceError(f"'{self._path}' holds no array '{like}'. {error}", path=self._path, dataset=like) from error

    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Source:
        store = self._store.another_watch()
        try:
            if planned is not None and planned.parts is not None:
                node, info = ArrayNode(planned.parts["document"]), planned
            else:
                read_node = store.node(dataset)
                if not isinstance(read_node, ArrayNode):
                    raise KeyError(dataset)
                node, info = read_node, describe(read_node, self._path, dataset, self._access)
                version = store.state_before(metadata_key(dataset, node.version))
                # All that the other ranks must know: they ask for chunks alone.
                if version is not None and isinstance(store.folder, RemoteFolder):
                    info = replace(info, parts={"document": node.document, "version": version})
            return ZarrSource(node, watch(node, store, dataset), info)
        except MetadataError as error:
            text = f"'{dataset}' in '{self._path}' cannot be loaded: it holds {error}."
            raise SourceError(text, path=self._path, dataset=dataset) from error

    def state(self) -> tuple[int, ...] | None:
        """The state of the metadata file of the root, which is another one in a store that was replaced.

        None at a URL, where each rank would have to ask for it: each array has its own.
        """
        if isinstance(self._store.folder, RemoteFolder):
            return None
        return next((state for mark in ROOTS if (state := self._store.state(mark)) is not None), None)

    def groups(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """The attributes of all groups that have metadata. One whose metadata are damaged is noted."""
        groups, unread = {}, []
        for name, node in self._store.nodes():
            try:
                if isinstance(node, GroupNode):
                    groups[name] = dict(node.attributes())
                elif isinstance(node, Exception):
                    raise node
            except (OSError, LookupError, TypeError, ValueError) as error:
                if name == "/" or is_unread(error):
                    raise
                unread.append(f"what is in attributes and groups of '{name}' ({error})")
        return groups, unread

    def _describe_all(self) -> Iterator[ArrayInfo]:
        """Describe every array, by name. One that cannot be read is listed with the reason."""
        for name, node in self._store.nodes():
            if isinstance(node, GroupNode):
                continue
            try:
                if isinstance(node, Exception):
                    raise node
                info = describe(node, self._path, name, self._access)
            except Exception as error:
                is_understood = not isinstance(error, MetadataError)
                if is_understood and name == "/":
                    raise
                refused = f"metadata that cannot be read ({error})" if is_understood else str(error)
                info = ArrayInfo(self._path, name, "Zarr", (), "unknown", refused=refused)
            yield info

    def close(self) -> None:
        self._store.close()


def describe(node: ArrayNode, path: str, name: str, access: Access = STRICT) -> ArrayInfo:
    """Describe an array without reading its chunks.

    Parameters
    ----------
    node : ArrayNode
        Its metadata.
    path, name : str
        Store and array as the user named them.
    access : Access
        What the caller allows.
    """
    dtype, attributes, names = node.dtype, node.attributes, names_of(node.document)
    refused = refusal(dtype)
    if refused is None and (object_codecs := _OBJECT_CODECS.intersection(names)):  # whatever type it declares
        refused = f"values encoded with '{min(object_codecs)}', which makes Python objects (and can be a program)"
    refused = refused or refuse_codecs(names, access)
    if node.document.get("storage_transformers"):  # zarr-python looks at these only when it opens an array by its path
        refused = refused or "values behind storage transformers, which are not known here"
    if "\\" in name:
        refused = refused or "values under a name with a backslash, which zarr-python takes for a slash. Rename its folder"
    if any(name == "shuffle" and str(options.get("elementsize")) == "0" for name, options in chain_of(node.document)):
        refused = refused or (
            "chunks after a shuffle of elements of 0 bytes, by which the netCDF library means the size of the type, and "
            f'zarr-python no shuffle. If netCDF wrote it, set "elementsize" to {dtype.itemsize} in its .zarray'
        )
    grid = grid_of(node.document)
    if grid is None:
        chunks = shards = None
        refused = refused or "chunks of a grid that is not regular; only regular grids can be loaded"
    else:
        chunks, shards = grid
        refused = refused or _unbounded(node, access)
    refused = refused or unaddressable(node.shape, chunks) or unaddressable(node.shape, shards)
    return ArrayInfo(
        path=path,
        dataset=name,
        format=f"Zarr v{node.version}",
        shape=node.shape,
        dtype=dtype.name if refused else native_dtype(dtype).name,
        # Zarr allows chunks of length 0 along axes of length 0, but a grid needs steps of at least 1.
        chunks=None if chunks is None else tuple(max(1, n) for n in chunks),
        codec=codec_of(node.document),
        shards=shards,
        refused=refused,
        is_coordinate=node.dims == (name.rpartition("/")[2],),
        attributes={key: _attribute(node, key) for key in TOLD if key in attributes},
        packing=_packing(node),
    )


def _packing(node: ArrayNode) -> Packing:
    """The attributes by which stored numbers become values.

    In format 2 the fill value of missing chunks is ``_FillValue`` as well, as xarray has it (and writes it).
    """
    attributes, kind = node.attributes, node.dtype.kind
    packing = {key: typed(_attribute(node, key)) for key in ATTRIBUTES if attributes.get(key) is not None}
    value = attributes.get("_FillValue")
    if kind == "c" and value is not None:
        number = _attribute(node, "_FillValue")
        packing["_FillValue"] = typed(np.complex128(complex(*number) if isinstance(number, list) else number))
    if kind in "iu" and node.version == 3 and isinstance(value, float) and math.isfinite(value):
        packing["_FillValue"] = typed(int(value))  # as xarray: without its fraction
    if node.marker is not None:
        packing["_FillValue"] = typed(node.marker)
    return packing


def _attribute(node: ArrayNode, key: str, *most: int) -> Any:
    """An attribute as plain Python. A ``_FillValue`` from xarray (base64 of a float64's bytes) becomes that number."""
    value = json_value(node.attributes[key], *most)
    if key != "_FillValue" or node.dtype.kind not in "fcV":  # V: bfloat16 and similar types
        return value
    if isinstance(value, list) and len(value) == 2:  # of complex numbers: real part, imaginary part
        return [float_of_base64(part) for part in value]
    return float_of_base64(value)


def _unbounded(node: ArrayNode, access: Access) -> str | None:
    """Why an array is refused that zarr-python would decode without a limit on the size; None if there is a limit.

    Codecs that the caller allows are not counted.
    """
    if is_stacked(node.document, access):
        return (
            f"chunks compressed more than once ({codec_of(node.document)}), which only zarr-python decodes, without a limit on "
            "the result's size. Write it again with one compressor"
        )
    if names_of(node.document).count("sharding_indexed") > 1:
        return "shards inside of shards, which only zarr-python reads: write it again with one kind of shards"
    n = n_in_shard(node.document)
    return f"{n} chunks in each shard, more than are read" if 16 * n > MOST_INDEX_NBYTES else None


# --- what must be known of an array to make another one like it


def _texts(node: ArrayNode, array: Any) -> np.ndarray[Any, Any] | None:
    """The values of a short array of text; None for another one. Only codecs are used that make nothing but text."""
    names = set(names_of(node.document))
    is_text = node.dtype.kind in "SUT" or (node.dtype.kind == "O" and "vlen-utf8" in names)
    n = max(array.size, math.prod(array.chunks))
    if not is_text or not names <= _OF_TEXT or n * node.dtype.itemsize > _MOST_TEXT_NBYTES:
        return None
    array.store.most_nbytes = _MOST_TEXT_NBYTES
    texts = np.asarray(array[...])
    return texts if texts.dtype.kind == "S" else texts.astype(object)


def _marker(value: Any, dtype: np.dtype[Any]) -> Any:
    """``_FillValue`` as a scalar of the array's type."""
    try:
        if dtype.kind == "c" and isinstance(value, list):
            return dtype.type(complex(*map(float, value)))
        return np.asarray(float(value) if isinstance(value, str) else value, dtype)[()]  # (also of "NaN")
    except (TypeError, ValueError, OverflowError):
        return value


def _options(name: str, options: Mapping[str, Any], itemsize: int) -> dict[str, Any]:
    """The options of a compressor, with the keys of `sink.Compression`."""
    codec = ZARR_CODECS.get(name)
    return {} if codec is None or not codec.levels else codec.keywords(parameters_of(name, options, itemsize))
