"""How do I obtain values from Zarr, format 2 or 3? With zarr-python, or chunk by chunk without it.

1. `_open_store` makes a path, a zip file or a URL into what zarr-python opens.
2. `describe` turns an array's metadata into an `ArrayInfo`, without touching chunks.
3. `ZarrSource.read_into` is one selection per region: zarr-python fetches and decodes the chunks that meet it, each
   once, a few at a time (its setting ``async.concurrency``), and copies them into the caller's buffer.
4. `ZarrSource.chunk_reader` is the faster way, for stores that are folders with the usual codecs: see `zarr_chunks`.

A chunk that is not in the store is the array's fill value: Zarr does not tell one that was never written from one
that was lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import zarr
import zarr.buffer
import zarr.storage

from shardload.errors import ConfigError
from shardload.region import Region
from shardload.sources.base import ArrayInfo, ChunkReader, Source, check_request, json_value, native_dtype, refusal
from shardload.sources.zarr_chunks import ZarrChunks, chunk_reader

__all__ = ["FORMAT", "ZarrFormat", "ZarrSource", "describe"]

_MARKS = ("zarr.json", ".zarray", ".zgroup", ".zmetadata")
_TOLD = ("scale_factor", "add_offset", "_FillValue", "missing_value", "units", "calendar")


class ZarrSource:
    """One open Zarr array.

    Parameters
    ----------
    array : zarr.Array
        Open; one that `info.refused` does not refuse.
    info : ArrayInfo
        What `describe` says of it.
    store : str or zarr.storage.ZipStore, optional
        What `_open_store` gave, to close with this source; None where the array is the caller's.
    """

    def __init__(self, array: Any, info: ArrayInfo, store: Any = None) -> None:
        self._array, self._info, self._store = array, info, store
        self._dtype = native_dtype(array.dtype)
        self._chunks: ZarrChunks | None = None

    @property
    def info(self) -> ArrayInfo:
        """Shape, dtype, chunks and the rest."""
        return self._info

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values, in native byte order."""
        return self._dtype

    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> None:
        """Decode the chunks that meet `region` into `out`; NumPy's assignment swaps bytes where it must."""
        check_request(self._info, self._dtype, region, out)
        if region.size == 0:
            return
        buffer = zarr.buffer.cpu.NDBuffer.from_numpy_array(out)
        self._array.get_basic_selection(region.slices(), out=buffer, prototype=zarr.buffer.cpu.buffer_prototype)

    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """What zarr-python gives for these slices."""
        return np.asarray(self._array[region.slices()])

    def view(self, region: Region) -> np.ndarray[Any, Any] | None:
        """None: the values are in a store."""
        return None

    def chunk_reader(self) -> ChunkReader | None:
        """The chunks of a local folder, where their encoding is one that `zarr_chunks` knows; else None."""
        if self._chunks is None:
            self._chunks = chunk_reader(self._array, self._info, self._dtype)
        return self._chunks

    def close(self) -> None:
        """Close the store, where this object opened it, and the shards that its chunk reader keeps open."""
        if self._chunks is not None:
            self._chunks.close()
        _close_store(self._store)
        self._store = None


class ZarrFormat:
    """Zarr stores of format 2 and 3: folders, zip files, and URLs where fsspec is installed."""

    name = "Zarr"

    def claims_path(self, path: str) -> bool:
        """Whether the folder or zip file has Zarr metadata at its root; a URL is taken to be Zarr."""
        if "://" in path:
            return True
        if os.path.isdir(path):
            return any(os.path.exists(os.path.join(path, mark)) for mark in _MARKS)
        try:
            if not zipfile.is_zipfile(path):
                return False
            with zipfile.ZipFile(path) as archive:
                return any(mark in archive.NameToInfo for mark in _MARKS)
        except (OSError, zipfile.BadZipFile, NotImplementedError):
            return False

    def claims_object(self, obj: object) -> bool:
        """Whether `obj` is a `zarr.Array` or a `zarr.Group`."""
        return isinstance(obj, zarr.Array | zarr.Group)

    def list_arrays(self, path: str) -> list[ArrayInfo]:
        """Every array in the store, by name; chunks are not looked at."""
        with _quiet():
            if os.path.isdir(path):
                return list(_describe_folder(path))
            store = _open_store(path)
            try:
                root = zarr.open(store, mode="r")
                return [describe(root, path, "/")] if isinstance(root, zarr.Array) else list(_describe_all(root, path))
            finally:
                _close_store(store)

    def open_path(self, path: str, dataset: str) -> Source:
        """Open an array by its name; KeyError if there is none."""
        parts = dataset.strip("/").split("/")
        if parts != [""] and any(part in ("", ".", "..") for part in parts):
            raise KeyError(dataset)  # Zarr has no such names, and says so with a ValueError
        store = _open_store(path)
        try:
            with _quiet():
                found = zarr.open(store, mode="r", path="/".join(parts) or None)
            if not isinstance(found, zarr.Array):
                raise KeyError(dataset)
            return ZarrSource(found, describe(found, path, dataset), store)
        except FileNotFoundError as error:
            _close_store(store)
            raise KeyError(dataset) from error
        except BaseException:
            _close_store(store)
            raise

    def open_object(self, obj: Any) -> Source:
        """Take an open `zarr.Array`."""
        path = _store_name(obj.store)
        if isinstance(obj, zarr.Group):
            names = ", ".join(repr(info.dataset) for info in _describe_all(obj, path)) or "none"
            raise ConfigError(
                f"'{obj.name}' in '{path}' is a group, not an array. Pass group['name'] with a name of an array in it: {names}."
            )
        return ZarrSource(obj, describe(obj, path, obj.name))


FORMAT = ZarrFormat()


def _open_store(path: str) -> Any:
    """What `zarr.open` takes for `path`: the path itself, or an open zip file."""
    if "://" in path or os.path.isdir(path):
        return path
    return zarr.storage.ZipStore(path, mode="r", read_only=True)


def _close_store(store: Any) -> None:
    """Close what `_open_store` opened."""
    if isinstance(store, zarr.storage.ZipStore):
        store.close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without zarr-python's remarks on stray files and on data types that other programs may not know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _store_name(store: Any) -> str:
    """An open store as messages name it."""
    for attribute in ("root", "path"):
        if isinstance(getattr(store, attribute, None), str | os.PathLike):
            return str(getattr(store, attribute))
    return f"<{type(store).__name__}>"


def _describe_all(group: Any, path: str) -> Iterator[ArrayInfo]:
    """What is known of every array below an open `group`, by name, from its consolidated metadata where it has some."""
    base = "/" + group.path.strip("/")
    for name, member in sorted(group.members(max_depth=None), key=lambda item: item[0]):
        if isinstance(member, zarr.Array):
            yield describe(member, path, f"{base.rstrip('/')}/{name}")


def _describe_folder(path: str, name: str = "/") -> Iterator[ArrayInfo]:
    """The same for a store that is a folder, by walking it down to its arrays.

    zarr-python's own walk ends at the first array that it cannot make sense of, and warns of every stray file. Here
    such an array is listed with its reason, and the others can be loaded.
    """
    folder = os.path.join(path, name.strip("/"))
    if _is_array(folder):
        try:
            array = zarr.open_array(folder, mode="r")
        except Exception as error:
            if name == "/":
                raise
            refused = f"metadata that zarr-python cannot read ({error})"
            yield ArrayInfo(path, name, "Zarr", (), "unknown", refused=refused)
        else:
            yield describe(array, path, name)
        return
    # An array's own folder is never listed: it may hold a million chunks.
    for entry in sorted(os.listdir(folder)):
        if any(os.path.exists(os.path.join(folder, entry, mark)) for mark in _MARKS):
            yield from _describe_folder(path, f"{name.rstrip('/')}/{entry}")


def _is_array(folder: str) -> bool:
    """Whether a folder of a store is an array, by its metadata; broken metadata counts, so as not to be passed over."""
    file = os.path.join(folder, "zarr.json")
    if not os.path.exists(file):
        return os.path.exists(os.path.join(folder, ".zarray"))
    try:
        with open(file, "rb") as opened:
            return bool(json.load(opened)["node_type"] == "array")
    except (OSError, ValueError, LookupError, TypeError):
        return True


def describe(array: Any, path: str, name: str) -> ArrayInfo:
    """What is known of an array without reading its chunks.

    Parameters
    ----------
    array : zarr.Array
        Open.
    path, name : str
        As the user named the store and the array.
    """
    refused = refusal(array.dtype)
    grid = array.metadata.to_dict().get("chunk_grid")
    if isinstance(grid, dict) and grid.get("name") != "regular":
        refused = refused or f"chunks of a '{grid.get('name')}' grid; only regular grids can be loaded"
        chunks = shards = None
    else:
        chunks, shards = array.chunks, array.shards
    dimensions = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    return ArrayInfo(
        path=path,
        dataset=name,
        format=f"Zarr v{array.metadata.zarr_format}",
        shape=tuple(array.shape),
        dtype=array.dtype.name if refused else native_dtype(array.dtype).name,
        # Zarr allows chunks of length 0 along axes of length 0; a grid needs steps of 1 at least
        chunks=None if chunks is None else tuple(max(1, n) for n in chunks),
        codec=_codec(array),
        shards=None if shards is None else tuple(shards),
        refused=refused,
        is_coordinate=array.ndim == 1 and list(dimensions or ()) == [name.rpartition("/")[2]],
        attributes={key: json_value(array.attrs[key]) for key in _TOLD if key in array.attrs},
    )


def _codec(array: Any) -> str:
    """Compressors, then filters, for people; those inside the shards where there are shards."""
    names = []
    for codec in (*array.compressors, *array.filters):
        name = getattr(codec, "codec_id", None) or codec.to_dict()["name"]
        names.append(str(name).removeprefix("numcodecs."))
    return "+".join(names) or "none"
