"""Does a stream give what NumPy gives, in one order, on any mesh, at the cost that it names, and from any state on?

Every value is its own flat index in its file, all axes of an array have lengths of their own, and meshes are permuted; h5py,
zarr and NumPy are the judges. Numbers in brackets are those of the contract that a stream keeps.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import jax
import netCDF4
import numpy as np
import pytest
import zarr
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError
from shardload.jobs.streaming import plan
from shardload.jobs.streaming.plan import EpochRounds
from tests.mpi.support import check, grid_shape, on_root, padded, ramp, same_error, warned_once
from tests.unit.files import write_hdf5

Array = np.ndarray[Any, Any]
GAP = 13  # the step before which some are missing
N_STEPS, LAT, LON = 37, 6, 7  # 2 and 3 divide LAT, as they do a batch of 6; nothing divides the others


@pytest.fixture(autouse=True)
def _small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round has no more than a block for each rank, and runs are single steps: as in files that are 10,000 times as large."""
    monkeypatch.setattr(plan, "_ROUND_NBYTES", 1)
    monkeypatch.setattr(plan, "_RUN_NBYTES", 1)


def stream(path: Any, mesh: Any, spec: Any, **options: Any) -> Any:
    """A stream; batches of 6."""
    return shardload.stream(path, mesh, spec, **{"batch": 6, **options})


def mesh_of(places: Any = None, shape: tuple[int, ...] | None = None) -> Mesh:
    """A mesh ("a", "b") in which no device is where its number says, but the last of an odd number: a major."""
    devices = jax.devices()
    places = [k ^ 1 if k ^ 1 < len(devices) else k for k in range(len(devices))][::-1] if places is None else places
    return Mesh(np.array([devices[k] for k in places]).reshape(shape or grid_shape(len(places))), ("a", "b"))


def samples(data: Array, anchors: Array, window: int | tuple[int, ...] = 0, axis: int = 0) -> Array:
    """What NumPy says that samples are."""
    steps = np.moveaxis(data, axis, 0)
    return np.asarray(steps[anchors[:, None] + np.array(window)] if isinstance(window, tuple) else steps[anchors + window])


@dataclass(frozen=True)
class Given:
    """What an iterator gave: the anchors of each batch, the chunks that the ranks decoded, and its last state."""

    index: list[list[int]]
    n_decoded: int
    state: dict[str, Any]

    @property
    def anchors(self) -> list[int]:
        return list(itertools.chain(*self.index))


def take(comm: Any, ds: Any, compare: Callable[[Any, Array], None], n: int | None = None, state: Any = None) -> Given:
    """Take batches, all or `n`, and compare each; the ranks must have been given the same."""
    index = []
    with iter(ds) as it:
        if state is not None:
            it.set_state(state)
        for batch in itertools.islice(it, n):
            compare(batch, it.index)
            index.append(it.index.tolist())
        last = it.get_state()
    mine = index, last, it.report.chunks_decoded
    assert comm.allgather(mine) == [mine] * comm.size, "the ranks were given different batches"
    assert json.loads(json.dumps(last)) == last, "the state is not JSON"
    return Given(index, it.report.chunks_decoded, last)


def comparer(data: Array, mesh: Any, spec: Any, window: Any = 0, axis: int = 0) -> Callable[[Any, Array], None]:
    """Compare a batch that is one array with NumPy's samples."""
    return lambda batch, index: check(batch, samples(data, index, window, axis), mesh, spec, index)


def batches_of(anchors: Array, batch: int = 6) -> list[list[int]]:
    """The whole batches of an epoch."""
    return [anchors[k : k + batch].tolist() for k in range(0, len(anchors) - batch + 1, batch)]


# --- (1) values


def write_all(folder: Path) -> dict[str, str]:
    """Files of the same shape in every format."""
    shape = (N_STEPS, LAT, LON)
    data = ramp(shape)
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("chunked", data=data, chunks=(5, 4, 7), compression="gzip", shuffle=True)
        file.create_dataset("steps", data=data, chunks=(1, LAT, LON))
        file.create_dataset("contiguous", data=data)
        file.create_dataset("big", data=data.astype(">f8"), chunks=(4, 2, 3))
        torn = file.create_dataset("torn", shape, "f4", chunks=(4, 3, 4), fillvalue=-5)
        torn[:9, :, 4:] = data[:9, :, 4:]
        file.create_dataset("middle", data=ramp((5, N_STEPS, LAT, LON)), chunks=(2, 10, 3, 7), compression="gzip")
        file.create_dataset("last", data=ramp((LAT, LON, N_STEPS)), chunks=(3, 4, 8))
        file.create_dataset("short", data=ramp((11, LAT)), chunks=(3, LAT))
    group = zarr.open_group(folder / "a.zarr", mode="w")
    group.create_array("chunks", data=data, chunks=(4, 4, 4))
    group.create_array("shards", data=data, chunks=(2, 3, 4), shards=(6, 6, 8))
    zarr.open_group(folder / "v2.zarr", mode="w", zarr_format=2).create_array("chunks", data=data, chunks=(4, 4, 4), order="F")
    with netCDF4.Dataset(folder / "a.nc", "w") as nc:
        for name, size in (("time", None), ("lat", LAT), ("lon", LON)):
            nc.createDimension(name, size)
        packed = nc.createVariable("t2m", "i2", ("time", "lat", "lon"), zlib=True, chunksizes=(3, 6, 4), fill_value=-9)
        packed.scale_factor, packed.add_offset = np.float32(0.5), np.float32(20)
        packed.set_auto_maskandscale(False)
        packed[:] = data.astype("i2")
        packed[7:9, 2] = -9
        nc.createVariable("lat_first", "f4", ("lat", "time", "lon"), chunksizes=(6, 4, 7))[:] = ramp((LAT, N_STEPS, LON))
    with netCDF4.Dataset(folder / "gap.nc", "w") as nc:
        for name, size in (("time", 30), ("lat", LAT)):
            nc.createDimension(name, size)
        nc.createVariable("time", "f8", ("time",))[:] = np.where(np.arange(30) < GAP, 6.0, 30.0) + 6 * np.arange(30)
        nc.createVariable("x", "f4", ("time", "lat"), chunksizes=(4, LAT))[:] = ramp((30, LAT))
    return {name: str(folder / name) for name in ("gap.nc", "a.h5", "a.zarr", "v2.zarr", "a.nc")}


@pytest.fixture(scope="module")
def files(comm: Any, tmp_path_factory: Any) -> dict[str, str]:
    return dict(on_root(comm, lambda: write_all(tmp_path_factory.mktemp("streams"))))


def h5(path: str, name: str) -> Array:
    with h5py.File(path) as file:
        return np.asarray(file[name][...])


def decoded_by_numpy(path: str) -> Array:
    stored = h5(path, "t2m")
    return np.where(stored == -9, np.float32(np.nan), stored * np.float32(0.5) + np.float32(20))


SOURCES: dict[str, tuple[str, str, dict[str, Any], Callable[[str], Array]]] = {
    "hdf5 chunks": ("a.h5", "chunked", {}, lambda path: h5(path, "chunked")),
    "hdf5 single steps": ("a.h5", "steps", {}, lambda path: h5(path, "steps")),
    "hdf5 contiguous": ("a.h5", "contiguous", {}, lambda path: h5(path, "contiguous")),
    "hdf5 big-endian doubles": ("a.h5", "big", {"dtype": "float32"}, lambda path: h5(path, "big").astype("f4")),
    "hdf5 missing chunks": ("a.h5", "torn", {"missing": "fill"}, lambda path: h5(path, "torn")),
    "zarr chunks": ("a.zarr", "chunks", {}, lambda path: np.asarray(zarr.open_array(path, path="chunks", mode="r")[:])),
    "zarr shards": ("a.zarr", "shards", {}, lambda path: np.asarray(zarr.open_array(path, path="shards", mode="r")[:])),
    "zarr format 2": ("v2.zarr", "chunks", {}, lambda path: np.asarray(zarr.open_array(path, path="chunks", mode="r")[:])),
    "netcdf packed": ("a.nc", "t2m", {"decode": True, "along": "time"}, decoded_by_numpy),
}


@pytest.mark.parametrize("source", list(SOURCES))
def test_each_slot_is_that_step(comm: Any, files: dict[str, str], source: str) -> None:
    """(1) Wrong if slots, steps or shards were exchanged, or a chunk were cut or decoded in another way than NumPy does."""
    file, name, options, read = SOURCES[source]
    k = list(SOURCES).index(source)
    mesh, spec = mesh_of(), (P("a", None, "b"), P("b", None, None, "a"))[k % 2]
    more = {"shuffle": k, "pool": 40 * LAT * LON * 4} if k % 3 == 1 else {"shuffle": k} if k % 3 == 2 else {}
    data = read(files[file])
    ds = stream(files[file], mesh, spec, dataset=name, window=(-1, 0), prefetch=k % 2 * 2, pad=0, **options, **more)

    def compare(batch: Any, index: Array) -> None:
        check(batch, padded(samples(data, index, (-1, 0)), mesh, spec, 0), mesh, spec, index)

    given = take(comm, ds, compare)
    assert given.index == batches_of(ds.order(0))
    assert len(ds) == len(given.index) == 6


@pytest.mark.parametrize("shuffle", [None, 3])
def test_windows(comm: Any, files: dict[str, str], shuffle: int | None) -> None:
    """(1, 11) Wrong if an offset went backwards, a tuple were sorted, an integer made an axis, or each leaf read its array."""
    windows = {
        "pair": (-1, 0),
        "next": 1,
        "back": -3,
        "unordered": (1, -2, 0),
        "one": (2,),
        "range": range(-1, 2),
        "itself": None,
    }
    data, mesh = h5(files["a.h5"], "chunked"), mesh_of()
    ds = stream(
        files["a.h5"], mesh, P("a", None, "b"), dataset=dict.fromkeys(windows, "chunked"), window=windows, shuffle=shuffle
    )

    def compare(batch: Any, index: Array) -> None:
        assert set(batch) == set(windows)
        for name, x in batch.items():
            window = tuple(windows[name]) if isinstance(windows[name], (tuple, range)) else windows[name] or 0
            spec = P("a", None, "b") if isinstance(window, tuple) else P("a", "b")
            check(x, samples(data, index, window), mesh, spec, name)

    given = take(comm, ds, compare)
    assert sorted(ds.order(0).tolist()) == list(range(3, N_STEPS - 2))
    if shuffle is None:
        assert given.n_decoded == n_chunks((5, 4, 7), range(0, 3 + 30 + 2))


def n_chunks(chunk: tuple[int, ...], steps: Any, shape: tuple[int, ...] = (LAT, LON), axis: int = 0) -> int:
    """Chunks that hold these steps."""
    rest = [c for k, c in enumerate(chunk) if k != axis]
    return len({step // chunk[axis] for step in steps}) * math.prod(-(-n // c) for n, c in zip(shape, rest, strict=True))


def test_the_program_goes_to_another_folder(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a stream looked for its file in the folder in which the program is when a batch is read."""
    folder, values = shared_tmp_path / "elsewhere", ramp((6, 3))

    def make() -> None:
        folder.mkdir()
        write_hdf5(shared_tmp_path / "run.h5", {"x": values})

    on_root(comm, make)
    monkeypatch.chdir(shared_tmp_path)
    ds = stream("run.h5", mesh_of(), P(), batch=3, epochs=1)
    monkeypatch.chdir(folder)
    for k, batch in enumerate(ds):
        check(batch, values[3 * k : 3 * k + 3], mesh_of(), P())


def test_a_tree_of_arrays_with_windows_and_specs_of_their_own(comm: Any, files: dict[str, str]) -> None:
    """(1) Wrong if the steps of one array came by the chunks of another, or a spec or window went to another leaf."""
    mesh, path = mesh_of(), files["a.h5"]
    names = {"in": {"t": "chunked", "u": "steps"}, "out": ["torn", "contiguous"]}
    windows = {"in": {"t": (-2, 0), "u": (0, 1)}, "out": [0, -1]}
    specs = {"in": {"t": P(None, None, "a"), "u": P("b", None, "a")}, "out": [P("a"), P("b", "a")]}
    ds = stream(path, mesh, specs, dataset=names, window=windows, missing="fill", shuffle=9, pool=20_000)

    def compare(batch: Any, index: Array) -> None:
        leaves = zip(*map(jax.tree.leaves, (batch, names)), (windows["in"]["t"], windows["in"]["u"], 0, -1), strict=False)
        for (x, name, window), spec in zip(leaves, (*specs["in"].values(), *specs["out"]), strict=True):  # type: ignore[attr-defined]
            check(x, samples(h5(path, name), index, window), mesh, spec, name)

    assert take(comm, ds, compare).index == batches_of(ds.order(0))


@pytest.mark.parametrize(
    ("file", "name", "along", "axis", "spec"),
    [
        ("a.h5", "middle", 1, 1, P("a", None, "b")),
        ("a.h5", "middle", -3, 1, P(None, None, "a", "b")),
        ("a.h5", "last", 2, 2, P("a", "b")),
        ("a.nc", "lat_first", "time", 1, P("b", "a")),
    ],
)
def test_steps_along_any_axis(comm: Any, files: dict[str, str], file: str, name: str, along: Any, axis: int, spec: P) -> None:
    """(1) Wrong if the stream went along the first axis, or the others came in another order: all of them differ in length."""
    data, mesh = h5(files[file], name), mesh_of()
    ds = stream(files[file], mesh, spec, dataset=name, along=along, pad=-1, shuffle=axis, prefetch=axis - 1)
    batch_shape = (6, *data.shape[:axis], *data.shape[axis + 1 :])

    def compare(batch: Any, index: Array) -> None:
        expected = samples(data, index, 0, axis)
        assert expected.shape == batch_shape
        check(batch, padded(expected, mesh, spec, -1), mesh, spec, index)

    given = take(comm, ds, compare)
    assert len(given.index) == 6


# --- (4, 5, 10) order and length


def meshes() -> dict[str, tuple[Mesh, P]]:
    """Meshes with fewer and other devices, and specs that cut samples, space, both, or nothing."""
    n = len(jax.devices())
    found = {
        "samples": (mesh_of(shape=(n, 1)), P("a")),
        "space": (mesh_of(shape=(1, n)), P(None, None, "b")),
        "both": (mesh_of(), P("b", None, "a")),
        "nothing": (mesh_of(), P()),
        "the last device": (mesh_of([n - 1]), P("a", None, "b")),
    }
    if n >= 4:
        found["two of them"] = mesh_of([3, 1], (1, 2)), P("b")
        found["three of them"] = mesh_of([2, 0, 3], (3, 1)), P("a")
    return found


def test_the_order_is_the_same_on_every_mesh(comm: Any, files: dict[str, str]) -> None:
    """(4, 5, 10) Wrong if samples were dealt to ranks, or order or length followed from mesh, readers or prefetch."""
    data, seen = h5(files["a.h5"], "chunked"), []
    for k, (name, (mesh, spec)) in enumerate(meshes().items()):
        options = {"shuffle": 5, "pool": 30 * LAT * LON * 4, "window": (-1, 1), "batch": 12, "pad": -2, "prefetch": k % 3}
        ds = stream(files["a.h5"], mesh, spec, dataset="chunked", readers=("auto", "root", 2)[k % 3], **options)

        def compare(batch: Any, index: Array, mesh: Mesh = mesh, spec: P = spec, name: str = name) -> None:
            check(batch, padded(samples(data, index, (-1, 1)), mesh, spec, -2), mesh, spec, name)

        given = take(comm, ds, compare)
        assert comm.allgather(len(ds)) == [2] * comm.size
        assert given.index == batches_of(ds.order(0), 12)
        seen.append((ds.order(0).tolist(), ds.order(7).tolist(), given.index, given.state))
    assert all(one == seen[0] for one in seen)
    assert sorted(seen[0][0]) == sorted(seen[0][1]) == list(range(1, N_STEPS - 1))
    assert seen[0][0] != seen[0][1]


# Pinned: what a file, a window, a pool and a seed give never changes.
PINNED = [
    (
        "chunked",
        {"shuffle": 1},
        (5, 0, 3),
        "7 9 10 8 5 6 12 13 11 14 25 29 36 26 28 35 27 15 34 33 18 32 31 17 24 19 22 21 23 16 20 30 2 0 4 1 3",
    ),
    (
        "chunked",
        {"shuffle": 1, "pool": 20 * LAT * LON * 4},
        (5, 0, 5),
        "7 10 9 8 5 6 12 13 25 11 14 29 26 28 27 36 34 15 35 33 32 31 24 18 22 21 23 17 20 19 2 30 16 0 4 1 3",
    ),
    (
        "chunked",
        {"shuffle": 1, "window": (-1, 0, 1), "pool": 30 * LAT * LON * 4},
        (10, 0, 2),
        "15 12 13 20 11 14 18 25 24 22 17 29 21 19 23 26 28 27 16 34 33 32 31 30 10 35 7 9 2 8 5 6 4 1 3",
    ),
    (
        "steps",
        {"shuffle": 2026},
        (1, 0, 1 << 31),
        "9 11 13 10 34 14 35 24 7 32 19 27 6 29 8 23 0 33 1 31 15 30 28 12 4 20 3 22 5 2 25 18 16 26 17 36 21",
    ),
    (
        "steps",
        {"shuffle": 2026, "window": (0, 1), "pool": 9 * LAT * LON * 4},
        (2, 0, 3),
        "11 10 24 0 1 25 27 26 20 13 31 30 21 12 14 3 2 15 19 23 34 35 18 22 29 7 28 6 16 17 4 9 5 8 32 33",
    ),
    (
        "chunked",
        {"shuffle": 1, "select": slice(7, 30), "pool": 13 * LAT * LON * 4},
        (5, 2, 1),
        "7 5 6 4 3 10 9 12 8 11 15 13 14 17 16 22 21 20 18 19 2 0 1",
    ),
]


@pytest.mark.parametrize("k", range(len(PINNED)))
def test_pinned_orders(files: dict[str, str], k: int) -> None:
    """(5) Wrong if the length of a block, its alignment, or the spread were computed in another way."""
    name, options, sizes, expected = PINNED[k]
    ds = stream(files["a.h5"], mesh_of(), P(), dataset=name, **options)
    made = ds.plan.sample_order
    assert (made.block, made.phase, made.spread) == sizes
    assert ds.order(3).tolist() == list(map(int, expected.split()))


def test_the_order_does_not_follow_from_what_it_must_not(files: dict[str, str]) -> None:
    """(5) Wrong if batch, dtype, scale or epochs changed it: a pool is bytes of the file."""

    def order(**options: Any) -> list[int]:
        given = {"dataset": "chunked", "shuffle": 4, "pool": 15 * LAT * LON * 4, **options}
        return list(stream(files["a.h5"], mesh_of(), P(), **given).order(2))

    first = order()
    for same in (
        {"batch": 5},
        {"batch": None},
        {"dtype": "float16"},
        {"scale": (1, 2)},
        {"epochs": None},
        {"remainder": "pad"},
    ):
        assert order(**same) == first, same
    for other in ({"shuffle": 5}, {"pool": 1 << 20}, {"window": 1}):
        assert order(**other) != first, other
    assert order(shuffle=None) == list(range(N_STEPS))
    ds = stream(files["a.h5"], mesh_of(), P(), dataset="chunked")
    ds.order()[:] = 0  # the caller's own
    assert ds.order().tolist() == list(range(N_STEPS))
    orders = []
    for other in (P(), P("a"), P("b")):  # which leaves are read together follows from their specs, and the order does not
        for leaves in (("x", "y", "z"), ("z", "y", "x"), ("y", "z", "x")):
            x, y, z = leaves
            selects = {x: (slice(2, 32), slice(0, 2)), y: (slice(4, 34), slice(None)), z: (slice(2, 32), slice(0, 2))}
            options = {"select": selects, "shuffle": 1, "pool": 12 * (LAT + 2) * LON * 4}
            specs = {x: P(), y: P("a"), z: other}
            ds = stream(files["a.h5"], mesh_of(), specs, dataset=dict.fromkeys(sorted(leaves), "chunked"), **options)
            orders.append(ds.order().tolist())
    assert orders == orders[:1] * 9


# --- length, epochs, remainders


def test_epochs(comm: Any, files: dict[str, str]) -> None:
    """(4, 7, 10) Wrong if an epoch gave a sample twice, or came in the order of the one before."""
    mesh, path = mesh_of(), files["a.h5"]
    compare = comparer(h5(path, "steps"), mesh, P("a", "b"))
    options = {"dataset": "steps", "shuffle": 0, "pool": 10 * LAT * LON * 4}
    ds = stream(path, mesh, P("a", "b"), epochs=2, **options)
    assert len(ds) == 12
    given = take(comm, ds, compare)
    orders = [ds.order(epoch) for epoch in range(3)]
    assert given.index == batches_of(orders[0]) + batches_of(orders[1])
    assert all(sorted(order.tolist()) == list(range(N_STEPS)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    endless = stream(path, mesh, P("a", "b"), epochs=None, **options)
    assert take(comm, endless, compare, 14).index == given.index + batches_of(orders[2])[:2]
    same_error(comm, lambda: len(endless), TypeError, "epochs=None", "no length")
    assert operator.length_hint(endless, 7) == 7  # as rich and tqdm ask


def test_remainders(comm: Any, files: dict[str, str]) -> None:
    """(10) Wrong if samples that fill no batch were lost, or stood where the mask says that none is."""
    mesh, path = mesh_of(shape=(len(jax.devices()), 1)), files["a.h5"]
    data, spec = h5(path, "chunked"), P("a")
    ds = stream(path, mesh, spec, dataset="chunked", batch=12, window=(0, 1), remainder="pad", pad=-3, epochs=2, shuffle=1)
    assert len(ds) == 6
    masks = []
    with iter(ds) as it:
        for k, batch in enumerate(it):
            order = ds.order(k // 3)[k % 3 * 12 :][:12]
            assert it.index.tolist() == order.tolist()
            expected = np.full((12, 2, LAT, LON), -3, "f4")
            expected[: len(order)] = samples(data, order, (0, 1))
            check(batch, expected, mesh, spec, k)
            masks.append(it.mask.tolist())
    assert masks == [[True] * 12, [True] * 12, [True] * 12] * 2
    ds = stream(path, mesh, spec, dataset="chunked", batch=12, remainder="pad", prefetch=0)
    with iter(ds) as it:
        *_, last = it
    assert it.mask.tolist() == [True] + [False] * 11
    check(last, np.concatenate([data[36:], np.zeros((11, LAT, LON), "f4")]), mesh, spec)
    dropped = stream(path, mesh, spec, dataset="chunked", batch=12)
    assert len(dropped) == 3
    parts = "37 samples", "12", "remainder='drop'"
    same_error(comm, lambda: stream(path, mesh, spec, dataset="chunked", batch=12, remainder="error"), ConfigError, *parts)
    whole = stream(path, mesh, spec, dataset="chunked", batch=12, window=(0, 1), remainder="error")
    assert len(whole) == 3


def test_single_steps(comm: Any, files: dict[str, str]) -> None:
    """(1) Wrong if a stream without a batch had an axis of one sample, or the spec were read as if it had."""
    path, mesh = files["a.h5"], mesh_of()
    data = h5(path, "chunked")
    names, windows = {"x": "chunked", "y": "chunked"}, {"x": (0, -2), "y": 1}
    ds = stream(path, mesh, P(None, "b"), dataset=names, window=windows, batch=None)

    def compare(batch: Any, index: Array) -> None:
        check(batch["x"], samples(data, index, (0, -2))[0], mesh, P(None, "b"))
        check(batch["y"], samples(data, index, 1)[0], mesh, P("b"))

    given = take(comm, ds, compare)
    assert given.index == [[k] for k in range(2, N_STEPS - 1)]


def test_samples_that_cross_a_block_are_left_out(comm: Any, files: dict[str, str]) -> None:
    """(12) Wrong if border="drop" still had chunks read twice, or left out what does not cross a border."""
    path, mesh = files["a.h5"], mesh_of()
    options = {"dataset": "chunked", "window": (-1, 0), "shuffle": 2, "pool": 25 * LAT * LON * 4, "border": "drop"}
    ds = stream(path, mesh, P("a", None, "b"), remainder="pad", **options)
    block = ds.plan.sample_order.block
    assert block == 10
    assert sorted(ds.order(0).tolist()) == [k for k in range(1, N_STEPS) if k // block == (k - 1) // block]

    def compare(batch: Any, index: Array) -> None:
        expected = np.zeros((6, 2, LAT, LON), "f4")
        expected[: len(index)] = samples(h5(path, "chunked"), index, (-1, 0))
        check(batch, expected, mesh, P("a", None, "b"))

    assert take(comm, ds, compare).n_decoded == n_chunks((5, 4, 7), range(N_STEPS))


def test_a_selection_is_a_file_of_its_own(comm: Any, files: dict[str, str]) -> None:
    """(8, 11) Wrong if a window took steps from outside, or anchors counted from the file's first step."""
    path, mesh = files["a.h5"], mesh_of()
    for select in ((slice(7, 33), slice(None), slice(2, 5)), (slice(3, 30), slice(None), -1)):
        data, spec = h5(path, "chunked")[select], P("a", None, "b")
        ds = stream(path, mesh, spec, dataset="chunked", select=select, window=(-2, 1))
        given = take(comm, ds, comparer(data, mesh, spec, (-2, 1)))
        first = select[0].start
        assert given.anchors == list(range(2, 2 + len(given.index) * 6))
        assert ds.order(0).tolist() == list(range(2, len(data) - 1))
        used = range(first, first + given.anchors[-1] + 2)

        assert given.n_decoded == 2 * len({step // 5 for step in used})
        order = stream(path, mesh, P(), dataset="chunked", select=select, shuffle=1).plan.sample_order
        numbers = order.block_of(np.arange(len(data)))
        borders = [k + first for k in range(1, len(data)) if numbers[k] != numbers[k - 1]]
        assert borders and all(border % 5 == 0 for border in borders), "a block begins inside a chunk of the file"


@pytest.mark.parametrize("shuffle", [None, 6])
def test_no_window_reaches_over_a_gap(comm: Any, files: dict[str, str], shuffle: int | None) -> None:
    """(8) Wrong if windows were cut by the number of steps alone, or a chunk around the gap were read twice."""
    path, mesh, spec = files["gap.nc"], mesh_of(), P("a", None, "b")
    options = {"dataset": "x", "along": "time", "window": (-2, 0, 1)}
    ds = stream(path, mesh, spec, gaps="skip", shuffle=shuffle, remainder="error", **options)
    given = take(comm, ds, comparer(h5(path, "x"), mesh, spec, (-2, 0, 1)))
    assert sorted(given.anchors) == [*range(2, GAP - 1), *range(GAP + 2, 29)]
    if shuffle is None:
        assert given.n_decoded == 8
    same_error(comm, lambda: stream(path, mesh, spec, **options), ConfigError, f"between steps {GAP - 1} and {GAP}")


# --- (2, 3) values


def test_scale_is_what_numpy_computes(comm: Any, files: dict[str, str]) -> None:
    """(2) Wrong if it used doubles, a reciprocal, stored numbers or another shard's part, or scaled padding."""
    mesh, generator = mesh_of(), np.random.default_rng(1)
    of_level = generator.uniform(0.1, 9, (2, 5, 1, 1))  # doubles: they are cast first
    of_point = generator.uniform(0.1, 9, (2, LAT, LON)).astype("f4")
    path = files["a.h5"]
    names = {"level": "middle", "point": "middle", "number": "middle", "plain": "middle"}
    scales = {"level": tuple(of_level), "point": tuple(of_point), "number": (277, 3.3), "plain": None}
    specs = {
        "level": P("a", None, None, "b"),
        "point": P(None, None, None, "b", "a"),
        "number": P("b", None, "a"),
        "plain": P("a"),
    }
    ds = stream(path, mesh, specs, dataset=names, along=1, window=(0, 1), scale=scales, pad=-7)
    data = h5(path, "middle")

    def compare(batch: Any, index: Array) -> None:
        x = samples(data, index, (0, 1), axis=1)
        for name, scale in scales.items():
            mean, deviation = (np.asarray(part, "f4") for part in scale or (0, 1))
            expected = (x - mean) / deviation if scale else x
            check(batch[name], padded(expected, mesh, specs[name], -7), mesh, specs[name], name)

    take(comm, ds, compare)
    with warned_once(comm, shardload.PackedWarning):
        stream(files["a.nc"], mesh, P("a"), dataset="t2m", dtype="f4", scale=(np.float32(30), 7))
    packed = stream(files["a.nc"], mesh, P("a"), dataset="t2m", decode=True, scale=(np.float32(30), 7))
    expected = (decoded_by_numpy(files["a.nc"]) - np.float32(30)) / np.float32(7)
    take(comm, packed, comparer(expected, mesh, P("a")), 2)
    parts = "scale", "shape (4,)", "(6, 7)"
    same_error(comm, lambda: stream(path, mesh, P(), dataset="chunked", scale=(np.zeros(4), 1)), ConfigError, *parts)


def test_batches_that_are_kept_never_change(comm: Any, files: dict[str, str]) -> None:
    """(3) Wrong if a batch lay in memory that the next ones are made in, or that goes when the stream is closed. Single steps
    are read straight into it.
    """
    path, mesh = files["a.h5"], mesh_of()
    data = h5(path, "steps")
    windows: list[tuple[Any, P]] = [((0, 1), P("a", None, "b")), (1, P("a", "b"))]
    for (window, spec), prefetch in itertools.product(windows, (0, 3)):
        with iter(stream(path, mesh, spec, dataset="steps", window=window, epochs=2, prefetch=prefetch)) as it:
            kept = [(batch, it.index) for batch in it]
        junk = [np.full((6, 2, LAT, LON), -1, "f4") for _ in range(32)]
        assert len(kept) == 12 and junk
        for batch, index in kept:
            check(batch, samples(data, index, window), mesh, spec, index)


def test_batches_by_number(comm: Any, files: dict[str, str]) -> None:
    """(9) Wrong if `ds[k]` counted from the epoch's first batch, moved an iterator on, or gave what an iteration does not; or
    took none of NumPy's integers, as those of a permutation are.
    """
    path, mesh, spec = files["a.h5"], mesh_of(), P("a", None, "b")
    data = h5(path, "chunked")
    ds = stream(path, mesh, spec, dataset="chunked", window=(0, -1), shuffle=8, epochs=2, remainder="pad", pad=0, batch=6)
    with iter(ds) as it:
        next(it)
        for k in (*np.array([11, 0]), 6, np.uint8(7)):
            order = ds.order(k // 6)[k % 6 * 6 :][:6]
            check(ds[k], samples(data, order, (0, -1)), mesh, spec, k)
        next(it)
        assert it.index.tolist() == ds.order(0)[6:12].tolist()
    for k in (12, -1):
        same_error(comm, lambda k=k: ds[k], IndexError, f"batch {k} of a stream; expected 0 to 11")  # type: ignore[misc]
    for k in (1.5, slice(1, 3)):
        same_error(comm, lambda k=k: ds[k], TypeError, "a batch of a stream is taken by its number")  # type: ignore[misc]
    for epoch in (-1, 1.5):
        same_error(comm, lambda epoch=epoch: ds.order(epoch), ConfigError, f"epoch is {epoch}; expected")  # type: ignore[misc]


# --- (11, 12) cost


def test_each_chunk_is_decoded_once_without_shuffle(comm: Any, files: dict[str, str]) -> None:
    """(11) Wrong if each rank decoded what it needs, or each leaf, or a window its border again."""
    path = files["a.h5"]
    for k, (name, chunk) in enumerate({"chunked": (5, 4, 7), "torn": (4, 3, 4), "steps": (1, LAT, LON)}.items()):
        for places, spec in ((None, P("b", None, None, "a")), ([0], P())):
            mesh = mesh_of(places)
            names, windows = {"x": name, "y": name}, {"x": (-3, 0, 1), "y": 2}
            specs = {"x": spec, "y": P(*(entry for at, entry in enumerate(spec) if at != 1))}
            options = {"window": windows, "missing": "fill", "pad": 0, "prefetch": k, "batch": 2}
            ds = stream(path, mesh, specs, dataset=names, **options)
            given = take(comm, ds, lambda batch, index: None)
            steps = {anchor + step for anchor in given.anchors for step in (-3, 0, 1, 2)}
            assert given.n_decoded == n_chunks(chunk, steps), (name, spec)


@pytest.mark.parametrize("shuffle", [None, 2])
def test_leaves_that_are_cut_in_other_ways_share_their_chunks(comm: Any, files: dict[str, str], shuffle: int | None) -> None:
    """(11) Wrong if a leaf with another spec, mesh, pad or scale read its array again, or got the part of another one."""
    path, n = files["a.h5"], len(jax.devices())
    data = h5(path, "chunked")
    specs = {"x": P("a", None, None, "b"), "y": P(None, "b"), "z": P("b", None, "a"), "again": P("a", None, None, "b")}
    meshes = {"x": mesh_of(), "y": mesh_of(shape=(1, n)), "z": mesh_of(), "again": mesh_of()}
    windows = {"x": (-1, 0), "y": 1, "z": (0, 1), "again": (1, -1)}
    pads, scales = {"x": 0, "y": -1, "z": -2, "again": 0}, {"x": None, "y": (3, 2), "z": None, "again": (1, 4)}
    options = {"window": windows, "pad": pads, "scale": scales, "shuffle": shuffle, "pool": 20 * LAT * LON * 4}
    ds = stream(path, meshes, specs, dataset=dict.fromkeys(specs, "chunked"), **options)

    def compare(batch: Any, index: Array) -> None:
        for name, spec in specs.items():
            mean, deviation = (np.float32(of) for of in scales[name] or (0, 1))
            expected = padded((samples(data, index, windows[name]) - mean) / deviation, meshes[name], spec, pads[name])
            check(batch[name], expected, meshes[name], spec, name)

    given = take(comm, ds, compare)
    assert given.index == batches_of(ds.order(0))
    assert len(ds.plan.arrays) == 1
    assert given.n_decoded == len(EpochRounds(ds.plan, 0, 0).readings[0]) * 2  # chunks of a column
    if shuffle is None:
        assert given.n_decoded == n_chunks((5, 4, 7), range(given.anchors[-1] + 2))


@pytest.fixture(scope="module")
def long_file(comm: Any, tmp_path_factory: Any) -> str:
    """100 chunks of 40 steps."""

    def make() -> str:
        path = tmp_path_factory.mktemp("streams") / "long.h5"
        write_hdf5(path, {"x": ramp((4000, 6))}, chunks=(40, 6))
        return str(path)

    return str(on_root(comm, make))


def test_shuffled_chunks_are_decoded_as_often_as_planned(comm: Any, long_file: str) -> None:
    """(12) Wrong if a step were let go and read again, or more often than 1.5 times at a pool of a tenth of the data."""
    mesh, spec = mesh_of(), P("a", None, "b")
    ds = stream(long_file, mesh, spec, dataset="x", window=(-1, 0, 1), shuffle=1, batch=240, pool=400 * 6 * 4, pad=0)
    planned = sum(map(len, EpochRounds(ds.plan, 0, 0).readings))
    data = h5(long_file, "x")
    given = take(
        comm, ds, lambda batch, index: check(batch, padded(samples(data, index, (-1, 0, 1)), mesh, spec, 0), mesh, spec)
    )
    assert given.n_decoded == planned
    assert 100 <= planned <= 150
    assert f"{planned / 100:.2f} times" in str(ds.plan)


def test_the_first_round_has_what_the_first_batch_needs(comm: Any, long_file: str) -> None:
    """Wrong if the first batch waited for chunks of later ones, wherever a run begins; or if later epochs began like that."""
    ds = stream(long_file, mesh_of(), P("a"), dataset="x", batch=12)
    for first in (0, 84):
        epoch = EpochRounds(ds.plan, 0, first)
        assert epoch.rounds()[0].readings == {0: range(1)}
        assert [k for each in epoch.rounds() for k in each.readings[0]] == [*range(len(epoch.readings[0]))]
    later = EpochRounds(ds.plan, 1, 0, first_batch=100)
    assert len(later.rounds()[0].readings[0]) == ds.plan.arrays[0].schedule.owners.n


@pytest.mark.parametrize(("shuffle", "window", "prefetch"), [(None, (0,), 2), (1, (0,), 2), (1, (0,), 0), (3, (-1, 0, 1), 2)])
def test_the_plan_counts_steps_as_long_as_they_are_held(
    monkeypatch: pytest.MonkeyPatch, long_file: str, shuffle: int | None, window: tuple[int, ...], prefetch: int
) -> None:
    """(13) Wrong if a run of steps, of which the last one is still needed, were counted less and less."""
    monkeypatch.setattr(plan, "_ROUND_NBYTES", 25 * 40 * 6 * 4 // len(jax.devices()))
    options = {"shuffle": shuffle, "window": window, "pool": 256 * 6 * 4, "prefetch": prefetch}
    ds = stream(long_file, mesh_of(), P("a"), dataset="x", batch=12, **options)
    epoch = EpochRounds(ds.plan, 0, 0)
    held = np.zeros(epoch.n_batches + 1, dtype=int)
    begins, begin_of = [each.batch for each in epoch.rounds()], dict[int, int]()
    for begin, each in zip([0, *begins] if prefetch else begins, epoch.rounds(), strict=False):
        for flow in epoch.flows(0, each.readings[0]):
            for (start, stop), last in zip(flow.runs.steps, flow.runs.last.tolist(), strict=True):
                batch = last // 12
                since = begin_of.setdefault(batch, begin) if ds.plan.in_place else begin
                held[since : batch + 1] += (stop - start) * 6 * 4
    assert epoch.most_held_nbytes(epoch.rounds()) == held.max()


def test_resuming_reads_at_most_the_pool(comm: Any, long_file: str) -> None:
    """(16) Wrong if a stream that goes on read the epoch from its beginning, or all of the file."""
    ds = stream(long_file, mesh_of(), P("a"), dataset="x", window=(-1, 0, 1), shuffle=1, batch=240, pool=400 * 6 * 4)
    order = ds.plan.sample_order
    pool = (order.spread + 1) * order.block // 40 + 2 * (order.spread + 1)  # chunks, with those at the borders of blocks
    assert f"reads at most {pool}% of the steps first" in str(ds.plan)
    whole = [len(EpochRounds(ds.plan, 0, first).readings[0]) for first in range(0, 3840, 240)]
    state = take(comm, ds, lambda batch, index: None, 7).state
    alone = stream(long_file, mesh_of(), P("a"), dataset="x", window=(-1, 0, 1), shuffle=1, batch=240, pool=9600, prefetch=0)
    assert take(comm, alone, lambda batch, index: None, 1, state).n_decoded <= pool + comm.size
    before = EpochRounds(ds.plan, 0, 0).readings[0].batches
    for k, n in enumerate(whole):
        assert n <= int((before >= k).sum()) + pool, k


# --- (14, 15) resume


STATE = {"dataset": "chunked", "window": (-1, 0), "shuffle": 3, "epochs": 2, "pool": 20 * LAT * LON * 4}


def test_a_state_goes_on_anywhere(comm: Any, files: dict[str, str]) -> None:
    """(14) Wrong if the state counted what was read ahead, batches instead of samples, or followed from the mesh."""
    path, data = files["a.h5"], h5(files["a.h5"], "chunked")
    mesh, spec, other = mesh_of(), P("a", None, "b"), mesh_of(shape=(1, len(jax.devices())))
    ds = stream(path, mesh, spec, prefetch=3, **STATE)
    expected = batches_of(ds.order(0)) + batches_of(ds.order(1))
    compare = comparer(data, mesh, spec, (-1, 0))
    for n in (2, 6, 12):
        state = take(comm, ds, compare, n).state
        assert (state["epoch"], state["sample"]) == (n // 6, n % 6 * 6)  # the end of an epoch is the beginning of the next
        there = stream(path, other, P(None, None, None, "b"), prefetch=n % 3, pad=0, **STATE)

        def elsewhere(batch: Any, index: Array) -> None:
            spec = P(None, None, None, "b")
            check(batch, padded(samples(data, index, (-1, 0)), other, spec, 0), other, spec)

        given = take(comm, there, elsewhere, None, json.loads(json.dumps(state)))
        assert given.index == expected[n:]
    with_other_batch = stream(path, mesh, spec, **STATE, batch=18)
    state = take(comm, ds, compare, 1).state
    given = take(comm, with_other_batch, compare, 1, state)
    assert given.anchors == ds.order(0)[6:24].tolist()
    assert take(comm, ds, compare, None, given.state).index == expected[4:]


def test_a_state_of_another_stream(comm: Any, files: dict[str, str]) -> None:
    """(15) Wrong if a stream went on in another order, or the error did not say which argument is another one."""
    path, mesh = files["a.h5"], mesh_of()

    def made(**changes: Any) -> Any:
        return stream(path, mesh, P(), **{**STATE, **changes})

    state = iter(made()).get_state()
    assert comm.allgather(state) == [state] * comm.size
    others: Mapping[str, dict[str, Any]] = {
        "seed": {"shuffle": 4},
        "window": {"window": (-1, 0, 1)},
        "pool": {"pool": 36 * LAT * LON * 4},
        "contiguous": {"dataset": "contiguous"},
        "selection": {"select": slice(0, 36)},
    }
    for part, changes in others.items():
        it = iter(made(**changes))
        same_error(comm, lambda it=it: it.set_state(state), ConfigError, part)  # type: ignore[misc]
    it = iter(made())
    older = {**state, "stream": {**state["stream"], "order": 0}}
    same_error(comm, lambda: it.set_state(older), ConfigError, "order is 1, was 0")
    same_error(comm, lambda: it.set_state({}), ConfigError, "no state")
    it.set_state(state)
    iter(made(batch=4)).set_state(state)
    # Two windows of the same length are two windows.
    wide = iter(made(window=(-2, 0, 1))).get_state()
    it = iter(made(window=(-2, 1)))
    same_error(comm, lambda: it.set_state(wide), ConfigError, "window")


def test_a_state_of_another_file(comm: Any, shared_tmp_path: Path) -> None:
    """(15) Wrong if the values of another year went for those of the file, or a copy of it elsewhere did not."""

    def make() -> None:
        for name, first in (("a", 0), ("b", 1)):
            write_hdf5(shared_tmp_path / f"{name}.h5", {"x": ramp((20, LAT)) + first}, chunks=(4, LAT))
        (shared_tmp_path / "elsewhere").mkdir()
        shutil.copy(shared_tmp_path / "a.h5", shared_tmp_path / "elsewhere" / "c.h5")

    on_root(comm, make)
    mesh, data = mesh_of(), ramp((20, LAT))
    a, b, c = (stream(shared_tmp_path / name, mesh, P(), dataset="x") for name in ("a.h5", "b.h5", "elsewhere/c.h5"))
    state = take(comm, a, comparer(data, mesh, P()), 1).state
    it = iter(b)
    same_error(comm, lambda: it.set_state(state), ConfigError, "values is")
    assert take(comm, c, comparer(data, mesh, P()), None, state).anchors == list(range(6, 18))


def test_a_state_with_a_remainder(comm: Any, files: dict[str, str]) -> None:
    """(14) Wrong if remainder="error" dropped samples after all, where a state goes on with another batch."""
    options = {"dataset": "chunked", "window": (0, 1), "remainder": "error", "prefetch": 0}
    mesh, data = mesh_of(), h5(files["a.h5"], "chunked")
    compare = comparer(data, mesh, P(), (0, 1))
    state = take(comm, stream(files["a.h5"], mesh, P(), batch=4, **options), compare, 1).state
    it = iter(stream(files["a.h5"], mesh, P(), batch=6, **options))
    same_error(comm, lambda: it.set_state(state), ConfigError, "the 32 that are left are no whole batches of 6")
    fits = stream(files["a.h5"], mesh, P(), batch=2, **options)
    assert take(comm, fits, compare, None, state).anchors == list(range(4, 36))
