"""Do the formats keep the promises that are asked of any, and does the suite find each promise that is broken?"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import netCDF4
import numpy as np
import pytest
import zarr

from shardload.formats.access import STRICT, Access
from shardload.formats.contract.array import check_request
from shardload.formats.contract.format import Format, OpenFile
from shardload.formats.hdf5.chunks import Hdf5Chunks
from shardload.formats.hdf5.file import FORMAT as HDF5
from shardload.formats.hdf5.file import Hdf5File, Hdf5Format
from shardload.formats.hdf5.source import Hdf5Source
from shardload.formats.memory import MemorySource
from shardload.formats.zarr.source import FORMAT as ZARR
from shardload.planning.region import Region
from tests.tiers import quick_ones, some_of
from tests.unit.files import flat
from tests.unit.formats.conformance import DTYPES, SHAPES, ConformanceError, check_format, check_source

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


def write_some(made: Any) -> tuple[Array, list[tuple[int, ...]]]:
    made[:3] = flat((3, 10), "i4", first=1)
    made[3:, 4:8] = 5
    return np.asarray(made[...]), [(1, 0), (1, 2), (2, 0), (2, 2)]


def hdf5_missing(path: str) -> tuple[Array, list[tuple[int, ...]]]:
    with h5py.File(path, "w") as file:
        return write_some(file.create_dataset("a", (7, 10), "i4", chunks=(3, 4), fillvalue=9, compression="gzip"))


def zarr_missing(path: str) -> tuple[Array, list[tuple[int, ...]]]:
    return write_some(zarr.open_array(path, mode="w", shape=(7, 10), chunks=(3, 4), dtype="i4", fill_value=9))


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
        values = flat(shape, dtype, first=1)
        strided = np.repeat(values, 2, axis=-1)[..., ::2] if shape else values
        for array in (values, values.copy(order="F"), strided, values[::-1].copy()[::-1] if shape else values):
            source = MemorySource(array)
            check_source(lambda a=array: MemorySource(a), values, is_handed_in=True)  # type: ignore[misc]
            view, is_whole = source.view(Region.whole(shape)), values.dtype.isnative and values.dtype.kind != "b"
            assert (view is not None) == is_whole and (view is None or not values.size or np.shares_memory(view, array))


# --- what can be wrong with a format

read_into, decode, open_file, list_arrays = Hdf5Source.read_into, Hdf5Chunks.decode, Hdf5Format.open_file, Hdf5File.list_arrays


def transposed(self: Hdf5Source, region: Region, out: Array) -> None:
    check_request(self.info, self.dtype, region, out)
    values = self.plain(Region.whole(self.info.shape))
    out[...] = (values.T if len(set(values.shape)) == 1 else values)[region.slices()]


def clamped(self: Hdf5Source, region: Region, out: Array) -> None:
    if out.dtype != self.dtype or not out.flags.writeable or out.shape != region.shape:
        raise ValueError("the buffer")
    found = self.plain(Region.whole(self.info.shape))[region.slices()]
    out[tuple(slice(0, n) for n in found.shape)] = found


def past_the_end(self: Hdf5Source, region: Region, out: Array) -> None:
    read_into(self, region, out)
    memory: Any = out
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    if memory.nbytes > out.nbytes:
        memory.view(np.uint8)[-1] = 0


def keeps_the_buffer(self: Hdf5Source, region: Region, out: Array) -> None:
    """A cache that hands out, and writes, what is the caller's."""
    cache = self.__dict__.setdefault("cache", {})
    if region not in cache:
        read_into(self, region, out)
        cache[region] = out
    out[...] = cache[region]


def cached_for_good(self: Hdf5Source, region: Region, out: Array) -> None:
    if "cache" not in self.__dict__:
        self.__dict__["cache"] = self.plain(Region.whole(self.info.shape))
    out[...] = self.__dict__["cache"][region.slices()]


def in_its_own_thread(self: Hdf5Source, region: Region, out: Array) -> None:
    if self.__dict__.setdefault("thread", threading.get_ident()) != threading.get_ident():
        raise RuntimeError("made in another thread")
    read_into(self, region, out)


def one_too_short(self: Hdf5Chunks, encoded: Any, out: Array) -> None:
    decode(self, encoded, out)
    out[-1:] = 0


def zeros_for_missing(self: Hdf5Chunks, encoded: Any, out: Array) -> None:
    decode(self, encoded, out)
    chunks = out.reshape(len(encoded.data), -1)
    for k, data in enumerate(encoded.data):
        if data is None:
            chunks[k] = 0


def damage_is_a_key_error(self: Hdf5Format, path: str, access: Access = STRICT) -> OpenFile:
    try:
        return open_file(self, path, access)
    except Exception:
        raise KeyError("/a") from None


def leaking(self: Hdf5Format, path: str, access: Access = STRICT) -> OpenFile:
    kept_open.append(os.open(path, os.O_RDONLY))
    return open_file(self, path, access)


kept_open: list[int] = []

# One for each kind of mistake: the promise that it breaks, and what is said.
WRONG: dict[str, tuple[type, dict[str, Any], str, str]] = {
    "axes transposed": (Hdf5Source, {"read_into": transposed}, "each value of each region", "that value belongs at"),
    "region clamped": (Hdf5Source, {"read_into": clamped}, "refuses a region outside", "no error for the region"),
    "writes past the buffer": (Hdf5Source, {"read_into": past_the_end}, "each value", "wrote outside of the buffer"),
    "keeps the buffer": (Hdf5Source, {"read_into": keeps_the_buffer}, "keeps nothing of the caller", "wrong values of"),
    "read after close": (Hdf5Source, {"read_into": cached_for_good}, "nothing after it was closed", "read after close"),
    "bound to a thread": (Hdf5Source, {"read_into": in_its_own_thread}, "from any thread", "made in another thread"),
    "state is made up": (
        Hdf5Source,
        {"state": lambda _: (1, 2), "opened_in": property(lambda _: (1, 2), lambda *_: None)},
        "state that changes",
        r"is \(1, 2\) before and after",
    ),
    "missing chunks untold": (
        Hdf5Source,
        {"read_into": lambda *arguments: (read_into(*arguments), [])[1]},
        "chunks that are missing",
        r"is \[\], expected \[\(1, 0\)",
    ),
    "view is something else": (
        Hdf5Source,
        {"view": lambda self, region: np.zeros(region.shape, self.dtype)},
        "by view",
        "wrong values",
    ),
    "chunks too short": (Hdf5Chunks, {"decode": one_too_short}, "chunk by chunk", "wrong values"),
    "zeros in missing chunks": (Hdf5Chunks, {"decode": zeros_for_missing}, "chunks that are missing", "expected 9"),
    "KeyError for damage": (Hdf5Format, {"open_file": damage_is_a_key_error}, "file was cut", "says that the file is sound"),
    "lists too little": (
        Hdf5File,
        {"list_arrays": lambda self, *given, **more: list_arrays(self, *given, **more)[1:]},
        "lists every array",
        "are listed",
    ),
    "leaves files open": (Hdf5Format, {"open_file": leaking}, "gives back what it opened", "descriptors stay open"),
}


@pytest.mark.parametrize("defect", quick_ones(WRONG, *list(WRONG)[::3]))
def test_a_defect_is_found_and_named(defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if HDF5 with this defect passed, or the message were about something else. Few shapes must do for that: more
    of them would be more occasions to find it."""
    holder, methods, promise, said = WRONG[defect]
    for name, wrong in methods.items():
        monkeypatch.setattr(holder, name, wrong)
    write, how = hdf5(compression="gzip"), {"dtypes": ["float32", ">i2"], "shapes": [(), (6, 6), (3, 5, 7)]}
    try:
        with pytest.raises(ConformanceError) as caught:
            check_format(HDF5, write, folder=tmp_path, write_missing=hdf5_missing, **how)  # type: ignore[arg-type]
    finally:
        while kept_open:
            os.close(kept_open.pop())
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("the format HDF5 breaks ")
    named = [k for k, line in enumerate(lines) if line.startswith("- It ") and re.search(promise, line)]
    assert named, str(caught.value)
    told = "\n".join(itertools.takewhile(lambda line: line.startswith("    "), lines[named[0] + 1 :]))
    assert re.search(said, told), str(caught.value)
