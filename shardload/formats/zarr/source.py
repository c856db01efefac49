"""How are values read from Zarr, format 2 or 3? With zarr-python, or chunk by chunk without it.

1. `open_store` turns a folder, a zip file or a URL into a store that zarr-python opens.
2. `describe` turns an array's metadata into an `ArrayInfo`, without reading chunks.
3. `ZarrSource.chunk_reader` is for stores that are folders with the usual codecs: see `chunks`. If there is one, `read_into`
   uses it too.
4. Otherwise `read_into` is one selection per region: zarr-python fetches and decodes the chunks that meet it, each once, a few
   at a time (its setting ``async.concurrency``), and copies them into the caller's buffer.

The values of a missing chunk are the array's fill value: Zarr cannot distinguish a chunk that was never written from a lost
one. `ZarrSource.missing` says which chunks were missing.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import math
import os
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import numcodecs.errors
import numpy as np
import zarr
import zarr.buffer
import zarr.errors
import zarr.storage

from shardload.errors import ConfigError, SourceError, is_unread, printable
from shardload.formats.access import STRICT, Access
from shardload.formats.containment import Fence
from shardload.formats.contract.array import MOST_KEPT, MOST_NAMED, TOLD, ArrayInfo, Properties, group_info, json_value, some
from shardload.formats.contract.by_chunks import a_few_chunks, chunks_met, index_in_parts, read_by_chunks
from shardload.formats.contract.chunk_reader import ChunkReader
from shardload.formats.contract.dtypes import check_request, is_added, native_dtype, refusal, unaddressable
from shardload.formats.contract.format import Format, OpenFile, Source
from shardload.formats.contract.ranges import state_of
from shardload.formats.labels import Coordinate, Labels, names_in
from shardload.formats.leftovers import ROOTS
from shardload.formats.zarr.chunks import ZarrChunks, chunk_layout, chunk_reader
from shardload.formats.zarr.codecs import refuse_codecs
from shardload.formats.zarr.dtypes import register
from shardload.formats.zarr.making import groups_of, properties_of
from shardload.formats.zarr.metadata import is_stacked, n_in_shard
from shardload.formats.zarr.store import (
    WatchedStore,
    check_zip,
    close_store,
    inner_store,
    nodes_in,
    open_store,
    watch,
    zip_entries,
    zip_state,
)
from shardload.planning.region import Region
from shardload.values.decoding import ATTRIBUTES, Packing, typed

__all__ = ["FORMAT", "ZarrFormat", "ZarrSource", "describe"]

register()

_MARKS = (*ROOTS, ".zmetadata")
_QUOTED = re.compile(r"""['"]+([^'"]+)""")
_UNKNOWN_TYPE = re.compile(r"No Zarr data type found that matches ({'name': )?'([^']*)'(, 'object_codec_id': None})?")
_UNKNOWN_CODEC = (numcodecs.errors.UnknownCodecError, zarr.errors.UnknownCodecError)
# How much longer a stored chunk may be than decoded, if only zarr-python knows its codecs: some turn one byte into 8.
_LONGEST, _HEAD_NBYTES = 8, 4096
_STACKED = (
    "its chunks are compressed more than once, and only zarr-python decodes them here, without a limit on the result's size"
)
_MOST_AT_ONCE = 1024  # chunks per call: zarr-python holds 2.5 KiB for each, however small it is
_MOST_INDEX_NBYTES = 1 << 26  # index of a shard, which zarr-python reads whole
# Codecs from which numcodecs makes Python objects. A pickle is a program that runs when it is decoded.
_OBJECT_CODECS = {"pickle", "json2", "msgpack2", "categorize", "vlen-array", "vlen-bytes", "vlen-utf8"}


class ZarrSource(Source):
    """One open Zarr array.

    Parameters
    ----------
    array : zarr.Array
        Open, and not refused by `info.refused`.
    info : ArrayInfo
        Its description, from `describe`.
    store : str or WatchedStore, optional
        The store from `open_store`, to close with this source; None if the array is the caller's.
    access : Access
        What the caller allows.
    """

    def __init__(self, array: Any, info: ArrayInfo, store: Any = None, access: Access = STRICT) -> None:
        self._array, self._info, self._store = watch(array, access.allow_external), info, store
        self._dtype = native_dtype(array.dtype)
        self._fence = (
            Fence.around_store(path, access.allow_external) if (path := _folder_of(array.store)) is not None else Fence()
        )
        self._missing: list[tuple[int, ...]] = []
        self._is_closed = False
        self._opened_in = self._array.store.state_before(self._metadata_key) or self.state()
        self._is_checked, self._is_stacked = False, is_stacked(array.metadata.to_dict(), access)
        self._array.store.most_nbytes = None if info.chunks is None else _LONGEST * self._stored_nbytes() + _HEAD_NBYTES

    @property
    def info(self) -> ArrayInfo:
        """Shape, dtype, chunks and the other metadata."""
        return self._info

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values, in native byte order."""
        return self._dtype

    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> None:
        """Decode the chunks that meet `region` into `out`; NumPy's assignment swaps bytes if necessary."""
        check_request(self._info, self._dtype, region, out)
        self._missing = []
        if region.size == 0:
            return
        if self._is_closed:  # zarr-python would open the store again
            raise ValueError(f"{self._info} was closed")
        if self._chunks is not None:
            self._missing = read_by_chunks(self._chunks, self._info.chunks or (), region, out)
            return
        if self._is_stacked:
            raise ValueError(_STACKED)
        store = self._array.store
        self._check_once()
        store.missing.clear()
        for part in self._parts(region):
            store.missing.clear()
            index: Any = (*part.slices(region.start), ...)
            buffer = zarr.buffer.cpu.NDBuffer.from_numpy_array(out[index])
            self._array.get_basic_selection(part.slices(), out=buffer, prototype=zarr.buffer.cpu.buffer_prototype)
            if store.missing:
                self._missing += self._missing_in(part)

    def _parts(self, region: Region) -> Iterator[Region]:
        """Cut a non-empty region into regions to read in one call: whole shards, unless they have too many chunks."""
        chunks, shards = self._info.chunks, self._info.shards
        if chunks is None:
            return iter((region,))
        per_shard = math.prod(-(-n // m) for n, m in zip(shards or chunks, chunks, strict=True))
        if per_shard > _MOST_AT_ONCE:
            return a_few_chunks(region, chunks, _MOST_AT_ONCE)
        return a_few_chunks(region, shards or chunks, _MOST_AT_ONCE // per_shard)

    def missing(self, region: Region) -> list[tuple[int, ...]]:
        """The chunks that `read_into` of this region did not find."""
        return self._missing

    def _missing_in(self, region: Region) -> list[tuple[int, ...]]:
        """The chunks in `region` whose file (or whose shard's file) the store did not have."""
        chunks = self._info.chunks or ()
        outer = self._info.shards or chunks
        keys, prefix = self._array.store.missing, f"{self._array.path}/" if self._array.path else ""
        cells = chunks_met(region, chunks)

        def is_missing(index: tuple[int, ...]) -> bool:
            at = tuple(i * c // n for i, c, n in zip(index, chunks, outer, strict=True))
            return prefix + self._array.metadata.encode_chunk_key(at) in keys

        return [index for index in itertools.product(*cells) if is_missing(index)]

    def _stored_nbytes(self) -> int:
        """Bytes of one chunk, or of one shard with its index, and with those of shards inside."""
        outer = self._info.shards or self._info.chunks or ()
        return math.prod(outer) * self._dtype.itemsize + 16 * n_in_shard(self._array.metadata.to_dict())

    @functools.cached_property
    def _chunks(self) -> ZarrChunks | None:
        return chunk_reader(self._array, self._info, self._dtype, self._fence)

    def _check_once(self) -> None:
        """Check, once, the sizes that a zip file declares, before anything is unpacked from it."""
        if not self._is_checked and self._array.store.most_nbytes is not None:
            check_zip(self._array, self._array.store.most_nbytes)
        self._is_checked = True

    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """The values as zarr-python's indexing gives them."""
        self._check_once()
        if self._is_stacked:  # decode here first, because zarr-python does not limit the size
            for part in self._parts(region) if region.size else ():
                if self._chunks is None:
                    raise ValueError(_STACKED)
                read_by_chunks(self._chunks, self._info.chunks or (), part, np.empty(part.shape, self._dtype))
        return index_in_parts(self._array, region, self._parts)

    def labels(self) -> Labels:
        """``dimension_names``, or xarray's ``_ARRAY_DIMENSIONS``; coordinates are the arrays of those names beside this one. In
        format 2 the fill value is an attribute for xarray.
        """
        attrs = {
            key: _attribute(self._array, key, MOST_KEPT)
            for key in self._array.metadata.attributes
            if key != "_ARRAY_DIMENSIONS"
        }
        fill = _fill_of_2(self._array)
        if fill is not None and fill.dtype.kind != "c":
            attrs["_FillValue"] = json_value(fill)
        dims = _dimensions(self._array)
        own = "/" + self._array.path.strip("/")
        above = own.rpartition("/")[0]
        names = dict.fromkeys([*(dim for dim in dims if dim), *names_in(attrs.get("coordinates"))])
        places = {name.rpartition("/")[2]: name if name.startswith("/") else f"{above}/{name}" for name in names}
        coords = {name: Coordinate(place) for name, place in places.items() if place != own}
        return Labels(dims, attrs, coords)

    def group_attrs(self) -> Mapping[str, Any]:
        """Those of the group above. In format 3 there may be none: a folder is enough."""
        own = self._array.path.strip("/")
        if not own:  # the store is the array
            return {}
        above = own.rpartition("/")[0]
        try:
            found = zarr.open_group(
                self._array.store, path=above, mode="r", zarr_format=self._array.metadata.zarr_format, use_consolidated=False
            )
        except FileNotFoundError:
            return {}
        return {key: json_value(value, MOST_KEPT) for key, value in found.metadata.attributes.items()}

    def properties(self) -> Properties:
        """Codecs with their options, and attributes as JSON has them."""
        with _quiet():
            return properties_of(self._array, self.labels())

    def chunk_reader(self) -> ChunkReader | None:
        """A reader of single chunks, for a local folder with an encoding that `chunks` knows; else None."""
        return self._chunks

    def state(self) -> tuple[int, ...] | None:
        """The state of the array's metadata file in a local folder, or of the zip file; None for other stores.

        Another store under the same name has another state.
        """
        below = inner_store(self._array.store)
        if isinstance(below, zarr.storage.ZipStore):
            return zip_state(below)
        folder = _folder_of(below)
        return None if folder is None else state_of(os.path.join(folder, self._metadata_key))

    def opened_in(self) -> tuple[int, ...] | None:
        """`state` before the metadata were read."""
        return self._opened_in

    @property
    def _metadata_key(self) -> str:
        mark = "zarr.json" if self._array.metadata.zarr_format == 3 else ".zarray"
        return f"{self._array.path}/{mark}" if self._array.path else mark

    def close(self) -> None:
        """Close the store, if this object opened it, and the shards that its chunk reader keeps open."""
        chunks = self.__dict__.get("_chunks")
        if chunks is not None:
            chunks.close()
        close_store(self._store)
        self._store, self._is_closed = None, True


class ZarrFormat(Format):
    """Zarr stores of format 2 and 3: folders, zip files, and URLs if fsspec is installed."""

    name = "Zarr"

    def claims_path(self, path: str) -> bool:
        """True if the folder has Zarr metadata at its root, or the zip file at any place: the store's folder may be in it."""
        if os.path.isdir(path):
            return any(os.path.exists(os.path.join(path, mark)) for mark in _MARKS)
        try:
            if not zipfile.is_zipfile(path):
                return False
            return any(entry.filename.rpartition("/")[2] in _MARKS for entry in zip_entries(path))
        except ValueError:
            return True  # opening it raises the error
        except (OSError, zipfile.BadZipFile, NotImplementedError):
            return False

    def claims_url(self, url: str) -> bool:
        """True for any URL: its content is not looked at."""
        return True

    def claims_object(self, obj: object) -> bool:
        """True if `obj` is a `zarr.Array` or a `zarr.Group`."""
        return isinstance(obj, zarr.Array | zarr.Group)

    def list_arrays(self, path: str, access: Access = STRICT) -> list[ArrayInfo]:
        """Every array in the store, by name; chunks are not read."""
        return self.sketch_arrays(path, access)

    def sketch_arrays(self, path: str, access: Access = STRICT, most: int | None = None, like: str = "") -> list[ArrayInfo]:
        """The same, but at most `most` + 1 arrays; first what a group `like` is that has none."""
        limit = None if most is None else most + 1
        with _quiet(), closing(_arrays_of(path, access)) as arrays:
            found = list(itertools.islice(arrays, limit))
        return [*_empty_group(path, like, access), *found][:limit] if like else found

    def open_path(self, path: str, dataset: str, access: Access = STRICT) -> Source:
        """Open an array by its name; KeyError if there is none."""
        _check_name(dataset)
        store = open_store(path, access.allow_external)
        try:
            return _open_array(store, path, dataset, access, is_own=True)
        except BaseException:
            close_store(store)
            raise

    def open_file(self, path: str, access: Access = STRICT) -> OpenFile:
        """Open the store once for several arrays."""
        return _ZarrStore(open_store(path, access.allow_external), path, access)

    def open_object(self, obj: Any, access: Access = STRICT) -> Source:
        """Make a source of an open `zarr.Array`."""
        path = _store_name(obj.store)
        if isinstance(obj, zarr.Group):
            names = some([repr(info.dataset) for info in itertools.islice(_describe_all(obj, path), MOST_NAMED + 1)]) or "none"
            raise ConfigError(
                f"'{obj.name}' in '{path}' is a group, not an array. Pass group['name'] with a name of an array in it: {names}."
            )
        return ZarrSource(obj, describe(obj, path, obj.name, access), None, access)


FORMAT = ZarrFormat()


class _ZarrStore(OpenFile):
    """A store that is opened once; each array has a watch of its own."""

    def __init__(self, store: Any, path: str, access: Access) -> None:
        self._store, self._path, self._access = store, path, access
        self._unread: list[str] = []  # of groups

    def open(self, dataset: str) -> Source:
        _check_name(dataset)
        return _open_array(self._store.another_watch(), self._path, dataset, self._access, is_own=False)

    def state(self) -> tuple[int, ...] | None:
        """The state of the zip file, or of the metadata file of the root, which is another one in a store that was replaced."""
        below = inner_store(self._store)
        if isinstance(below, zarr.storage.ZipStore):
            return zip_state(below)
        folder = _folder_of(below)
        states = (state_of(os.path.join(folder, mark)) for mark in ROOTS) if folder is not None else ()
        return next((state for state in states if state is not None), None)

    def groups(self) -> dict[str, dict[str, Any]]:
        """The attributes of all groups that have metadata."""
        folder, self._unread = _folder_of(self._store), []
        with _quiet():
            if folder is not None:
                fence = Fence.around_store(self._path, self._access.allow_external)
                nodes = nodes_in(folder, fence, self._note)
                return self._attributes(name for name, place, is_array in nodes if not is_array and _has_metadata(place))
            if isinstance(inner_store(self._store), zarr.storage.ZipStore):
                return self._attributes(_zip_nodes(self._path))
            return groups_of(zarr.open(self._store.another_watch(), mode="r"))

    def _attributes(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Those of the groups among these nodes. One whose metadata are damaged is noted."""
        found = {}
        for name in names:
            try:
                node = _node(self._store.another_watch(), name)()
            except (OSError, KeyError, TypeError, ValueError) as error:
                if name == "/" or is_unread(error):
                    raise
                self._note(name, error)
            else:
                if isinstance(node, zarr.Group):
                    found[name] = dict(node.metadata.attributes)
        return found

    def _note(self, name: str, error: Exception) -> None:
        self._unread.append(f"what is in attributes and groups of '{name}' ({error})")

    def unread(self) -> list[str]:
        """What `groups` could not read."""
        return self._unread

    def close(self) -> None:
        close_store(self._store)


def _check_name(dataset: str) -> None:
    """Raise KeyError for names that Zarr cannot have (it would raise ValueError)."""
    parts = dataset.strip("/").split("/")
    if parts != [""] and any(part in ("", ".", "..") for part in parts):
        raise KeyError(dataset)


def _open_array(store: Any, path: str, dataset: str, access: Access, is_own: bool) -> ZarrSource:
    """Open an array of an open store. With `is_own`, the store is closed with the source."""
    try:
        with _quiet():
            with _naming_codecs(path, dataset):
                found = zarr.open(store, mode="r", path=dataset.strip("/") or None)
            if not isinstance(found, zarr.Array):
                raise KeyError(dataset)
            return ZarrSource(found, describe(found, path, dataset, access), store if is_own else None, access)
    except FileNotFoundError as error:
        raise KeyError(dataset) from error


def _empty_group(path: str, name: str, access: Access) -> list[ArrayInfo]:
    """What a group of that name is, if there is one and it has no arrays; else nothing."""
    store = open_store(path, access.allow_external)
    try:
        _check_name(name)
        with _quiet(), closing(_arrays_of(path, access)) as arrays:
            found = zarr.open(store, mode="r", path=name.strip("/") or None)
            if not isinstance(found, zarr.Group) or any(_is_below(info.dataset, f"/{name.strip('/')}") for info in arrays):
                return []
        how = f"zarr.open_group({path!r}, path={name.strip('/')!r}, mode='r').attrs"
        return [group_info(path, name, "Zarr", list(found.attrs), how)]
    except (KeyError, OSError, RuntimeError, ValueError):  # the search for the array has said what is wrong
        return []
    finally:
        close_store(store)


def _arrays_of(path: str, access: Access) -> Generator[ArrayInfo]:
    """Describe every array of a store, by name."""
    if os.path.isdir(path):
        yield from _describe_folder(path, Fence.around_store(path, access.allow_external), access)
        return
    store = open_store(path, access.allow_external)
    try:
        if isinstance(inner_store(store), zarr.storage.ZipStore):
            yield from _describe_zip(store, path, access)
            return
        with _naming_codecs(path, "/"):
            root = zarr.open(store, mode="r")
        yield from [describe(root, path, "/", access)] if isinstance(root, zarr.Array) else _describe_all(root, path, access)
    finally:
        close_store(store)


def _folder_of(store: Any) -> str | None:
    """The folder of a store; None if the store is not a local folder."""
    below = inner_store(store)
    return os.fspath(below.root) if isinstance(below, zarr.storage.LocalStore) else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress zarr-python's warnings about stray files, and about data types that other programs may not know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextlib.contextmanager
def _naming_codecs(path: str, dataset: str) -> Iterator[None]:
    """Turn the error about an unknown codec or type into a SourceError that names it: the store is not damaged."""
    try:
        yield
    except (*_UNKNOWN_CODEC, ValueError) as error:
        unknown = _unknown(error)
        if unknown is None:
            raise
        text = f"'{dataset}' in '{path}' cannot be loaded: it holds {unknown}."
        raise SourceError(text, path=path, dataset=dataset) from error


def _unknown(error: Exception) -> str | None:
    """The codec or type that zarr-python does not know, in words that follow "holds"; None if that is not what it says."""
    quoted = _QUOTED.findall(str(error))  # by zarr-python and numcodecs in several ways, and by some releases twice
    if isinstance(error, _UNKNOWN_CODEC):
        name = printable(quoted[0][:80] if quoted else "")
        return f"chunks encoded with the codec '{name}', which is not installed here: install the package that it comes from"
    found = _UNKNOWN_TYPE.fullmatch(str(error))
    return None if found is None else f"values of the type '{printable(found[2][:80])}', which zarr-python does not know"


def _store_name(store: Any) -> str:
    """An open store as messages name it."""
    store = inner_store(store)
    for attribute in ("root", "path"):
        if isinstance(getattr(store, attribute, None), str | os.PathLike):
            return str(getattr(store, attribute))
    return f"<{type(store).__name__}>"


def _describe_all(group: Any, path: str, access: Access = STRICT) -> Iterator[ArrayInfo]:
    """Describe every array below an open `group`, by name, from its consolidated metadata if it has some."""
    base = "/" + group.path.strip("/")
    for name, member in sorted(group.members(max_depth=None), key=lambda item: item[0]):
        if isinstance(member, zarr.Array):
            yield describe(member, path, f"{base.rstrip('/')}/{name}", access)


def _describe_folder(path: str, fence: Fence, access: Access) -> Iterator[ArrayInfo]:
    """Do the same for a store that is a folder.

    zarr-python's own walk stops at the first array that it cannot read, warns of every stray file, and leaves out what is below
    folders without metadata. Here an array that cannot be read is listed with the reason, and the others can be loaded.
    """
    failed: list[ArrayInfo] = []  # groups of which it is not known which arrays they have
    for name, folder, is_array in nodes_in(path, fence, lambda name, error: failed.append(_unread(path, name, error))):
        yield from failed
        failed.clear()
        if is_array:
            store = WatchedStore(zarr.storage.LocalStore(folder, read_only=True), fence)
            yield from _described(partial(zarr.open_array, store, mode="r"), path, name, access)
    yield from failed


def _describe_zip(store: WatchedStore, path: str, access: Access) -> Iterator[ArrayInfo]:
    """Do the same for a zip file. Consolidated metadata may be old, and are not used."""
    array: str | None = None  # the last one: no other is below it
    for name in _zip_nodes(path):
        if array is None or not _is_below(name, array):
            for info in _described(_node(store, name), path, name, access):
                array = name
                yield info


def _zip_nodes(path: str) -> list[str]:
    """The arrays and groups of a zip file: its entries say where metadata are."""
    entries = (entry.filename.split("/") for entry in zip_entries(path))
    folders = {tuple(parts[:-1]) for parts in entries if parts[-1] in ("zarr.json", ".zarray", ".zgroup")}
    return ["/" + "/".join(parts) for parts in sorted(folders) if not {"", ".", ".."} & set(parts)]


def _node(store: WatchedStore, name: str) -> Callable[[], Any]:
    return partial(zarr.open, store, mode="r", path=name.strip("/") or None, use_consolidated=False)


def _has_metadata(folder: str) -> bool:
    return any(os.path.lexists(os.path.join(folder, mark)) for mark in ROOTS)


def _is_below(name: str, group: str) -> bool:
    return name == group or name.startswith(group.rstrip("/") + "/")


def _described(node: Callable[[], Any], path: str, name: str, access: Access) -> Iterator[ArrayInfo]:
    """Describe what `node` opens, if it is an array; with the reason, if it cannot be opened."""
    try:
        found = node()
    except Exception as error:
        unknown = _unknown(error)
        if name == "/" and unknown is None:
            raise
        yield _unread(path, name, error)
    else:
        if isinstance(found, zarr.Array):
            yield describe(found, path, name, access)


def _unread(path: str, name: str, error: Exception) -> ArrayInfo:
    """What stands for an array or group that cannot be opened: it is listed, with the reason."""
    # A type is as one of HDF5's that NumPy does not have: no other array has to wait for it.
    dtype = "unknown type" if _UNKNOWN_TYPE.fullmatch(str(error)) else "unknown"
    refused = _unknown(error) or f"metadata that zarr-python cannot read ({error})"
    return ArrayInfo(path, name, "Zarr", (), dtype, refused=refused)


def describe(array: Any, path: str, name: str, access: Access = STRICT) -> ArrayInfo:
    """Describe an array without reading its chunks.

    Parameters
    ----------
    array : zarr.Array
        An open array.
    path, name : str
        Store and array as the user named them.
    access : Access
        What the caller allows.
    """
    refused = refusal(array.dtype) or _unsafe(array) or refuse_codecs(array.metadata, access)
    grid = array.metadata.to_dict().get("chunk_grid")
    if isinstance(grid, dict) and grid.get("name") != "regular":  # zarr-python may raise if asked for its chunks or shards
        refused = refused or f"chunks of a '{grid.get('name')}' grid; only regular grids can be loaded"
        chunks = shards = None
    else:
        refused = refused or _unbounded(array, access)
        chunks, shards = array.chunks, array.shards
    refused = refused or unaddressable(array.shape, chunks) or unaddressable(array.shape, shards)
    return ArrayInfo(
        path=path,
        dataset=name,
        format=f"Zarr v{array.metadata.zarr_format}",
        shape=tuple(array.shape),
        dtype=array.dtype.name if refused else native_dtype(array.dtype).name,
        # Zarr allows chunks of length 0 along axes of length 0, but a grid needs steps of at least 1.
        chunks=None if chunks is None else tuple(max(1, n) for n in chunks),
        codec=_codec(array),
        shards=None if shards is None else tuple(shards),
        refused=refused,
        is_coordinate=array.ndim == 1 and _dimensions(array) == (name.rpartition("/")[2],),
        attributes={key: _attribute(array, key) for key in TOLD if key in array.attrs},
        packing=_packing(array),
    )


def _dimensions(array: Any) -> tuple[str | None, ...]:
    """The names of the axes; None for an axis without one, or with an empty one."""
    found = getattr(array.metadata, "dimension_names", None) or array.metadata.attributes.get("_ARRAY_DIMENSIONS")
    if not isinstance(found, list | tuple) or len(found) != array.ndim:
        return (None,) * int(array.ndim)
    return tuple([name if isinstance(name, str) and name else None for name in found])


def _packing(array: Any) -> Packing:
    """The attributes by which stored numbers become values.

    In format 2 the fill value of missing chunks is ``_FillValue`` as well, as xarray has it (and writes it).
    """
    attributes, kind = array.metadata.attributes, getattr(array.dtype, "kind", "")
    found = {key: typed(_attribute(array, key)) for key in ATTRIBUTES if attributes.get(key) is not None}
    if kind == "c" and "_FillValue" in found:
        value = _attribute(array, "_FillValue")
        found["_FillValue"] = typed(np.complex128(complex(*value) if isinstance(value, list) else value))
    value = attributes.get("_FillValue")
    if kind in "iu" and array.metadata.zarr_format == 3 and isinstance(value, float) and math.isfinite(value):
        found["_FillValue"] = typed(int(value))  # as xarray: without its fraction
    fill = _fill_of_2(array)
    if fill is not None:
        found["_FillValue"] = typed(fill)
    return found


def _fill_of_2(array: Any) -> Any:
    """The fill value of an array of numbers in format 2, as a scalar of its type; None if there is none."""
    fill = array.metadata.fill_value if array.metadata.zarr_format == 2 else None
    is_number = refusal(array.dtype) is None and not is_added(array.dtype)  # xarray knows no others
    return np.asarray(fill, array.dtype)[()] if fill is not None and is_number else None


def _attribute(array: Any, key: str, *most: int) -> Any:
    """An attribute as plain Python. A ``_FillValue`` from xarray (base64 of a float64's bytes) becomes that number."""
    value = json_value(array.attrs[key], *most)
    kind = getattr(array.dtype, "kind", "")
    if key != "_FillValue" or kind not in "fcV":  # V: bfloat16 and similar types
        return value
    if isinstance(value, list) and len(value) == 2:  # of complex numbers: real part, imaginary part
        return [_float_of_base64(part) for part in value]
    return _float_of_base64(value)


def _float_of_base64(value: Any) -> Any:
    """Decode a float that xarray wrote as base64 (JSON has no NaN). Any other value is returned unchanged."""
    try:
        (number,) = struct.unpack("<d", base64.b64decode(value, validate=True))
    except (TypeError, ValueError, struct.error):
        return value
    return math.nan if math.isnan(number) else number


def _unsafe(array: Any) -> str | None:
    """Why an array is refused whose stored values are Python objects, whatever type it declares; None if they are not."""
    names = {name.strip() for name in _codec(array).lower().split("+")} & _OBJECT_CODECS
    return f"values encoded with '{min(names)}', which makes Python objects (and can be a program)" if names else None


def _unbounded(array: Any, access: Access) -> str | None:
    """Why an array is refused that zarr-python would decode to a size without a limit; None if there is a limit.

    Codecs that the caller allows are not counted.
    """
    if is_stacked(array.metadata.to_dict(), access) and chunk_layout(array, native_dtype(array.dtype)) is None:
        return (
            f"chunks compressed more than once ({_codec(array)}), which only zarr-python decodes, without a limit on the "
            "result's size. Keep them in a folder, with gzip, zstd or Blosc, or write it again with one compressor"
        )
    n = n_in_shard(array.metadata.to_dict())
    return f"{n} chunks in each shard, more than are read" if 16 * n > _MOST_INDEX_NBYTES else None


def _codec(array: Any) -> str:
    """Compressors, then filters, for people; with shards, those of the chunks inside."""
    names = []
    for codec in (*array.compressors, *array.filters):
        name = getattr(codec, "codec_id", None) or codec.to_dict()["name"]
        names.append(str(name).removeprefix("numcodecs."))
    return "+".join(names) or "none"
