"""Which files are damaged, and how? Small good files of many kinds, and mutations of them that follow from a number alone.

A `Kind` is a good file (or store) in memory, with what is known of it: its values, and which of its bytes hold which chunk. A
`Case` is one mutation of it, which knows which chunks it touched, so that every other value can still be compared.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numcodecs
import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ShardingCodec, ZstdCodec

SHAPE, CHUNKS = (13, 22, 3), (5, 8, 3)
METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


@dataclass
class Kind:
    """A good file. `payload` says where chunks are: (name of the file, first byte, past the last byte, chunk)."""

    name: str
    files: dict[str, bytes]
    values: np.ndarray[Any, Any]
    chunks: tuple[int, ...]
    checked: bool
    payload: list[tuple[str, int, int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def path(self) -> str:
        """What is loaded."""
        return next(iter(self.files)) if len(self.files) == 1 else "store.zarr"


@dataclass
class Case:
    """One damaged file. `touched`: the chunks; None where more than values was changed. `links` are made too: (name, what)."""

    number: int
    kind: Kind
    what: str
    files: dict[str, bytes]
    touched: set[tuple[int, ...]] | None
    links: list[tuple[str, str]] = field(default_factory=list)

    def write(self, folder: Path) -> str:
        """Write it below `folder`; returns the path to load."""
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        for name, target in self.links:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).mkdir() if target == "folder" else (folder / name).symlink_to(target)
        return str(folder / self.kind.path)


def values(dtype: str) -> np.ndarray[Any, Any]:
    """Values that are their own flat index."""
    return np.arange(math.prod(SHAPE)).reshape(SHAPE).astype(dtype)


def hdf5_kinds(folder: Path) -> list[Kind]:
    """HDF5 files: every kind of storage and of filter, by the oldest and the newest rules of the file format."""
    layouts: dict[str, tuple[str, dict[str, Any], bool]] = {
        "contiguous": ("<f4", {}, False),
        "contiguous-be": (">i4", {}, False),
        "chunks": ("<f8", {"chunks": CHUNKS}, False),
        "growing": ("<i4", {"chunks": CHUNKS, "maxshape": (None, None, 3)}, False),
        "gzip": ("<f4", {"chunks": CHUNKS, "compression": "gzip"}, True),
        "gzip-shuffle": (">f4", {"chunks": CHUNKS, "compression": "gzip", "shuffle": True}, True),
        "fletcher32": ("<f4", {"chunks": CHUNKS, "fletcher32": True, "shuffle": True}, True),
        "gzip-fletcher32": ("<i8", {"chunks": CHUNKS, "compression": "gzip", "fletcher32": True}, True),
        "lzf": ("<i4", {"chunks": CHUNKS, "compression": "lzf"}, False),
        "zstd": ("<f4", {"chunks": CHUNKS, **hdf5plugin.Zstd()}, False),
        "blosc": ("<f4", {"chunks": CHUNKS, **hdf5plugin.Blosc("lz4")}, False),
        "lz4": ("<i4", {"chunks": CHUNKS, **hdf5plugin.LZ4()}, False),
        "one-chunk": ("<f4", {"chunks": SHAPE, "compression": "gzip", "shuffle": True}, True),
    }
    kinds = []
    for libver in ("earliest", "latest"):
        for name, (dtype, options, checked) in layouts.items():
            path = folder / f"{name}-{libver}.h5"
            data = values(dtype)
            with h5py.File(path, "w", libver=libver) as file:
                file.create_dataset("a", data=data, **options).attrs["units"] = "K"
                file["b"] = np.arange(3)
            kinds.append(_located(Kind(f"hdf5-{libver}-{name}", {path.name: path.read_bytes()}, data, SHAPE, checked), path))
    return kinds


def _located(kind: Kind, path: Path) -> Kind:
    """The same, with the places of its chunks."""
    with h5py.File(path, "r") as file:
        found = file["a"]
        if found.chunks is None:
            at, size = found.id.get_offset(), found.nbytes
            kind.payload = [(path.name, at, at + size, (0, 0, 0))]
            return kind
        kind.chunks = found.chunks
        for k in range(found.id.get_num_chunks()):
            info = found.id.get_chunk_info(k)
            index = tuple(a // c for a, c in zip(info.chunk_offset, found.chunks, strict=True))
            kind.payload.append((path.name, info.byte_offset, info.byte_offset + info.size, index))
    return kind


def zarr_kinds(folder: Path) -> list[Kind]:
    """Zarr stores of both formats, with and without shards."""
    two: dict[str, tuple[str, dict[str, Any], bool]] = {
        "zlib": ("<f4", {"compressors": numcodecs.Zlib()}, True),
        "blosc": ("<f4", {"compressors": numcodecs.Blosc()}, False),
        "plain-shuffle": (">i4", {"compressors": None, "filters": [numcodecs.Shuffle(4)]}, False),
        "delta": ("<i4", {"compressors": numcodecs.GZip(), "filters": [numcodecs.Delta("<i4")]}, True),
    }
    three: dict[str, tuple[str, list[Any], bool]] = {
        "zstd": ("f4", [BytesCodec(), ZstdCodec()], False),
        "zstd-checksum": ("f8", [BytesCodec(), ZstdCodec(checksum=True)], True),
        "gzip-be": ("i4", [BytesCodec(endian="big"), GzipCodec()], True),
        "blosc": ("f4", [BytesCodec(), BloscCodec(typesize=4)], False),
        "plain": ("f4", [BytesCodec()], False),
    }
    kinds = []
    for name, (dtype, options, checked) in two.items():
        made = zarr.open_group(folder / f"2-{name}.zarr", mode="w", zarr_format=2)
        made.create_array("a", shape=SHAPE, dtype=dtype, chunks=CHUNKS, **options)[...] = values(dtype)
        if name == "zlib":
            zarr.consolidate_metadata(made.store)
        kinds.append(_stored(f"zarr2-{name}", folder / f"2-{name}.zarr", values(dtype), checked))
    for name, (dtype, codecs, checked) in three.items():
        for location in ("", "start", "end"):
            where = folder / f"3-{name}-{location}.zarr"
            plain: dict[str, Any] = {"shape": SHAPE, "dtype": dtype, "serializer": codecs[0], "compressors": codecs[1:] or None}
            if location:
                plain["serializer"] = ShardingCodec(chunk_shape=(5, 4, 3), codecs=codecs, index_location=location)
                plain["compressors"] = None
            zarr.open_group(where, mode="w").create_array("a", chunks=CHUNKS, **plain)[...] = values(dtype)
            kinds.append(_stored(f"zarr3-{name}{'-shards-' + location if location else ''}", where, values(dtype), checked))
    return kinds


def _stored(name: str, where: Path, data: np.ndarray[Any, Any], checked: bool) -> Kind:
    files = {f"store.zarr/{file.relative_to(where)}": file.read_bytes() for file in sorted(where.rglob("*")) if file.is_file()}
    payload = []
    for file, stored in files.items():
        if file.rpartition("/")[2] not in METADATA:
            key = file.removeprefix("store.zarr/a/").removeprefix("c/").replace("/", ".")
            payload.append((file, 0, len(stored), tuple(int(k) for k in key.split("."))))
    return Kind(name, files, data, CHUNKS, checked, payload)


def make_kinds(folder: Path) -> list[Kind]:
    """All of them."""
    return [*hdf5_kinds(folder), *zarr_kinds(folder)]


# --- mutations


def make_case(kinds: list[Kind], seed: int, number: int) -> Case:
    """The case of a number: the same in every process."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choice(kinds)
    files = dict(kind.files)
    if len(files) == 1:
        return _bytes_case(rng, number, kind, files, next(iter(files)))
    ways: list[Callable[..., Case]] = [_json_case, _json_case, _store_case, _chunk_case]
    return rng.choice(ways)(rng, number, kind, files)


def _bytes_case(rng: random.Random, number: int, kind: Kind, files: dict[str, bytes], name: str) -> Case:
    """Damage bytes: those of chunks, those of the metadata, or any."""
    data = files[name]
    mine = [(a, b) for file, a, b, _ in kind.payload if file == name]
    where = rng.choice(["chunks", "metadata", "metadata", "any"]) if mine else "any"
    if where == "chunks":
        a, b = rng.choice(mine)
        at = rng.randrange(a, b) if b > a else a
    else:
        is_free = np.ones(len(data), bool)
        for a, b in mine if where != "any" else ():
            is_free[a:b] = False
        at = rng.choice(np.flatnonzero(is_free).tolist() or [0])
    what, files[name] = damaged(rng, data, at)
    return Case(number, kind, f"{name} byte {at}: {what}", files, _touched(kind, name, data, files[name]))


def damaged(rng: random.Random, data: bytes, at: int) -> tuple[str, bytes]:
    """One operation on bytes at a place."""
    out, width = bytearray(data), rng.choice([1, 1, 2, 4, 8])
    what = rng.choice(["flip", "flip", "number", "number", "noise", "zeros", "copy", "cut", "insert", "delete"])
    if what == "flip":
        out[at] ^= 1 << rng.randrange(8)
    elif what == "number":
        number = rng.choice([0, 1, 2**63, 2**64 - 1, 2**31, 2**32 - 1, 0x7F, 0x80, len(data), rng.getrandbits(64)])
        out[at : at + width] = number.to_bytes(8, "little")[:width]
    elif what in ("noise", "zeros"):
        n = min(rng.choice([2, 8, 32, 200]), len(out) - at)
        out[at : at + n] = rng.randbytes(n) if what == "noise" else bytes(n)
    elif what == "copy":
        n, source = rng.choice([4, 8, 64]), rng.randrange(len(data))
        out[at : at + n] = data[source : source + n]
    elif what == "cut":
        del out[at:]
    elif what == "insert":
        out[at:at] = rng.randbytes(width)
    else:
        del out[at : at + width]
    return what, bytes(out)


def _touched(kind: Kind, name: str, before: bytes, after: bytes) -> set[tuple[int, ...]] | None:
    """The chunks whose stored bytes differ; None where others do."""
    if len(before) != len(after):
        return None
    old, new = (np.frombuffer(text, dtype=np.uint8) for text in (before, after))
    changed, touched = old != new, set()
    for file, a, b, index in kind.payload:
        if file == name and changed[a:b].any():
            touched.add(index)
            changed[a:b] = False
    return None if changed.any() else touched


def _chunk_case(rng: random.Random, number: int, kind: Kind, files: dict[str, bytes]) -> Case:
    """Damage one chunk's file."""
    name, _, _, index = rng.choice(kind.payload)
    what, files[name] = damaged(rng, files[name], rng.randrange(len(files[name])))
    return Case(number, kind, f"{name}: {what}", files, {index})


def _store_case(rng: random.Random, number: int, kind: Kind, files: dict[str, bytes]) -> Case:
    """Remove, exchange or replace files of chunks."""
    (one, _, _, first), (other, _, _, second) = rng.choice(kind.payload), rng.choice(kind.payload)
    what = rng.choice(
        ["lost", "exchanged", "empty", "folder", "link outside", "link to itself", "link to nothing", "link inside"]
    )
    case = Case(number, kind, f"{one}: {what}", files, {first})
    if what == "exchanged":
        files[one], files[other] = files[other], files[one]
        case.touched = {first, second}
    elif what == "empty":
        files[one] = b""
    else:
        del files[one]
        targets = {"folder": "folder", "link outside": "/etc/hostname", "link to nothing": "nowhere"}
        targets |= {"link to itself": Path(one).name, "link inside": "zarr.json"}
        if what != "lost":
            case.links.append((one, targets[what]))
    return case


STRANGE: tuple[Any, ...] = (
    *(-1, 0, 1, 3, 7, 2**31, 2**40, 2**62, 2**63, 10**30, 1.5, True, None, "", "7", "../../../etc", "pickle", "json2"),
    *(
        "<f4",
        ">f8",
        "|O",
        "|S4",
        "<U3",
        "<M8[s]",
        "float32",
        "int64",
        "complex128",
        "string",
        "zstd",
        "gzip",
        "blosc",
        "crc32c",
    ),
    *("zlib", "bytes", "transpose", "sharding_indexed", "start", "end", "NaN", "Infinity", [], [1], [0, 0, 0], [-5, 8, 3], {}),
    *(
        [2**40, 2**40, 2**40],
        [5, 8],
        [1, 1, 1],
        {"id": "pickle"},
        {"id": "zlib", "level": 1},
        {"name": "gzip"},
        {"name": "bytes"},
    ),
)


def _json_case(rng: random.Random, number: int, kind: Kind, files: dict[str, bytes]) -> Case:
    """Damage metadata: its bytes, or a field of it."""
    name = rng.choice([file for file in files if file.rpartition("/")[2] in METADATA])
    if rng.random() < 0.2:
        what, files[name] = damaged(rng, files[name], rng.randrange(len(files[name])))
        return Case(number, kind, f"{name}: {what}", files, None)
    found = json.loads(files[name])
    place, parent, key = some_field(rng, found)
    what = rng.choice(["replace", "replace", "replace", "remove", "add", "swap"])
    if parent is None:
        found = rng.choice(STRANGE)
    elif what == "replace":
        parent[key] = copy.deepcopy(rng.choice(STRANGE))
    elif what == "remove":
        del parent[key]
    elif what == "add" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(rng.choice([*STRANGE, parent[key]])))
    elif what == "add":
        parent[f"new{key}"] = copy.deepcopy(parent[key])
    else:
        _, other, at = some_field(rng, found)
        if other is not None:
            parent[key], other[at] = copy.deepcopy(other[at]), copy.deepcopy(parent[key])
    files[name] = json.dumps(found).encode()
    return Case(number, kind, f"{name}: {what} {place}", files, None)


def some_field(rng: random.Random, found: Any) -> tuple[str, Any, Any]:
    """A place in a document: its name, what it is in, and its key there."""
    places: list[tuple[str, Any, Any]] = []

    def walk(value: Any, name: str) -> None:
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            places.append((f"{name}/{key}", value, key))
            walk(value[key], f"{name}/{key}")

    walk(found, "")
    return rng.choice(places) if places else ("/", None, None)
