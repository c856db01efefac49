"""Which files do the tests read? Writers of small HDF5 and Zarr files whose values tell where they came from.

Every value is its own flat index in the array (modulo a prime, where the type is too small for that), and every axis
has a length of its own: a value that turns up in the wrong place says which place is its own.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr

from shardload.formats.access import STRICT, Access
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.format import Source
from shardload.formats.lookup import Finder, open_source, split_path
from shardload.planning.region import Region
from shardload.planning.tuning import default_tuning

SHAPES: tuple[tuple[int, ...], ...] = ((), (11,), (5, 7), (3, 5, 7), (2, 3, 5, 7), (2, 3, 4, 5, 7))


# One of each size, kind and byte order. What filters and chunks do to bytes rests on no more of a type.
SIZES = ("bool", "int8", ">i2", "float16", "int32", ">f4", "uint64", ">f8", "complex64", ">c16")

_PRIMES = {"bool": 2, "int8": 113, "uint8": 251, "float16": 2039}


def flat(shape: tuple[int, ...], dtype: Any = "float32", first: int = 0) -> np.ndarray[Any, Any]:
    """An array whose values are their own flat index plus `first`."""
    dtype = np.dtype(dtype)
    index = np.arange(first, first + math.prod(shape), dtype="int64").reshape(shape)
    if dtype.kind == "b":
        return np.asarray((index * index // 3) % 2 == 1)  # no pattern that a shift or a transpose would keep
    index = index % _PRIMES.get(dtype.newbyteorder("=").name, 2**62)
    if dtype.kind == "c":
        return np.asarray((index - 1j * (index + 0.5)).astype(dtype))
    return np.asarray(index.astype(dtype))


def chunks_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Two chunks along each axis, the second one short where the axis has an odd length."""
    return tuple(max(1, (n + 1) // 2) for n in shape)


def regions_of(shape: tuple[int, ...]) -> Iterator[Region]:
    """The whole, the middle, the last element, one plane per axis, and an empty region."""
    yield Region.whole(shape)
    yield Region(tuple(n // 3 for n in shape), tuple(n - (n > 3) for n in shape))
    if 0 in shape:
        return
    yield Region(tuple(n - 1 for n in shape), shape)
    for axis, size in enumerate(shape):
        at = size // 2
        yield Region((*(0,) * axis, at, *(0,) * (len(shape) - axis - 1)), (*shape[:axis], at + 1, *shape[axis + 1 :]))
    if shape:
        yield Region((1, *(0,) * (len(shape) - 1)), (1, *shape[1:]))


def assert_same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], message: str = "") -> None:
    """`np.testing.assert_array_equal` in its strict sense. Equal bits, the usual case, are seen in a tenth of its time."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype) or found.tobytes() != expected.tobytes():
        np.testing.assert_array_equal(found, expected, err_msg=message, strict=True)


def box_of(index: Sequence[int]) -> tuple[range, ...]:
    """One chunk as a box."""
    return tuple([range(k, k + 1) for k in index])


def check_source(source: Source, expected: np.ndarray[Any, Any]) -> None:
    """Raise AssertionError unless `source` delivers `expected` in every region of `regions_of`, in native bytes."""
    native = expected.astype(expected.dtype.newbyteorder("="))
    assert source.info.shape == expected.shape
    assert source.info.refused is None
    assert source.dtype == native.dtype and source.dtype.isnative
    assert source.info.dtype == native.dtype.name
    for region in regions_of(expected.shape):
        out = np.full(region.shape, 99).astype(native.dtype)
        source.read_into(region, out)
        assert_same(out, native[(*region.slices(), ...)], f"{source.info} {region}")


def read(source: Source, region: Region) -> np.ndarray[Any, Any]:
    """The values of a region, read into a buffer that holds others."""
    out = np.full(region.shape, 99).astype(source.dtype)
    source.read_into(region, out)
    return out


def missing_in(source: Source, region: Region | None = None) -> list[tuple[int, ...]]:
    """The missing chunks that meet a region (None: the whole), which is read for that."""
    region = region or Region.whole(source.info.shape)
    return list(source.read_into(region, np.empty(region.shape, source.dtype)))


def read_all(source: Source) -> np.ndarray[Any, Any]:
    """All values of a source."""
    return read(source, Region.whole(source.info.shape))


def load_all(path: Any, name: str, access: Access = STRICT) -> np.ndarray[Any, Any]:
    """All values of an array in a file, which is closed then."""
    with closing(open_source(path, name, access)) as source:
        return read_all(source)


@contextmanager
def python_memory_below(nbytes: int) -> Iterator[None]:
    """Raise AssertionError if Python's allocators have given that much at a time meanwhile."""
    tracemalloc.start()
    try:
        yield
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < nbytes, most


def write_hdf5(path: Path | str, arrays: dict[str, Any], **options: Any) -> str:
    """Write arrays, contiguous unless `options` (of `h5py.Group.create_dataset`) say otherwise; returns the path."""
    with h5py.File(path, "w") as file:
        for name, data in arrays.items():
            file.create_dataset(name, data=data, **options)
    return str(path)


def compact(creation: Any) -> None:
    """Values lie in the dataset's header."""
    creation.set_layout(h5py.h5d.COMPACT)


def early(creation: Any) -> None:
    """All chunks get their places when the dataset is made."""
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)


def plain_edges(creation: Any) -> None:
    """Chunks at the edge are not filtered, which h5py cannot ask for."""
    library = ctypes.CDLL(h5py.h5d.__file__)
    library.H5Pset_chunk_opts.argtypes = [ctypes.c_int64, ctypes.c_uint]
    assert library.H5Pset_chunk_opts(creation.id, 2) >= 0  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS


def raw_dataset(
    group: Any, name: str, kind: Any, shape: tuple[int, ...], values: Any = None, *, chunks: Any = None, filters: Any = (),
    setting: Callable[[Any], Any] = lambda creation: None, most: Any = None, memory_kind: Any = None,
) -> h5py.Dataset:  # fmt: skip
    """A dataset by HDF5's own functions: of types, layouts and filters (number, flags, parameters) that h5py does not make."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if chunks is not None:
        creation.set_chunk(chunks)
    for one in filters:
        creation.set_filter(*one)
    setting(creation)
    space = h5py.h5s.create_simple(shape, most) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    made = h5py.h5d.create(group.id, name.encode(), kind, space, creation)
    if values is not None:
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, values, memory_kind)
    return h5py.Dataset(made)


def spoiled(path: Path, number: int, value: int, dtype: str = "i4", **options: Any) -> str:
    """Write a dataset of two chunks, and overwrite one parameter of its filter in the file; returns the path."""
    path = Path(write_hdf5(path, {"x": np.arange(64, dtype=dtype).reshape(8, 8)}, chunks=(4, 8), **options))
    with h5py.File(path) as file:
        values = file["x"].id.get_create_plist().get_filter(0)[2][:5]  # older h5py tells no more than 16 of them
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack(f"<{len(values)}I", *values)) + 4 * number
    data[at : at + 4] = struct.pack("<I", value)
    path.write_bytes(data)
    return str(path)


def write_zarr(path: Path | str, arrays: dict[str, Any], zarr_format: Any = 3, **options: Any) -> str:
    """Write arrays into a group, in chunks that do not divide the axes; returns the path."""
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    for name, data in arrays.items():
        data = np.asarray(data)
        chunks = {"chunks": chunks_of(data.shape), **options}
        # Not `data=`: zarr 3.1.0 then writes the chunks of one shard at the same time, and loses some.
        group.create_array(name, shape=data.shape, dtype=data.dtype, **chunks)[...] = data
    return str(path)


def stored_in(path: Path | str, name: str) -> np.ndarray[Any, Any]:
    """The values of an array, by the library of the file's format."""
    if os.path.isdir(path):
        return np.asarray(zarr.open_group(path, mode="r")[name][...])
    with h5py.File(path) as file:
        return np.asarray(file[name][...])


def read_small(path: Any, info: ArrayInfo) -> Any:
    """The bytes of the values that come with the metadata of an array; None if it is not small, or they cannot be read."""
    with Finder(STRICT, default_tuning()) as finder:
        values = finder.find(split_path(os.fspath(path))[0], info.dataset).values
        return None if values is None else values.tobytes()


def change_json(path: Path, **changes: Any) -> dict[str, Any]:
    """Change a document, as metadata of Zarr; returns what it was."""
    document: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps(document | changes))
    return document


def raising(error: BaseException) -> Callable[..., Any]:
    """In the place of a function that fails."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def system_error(code: int) -> OSError:
    """An error of the system with its own text."""
    return OSError(code, os.strerror(code))


def write_tensorstore(path: str | Path, data: np.ndarray[Any, Any], driver: str = "zarr3", **metadata: Any) -> Any:
    """Write a store of one array with TensorStore; returns it, open."""
    import tensorstore  # here, because most tests need it not

    if driver == "zarr3":
        metadata["data_type"] = data.dtype.name
    spec = {"driver": driver, "kvstore": f"file://{path}/", "metadata": {"shape": data.shape, **metadata}, "create": True}
    store = tensorstore.open(spec).result()
    store.write(data).result()
    return store
