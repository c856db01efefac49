"""How is a set of references read (kerchunk's JSON or Parquet): a Zarr store whose chunks are ranges of other files?

`ReferenceFolder` has its keys. A value is in the set itself, or it is a range of an object: a local file, or one at a URL.
Chunks are read from that object as those of a shard are: nearby ranges together, and from one version of it. In JSON all
references are in one file; in Parquet (`_Tables`) metadata are in one file, and references in tables, which are read when
they are needed.

The set says which objects are read. Those outside of its own folder need ``allow_external=True``.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import posixpath
import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import numpy as np
import zstandard

from shardload.errors import ConfigError
from shardload.formats.access import Access
from shardload.storage.leftovers import METADATA, NODE_FILES, ROOTS
from shardload.storage.local import TARGET_HINT, Fence, LocalFile, LocalFolder, OutsideError, head_of, open_file, state_of
from shardload.storage.objects import Content, MemoryObject, ObjectFolder, StoredObject, read_content
from shardload.storage.remote import Pin, RemoteObject, is_remote, open_remote, without_secrets

_JSON_SUFFIXES, _PARQUET_SUFFIXES = (".json", ".json.zst"), (".parq", ".parquet")  # of files; of folders
SUFFIXES = (*_JSON_SUFFIXES, *_PARQUET_SUFFIXES)

_MOST_NBYTES = 1 << 30  # of the set, unpacked
_MOST_OPEN, _MOST_REMOTE = 64, 4096  # objects; those at URLs are no open files, and are kept if they were fetched ahead
_MOST_PARTS = 256  # of a name; each of the folders above it is noted
_HEAD_NBYTES, _FIRST_NBYTES = 1 << 14, 1 << 22
_MARKS = (b'"refs"', b'.zgroup"', b'.zarray"', b'zarr.json"')
_ZSTD = b"\x28\xb5\x2f\xfd"
_OF_PARQUET, _COLUMNS, _TEXTS = ".zmetadata", ("path", "offset", "size", "raw"), ("path", "raw")
_MOST_ROWS, _MOST_TABLES = 1 << 24, 8  # rows of a table; tables that are kept


def is_references(path: str) -> bool:
    """Whether a file is a set of references in JSON, by its beginning, or a folder one in Parquet."""
    if os.path.isdir(path):
        return _is_parquet(path)
    if not path.lower().endswith(_JSON_SUFFIXES):
        return False
    try:
        head = _unpacked(head_of(path, _HEAD_NBYTES), _HEAD_NBYTES)
    except (ValueError, zstandard.ZstdError):
        return False
    return head.lstrip().startswith(b"{") and any(mark in head for mark in _MARKS)


def _is_parquet(folder: str) -> bool:
    """Whether a folder is a set of references in Parquet, and no Zarr store."""
    path = os.path.join(folder, _OF_PARQUET)
    if any(os.path.exists(os.path.join(folder, name)) for name in ROOTS) or not os.path.isfile(path):
        return False
    return b'"record_size"' in head_of(path, min(_MOST_NBYTES, os.path.getsize(path)))  # no more memory than it has


class ReferenceFolder:
    """The keys of a set of references (`ObjectFolder`).

    Parameters
    ----------
    path : str
        A file of JSON or a folder of Parquet, or the URL of one: its suffix says which.
    access : Access
        What the caller allows.

    Raises
    ------
    ValueError
        If it is no such set.
    ConfigError
        If it is in Parquet, and pyarrow is not installed.
    """

    def __init__(self, path: str, access: Access) -> None:
        self.name, self._path, self._access = without_secrets(path).rstrip("/"), path.rstrip("/"), access
        self._remote = remote = open_remote(path, access.storage) if is_remote(path) else None
        is_folder = os.path.isdir(path) if remote is None else self.name.lower().endswith(_PARQUET_SUFFIXES)
        stored: Any
        if is_folder:
            folder = remote or LocalFolder(path, Fence.around_store(path, access.allow_external))
            stored = folder.open(_OF_PARQUET, _FIRST_NBYTES)
            if stored is None:
                raise FileNotFoundError(f"there is no {_OF_PARQUET}, which a set of references in Parquet has")
        else:
            stored = LocalFile(open_file(path), path) if remote is None else remote.object()
        opened_in = stored.version if remote is None else None  # before it is read: it may be written meanwhile
        content = stored.read_at_most(0, _FIRST_NBYTES)  # as the first read of an object at a URL: one request
        _check_size(stored.nbytes)
        content += stored.read_at_most(len(content), stored.nbytes - len(content))
        self.opened_in = (opened_in or stored.version or ())[:2]
        stored.close()
        self._tables = _Tables(folder, self.name, content) if is_folder else None
        self._references = _references_in(content) if self._tables is None else self._tables.metadata
        self._folders: Mapping[str, list[str]] = folders_of(self._references)
        self._lock, self._objects = threading.Lock(), OrderedDict[str, StoredObject]()
        # The versions of objects that are not kept any more, and the pins of those at URLs.
        self._let_go = dict[str, tuple[tuple[int, ...] | None, Pin | None]]()

    def version(self, key: str) -> tuple[int, ...] | None:
        """See `ObjectFolder`: that of the set now. `opened_in` is that which was read."""
        if key not in self._references:
            return None
        name = "" if self._tables is None else _OF_PARQUET
        if self._remote is not None:
            return self._remote.version(name)
        return state_of(os.path.join(self._path, name) if name else self._path)

    def place(self, key: str) -> tuple[StoredObject, int, int] | None:
        """The object that has a value, its offset there, and its bytes; None if there is none."""
        if key in self._references:
            reference = self._references[key]
        elif self._tables is None or (reference := self._tables.reference(key)) is None:
            return None
        if isinstance(reference, str | bytes):
            content = reference.encode() if isinstance(reference, str) else reference
            data = base64.b64decode(content[7:]) if content.startswith(b"base64:") else content
            return MemoryObject(data), 0, len(data)
        is_place = isinstance(reference, list) and len(reference) in (1, 3) and isinstance(reference[0], str)
        if not is_place or not all(isinstance(number, int | np.integer) for number in reference[1:]):
            text = str(reference)[:80]
            raise ValueError(f"the reference '{key}' is {text}, expected a text, [URL], or [URL, offset, bytes]")
        target = self._object(reference[0])
        return (target, 0, target.nbytes) if len(reference) == 1 else (target, int(reference[1]), int(reference[2]))

    def open(self, key: str, ahead: int = 1) -> MemoryObject | None:
        """See `ObjectFolder`."""
        content = self._read(key, _MOST_NBYTES)
        return None if content is None else MemoryObject(content)

    def read_many(self, keys: Iterable[str], most_nbytes: int) -> list[Content | None]:
        """See `ObjectFolder`."""
        return [self._read(key, most_nbytes) for key in keys]

    def _read(self, key: str, most_nbytes: int) -> Content | None:
        place = self.place(key)
        if place is None:
            return None
        stored, offset, nbytes = place
        return read_content(stored, key, most_nbytes, (offset, offset + nbytes))

    def folders(self, key: str) -> list[str]:
        """See `ObjectFolder`."""
        return self._folders.get(key, [])

    def _object(self, url: str) -> StoredObject:
        """An object with values. The last few stay open."""
        with self._lock:
            stored = self._objects.get(url)
            if stored is None:
                version, pin = self._let_go.get(url, (None, None))
                stored = self._open(url, pin)
                if url in self._let_go and stored.version != version:
                    raise OSError(f"'{without_secrets(url)}' was replaced, or written, since it was read first")
                self._objects[url] = stored
                if len(self._objects) > (_MOST_REMOTE if isinstance(stored, RemoteObject) else _MOST_OPEN):
                    first_url, first = self._objects.popitem(last=False)
                    self._let_go[first_url] = first.version, first.pin if isinstance(first, RemoteObject) else None
            self._objects.move_to_end(url)
        return stored

    def versions_read(self) -> dict[str, tuple[Any, ...]]:
        """See `Source`."""
        with self._lock:
            versions = {url: version for url, (version, _) in self._let_go.items()}
            versions |= {url: stored.version for url, stored in self._objects.items()}
        return {
            hashlib.blake2b(url.encode(), digest_size=8).hexdigest(): (without_secrets(url), *(version or ())[:2])
            for url, version in versions.items()
        }

    def _open(self, url: str, pin: Pin | None) -> StoredObject:
        """Open an object: of one at a URL, this version. A name without a scheme is that of a file beside the set."""
        above = posixpath.dirname(self.name)
        if is_remote(self._path) and "://" not in url and not url.startswith("/"):
            url = f"{above}/{url.removeprefix('./')}"
        if is_remote(url):
            # To HTTP a backslash is a slash, and tabs and line breaks are nothing.
            has_steps_up = ".." in re.split(r"[/\\]", unquote(url)) or not url.isprintable()
            is_inside = url.startswith(f"{above}/") and not has_steps_up
            if not is_inside and not self._access.allow_external:
                raise OutsideError(
                    f"'{self.name}' refers to '{without_secrets(url)}', outside of its own folder; {TARGET_HINT}"
                )
            return open_remote(url, self._access.storage).object(pin)
        path = re.sub("^(file|local)://", "", url)
        if "://" in path:
            raise ValueError(f"'{self.name}' refers to '{path}', a URL of an unknown kind")
        if is_remote(self._path) and not self._access.allow_external:
            raise OutsideError(f"'{self.name}' refers to '{path}', a file of this machine; {TARGET_HINT}")
        path = os.path.join(os.path.dirname(self._path), path)
        # Beside the set, also if that is a folder.
        fence = Fence() if is_remote(self._path) else Fence.around_file(self._path, self._access.allow_external)
        return LocalFile(fence.open(path, self._path), path)


_Table = tuple[int, list[Any]]  # how many rows it has, and its columns; None for those that it lacks


class _Tables:
    """The references of a set in Parquet, in the layout of fsspec's `LazyReferenceMapper`: as many chunks of an array as
    ``record_size`` says are in one table, in C order.

    Parameters
    ----------
    folder : ObjectFolder
        The set.
    name : str
        Its name for people.
    content : bytes
        Its ``.zmetadata``.

    Attributes
    ----------
    metadata : dict
        Metadata of Zarr as text, by their keys.
    """

    def __init__(self, folder: ObjectFolder, name: str, content: bytes) -> None:
        try:
            import pyarrow.parquet
        except ImportError:
            text = f"'{name}' has references in Parquet, which are read with pyarrow, which is not installed"
            raise ConfigError(f"{text}: pip install pyarrow") from None
        document = json.loads(content)
        metadata, n_rows = (document.get(key) for key in ("metadata", "record_size")) if isinstance(document, dict) else (0, 0)
        if not isinstance(metadata, dict) or not isinstance(n_rows, int) or not 0 < n_rows <= _MOST_ROWS:
            raise ValueError(f"it is no set of references in Parquet: its {_OF_PARQUET} has no 'metadata', or no 'record_size'")
        self.metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
        self._parquet, self._folder, self._n_rows = pyarrow.parquet, folder, n_rows
        self._lock, self._tables, self._counts = threading.Lock(), OrderedDict[str, _Table | None](), dict[str, list[int]]()

    def reference(self, key: str) -> Any:
        """The reference of a chunk, as JSON would have it; None if there is none."""
        array, _, index = key.rpartition("/")
        if index in METADATA:
            return None
        number = 0
        for k, n in zip(map(int, index.split(".")), self._counts_of(array), strict=True):
            number = number * n + k
        name = f"{array}/refs.{number // self._n_rows}.parq".lstrip("/")
        table, row = self._table(name), number % self._n_rows
        if table is None:  # no chunk of it is stored
            return None
        n_rows, columns = table
        if row >= n_rows:
            raise ValueError(f"'{name}' has {n_rows} rows, and none for '{key}', which is in row {row}: it is cut")
        path, offset, nbytes, raw = (None if column is None else column[row] for column in columns)
        if isinstance(raw, str | bytes):
            return raw
        if path is None or path != path:  # NaN, from a column without any
            return None
        return [path] if (offset, nbytes) == (0, 0) else [path, offset, nbytes]

    def _counts_of(self, array: str) -> list[int]:
        """How many chunks an array has along each axis; [1] for an array without axes."""
        if array not in self._counts:
            document = json.loads(self.metadata.get(f"{array}/.zarray".lstrip("/"), "{}"))
            if not document:
                raise ValueError(f"'{array}' has no .zarray: only arrays of Zarr format 2 have references in Parquet")
            counts = [-(-n // c) for n, c in zip(document["shape"], document["chunks"], strict=True)]
            self._counts[array] = counts or [1]
        return self._counts[array]

    def _table(self, name: str) -> _Table | None:
        """A table; None if there is none. The last few are kept."""
        with self._lock:
            if name not in self._tables:
                (content,) = self._folder.read_many([name], _MOST_NBYTES)
                self._tables[name] = None if content is None else self._table_in(name, content)
                if len(self._tables) > _MOST_TABLES:
                    self._tables.popitem(last=False)
            self._tables.move_to_end(name)
            return self._tables[name]

    def _table_in(self, name: str, content: Content) -> _Table:
        """The table that a file has. ValueError if it would be larger than it may be."""
        file = self._parquet.ParquetFile(io.BytesIO(bytes(content)))
        nbytes = sum(file.metadata.row_group(k).total_byte_size for k in range(file.num_row_groups))
        if file.metadata.num_rows > self._n_rows or nbytes > _MOST_NBYTES:
            raise ValueError(f"'{name}' has {file.metadata.num_rows} rows of {nbytes} bytes, expected {self._n_rows} at most")
        texts = [name for name in _TEXTS if name in file.schema_arrow.names]
        table = self._parquet.ParquetFile(io.BytesIO(bytes(content)), read_dictionary=texts).read()
        return table.num_rows, [_values_of(table[name]) if name in table.column_names else None for name in _COLUMNS]


def _values_of(column: Any) -> Any:
    """The values of a column. Rows of one text have the same object: each of a million may have a long one."""
    if not hasattr(column.type, "index_type"):
        return column.to_numpy()
    encoded = column.combine_chunks()
    texts = np.array([*encoded.dictionary.to_pylist(), None], dtype=object)
    return texts[encoded.indices.fill_null(-1).to_numpy()]


def _unpacked(content: bytes, most_nbytes: int) -> bytes:
    """JSON, decompressed if it is compressed."""
    if not content.startswith(_ZSTD):
        return content
    with zstandard.ZstdDecompressor().stream_reader(content) as reader:
        parts, n_left = list[bytes](), most_nbytes
        while n_left and (part := reader.read(min(n_left, _FIRST_NBYTES))):  # which takes the memory that it may fill
            parts.append(part)
            n_left -= len(part)
        return b"".join(parts)


def _check_size(nbytes: int) -> None:
    if nbytes > _MOST_NBYTES:
        raise ValueError(f"it has {nbytes} bytes or more, a set of references {_MOST_NBYTES} at most")


def _references_in(content: bytes) -> dict[str, Any]:
    """From key to text or place, in either version of kerchunk's JSON. ValueError if it is no such set."""
    text = _unpacked(content, _MOST_NBYTES + 1)
    _check_size(len(text))
    document = json.loads(text)
    refs = document.get("refs", document) if isinstance(document, dict) else None
    if not isinstance(refs, dict):
        raise ValueError("it is no set of references: a dict of keys, or one with 'refs'")
    if document.get("gen"):
        raise ValueError("its references are generated ('gen'): write them out, with fsspec's ReferenceFileSystem.save_json")
    templates = document.get("templates") or {}
    references = {}
    for key, value in refs.items():
        if isinstance(value, dict):  # metadata as JSON, not as text
            value = json.dumps(value)
        elif isinstance(value, list) and value and "{{" in str(value[0]):
            value = [_filled_in(str(value[0]), templates), *value[1:]]
        references[key] = value
    return references


def _filled_in(url: str, templates: Mapping[str, Any]) -> str:
    """A URL with names of templates, as ``{{u}}``, replaced."""

    def value(match: re.Match[str]) -> str:
        name = match[1].strip()
        if not isinstance(templates.get(name), str) or "{{" in templates[name]:
            raise ValueError(f"the template '{name}' of a reference is no plain text: write the references without templates")
        return str(templates[name])

    return re.sub(r"\{\{(.*?)\}\}", value, url)


def folders_of(keys: Iterable[str]) -> dict[str, list[str]]:
    """The names of the folders with metadata below each folder, sorted."""
    below: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        folder, _, name = key.rpartition("/")
        if name in NODE_FILES and (not folder or {"", ".", ".."}.isdisjoint(folder.split("/"))):
            if key.count("/") > _MOST_PARTS:
                raise ValueError(f"'{key[:40]}...' has {key.count('/')} groups above it; {_MOST_PARTS} are read at most")
            while folder:
                above, _, name = folder.rpartition("/")
                below[above].add(name)
                folder = above
    return {folder: sorted(names) for folder, names in below.items()}
