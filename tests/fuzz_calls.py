"""Random copies, appends, and loads of one or several files, each compared with other libraries. On any number of ranks:

    mpiexec -n 4 python -m tests.fuzz_calls copy --cases 2000 --seed 1     # or append, load, dataset

xarray writes the files: arrays along common axes, with coordinates, packed or not, in random chunks. All ranks draw the same
numbers, each case its own: ``--first 123 --cases 1`` repeats case 123. The first difference ends the job. An error of shardload
is none, if all ranks raise it and no file is left: at the end they are listed, each with its first case, for a person to read.
"""

from __future__ import annotations

import argparse
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import xarray
import zarr
from jax.sharding import NamedSharding

import shardload
from shardload import ShardloadError
from tests.fuzz_loads import comm, compare, folder_in_memory, padded, pick, sharding
from tests.mpi.support import on_root

Array = np.ndarray[Any, Any]
Draw = np.random.Generator
SUFFIXES = (".h5", ".nc", ".zarr", ".zarr2")
TYPES = ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u4")
ATTRS = {"units": "K", "title": "größe", "row": np.arange(3, dtype="i2"), "number": np.float32(0.1)}
PACKING = {"scale_factor": np.float64(0.5), "add_offset": np.float64(-10)}
OF_LIBRARIES = re.compile("CLASS|NAME|REFERENCE_LIST|DIMENSION_L.*|_NCProp.*|_Netcdf4.*|_ARRAY_DIM.*|_FillValue|coordinates")
TEMPORARY = (".unfinished", ".appending", ".changes")
DEFAULTS: dict[str, Any] = {"progress": False, "timeout": 60.0}


def positions(draw: Draw, n: int) -> slice | int:
    """A part of an axis: one position, or a slice, whose ends may be counted from behind."""
    first, last = sorted(draw.integers(0, n + 1, 2).tolist())
    slices = [slice(first, last), slice(None), slice(first - n if first else None, None), slice(first, last - n or None)]
    return pick(draw, [*slices, int(draw.integers(-n, n))] if n else [slice(None)])


def random_dataset(draw: Draw, lengths: dict[str, int]) -> xarray.Dataset:
    """Stored numbers, with attributes that may say how they are packed, and coordinates."""
    arrays, axes = {}, set[str]()
    for name in ("rho", "vel", "mask")[: int(draw.integers(1, 4))]:
        dims = tuple(draw.permutation(list(lengths))[: int(draw.integers(1, 4))].tolist())
        shape, dtype = tuple(lengths[dim] for dim in dims), np.dtype(pick(draw, TYPES))
        attrs: dict[str, Any] = {key: value for key, value in ATTRS.items() if draw.random() < 0.3}
        if draw.random() < 0.4:
            attrs |= {key: value for key, value in PACKING.items() if draw.random() < 0.6}
            attrs |= {"_FillValue": dtype.type(3)} if draw.random() < 0.6 else {}
        arrays[name] = dims, (np.arange(np.prod(shape)).reshape(shape) + int(draw.integers(100))).astype(dtype), attrs
        axes |= set(dims)
    coords = {}
    for dim in sorted(axes):
        if dim == "time" or draw.random() < 0.6:
            values = (np.arange(lengths[dim]) * 2 - 3).astype(pick(draw, ["f8", "f4", "i4"]))
            coords[dim] = dim, values, {"units": "hours since 2000-01-01" if dim == "time" else "degrees"}
    return xarray.Dataset(arrays, coords, {key: value for key, value in ATTRS.items() if draw.random() < 0.3})


def write(draw: Draw, path: Path, dataset: xarray.Dataset) -> None:
    """Write a file in random chunks."""
    encoding: dict[Any, dict[str, Any]] = {}
    for name, array in dataset.variables.items():
        chunks = tuple(int(draw.integers(1, max(n, 1) + 1)) for n in array.shape)
        is_plain, is_whole, n = draw.random() < 0.5, draw.random() < 0.3, int(draw.integers(1, 4))
        encoding[name] = {} if "_FillValue" in array.attrs else {"_FillValue": None}
        if path.suffix.startswith(".zarr"):
            encoding[name] |= {"chunks": chunks} | ({"compressors": None} if is_plain else {})
            encoding[name] |= {"shards": tuple(n * size for size in chunks)} if is_whole and path.suffix == ".zarr" else {}
        elif not is_whole or "time" in array.dims:
            encoding[name] |= {"chunksizes": chunks, "zlib": not is_plain, "fletcher32": is_plain and n == 1}

    def make() -> None:
        if path.suffix.startswith(".zarr"):
            dataset.to_zarr(path, zarr_format=2 if path.suffix == ".zarr2" else 3, encoding=encoding, consolidated=False)
        else:
            unlimited = ["time"] if "time" in dataset.dims else []
            dataset.to_netcdf(path, engine="h5netcdf", encoding=encoding, unlimited_dims=unlimited)

    on_root(comm, make)


def stored(path: Path) -> dict[str, tuple[Array, dict[str, Any]]]:
    """Values and attributes of all arrays, by the format's own library."""
    if path.is_dir():
        return {name: (np.asarray(node[...]), plain(node.attrs)) for name, node in zarr.open_group(path, mode="r").arrays()}
    with h5py.File(path) as file:
        nodes = {name: node for name, node in file.items() if b"not a netCDF variable" not in node.attrs.get("NAME", b"")}
        return {name: (node[()], plain(node.attrs)) for name, node in nodes.items()}


def plain(attrs: Any) -> dict[str, Any]:
    """The author's attributes as plain Python; of one number, that number, because netCDF stores it as a list."""
    values = {key: np.asarray(value).tolist() for key, value in attrs.items() if not OF_LIBRARIES.fullmatch(key)}
    values = {key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in values.items()}
    return {key: value.decode() if isinstance(value, bytes) else value for key, value in values.items()}


def opened(path: Path, **how: Any) -> xarray.Dataset:
    """The file as xarray has it."""
    return xarray.load_dataset(path, engine="zarr" if path.is_dir() else "h5netcdf", **how)


def expect(what: str, found: Any, expected: Any) -> None:
    """Raise unless two arrays are the same. NaN is itself, and the order of bytes means nothing."""
    np.testing.assert_array_equal(found, expected, err_msg=what)
    if np.asarray(found).dtype.newbyteorder("=") != np.asarray(expected).dtype.newbyteorder("="):
        raise AssertionError(f"{what}: {np.asarray(found).dtype}, expected {np.asarray(expected).dtype}")


def copy(draw: Draw, folder: Path) -> None:
    """Copy a file, or a part of it, into another format, chunks and compression. Wrong if anything were lost or misplaced."""
    lengths = {dim: int(draw.integers(1, 9)) for dim in ("time", "lat", "lon")}
    dataset, suffix = random_dataset(draw, lengths), pick(draw, SUFFIXES[:3])  # Zarr 2 is read alone
    source, target = folder / f"in{pick(draw, SUFFIXES)}", folder / f"out{suffix}"
    write(draw, source, dataset)
    how: dict[str, Any] = {}
    if draw.random() < 0.5:
        how["chunks"] = tuple(int(draw.integers(1, n + 2)) for n in dataset.rho.shape)
        if suffix == ".zarr" and draw.random() < 0.4:
            how["shards"] = tuple(n * int(draw.integers(1, 4)) for n in how["chunks"])
    if draw.random() < 0.7:
        how["compression"] = pick(draw, [None, "gzip", "zstd", "blosc"])
    axes = sorted({str(dim) for array in dataset.data_vars.values() for dim in array.dims})
    select = {dim: positions(draw, lengths[dim]) for dim in axes if draw.random() < 0.3}
    shardload.copy(source, target, select=select or None, **how, **DEFAULTS)

    def look() -> None:
        before, after = stored(source), stored(target)
        assert sorted(after) == sorted(before)
        for name, (values, attrs) in before.items():
            part = tuple(select.get(str(dim), slice(None)) for dim in dataset[name].dims)
            expect(f"{name} in the copy", after[name][0], values[part])
            assert after[name][1] == attrs, (name, after[name][1], attrs)
        for decode in [False] if target.is_dir() else [False, True]:  # a number in JSON has no type: docs/values.md
            found, expected = (opened(path, mask_and_scale=decode, decode_times=False) for path in (target, source))
            assert set(found.coords) == set(expected.coords), (found.coords, expected.coords)
            for name in map(str, expected.variables):
                values = expected[name].isel({dim: part for dim, part in select.items() if dim in expected[name].dims})
                # Axes of plain HDF5 may have labels alone, which xarray does not read.
                assert found[name].dims == values.dims or suffix == ".h5", (name, found[name].dims, values.dims)
                expect(f"{name}, as xarray reads it", found[name].values, values.values)

    on_root(comm, look)


def append(draw: Draw, folder: Path) -> None:
    """Append rows several times, some in the place of older ones. Wrong if a chunk at the edge lost its old rows."""
    lengths = {dim: int(draw.integers(dim != "time", 9)) for dim in ("time", "lat", "lon")}
    dataset, path = random_dataset(draw, lengths), folder / f"run{pick(draw, SUFFIXES)}"
    write(draw, path, dataset)
    expected = {name: values for name, (values, _) in on_root(comm, lambda: stored(path)).items()}
    axes = {str(name): array.dims.index("time") for name, array in dataset.variables.items() if "time" in array.dims}
    for turn in range(int(draw.integers(1, 4)) if axes else 0):
        n_old, n_new, tree, shapes, how = len(expected["time"]), int(draw.integers(1, 7)), {}, {}, dict(DEFAULTS)
        n_kept = int(draw.integers(0, n_old + 1)) if draw.random() < 0.3 else n_old
        if n_kept < n_old:
            how["at"] = expected["time"][n_kept].item()
        for name, axis in axes.items():
            old = np.take(expected[name], range(n_kept), axis)
            shapes[name] = (*old.shape[:axis], n_new, *old.shape[axis + 1 :])
            numbers = np.arange(np.prod(shapes[name])).reshape(shapes[name])
            numbers = (numbers + n_kept) * 2 - 3 if name == "time" else numbers + 50 * turn
            mesh, spec, cuts = sharding(draw, old.ndim)
            new = padded(numbers.astype(old.dtype.newbyteorder("=")), cuts)
            tree[name] = jax.make_array_from_callback(new.shape, NamedSharding(mesh, spec), new.__getitem__, dtype=new.dtype)
            expected[name] = np.concatenate([old, numbers.astype(old.dtype)], axis)
        shardload.append(path, tree, dim="time", shape=shapes, **how)
    found, by_xarray = on_root(comm, lambda: (stored(path), opened(path, mask_and_scale=False, decode_times=False)))
    for name, values in expected.items():
        expect(name, found[name][0], values)
        expect(f"{name}, as xarray reads it", by_xarray[name].values, values)


def several(draw: Draw, folder: Path) -> tuple[Any, xarray.Dataset]:
    """One file, or several that are one; and the stored numbers."""
    lengths = {dim: int(draw.integers(1, 9)) for dim in ("time", "lat", "lon")}
    dataset, suffix = random_dataset(draw, lengths), pick(draw, SUFFIXES)
    if suffix.startswith(".zarr") or "time" not in dataset.dims or draw.random() < 0.3:
        write(draw, folder / f"one{suffix}", dataset)
        return folder / f"one{suffix}", dataset
    border = int(draw.integers(0, lengths["time"] + 1))
    paths = [folder / f"part0{suffix}", folder / f"part1{suffix}"]
    for path, rows in zip(paths, (slice(border), slice(border, None)), strict=True):
        write(draw, path, dataset.isel(time=rows))
    if draw.random() < 0.5:
        return shardload.concat(paths, "time", timeout=60.0), dataset
    on_root(comm, lambda: shardload.join(folder / f"whole{suffix}", paths, axis="time", progress=False))
    return folder / f"whole{suffix}", dataset


def load(draw: Draw, folder: Path) -> None:
    """Load a part of an array, decoded or not, with padding. Wrong if a file were begun at another row, or decoded twice."""
    path, dataset = several(draw, folder)
    name, decode = str(pick(draw, sorted(map(str, dataset.variables)))), draw.random() < 0.5
    whole = xarray.decode_cf(dataset, mask_and_scale=decode, decode_times=False)[name]
    select = {str(dim): positions(draw, n) for dim, n in whole.sizes.items() if draw.random() < 0.5}
    values = whole.isel(select).values
    mesh, spec, cuts = sharding(draw, values.ndim)
    how = {"readers": pick(draw, ["auto", "root", "parallel", "direct", 2]), "verify": pick(draw, ["index", "full"])}
    array = shardload.load(path, mesh, spec, dataset=name, select=select or None, decode=decode, pad=0, **how, **DEFAULTS)
    compare(f"{name} {select} decode={decode} {spec} {how}", array, padded(values, cuts) if cuts else values)


def load_dataset(draw: Draw, folder: Path) -> None:
    """Load all variables as a Dataset, with padding."""
    path, dataset = several(draw, folder)
    axes = sorted({str(dim) for array in dataset.data_vars.values() for dim in array.dims})
    select = {dim: positions(draw, dataset.sizes[dim]) for dim in axes if draw.random() < 0.3}
    mesh, kept = sharding(draw, 0)[0], [dim for dim in axes if not isinstance(select.get(dim), int)]
    spec = dict(zip(draw.permutation(kept).tolist(), mesh.axis_names, strict=False))
    how = {"select": select or None, "dtype": "float64", "pad": float("nan")}
    found = shardload.unpad(shardload.load_dataset(path, mesh, spec, **how, **DEFAULTS), numpy=True)
    expected = xarray.decode_cf(dataset).isel(select)
    xarray.testing.assert_identical(found, expected.assign({name: expected[name].astype("f8") for name in expected.data_vars}))


CALLS: dict[str, Callable[[Draw, Path], None]] = {"copy": copy, "append": append, "load": load, "dataset": load_dataset}


def main() -> None:
    """Do as many as the caller says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("call", choices=CALLS)
    for name, default in (("--cases", 500), ("--first", 0), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    shardload.initialize()
    refused: dict[str, str] = {}  # the first error of each kind, without names and numbers
    with folder_in_memory() as parent:
        folder = parent / "case"
        for number in range(given.first, given.first + given.cases):
            error = None
            on_root(comm, folder.mkdir)
            try:
                with warnings.catch_warnings(action="ignore"):
                    CALLS[given.call](np.random.default_rng([given.seed, number]), folder)
            except ShardloadError as raised:
                error = raised
                refused.setdefault(re.sub(r"'[^']*'|[\d(), ]", "", str(error)), f"case {number}: {error!r}")
            except BaseException as raised:
                raised.add_note(f"rank {comm.rank}: {given.call} --seed {given.seed} --first {number} --cases 1")
                raise
            left = on_root(comm, lambda: [name for name in map(str, folder.iterdir()) if name.endswith(TEMPORARY)])
            if left or len(set(comm.allgather(type(error)))) > 1:
                raise ValueError(f"case {number}: {left} is left, or ranks raise other errors: {error!r}")
            on_root(comm, lambda: shutil.rmtree(folder))
    if comm.rank == 0:
        print(*refused.values(), f"{given.cases} times {given.call} was compared on {comm.size} ranks", sep="\n", flush=True)


if __name__ == "__main__":
    main()
