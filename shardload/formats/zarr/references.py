"""How is a set of references read (kerchunk's JSON): a Zarr store whose chunks are ranges of other files?

`ReferenceFolder` has its keys. A value is in the set itself, or a range of an object: a file here, or at a URL. Chunks are then
read from that object as those of a shard are: nearby ranges together, and as one version of it.

Who wrote the set says which objects are read. So those outside of its own folder need ``allow_external=True``.
"""

from __future__ import annotations

import base64
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

from shardload.errors import SourceError
from shardload.formats.access import Access
from shardload.storage.containment import TARGET_HINT, OutsideError
from shardload.storage.leftovers import ROOTS
from shardload.storage.local import LocalFile, state_of
from shardload.storage.objects import Content, MemoryObject, StoredObject
from shardload.storage.remote import is_remote, open_remote, without_secrets

SUFFIXES = (".json", ".json.zst")

_MOST_NBYTES = 1 << 30  # of the set, unpacked
_MOST_OPEN = 64  # objects
_HEAD_NBYTES, _FIRST_NBYTES = 1 << 14, 1 << 22
_MARKS = (b'"refs"', b'.zgroup"', b'.zarray"', b'zarr.json"')
_ZSTD = b"\x28\xb5\x2f\xfd"
_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs")


def is_references(path: str) -> bool:
    """Whether a file is a set of references, by its beginning."""
    if not path.lower().endswith(SUFFIXES) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        head = file.read(_HEAD_NBYTES)
    try:
        head = _unpacked(head, _HEAD_NBYTES)
    except (ValueError, zstandard.ZstdError):
        return False
    return head.lstrip().startswith(b"{") and any(mark in head for mark in _MARKS)


def refuse_parquet(folder: str) -> None:
    """SourceError for references in Parquet."""
    path = os.path.join(folder, ".zmetadata")
    if any(os.path.exists(os.path.join(folder, name)) for name in ROOTS) or not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        is_parquet = b'"record_size"' in file.read(_MOST_NBYTES)
    if is_parquet:
        raise SourceError(
            f"'{folder}' has references in Parquet, which are not read. Write them as JSON: "
            f"fsspec.filesystem('reference', fo={folder!r}).save_as_json('refs.json')",
            path=folder,
        )


class ReferenceFolder:
    """The keys of a set of references (`ObjectFolder`).

    Parameters
    ----------
    path : str
        A file, or the URL of one.
    access : Access
        What the caller allows.

    Raises
    ------
    ValueError
        If it is no such set.
    """

    def __init__(self, path: str, access: Access) -> None:
        self.name, self._path, self._access = without_secrets(path), path, access
        stored: Any = open_remote(path, access.storage).object() if is_remote(path) else LocalFile(access.open_file(path), path)
        content = stored.read_at_most(0, _FIRST_NBYTES)  # as the first read of an object at a URL: one request
        content += stored.read_at_most(len(content), stored.nbytes - len(content))
        self._version = stored.version if is_remote(path) else None
        stored.close()
        self._places = _references_in(_unpacked(content, _MOST_NBYTES))
        self._below: Mapping[str, list[str]] = _folders_of(self._places)
        self._lock, self._objects = threading.Lock(), OrderedDict[str, StoredObject]()

    def version(self, key: str) -> tuple[int, ...] | None:
        """See `ObjectFolder`: that of the set."""
        return (self._version or state_of(self._path)) if key in self._places else None

    def place(self, key: str) -> tuple[StoredObject, int, int] | None:
        """In which object a value is, where it begins, and its bytes; None if there is none."""
        found = self._places.get(key)
        if found is None:
            return None
        if isinstance(found, str):
            content = found.removeprefix("base64:")
            data = base64.b64decode(content) if content != found else found.encode()
            return MemoryObject(data), 0, len(data)
        if not isinstance(found, list) or len(found) not in (1, 3) or not isinstance(found[0], str):
            raise ValueError(f"the reference '{key}' is {str(found)[:80]}, expected a text, [URL], or [URL, offset, bytes]")
        target = self._object(found[0])
        return (target, 0, target.nbytes) if len(found) == 1 else (target, int(found[1]), int(found[2]))

    def open(self, key: str, ahead: int = 1) -> MemoryObject | None:
        """See `ObjectFolder`."""
        (content,) = self.read_many([key], _MOST_NBYTES)
        return None if content is None else MemoryObject(content)

    def read_many(self, keys: Iterable[str], most_nbytes: int) -> list[Content | None]:
        """See `ObjectFolder`."""
        contents: list[Content | None] = []
        for key in keys:
            found = self.place(key)
            if found is not None and found[2] > most_nbytes:
                raise ValueError(f"'{key}' has {found[2]} bytes, what is stored there {most_nbytes} at most")
            memory = None if found is None else np.empty(found[2], dtype=np.uint8)
            if found is not None and memory is not None:
                found[0].read_into(memory, found[1])
            contents.append(memory)
        return contents

    def folders(self, key: str) -> list[str]:
        """See `ObjectFolder`."""
        return self._below.get(key, [])

    def _object(self, url: str) -> StoredObject:
        """An object that is referred to; the last few stay open."""
        with self._lock:
            stored = self._objects.get(url)
            if stored is None:
                stored = self._objects[url] = self._opened(url)
                if len(self._objects) > _MOST_OPEN:
                    self._objects.popitem(last=False)
            self._objects.move_to_end(url)
        return stored

    def _opened(self, url: str) -> StoredObject:
        """Open an object. A name without a scheme is that of a file beside the set."""
        above = posixpath.dirname(self.name)
        if is_remote(self._path) and "://" not in url and not url.startswith("/"):
            url = f"{above}/{url}"
        if is_remote(url):
            is_inside = url.startswith(f"{above}/") and ".." not in unquote(url).split("/")
            if not is_inside and not self._access.allow_external:
                raise OutsideError(
                    f"'{self.name}' refers to '{without_secrets(url)}', outside of its own folder; {TARGET_HINT}"
                )
            return open_remote(url, self._access.storage).object()
        path = re.sub("^(file|local)://", "", url)
        if "://" in path:
            raise ValueError(f"'{self.name}' refers to '{path}', a URL of an unknown kind")
        if is_remote(self._path) and not self._access.allow_external:
            raise OutsideError(f"'{self.name}' refers to '{path}', a file of this machine; {TARGET_HINT}")
        path = os.path.join(os.path.dirname(self._path), path)
        return LocalFile(self._access.open_file(path, None if is_remote(self._path) else self._path), path)


def _unpacked(content: bytes, most_nbytes: int) -> bytes:
    """JSON, which may be compressed."""
    if not content.startswith(_ZSTD):
        return content
    with zstandard.ZstdDecompressor().stream_reader(content) as reader:
        return reader.read(most_nbytes)


def _references_in(text: bytes) -> dict[str, Any]:
    """Key to text or place, of both versions of kerchunk's JSON. ValueError if it is no such set."""
    document = json.loads(text)
    refs = document.get("refs", document) if isinstance(document, dict) else None
    if not isinstance(refs, dict):
        raise ValueError("it is no set of references: a dict of keys, or one with 'refs'")
    if document.get("gen"):
        raise ValueError("its references are generated ('gen'): write them out, with fsspec's ReferenceFileSystem.save_as_json")
    templates = document.get("templates") or {}
    found = {}
    for key, value in refs.items():
        if isinstance(value, dict):  # metadata as JSON, not as text
            value = json.dumps(value)
        elif isinstance(value, list) and value and "{{" in str(value[0]):
            value = [_filled_in(str(value[0]), templates), *value[1:]]
        found[key] = value
    return found


def _filled_in(url: str, templates: Mapping[str, Any]) -> str:
    """A URL with names of templates, as ``{{u}}``, replaced."""

    def value(match: re.Match[str]) -> str:
        name = match[1].strip()
        if not isinstance(templates.get(name), str) or "{{" in templates[name]:
            raise ValueError(f"the template '{name}' of a reference is no plain text: write the references without templates")
        return str(templates[name])

    return re.sub(r"\{\{(.*?)\}\}", value, url)


def _folders_of(keys: Iterable[str]) -> dict[str, list[str]]:
    """The names of the folders with metadata below each folder, sorted."""
    below: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        if key.rpartition("/")[2] in _METADATA:
            folder = key.rpartition("/")[0]
            while folder:
                above, _, name = folder.rpartition("/")
                below[above].add(name)
                folder = above
    return {folder: sorted(names) for folder, names in below.items()}
