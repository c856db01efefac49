"""How is a set of references read (kerchunk's JSON): a Zarr store whose chunks are ranges of other files?

`ReferenceFolder` has its keys. A value is in the set itself, or it is a range of an object: a local file, or one at a URL.
Chunks are read from that object as those of a shard are: nearby ranges together, and from one version of it.

The set says which objects are read. Those outside of its own folder need ``allow_external=True``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import posixpath
import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import zstandard

from shardload.errors import ConfigError
from shardload.formats.access import Access
from shardload.storage.leftovers import NODE_FILES
from shardload.storage.local import TARGET_HINT, Fence, LocalFile, OutsideError, head_of, state_of
from shardload.storage.objects import Content, MemoryObject, StoredObject, read_content
from shardload.storage.remote import Pin, RemoteObject, is_remote, open_remote, without_secrets

_JSON_SUFFIXES, _PARQUET_SUFFIXES = (".json", ".json.zst"), (".parq", ".parquet")  # of files; of folders
SUFFIXES = (*_JSON_SUFFIXES, *_PARQUET_SUFFIXES)

_MOST_NBYTES = 1 << 30  # of the set, unpacked
_MOST_OPEN, _MOST_REMOTE = 64, 4096  # objects; those at URLs are no open files, and are kept if they were fetched ahead
_MOST_PARTS = 256  # of a name; each of the folders above it is noted
_HEAD_NBYTES, _FIRST_NBYTES = 1 << 14, 1 << 22
_MARKS = (b'"refs"', b'.zgroup"', b'.zarray"', b'zarr.json"')
_ZSTD = b"\x28\xb5\x2f\xfd"


def is_references(path: str) -> bool:
    """Whether a file is a set of references in JSON, by its beginning, or a folder one in Parquet, by its name."""
    if os.path.isdir(path):
        return path.rstrip("/").lower().endswith(_PARQUET_SUFFIXES)
    if not path.lower().endswith(_JSON_SUFFIXES):
        return False
    try:
        head = _unpacked(head_of(path, _HEAD_NBYTES), _HEAD_NBYTES)
    except (ValueError, zstandard.ZstdError):
        return False
    return head.lstrip().startswith(b"{") and any(mark in head for mark in _MARKS)


class ReferenceFolder:
    """The keys of a set of references (`ObjectFolder`).

    Parameters
    ----------
    path : str
        A file of JSON, or the URL of one.
    access : Access
        What the caller allows.

    Raises
    ------
    ValueError
        If it is no such set.
    ConfigError
        If it is in Parquet.
    """

    def __init__(self, path: str, access: Access) -> None:
        self.name, self._path, self._access = without_secrets(path).rstrip("/"), path.rstrip("/"), access
        self._remote = remote = open_remote(path, access.storage) if is_remote(path) else None
        if self.name.lower().endswith(_PARQUET_SUFFIXES):
            raise ConfigError(
                f"'{self.name}' has references in Parquet, which are not read. Write them as JSON, or open the array with "
                "zarr-python and fsspec's ReferenceFileSystem, and pass it with allow_external=True"
            )
        stored: Any = LocalFile(access.open_file(path), path) if remote is None else remote.object()
        opened_in = stored.version if remote is None else None  # before it is read: it may be written meanwhile
        content = stored.read_at_most(0, _FIRST_NBYTES)  # as the first read of an object at a URL: one request
        _check_size(stored.nbytes)
        content += stored.read_at_most(len(content), stored.nbytes - len(content))
        self.opened_in = (opened_in or stored.version or ())[:2]
        stored.close()
        self._references = _references_in(content)
        self._folders: Mapping[str, list[str]] = folders_of(self._references)
        self._lock, self._objects = threading.Lock(), OrderedDict[str, StoredObject]()
        # The versions of objects that are not kept any more, and the pins of those at URLs.
        self._let_go = dict[str, tuple[tuple[int, ...] | None, Pin | None]]()

    def version(self, key: str) -> tuple[int, ...] | None:
        """See `ObjectFolder`: that of the set now. `opened_in` is that which was read."""
        if key not in self._references:
            return None
        return state_of(self._path) if self._remote is None else self._remote.version("")

    def place(self, key: str) -> tuple[StoredObject, int, int] | None:
        """The object that has a value, its offset there, and its bytes; None if there is none."""
        if key not in self._references:
            return None
        reference = self._references[key]
        if isinstance(reference, str):
            content = reference.encode()
            data = base64.b64decode(content[7:]) if content.startswith(b"base64:") else content
            return MemoryObject(data), 0, len(data)
        is_place = isinstance(reference, list) and len(reference) in (1, 3) and isinstance(reference[0], str)
        if not is_place or not all(isinstance(number, int) for number in reference[1:]):
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
        if is_remote(self._path):
            return LocalFile(self._access.open_file(path), path)
        fence = Fence.around_file(self._path, self._access.allow_external)
        return LocalFile(self._access.open_file(path, self._path, fence), path)


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
