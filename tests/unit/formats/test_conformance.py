"""Do the formats keep the promises that are asked of any, and does the suite find each promise that is broken?"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import netCDF4
import numpy as np
import pytest
import zarr

from shardload.formats.access import STRICT, Access
from shardload.formats.contract.array import ArrayInfo, check_request, native_dtype
from shardload.formats.contract.chunk_reader import ChunkReader, Encoded
from shardload.formats.contract.format import Format, OpenFile, Source
from shardload.formats.hdf5.file import FORMAT as HDF5
from shardload.formats.memory import MemorySource
from shardload.formats.zarr.source import FORMAT as ZARR
from shardload.planning.region import Region
from shardload.storage.local import state_of
from tests.tiers import quick_ones, some_of
from tests.unit.formats.conformance import DTYPES, SHAPES, ConformanceError, check_format, check_source, ramp

Array = np.ndarray[Any, Any]


def chunks_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """About three along each axis, which they do not divide."""
    return tuple(max(1, -(-n // 3)) for n in shape)


def hdf5(**options: Any) -> Callable[[str, dict[str, Array]], None]:
    def write(path: str, arrays: dict[str, Array]) -> None:
        with h5py.File(path, "w") as file:
            for name, values in arrays.items():
                chunked = bool(options) and values.size > 0 and values.ndim > 0
                file.create_dataset(name, data=values, **({"chunks": chunks_of(values.shape), **options} if chunked else {}))

    return write


def netcdf(path: str, arrays: dict[str, Array]) -> None:
    with netCDF4.Dataset(path, "w") as file:
        for name, values in arrays.items():
            names = [f"{name.replace('/', '_')}_{k}" for k in range(values.ndim)]
            for axis, n in zip(names, values.shape, strict=True):
                file.createDimension(axis, n)
            order = "big" if values.dtype.byteorder == ">" else "little"
            file.createVariable(name, values.dtype, names, endian=order, zlib=values.ndim > 0, fill_value=False)[...] = values


def zarr_store(zarr_format: Any, kind: str = "", **options: Any) -> Callable[[str, dict[str, Array]], None]:
    def write(path: str, arrays: dict[str, Array]) -> None:
        if os.path.isdir(path):
            shutil.rmtree(path)
        group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
        for name, values in arrays.items():
            more: dict[str, Any] = {"chunks": chunks_of(values.shape), **options}
            if kind == "sharded" and values.ndim:
                more["shards"] = tuple(2 * n for n in more["chunks"])
            group.create_array(name, shape=values.shape, dtype=values.dtype, **more)[...] = values

    return write


def hdf5_missing(path: str) -> tuple[Array, list[tuple[int, ...]]]:
    with h5py.File(path, "w") as file:
        made = file.create_dataset("a", (7, 10), "i4", chunks=(3, 4), fillvalue=9, compression="gzip")
        made[:3] = ramp((3, 10), "i4")
        made[3:, 4:8] = 5
        return made[...], [(1, 0), (1, 2), (2, 0), (2, 2)]


def zarr_missing(path: str) -> tuple[Array, list[tuple[int, ...]]]:
    made = zarr.open_array(path, mode="w", shape=(7, 10), chunks=(3, 4), dtype="i4", fill_value=9)
    made[:3] = ramp((3, 10), "i4")
    made[3:, 4:8] = 5
    return np.asarray(made[...]), [(1, 0), (1, 2), (2, 0), (2, 2)]


NETCDF_TYPES = [
    name for name in DTYPES if name.lstrip(">") not in ("bool", "float16", "f2", "complex64", "complex128", "c8", "c16")
]
FEW = ("bool", "int16", "float64", ">i4", ">c8")
OURS: dict[str, tuple[Format, Callable[[str, dict[str, Array]], None], dict[str, Any]]] = {
    "HDF5": (HDF5, hdf5(), {}),
    "HDF5, gzip and shuffle": (HDF5, hdf5(compression="gzip", shuffle=True), {"dtypes": FEW, "write_missing": hdf5_missing}),
    "netCDF4": (HDF5, netcdf, {"dtypes": NETCDF_TYPES[::3], "shapes": [shape for shape in SHAPES if 0 not in shape]}),
    "Zarr v2": (ZARR, zarr_store(2), {"dtypes": FEW[1::2], "shapes": SHAPES[::2]}),
    "Zarr v3": (ZARR, zarr_store(3), {"dtypes": FEW, "write_missing": zarr_missing}),
    "Zarr v3, sharded": (
        ZARR,
        zarr_store(3, "sharded"),
        {"dtypes": FEW[::2], "shapes": [shape for shape in SHAPES if 0 not in shape]},
    ),
    # Read by zarr-python: few are enough.
    "Zarr v2, by columns": (ZARR, zarr_store(2, order="F"), {"dtypes": FEW[::2], "shapes": SHAPES[::3]}),
}


# Shards: test_conformance in test_save_zarr.py. Another store: test_zarr.py.
@pytest.mark.parametrize(
    "name", quick_ones(OURS, *(name for name in OURS if name not in ("Zarr v3, sharded", "Zarr v2, by columns")))
)
def test_our_own_formats_conform(name: str, tmp_path: Path) -> None:
    file_format, write, how = OURS[name]
    dtypes, shapes = how.get("dtypes", DTYPES), how.get("shapes", SHAPES)
    how = how | {"dtypes": some_of(dtypes[[*OURS].index(name) % 3 :], 3), "shapes": some_of(shapes, 2)}
    check_format(file_format, write, folder=tmp_path, **how)


@pytest.mark.parametrize("dtype", [*DTYPES, *(getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn", "int4"))])
def test_arrays_in_memory_conform(dtype: Any) -> None:
    for shape in ((3, 5, 7), (), (0,)) if dtype in FEW else ((3, 5, 7),):
        values = ramp(shape, dtype)
        strided = np.repeat(values, 2, axis=-1)[..., ::2] if shape else values
        for array in (values, values.copy(order="F"), strided, values[::-1].copy()[::-1] if shape else values):
            source = MemorySource(array)
            check_source(lambda a=array: MemorySource(a), values, is_handed_in=True)  # type: ignore[misc]
            view, is_whole = source.view(Region.whole(shape)), values.dtype.isnative and values.dtype.kind != "b"
            assert (view is not None) == is_whole and (view is None or not values.size or np.shares_memory(view, array))


# --- a format that conforms, and what can be wrong with it

MARK = b"RAW1"
FILL = 9  # of missing chunks


def write_raw(path: str, arrays: dict[str, Array], chunks: Any = None, missing: Any = ()) -> None:
    """Arrays one after the other, after a header that says where each is."""
    head, at = {}, 0
    for name, values in arrays.items():
        cells = [max(1, -(-n // 3)) for n in values.shape] if chunks is None else chunks
        head[f"/{name}"] = {"shape": values.shape, "dtype": values.dtype.str, "at": at, "chunks": cells, "missing": missing}
        at += values.nbytes
    text = json.dumps({"nbytes": at, "arrays": head}).encode()
    Path(path).write_bytes(MARK + len(text).to_bytes(4, "little") + text + b"".join(v.tobytes() for v in arrays.values()))


def raw_missing(path: str) -> tuple[Array, list[tuple[int, ...]]]:
    values = ramp((6, 8), "i4")
    values[:2, 4:] = FILL
    write_raw(path, {"a": values}, [2, 4], [(0, 1)])
    return values, [(0, 1)]


class Raw(Source):
    """One array of such a file."""

    def __init__(self, path: str, name: str, entry: dict[str, Any], start: int) -> None:
        self.path, self.entry, self.start = path, entry, start
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115
        self.stored = np.dtype(entry["dtype"])
        self.shape = tuple(entry["shape"])
        self.own = ArrayInfo(path, name, "raw", self.shape, native_dtype(self.stored).name, tuple(entry["chunks"]))

    @property
    def info(self) -> ArrayInfo:
        return self.own

    @property
    def dtype(self) -> np.dtype[Any]:
        return native_dtype(self.stored)

    def values(self) -> Array:
        nbytes = int(np.prod(self.shape, dtype=int)) * self.stored.itemsize
        data = os.pread(self.file.fileno(), nbytes, self.start + self.entry["at"])
        if len(data) < nbytes:
            raise OSError("the file ends too early")
        return np.frombuffer(data, self.stored).reshape(self.shape)

    def read_into(self, region: Region, out: Array) -> None:
        check_request(self.info, self.dtype, region, out)
        out[...] = self.values()[region.slices()]

    def missing(self, region: Region) -> list[tuple[int, ...]]:
        cells = {tuple(index): Region.whole(self.shape) for index in self.entry["missing"]}
        for index in cells:
            start = tuple(k * c for k, c in zip(index, self.own.chunks or (), strict=True))
            cells[index] = Region(start, tuple(a + c for a, c in zip(start, self.own.chunks or (), strict=True)))
        return [index for index, cell in cells.items() if region.size and cell.intersect(region)]

    def chunk_reader(self) -> Any:
        return RawChunks(self)

    def state(self) -> tuple[int, ...] | None:
        return None if self.file.closed else state_of(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class RawChunks(ChunkReader):
    def __init__(self, source: Raw) -> None:
        self.source, self.chunks = source, source.info.chunks or ()

    def fetch(self, box: Any, room: Any = None) -> Any:
        indices, values, missing = [*itertools.product(*box)], self.source.values(), self.source.entry["missing"]
        starts = [[k * c for k, c in zip(index, self.chunks, strict=True)] for index in indices]
        stored = [values[(*(slice(a, a + c) for a, c in zip(at, self.chunks, strict=True)), ...)] for at in starts]
        return Encoded([None if [*index] in missing else part for index, part in zip(indices, stored, strict=True)])

    def decode(self, encoded: Any, out: Array) -> None:
        chunks = out.reshape(len(encoded.data), *self.chunks)
        for k, values in enumerate(encoded.data):
            if values is None:
                chunks[k] = FILL
            else:
                chunks[(k, *(slice(0, n) for n in values.shape), ...)] = values


class RawFile(OpenFile):
    """Opens the file anew for each array."""

    def __init__(self, path: str, source: type[Raw] = Raw) -> None:
        self.path, self.source = path, source

    def header(self) -> tuple[dict[str, Any], int]:
        data = Path(self.path).read_bytes()
        n = int.from_bytes(data[4:8], "little")
        found = json.loads(data[8 : 8 + n])
        if len(data) != 8 + n + found["nbytes"]:
            raise ValueError("the file is not as long as it says")
        return found["arrays"], 8 + n

    def list_arrays(self) -> list[ArrayInfo]:
        sources = [self.open(name) for name in self.header()[0]]
        for source in sources:
            source.close()
        return [source.info for source in sources]

    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Source:
        arrays, start = self.header()
        if dataset not in arrays:
            raise KeyError(dataset)
        return self.source(self.path, dataset, arrays[dataset], start)


class RawFormat(Format):
    """Conforms."""

    name = "raw"

    def __init__(self, source: type[Raw] = Raw, file: type[RawFile] = RawFile) -> None:
        self.source, self.file = source, file

    def claims_path(self, path: str) -> bool:
        return os.path.isfile(path) and Path(path).read_bytes()[:4] == MARK

    def open_file(self, path: str, access: Access = STRICT) -> OpenFile:
        return self.file(path, self.source)


def check_raw(file_format: Format, folder: Path, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
    types = ["float32", ">i2"]
    check_format(file_format, write_raw, folder=folder, dtypes=types, shapes=shapes, write_missing=raw_missing)


def test_a_format_that_conforms(tmp_path: Path) -> None:
    check_raw(RawFormat(), tmp_path)


def source_with(**methods: Any) -> Format:
    return RawFormat(type("Wrong", (Raw,), methods))


def file_with(**methods: Any) -> Format:
    return RawFormat(Raw, type("WrongFile", (RawFile,), methods))


def transposed(self: Raw, region: Region, out: Array) -> None:
    check_request(self.info, self.dtype, region, out)
    values = self.values()
    out[...] = (values.T if len(set(values.shape)) == 1 else values)[region.slices()]


def clamped(self: Raw, region: Region, out: Array) -> None:
    if out.dtype != self.dtype or not out.flags.writeable or out.shape != region.shape:
        raise ValueError("the buffer")
    found = self.values()[region.slices()]
    out[tuple(slice(0, n) for n in found.shape)] = found


def past_the_end(self: Raw, region: Region, out: Array) -> None:
    Raw.read_into(self, region, out)
    memory: Any = out
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    if memory.nbytes > out.nbytes:
        memory.view(np.uint8)[-1] = 0


def keeps_the_buffer(self: Raw, region: Region, out: Array) -> None:
    """A cache that hands out, and writes, what is the caller's."""
    cache = self.__dict__.setdefault("cache", {})
    if region not in cache:
        Raw.read_into(self, region, out)
        cache[region] = out
    out[...] = cache[region]


def cached_for_good(self: Raw, region: Region, out: Array) -> None:
    if "cache" not in self.__dict__:
        self.__dict__["cache"] = self.values()
    out[...] = self.__dict__["cache"][region.slices()]


def in_its_own_thread(self: Raw, region: Region, out: Array) -> None:
    if self.__dict__.setdefault("thread", threading.get_ident()) != threading.get_ident():
        raise RuntimeError("made in another thread")
    Raw.read_into(self, region, out)


def header_or_key_error(self: RawFile) -> tuple[dict[str, Any], int]:
    try:
        return RawFile.header(self)
    except ValueError:
        raise KeyError("/a") from None


def leaking(self: RawFile) -> tuple[dict[str, Any], int]:
    kept_open.append(os.open(self.path, os.O_RDONLY))
    return RawFile.header(self)


kept_open: list[int] = []


class OneTooShort(RawChunks):
    def decode(self, encoded: Any, out: Array) -> None:
        super().decode(encoded, out)
        out[-1:] = 0


class ZerosForMissing(RawChunks):
    def decode(self, encoded: Any, out: Array) -> None:
        super().decode(Encoded([np.zeros(self.chunks) if values is None else values for values in encoded.data]), out)


# One for each kind of mistake.
WRONG: dict[str, tuple[Format, str, str]] = {
    "axes transposed": (source_with(read_into=transposed), "each value of each region", r"that value belongs at"),
    "region clamped": (source_with(read_into=clamped), "refuses a region outside", "no error for the region"),
    "writes past the buffer": (source_with(read_into=past_the_end), "each value", "wrote outside of the buffer"),
    "keeps the buffer": (source_with(read_into=keeps_the_buffer), "keeps nothing of the caller", "wrong values of"),
    "read after close": (source_with(read_into=cached_for_good), "gives nothing after it was closed", "read after close"),
    "bound to a thread": (
        source_with(read_into=in_its_own_thread),
        "is read from any thread",
        "RuntimeError: made in another thread",
    ),
    "state is made up": (source_with(state=lambda _: (1, 2)), "state that changes", r"is \(1, 2\) before and after"),
    "missing chunks untold": (source_with(missing=lambda *_: []), "chunks that are missing", r"is \[\], expected \[\(0, 1\)\]"),
    "view is something else": (source_with(view=lambda self, r: np.zeros(r.shape, self.dtype)), "by view", "wrong values"),
    "chunks too short": (source_with(chunk_reader=lambda self: OneTooShort(self)), "chunk by chunk", "wrong values"),
    "zeros in missing chunks": (
        source_with(chunk_reader=lambda self: ZerosForMissing(self)),
        "chunks that are missing",
        "expected 9",
    ),
    "KeyError for damage": (file_with(header=header_or_key_error), "where a file was cut", "says that the file is sound"),
    "lists too little": (file_with(list_arrays=lambda self: RawFile.list_arrays(self)[1:]), "lists every array", "are listed"),
    "leaves files open": (file_with(header=leaking), "gives back what it opened", "descriptors stay open"),
}


FEW_SHAPES = ((), (6, 6), (3, 5, 7))


@pytest.mark.parametrize("defect", quick_ones(WRONG, *list(WRONG)[::3]))
def test_a_defect_is_found_and_named(defect: str, tmp_path: Path) -> None:
    """Wrong if a format with this defect passed, or the message were about something else. Few shapes must do for that: more
    of them would be more occasions to find it."""
    file_format, promise, said = WRONG[defect]
    try:
        with pytest.raises(ConformanceError) as caught:
            check_raw(file_format, tmp_path, FEW_SHAPES)
    finally:
        while kept_open:
            os.close(kept_open.pop())
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("the format raw breaks ")
    named = [k for k, line in enumerate(lines) if line.startswith("- It ") and re.search(promise, line)]
    assert named, str(caught.value)
    told = "\n".join(itertools.takewhile(lambda line: line.startswith("    "), lines[named[0] + 1 :]))
    assert re.search(said, told), str(caught.value)
