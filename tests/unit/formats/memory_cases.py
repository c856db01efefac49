"""How much memory do libraries take where little is stored? What `test_caps` measures in a process without JAX.

`write_cases` writes the files; ``python -m tests.unit.formats.memory_cases FOLDER`` reads them, and tells as JSON by how many
bytes the process grew.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401 - it registers its filters, which files are made with here
import numpy as np
import zarr

from shardload.formats.lookup import find_array, list_arrays, open_source
from shardload.planning.region import Region
from tests.unit.files import raw_dataset, read_all

SIDE = 128  # of an array in chunks of one byte: HDF5 takes 6 KiB for each chunk of one read, 100 MB in all
BIG = 128 << 20


def with_filters(
    file: h5py.File,
    name: str,
    stored: bytes,
    filters: list[tuple[int, tuple[int, ...]]],
    n: int = 4096,
    short: int = 0,
    mask: int = 0,
) -> None:
    """A dataset of one chunk of `n` bytes, with these filters and these stored bytes. It may be shorter than the chunk."""
    pipeline = [(number, 0, values) for number, values in filters]
    made = raw_dataset(file, name, h5py.h5t.NATIVE_UINT8, (n - short,), chunks=(n,), filters=pipeline, most=(n,))
    made.id.write_direct_chunk((0,), stored, mask)


def deflated_zeros() -> bytes:
    """`BIG` zeros, deflated. A part of them is, and repeated, which takes a hundredth of the time."""
    part = zlib.compressobj(9, wbits=-15)
    n = 1 << 20
    return (part.compress(bytes(n)) + part.flush(zlib.Z_FULL_FLUSH)) * (BIG // n) + part.flush()


def write_cases(folder: Path) -> None:
    """The files that `measure` reads."""
    raw = deflated_zeros()
    bomb = bytes.fromhex("78da") + raw + struct.pack(">I", BIG % 65521 << 16 | 1)  # Adler-32
    bomb_gzip = bytes.fromhex("1f8b0800000000000003") + raw + struct.pack("<II", zlib.crc32(bytes(BIG)), BIG)
    with h5py.File(folder / "tiny.h5", "w") as file:
        file.create_dataset("x", (SIDE, SIDE), "u1", chunks=(1, 1))
        made = file.create_dataset("some", (SIDE, SIDE), "u1", chunks=(1, 1), compression="gzip")
        made[3, :5] = 7
        layout = h5py.VirtualLayout((SIDE, SIDE), "u1")
        layout[...] = h5py.VirtualSource(".", "some", shape=(SIDE, SIDE))
        file.create_virtual_dataset("virtual", layout)
    with h5py.File(folder / "nested.h5", "w") as file:
        with_filters(file, "x", zlib.compress(bomb, 9), [(1, (9,)), (1, (9,))])
        with_filters(file, "edge", bomb, [(1, (9,))], len(bomb), 1)  # such a chunk may be stored without filters
    with h5py.File(folder / "attributes.h5", "w", libver="latest") as file:
        for owner, name in ((file.create_dataset("x", data=np.arange(4)), "_FillValue"), (file, "_NCProperties")):
            owner.attrs[name] = np.zeros(4 << 20)
    for name, key, zarr_format in (("v3", "zarr.json", 3), ("v2", ".zarray", 2), ("attributes", ".zattrs", 2)):
        path = zarr.create_array(folder / f"{name}.zarr", shape=(4,), chunks=(4,), dtype="u1", zarr_format=zarr_format)
        os.truncate(Path(str(path.store.root)) / key, BIG)
    made = zarr.create_array(
        folder / "gzip.zarr", shape=(4096,), chunks=(4096,), dtype="u1", compressors=[zarr.codecs.GzipCodec()] * 2
    )
    made[:] = 1
    (folder / "gzip.zarr/c/0").write_bytes(zlib.compress(bomb_gzip, 9, wbits=31))
    zarr.create_array(folder / "long.zarr", shape=(64, 64), chunks=(64, 64), dtype="u1", order="F", zarr_format=2)
    (folder / "long.zarr/0.0").touch()
    os.truncate(folder / "long.zarr/0.0", BIG)
    (folder / "values.zarr").mkdir()
    (folder / "values.zarr/zarr.json").write_text("[" + "[]," * (4 << 20) + "0]")


def read(folder: str, name: str, dataset: str) -> None:
    with closing(open_source(os.path.join(folder, name), dataset)) as source:
        values = read_all(source)
        assert values.sum() in (0, 35)
        np.testing.assert_array_equal(source.plain(Region.whole(values.shape)), values)


def read_plain(folder: str, name: str, dataset: str) -> None:
    """What `shardload.verify` of an array asks for, with nothing before it."""
    with closing(open_source(os.path.join(folder, name), dataset)) as source:
        source.plain(Region.whole(source.info.shape))


def first_chunk(source: Any) -> None:
    """As the ranks read it."""
    chunks = source.chunk_reader()
    encoded = chunks.fetch((range(1),) * len(source.info.shape))
    chunks.decode(encoded, np.empty(source.info.chunks, source.dtype))


CASES: dict[str, Callable[[str], Any]] = {
    "tiny chunks, none written": lambda folder: read(folder, "tiny.h5", "x"),
    "tiny chunks, some written": lambda folder: read(folder, "tiny.h5", "some"),
    "tiny chunks behind a virtual dataset": lambda folder: read(folder, "tiny.h5", "virtual"),
    "gzip over gzip in HDF5": lambda folder: read(folder, "nested.h5", "x"),
    "a chunk over the edge in HDF5": lambda folder: first_chunk(open_source(os.path.join(folder, "nested.h5"), "edge")),
    "gzip over gzip in HDF5, plain": lambda folder: read_plain(folder, "nested.h5", "x"),
    "gzip over gzip in Zarr, plain": lambda folder: read_plain(folder, "gzip.zarr", "/"),
    "long attributes": lambda folder: list_arrays(os.path.join(folder, "attributes.h5")),
    "a long zarr.json": lambda folder: find_array(os.path.join(folder, "v3.zarr"), "/"),
    "a long zarr.json, listed": lambda folder: list_arrays(os.path.join(folder, "v3.zarr")),
    "a long .zarray": lambda folder: find_array(os.path.join(folder, "v2.zarr"), "/"),
    "a long .zattrs": lambda folder: find_array(os.path.join(folder, "attributes.zarr"), "/"),
    "gzip over gzip in Zarr": lambda folder: read(folder, "gzip.zarr", "/"),
    "a long chunk, by zarr-python": lambda folder: read(folder, "long.zarr", "/"),
    "JSON of many values": lambda folder: list_arrays(os.path.join(folder, "values.zarr")),
}
FINE = {"tiny chunks, none written", "tiny chunks, some written", "tiny chunks behind a virtual dataset", "long attributes"}


def measure(folder: str) -> dict[str, tuple[int, str]]:
    """By case: by how many bytes this process grew, and the error."""
    found = {}
    for name, run in CASES.items():
        before, error = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, ""
        try:
            run(folder)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        found[name] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10, error
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
