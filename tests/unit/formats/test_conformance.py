"""Do the formats keep the promises that are asked of any, and does the suite find each promise that is broken?"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import netCDF4
import numpy as np
import pytest
import zarr

from shardload.errors import ConfigError
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


def read_wrongly(change: Callable[[Raw, Region, Array], None]) -> Format:
    def read_into(self: Raw, region: Region, out: Array) -> None:
        check_request(self.info, self.dtype, region, out)
        change(self, region, out)

    return source_with(read_into=read_into)


def chunks_with(reader: type[ChunkReader]) -> Format:
    return source_with(chunk_reader=lambda self: reader(self))  # type: ignore[call-arg]


def file_with(source: type[Raw] = Raw, **methods: Any) -> Format:
    return RawFormat(source, type("WrongFile", (RawFile,), methods))


def format_with(**methods: Any) -> Format:
    made: Format = type("WrongFormat", (RawFormat,), methods)()
    return made


def forgets_the_rest(self: Raw, region: Region) -> None:
    """It gives zeros beside what is expected."""
    right = self.values

    def values() -> Array:
        made = np.zeros(self.shape, self.stored)
        made[region.slices()] = right()[region.slices()]
        return made

    self.values = values  # type: ignore[method-assign]


def transposed(self: Raw, region: Region, out: Array) -> None:
    values = self.values()
    out[...] = (values.T if len(set(values.shape)) == 1 else values)[region.slices()]


def other_order(self: Raw, region: Region, out: Array) -> None:
    out[...] = self.values().view(self.dtype)[region.slices()]


def clamped(self: Raw, region: Region, out: Array) -> None:
    if out.dtype != self.dtype or not out.flags.writeable or out.shape != region.shape:
        raise ValueError("the buffer")
    found = self.values()[region.slices()]
    out[tuple(slice(0, n) for n in found.shape)] = found


def unfilled(self: Raw, region: Region, out: Array) -> None:
    found = self.values()[region.slices()]
    if region.ndim:
        out[..., :-1] = found[..., :-1]
    else:
        out[...] = found


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


shared: dict[str, Any] = {}


def is_one_of_several() -> bool:
    """Whether another thread of a pool may come by. Who is alone would wait for nobody."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
    return threading.current_thread().name in names and len(names) > 1


def shared_memory(self: Raw, region: Region, out: Array) -> None:
    """One buffer for all sources: two threads meet between filling and copying it."""
    shared["values"] = self.values()[region.slices()]
    if "meet" in shared and is_one_of_several():
        try:
            shared["meet"].wait(0.2)
        except threading.BrokenBarrierError:  # nobody came, because the machine is busy: the next ones meet again
            shared["meet"].reset()
    found = shared["values"]
    out[...] = found if found.shape == out.shape else 0


def in_its_own_thread(self: Raw, region: Region, out: Array) -> None:
    if self.__dict__.setdefault("thread", threading.get_ident()) != threading.get_ident():
        raise RuntimeError("made in another thread")
    Raw.read_into(self, region, out)


def with_info(**changes: Any) -> Format:
    def init(self: Raw, *arguments: Any) -> None:
        Raw.__init__(self, *arguments)
        self.own = dataclasses.replace(self.own, **{name: change(self.own) for name, change in changes.items()})

    return source_with(__init__=init)


def padded(self: Raw) -> Array:
    nbytes = int(np.prod(self.shape, dtype=int)) * self.stored.itemsize
    data = os.pread(self.file.fileno(), nbytes, self.start + self.entry["at"])
    return np.frombuffer(data.ljust(nbytes, b"\0"), self.stored).reshape(self.shape)


def believing(self: RawFile) -> tuple[dict[str, Any], int]:
    data = Path(self.path).read_bytes()
    n = int.from_bytes(data[4:8], "little")
    return json.loads(data[8 : 8 + n])["arrays"], 8 + n


def raising(error: Callable[[str], BaseException]) -> Format:
    """Raises this for what is damaged."""

    def opened(self: RawFile, dataset: str, planned: ArrayInfo | None = None) -> Source:
        try:
            self.header()
        except ValueError:
            raise error(dataset) from None
        return RawFile.open(self, dataset)

    return file_with(open=opened)


def claims_by_suffix(self: RawFormat, path: str) -> bool:
    return ".bin" not in path and os.path.isfile(path)


def claims_at_all_costs(self: RawFormat, path: str) -> bool:
    return Path(path).read_bytes()[:4] == MARK


def leaking(self: RawFile) -> tuple[dict[str, Any], int]:
    kept_open.append(os.open(self.path, os.O_RDONLY))
    return RawFile.header(self)


kept_open: list[int] = []


def as_planned(self: RawFile, dataset: str, planned: ArrayInfo | None = None) -> Source:
    """It takes the type from the description, which has no byte order."""
    source = RawFile.open(self, dataset)
    if planned is not None:
        vars(source)["stored"] = np.dtype(planned.dtype)
    return source


def the_first(self: RawFile, dataset: str, planned: ArrayInfo | None = None) -> Source:
    """The same array whatever the name, once it is known."""
    first = self.__dict__.setdefault("first", dataset if dataset in self.header()[0] else None)
    return RawFile.open(self, first or dataset)


class OneTooShort(RawChunks):
    def decode(self, encoded: Any, out: Array) -> None:
        super().decode(encoded, out)
        out[-1:] = 0


class ByTheAxesOfTheBox(RawChunks):
    def decode(self, encoded: Any, out: Array) -> None:
        for place, values in zip(np.ndindex(*out.shape[: len(self.chunks)]), encoded.data, strict=False):
            inside = () if values is None else tuple(slice(0, n) for n in values.shape)
            out[(*place, *inside, ...)] = FILL if values is None else values


class RoomForEachChunk(RawChunks):
    """Each chunk is read into memory that may be the last one's."""

    def fetch(self, box: Any, room: Any = None) -> Any:
        read = []
        for values in super().fetch(box).data:
            read.append(values)
            if values is not None:
                read[-1] = room(values.nbytes).view(values.dtype).reshape(values.shape)
                read[-1][...] = values
        return Encoded(read)


class ZerosForMissing(RawChunks):
    def decode(self, encoded: Any, out: Array) -> None:
        super().decode(Encoded([np.zeros(self.chunks) if values is None else values for values in encoded.data]), out)


class FillForMissing(RawChunks):
    def fetch(self, box: Any, room: Any = None) -> Any:
        return Encoded([np.full(self.chunks, FILL) if values is None else values for values in super().fetch(box).data])


class PlainFromTheStart(RawChunks):
    """What is stored as plain values is taken from the beginning of the array, whatever the box."""

    def read_plain(self, box: Any, out: Array) -> bool:
        out.reshape(-1)[...] = np.resize(self.source.values(), out.size)
        return True


class OneAtATime(RawChunks):
    def fetch(self, box: Any, room: Any = None) -> Any:
        self.__dict__["found"] = super().fetch(box)
        if is_one_of_several():
            with contextlib.suppress(threading.BrokenBarrierError):
                shared["meet"].wait(0.2)
        return self.__dict__["found"]


WRONG: dict[str, tuple[Format, str, str]] = {
    "axes transposed": (read_wrongly(transposed), "each value of each region", r"that value belongs at"),
    "other byte order": (read_wrongly(other_order), "each value of each region", "wrong values of"),
    "region clamped": (source_with(read_into=clamped), "refuses a region outside", "no error for the region"),
    "buffer not filled": (read_wrongly(unfilled), "each value of each region", "nothing was written there"),
    "writes past the buffer": (read_wrongly(past_the_end), "each value", "wrote outside of the buffer"),
    "keeps the buffer": (read_wrongly(keeps_the_buffer), "keeps nothing of the caller", "wrong values of"),
    "read after close": (read_wrongly(cached_for_good), "gives nothing after it was closed", "read after close"),
    "one buffer for all": (read_wrongly(shared_memory), "several at once", "wrong values of"),
    "bound to a thread": (read_wrongly(in_its_own_thread), "is read from any thread", "RuntimeError: made in another thread"),
    "dtype named otherwise": (with_info(dtype=lambda info: f"<{info.dtype}"), "as it is", "expected 'float32', NumPy's name"),
    "numbers of NumPy": (with_info(nbytes_stored=lambda _: np.int64(3)), "as it is", "cannot be sent to another rank"),
    "chunks of nothing": (with_info(chunks=lambda info: (0,) * len(info.shape)), "as it is", "positive length for each"),
    "state is made up": (source_with(state=lambda _: (1, 2)), "state that changes", r"is \(1, 2\) before and after"),
    "no state": (source_with(state=lambda _: None), "state that changes", "is None: nobody would notice"),
    "state goes on": (
        source_with(state=lambda _: (time.perf_counter_ns(),)),
        "stays while nothing changes",
        "nothing has changed",
    ),
    "all chunks missing": (source_with(missing=lambda *_: [(0,) * 4]), "no chunk as missing that was", "."),
    "missing chunks untold": (source_with(missing=lambda *_: []), "chunks that are missing", r"is \[\], expected \[\(0, 1\)\]"),
    "plain is something else": (source_with(plain=lambda self, r: self.values()[r.slices()] * 2), "by plain", "wrong values"),
    "view is something else": (source_with(view=lambda self, r: np.zeros(r.shape, self.dtype)), "by view", "wrong values"),
    "what was not expected is lost": (source_with(expect=forgets_the_rest), "told that a part will be read", "wrong values of"),
    "chunks too short": (chunks_with(OneTooShort), "chunk by chunk", "wrong values"),
    "chunks one at a time": (chunks_with(OneAtATime), "chunk by chunk", "."),
    "chunks where the box has its axes": (chunks_with(ByTheAxesOfTheBox), "chunk by chunk", "."),
    "room for each chunk": (chunks_with(RoomForEachChunk), "chunk by chunk", "wrong values"),
    "plain chunks of another place": (chunks_with(PlainFromTheStart), "chunk by chunk", "wrong values"),
    "zeros in missing chunks": (chunks_with(ZerosForMissing), "chunks that are missing", "expected 9"),
    "missing chunks as if they were there": (chunks_with(FillForMissing), "chunks that are missing", r"None for \[\]"),
    "KeyError for damage": (raising(KeyError), "where a file was cut", "says that the file is sound"),
    "no memory for damage": (raising(lambda _: MemoryError()), "where a file was cut", "MemoryError"),
    "the caller's error for damage": (raising(ConfigError), "where a file was cut", "ConfigError.*instead of SourceError"),
    "exit for damage": (raising(SystemExit), "where a file was cut", "SystemExit"),
    "claims by suffix": (format_with(claims_path=claims_by_suffix), "claims its own files", "not claimed under the name"),
    "claims all": (format_with(claims_path=lambda *_: True), "no other files", "an empty file is claimed"),
    "claims_path raises": (format_with(claims_path=claims_at_all_costs), "no other files", "Is.*Directory"),
    "claims objects": (format_with(claims_object=lambda *_: True), "no other files", "the object None is claimed"),
    "lists too little": (file_with(list_arrays=lambda self: RawFile.list_arrays(self)[1:]), "lists every array", "are listed"),
    "opens any name": (
        file_with(open=lambda self, *_: RawFile.open(self, next(iter(self.header()[0])))),
        "raises KeyError",
        "can be opened, and was never written",
    ),
    "leaves files open": (file_with(header=leaking), "gives back what it opened", "descriptors stay open"),
    "opens as described": (file_with(open=as_planned), "if it is given its description", "wrong values of"),
    "one array for all names": (file_with(open=the_first), "each value of each region", "."),
}
WRONG["cut files padded"] = (
    file_with(type("Wrong", (Raw,), {"values": padded}), header=believing),
    "where a file was cut",
    "cut to .* wrong values",
)


FEW_SHAPES = ((), (6, 6), (3, 5, 7))


@pytest.mark.parametrize("defect", quick_ones(WRONG, *list(WRONG)[::3]))
def test_a_defect_is_found_and_named(defect: str, tmp_path: Path) -> None:
    """Wrong if a format with this defect passed, or the message were about something else. Few shapes must do for that: more
    of them would be more occasions to find it."""
    file_format, promise, said = WRONG[defect]
    shared["meet"] = threading.Barrier(2)
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
