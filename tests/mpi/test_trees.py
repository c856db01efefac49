"""Is a tree of names loaded as each of its names would be, and what do all ranks see if it cannot be?

Compared with h5py, zarr and NumPy. Arrays of the same shape differ in every element, so that one in the place of another shows.
"""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
import zarr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, MissingChunksWarning, PeerError, SourceError, VerifyError
from shardload.comm.group import Group
from shardload.engine import session
from shardload.formats.hdf5 import file as hdf5_file
from shardload.jobs.loading import endpoints
from shardload.transfer import buffers
from tests.mpi.support import (
    READERS,
    check,
    counted,
    mesh_of,
    on_root,
    padded,
    ramp,
    refuse_reads,
    same_error,
    unit,
    warned_once,
)
from tests.mpi.test_state import Twins
from tests.unit.files import write_hdf5

Pair = namedtuple("Pair", "left right")
pytestmark = pytest.mark.usefixtures("moved_as_large")


def values() -> dict[str, np.ndarray]:
    """All arrays of the snapshot, by their full names. `vel` has the shape of `pos`."""
    n = unit()
    shape = (4 * n + 1, 2 * n)
    return {
        "/stars/pos": ramp(shape),
        "/stars/vel": ramp(shape) + np.float32(1 << 20),
        "/stars/more/id": ramp((4 * n + 1,), "int32"),
        "/gas/rho": ramp((2 * n, n, 3)) + np.float32(1 << 21),
        "/gas/mask": ramp((2 * n, n), "uint8"),
        "/time": np.float32(13.5),
    }


@pytest.fixture(scope="module")
def snap(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The same arrays in an HDF5 file, with text beside them, and in a Zarr store."""
    arrays = values()

    def write() -> tuple[str, str]:
        folder = tmp_path_factory.mktemp("trees")
        root = zarr.open_group(folder / "snap.zarr", mode="w")
        with h5py.File(folder / "snap.h5", "w") as file:
            for name, data in arrays.items():
                how: dict[str, Any] = {} if data.ndim != 2 else {"chunks": (3, 3), "compression": "gzip"}
                file.create_dataset(name, data=data, **how)
                root.create_array(name.strip("/"), data=np.asarray(data), chunks=tuple(max(1, k // 2) for k in data.shape))
            file["/stars/more/code"] = "written by hand"
        return str(folder / "snap.h5"), str(folder / "snap.zarr")

    return on_root(comm, write)


NAMES = {"vel": "stars/vel", "pos": "/stars/pos", "gas": ["gas/rho", ("gas/mask",)], "id": "stars/more/id"}
SPECS = {"vel": P("a", "b"), "pos": P(("b", "a")), "gas": P("b"), "id": P("b")}
PADS = {"vel": 0, "pos": -7, "gas": None, "id": 3}


def check_snap(x: Any, note: object = "") -> None:
    mesh, of = mesh_of(), values()
    for key in ("vel", "pos", "id"):
        expected = of["/stars/more/id" if key == "id" else f"/stars/{key}"]
        check(x[key], padded(expected, mesh, SPECS[key], PADS[key]), mesh, SPECS[key], (key, note))
    assert type(x) is dict and type(x["gas"]) is list and type(x["gas"][1]) is tuple
    check(x["gas"][0], of["/gas/rho"], mesh, P("b"), note)
    check(x["gas"][1][0], of["/gas/mask"], mesh, P("b"), note)


@pytest.mark.parametrize("readers", READERS)
def test_a_tree_of_names(snap: tuple[str, str], readers: Any) -> None:
    """Wrong if arrays were exchanged, a prefix went to another leaf, or one array were padded with another's value."""
    how: dict[str, Any] = {"dataset": NAMES, "pad": PADS, "readers": readers, "staging": "64KiB"}
    for path, verify in zip(snap, ("full", "checksum"), strict=True):
        check_snap(shardload.load(path, mesh_of(), SPECS, verify=verify, **how), readers)


def test_one_value_for_all_and_options_of_their_own(snap: tuple[str, str]) -> None:
    """Wrong if a selection, a dtype or a sharding of one array were used for another."""
    n, mesh, of = unit(), mesh_of(), values()
    names = Pair("stars/pos", "gas/rho")
    select, dtype = Pair((slice(1, None), 3), slice(n, 2 * n)), Pair("float32", "int32")
    x = shardload.load(snap[0], mesh, P("a"), dataset=names, select=select, dtype=dtype)
    assert isinstance(x, Pair)
    check(x.left, of["/stars/pos"][1:, 3], mesh, P("a"))
    check(x.right, of["/gas/rho"][n : 2 * n].astype("int32"), mesh, P("a"))
    shardings = [NamedSharding(mesh, P("b")), NamedSharding(mesh, P(None, "a"))]
    (y, z) = shardload.load(snap[0], shardings, dataset=["gas/mask", "gas/mask"], select=(slice(0, n), ...))
    check(y, of["/gas/mask"][:n], mesh, P("b"))
    check(z, of["/gas/mask"][:n], mesh, P(None, "a"))


def test_several_files(snap: tuple[str, str]) -> None:
    """Wrong if a name were looked up in another file, or one name written in the path of another."""
    mesh, of = mesh_of(), values()
    x = shardload.load({"h": snap[0], "z": snap[1]}, mesh, P("b"), dataset={"h": "gas/mask", "z": {"rho": "gas/rho"}})
    check(x["h"], of["/gas/mask"], mesh, P("b"))
    check(x["z"]["rho"], of["/gas/rho"], mesh, P("b"))
    first, second = shardload.load([f"{snap[0]}:/gas/rho", f"{snap[0]}:/gas/mask"], mesh, P("b"))
    check(first, of["/gas/rho"], mesh, P("b"))
    check(second, of["/gas/mask"], mesh, P("b"))


def test_dimensions_without_a_variable_are_no_arrays(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if "*" gave each axis of a netCDF file that has no coordinate one of zeros, and a spec had to divide it."""
    path = str(shared_tmp_path / "a.nc")

    def write() -> None:
        with h5py.File(path, "w") as file:
            file["v"] = np.ones((5, 2), "f4")
            for axis, n in enumerate(file["v"].shape):
                file.create_dataset(f"g/d{axis}", shape=(n,), dtype=">f4")
                file[f"g/d{axis}"].make_scale(f"This is a netCDF dimension but not a netCDF variable.{n:10d}")
                file["v"].dims[axis].attach_scale(file[f"g/d{axis}"])

    on_root(comm, write)
    plan = shardload.plan(path, mesh_of(), P(), dataset="*")
    assert set(plan.execute()) == {"v"} and [one.dataset for one in plan.left_out] == ["/g/d0", "/g/d1"]
    assert "'/g/d0' (no values: it is a netCDF dimension without a variable)" in " ".join(str(plan).split())
    assert plan.plans["v"].info.dims == ("d0", "d1") and not plan.plans["v"].info.coords
    same_error(comm, lambda: shardload.load(path, mesh_of(), P(), dataset="g/*"), ConfigError, "g")
    by_name = shardload.load(path, mesh_of(), P(), dataset="g/d0", missing="fill")
    assert by_name.shape == (5,), "what a program of HDF5 finds there"


@pytest.mark.parametrize("kind", ["HDF5", "Zarr"])
def test_all_arrays(snap: tuple[str, str], kind: str) -> None:
    """Wrong if an array were missing or in another's place, or text ended the load."""
    mesh, of, path = mesh_of(), values(), snap[kind == "Zarr"]
    plan = shardload.plan(path, mesh, {"stars": {"pos": P("a"), "vel": P("b"), "more": P()}, "gas": P("b"), "time": P()},
                          dataset="*", pad={"stars": 5, "gas": None, "time": None})  # fmt: skip
    x = plan.execute()
    assert jax.tree_util.tree_structure(x) == jax.tree_util.tree_structure(
        {"stars": {"pos": 0, "vel": 0, "more": {"id": 0}}, "gas": {"rho": 0, "mask": 0}, "time": 0}
    )
    check(x["stars"]["pos"], padded(of["/stars/pos"], mesh, P("a"), 5), mesh, P("a"))
    check(x["stars"]["vel"], padded(of["/stars/vel"], mesh, P("b"), 5), mesh, P("b"))
    check(x["stars"]["more"]["id"], of["/stars/more/id"], mesh, P())
    check(x["gas"]["mask"], of["/gas/mask"], mesh, P("b"))
    check(x["time"], np.asarray(of["/time"]), mesh, P())
    assert [one.dataset for one in plan.left_out] == ["/stars/more/code"] * (kind == "HDF5")
    assert ("left out" in str(plan)) == (kind == "HDF5")
    below = shardload.load(path, mesh, P("b"), dataset={"only": "gas/*"})
    assert sorted(below["only"]) == ["mask", "rho"]
    check(below["only"]["rho"], of["/gas/rho"], mesh, P("b"))
    scalar = shardload.load(path, mesh, P("a"), dataset="/*", select=..., pad=0)["time"]
    check(scalar, np.asarray(of["/time"]), mesh, P())


def test_the_plan_of_a_tree(snap: tuple[str, str]) -> None:
    """Wrong if the plan and the load were not of the same arrays, or plans of a tree could not be used alone."""
    mesh, of = mesh_of(), values()
    plan = shardload.plan(snap[0], mesh, SPECS, dataset=NAMES, pad=PADS, readers="parallel", staging="1MiB", verify="full")
    text = str(plan)
    for word in ("load 5 arrays", "['gas'][1][0]", "/stars/vel", "P(('b', 'a'))", "total:", "peak host memory", "1.0 MiB"):
        assert word in text, text
    assert plan.where == ("['gas'][0]", "['gas'][1][0]", "['id']", "['pos']", "['vel']")
    assert plan.nbytes == sum(np.prod(one.shape_global) * one.dtype.itemsize for one in plan.leaves)
    pieces = sum(one.pieces_nbytes for one in plan.leaves)
    assert pieces < plan.peak_nbytes <= pieces + (1 << 20)
    x = plan.execute()
    check_snap(x)
    check_snap(plan.execute(), "again")
    report = plan.report
    assert report is not None and [one.where for one in report.arrays] == list(plan.where)
    assert report.nbytes_read == sum(one.nbytes_read for one in report.arrays)
    by_where = {one.where: one for one in report.arrays}
    assert by_where["['gas'][0]"].nbytes_read == of["/gas/rho"].nbytes and by_where["['gas'][0]"].chunks_decoded == 0
    n_chunks = -(-(4 * unit() + 1) // 3) * -(-2 * unit() // 3)
    assert by_where["['pos']"].chunks_decoded == n_chunks and "['pos'] '/stars/pos'" in str(report)
    proven = [one.proven for one in report.arrays]
    assert report.proven.n_elements == sum(one.n_elements for one in proven)
    check(plan.plans["gas"][0].execute(), of["/gas/rho"], mesh, P("b"))


@pytest.mark.any_version
@pytest.mark.any_library
def test_verify_a_tree(comm: Any, snap: tuple[str, str]) -> None:
    """Wrong if an array were compared with another one's file, or one of them with none."""
    x = shardload.load(snap[0], mesh_of(), SPECS, dataset=NAMES, pad=PADS)
    proven = shardload.verify(x, snap[0], dataset=NAMES, pad=PADS)
    assert jax.tree_util.tree_structure(proven) == jax.tree_util.tree_structure(x)
    assert proven["id"].n_elements >= values()["/stars/more/id"].size
    exchanged = {**x, "gas": [x["gas"][1][0], (x["gas"][1][0],)]}
    call = lambda y, **how: lambda: shardload.verify(y, snap[0], **{"dataset": NAMES, "pad": PADS, **how})  # noqa: E731
    same_error(comm, call(exchanged), ConfigError, "array ['gas'][0]", "x has shape")
    y = shardload.load(snap[0], mesh_of(), P("b"), dataset=["gas/mask", "gas/rho"], select=(slice(0, unit()), 0))
    other = {"dataset": ["gas/rho", "gas/mask"], "select": [(slice(0, unit()), 0, slice(0, 3)), (slice(0, unit()), 0)]}
    same_error(comm, lambda: shardload.verify(y, snap[0], **other), ConfigError, "array [0]")
    wrong = {**x, "vel": jax.device_put(x["vel"] + 1, x["vel"].sharding)}
    same_error(comm, call(wrong), VerifyError, "array ['vel']", "'/stars/vel'")
    same_error(comm, call({"vel": x["vel"]}), ConfigError, "x does not match dataset", "x has no ['gas']")
    more = call({**x, "more": x["id"]})
    same_error(comm, more, ConfigError, "x does not match dataset: only x has ['more']. Pass a tree with the same keys")
    same_error(
        comm, call(x, dataset="gas/rho"), ConfigError, "x is a tree of 5 arrays, but dataset and path name 1. Pass dataset="
    )
    same_error(comm, call({**x, "id": "no array"}), ConfigError, "x['id'] is a str; expected a jax.Array")


def test_scatter_takes_one_array(comm: Any) -> None:
    """Wrong if the arrays of a tree came as one array that nobody asked for, or an option that is a tree counted in part."""
    mesh, x = mesh_of(), values()["/gas/mask"]
    check(shardload.scatter([x, x], mesh, P(None, "a")), np.stack([x, x]), mesh, P(None, "a"))
    for tree in ({"x": x}, {}, {2.5: x}, Pair(x, x), Twins(x, x)):
        says = (f"array is a {type(tree).__name__} on rank 0, a tree, and scatter takes one array", "call it for each")
        same_error(comm, lambda tree=tree: shardload.scatter(tree, mesh, P()), ConfigError, *says)
    ragged = [np.zeros(2, "f4"), np.zeros(3, "f4")]
    same_error(comm, lambda: shardload.scatter(ragged, mesh, P()), ConfigError, "array is a list on rank 0", "call it for each")
    same_error(comm, lambda: shardload.scatter([{"x": x}], mesh, P()), SourceError, "objects")
    for make in (lambda x: x, lambda x: [x, x]):
        call = jax.jit(lambda x, make=make: shardload.scatter(make(x), mesh, P()))
        same_error(comm, lambda call=call: call(x), ConfigError, "traced on rank 0: it has no values yet. Call scatter outside")
    same_error(comm, lambda: shardload.scatter(x, mesh, {"x": P()}), ConfigError, "a tree, but there is one array")
    same_error(comm, lambda: shardload.scatter([x, x], mesh, [P(), P()]), ConfigError, "expected a PartitionSpec")
    for dtype in ({"x": "int32"}, ["int32"]):
        same_error(comm, lambda: shardload.scatter(x, mesh, P(), dtype=dtype), ConfigError, f"dtype is {dtype}; expected")  # noqa: B023


# --- what is wrong with the call


BAD = [
    ({"dataset": {"a": "stars/pos", "b": "stars/veI"}}, ("array ['b']", "no array '/stars/veI'", "first): '/stars/vel'")),
    ({"dataset": "star/*"}, ("no arrays below '/star'", "nearest first): '/stars/*'")),
    ({"dataset": "gas/rho/*"}, ("'/gas/rho'", "is an array, not a group")),
    ({"dataset": ["gas/rho", "gas/mask"], "spec": P(None, None, None)},
     ("array [1]", "P(None, None, None) has 3 entries", "counts for several arrays: pass trees")),
    pytest.param(
        {"dataset": {"p": "stars/pos", "r": "gas/rho"}, "spec": P("a")},
        ("array ['p']", "Pass pad=np.nan", "counts for several arrays: pass trees"), marks=pytest.mark.mpi(min_size=2),
    ),
    ({"dataset": {"p": "gas/mask", "r": "gas/rho"}, "dtype": {"p": "f4", "r": "foo"}}, ("array ['r']: dtype is 'foo'",)),
    ({"dataset": {"p": "gas/mask", "r": "gas/rho"}, "select": {"p": 0, "r": (0, 0, 0, 0)}}, ("array ['r']", "'/gas/rho'")),
    ({"dataset": {"p": "gas/mask", "r": ""}}, ("dataset is ''",)),
    ({"dataset": {"p": "gas/*"}, "spec": {"p": {"rho": P()}}}, ("spec['p'] does not match", "spec has no ['mask']")),
    ({"dataset": {"p": "gas/*"}, "spec": P("a"), "pad": {"p": {"rho": 0, "mask": 300}}},
     ("array ['p']['mask']", "pad is 300")),
    ({"dataset": "stars/v*"}, ("no array '/stars/v*'", "first): '/stars/vel'")),
    ({"dataset": {"p": "gas/mask", "r": "gas/rho"}, "select": {"p": 0}},
     ("select names the axis 'p'", "counts for several arrays")),
]  # fmt: skip


@pytest.mark.parametrize(("how", "parts"), BAD, ids=[str(k) for k in range(len(BAD))])
def test_bad_trees(
    comm: Any, snap: tuple[str, str], how: dict[str, Any], parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if a rank went on, anything were read, or the text did not say which array it is about."""
    refuse_reads(monkeypatch)
    call = lambda: shardload.load(snap[0], mesh_of(), **{"spec": P(), **how})  # noqa: E731
    same_error(comm, call, ConfigError, *parts)


def test_the_plan_of_a_tree_is_not_that_of_one_array(snap: tuple[str, str]) -> None:
    made = shardload.plan(snap[0], mesh_of(), P(), dataset={"p": "stars/pos"})
    x = made.execute()
    for call in (lambda: shardload.mask(2 * x["p"], made), lambda: shardload.unpad(2 * x["p"], made, numpy=True)):
        with pytest.raises(ConfigError, match=r"plan or shape is a tree; .* pass the Plan of this array: plan.plans\['name'\]"):
            call()
    with pytest.raises(ConfigError, match=r"found ArrayImpl and dict.*, its plan: plan.plans\['name'\]"):
        shardload.to_xarray(x["p"], made)


@pytest.mark.mpi(min_size=2)
def test_calls_that_differ_are_named_with_their_arrays(comm: Any, snap: tuple[str, str]) -> None:
    names = {"p": "stars/pos", "v": "stars/vel", **({"r": "gas/rho"} if comm.rank == 1 else {})}
    call = lambda: shardload.load(snap[0], mesh_of(), P(), dataset=names)  # noqa: E731
    same_error(comm, call, PeerError, "(3 arrays: ['p'], ['r'], ['v'])", "(2 arrays: ['p'], ['v'])")
    names = {"p": "stars/pos", "v": "stars/vel" if comm.rank == 1 else "gas/rho"}
    same_error(comm, call, PeerError, "dataset of array ['v'] = ")


# --- one of everything


@pytest.mark.mpi(min_size=2)
def test_another_mesh_in_a_tree_for_a_pattern(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if ranks compared the first mesh alone."""
    path = shared_tmp_path / "two.h5"
    on_root(comm, lambda: write_hdf5(path, {"u": ramp((4,), "f4"), "v": ramp((4,), "f4")}))
    mesh, other = mesh_of(names=("a",)), mesh_of(names=("a" if comm.rank == 0 else "b",))
    same_error(comm, lambda: shardload.load(path, {"u": mesh, "v": other}, P(), dataset="*"), PeerError, "sharding")


@pytest.mark.parametrize("verify", ["index", "checksum", "full"])
def test_one_round_for_all(comm: Any, snap: tuple[str, str], verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if arrays were verified, or files opened, one by one: five arrays by two spellings of a file's name. Or if each had
    an exchange or a pool of threads of its own.
    """
    mesh = mesh_of()
    written = [snap[0], f"{snap[0]}:/gas/mask", f"{Path(snap[0]).parent}/./snap.h5", snap[0], snap[0]]
    names = ["gas/rho", None, "gas/mask", "stars/vel", "stars/pos"]
    how: dict[str, Any] = {"dataset": names, "pad": 0, "readers": "parallel", "verify": verify}
    shardload.load(written, mesh, P(), **how)  # what is made once for a communicator is there
    counts: Counter[str] = Counter()
    for name in ("begin", "all_same", "agree", "least_ints", "gather_int", "gather_ints"):
        counted(monkeypatch, counts, Group, name)
    counted(monkeypatch, counts, hdf5_file, "open_explained")
    counted(monkeypatch, counts, session, "exchange")
    counted(monkeypatch, counts, buffers, "Pool")
    x = shardload.load(written, mesh, P(), **how)
    replicated = verify != "index" and len(jax.devices()) > 1
    expected = {
        "begin": 1,
        "all_same": 1,
        "agree": 2 + (verify == "full"),
        "least_ints": int(replicated),
        "exchange": 1,
        "Pool": 1,
    }
    opened = counts.pop("open_explained", 0)  # with several nodes one rank reads arrays as small as these
    assert (comm.rank == 0) <= opened <= 1 + (comm.rank == 0) + (verify == "full"), (
        "rank 0 opens it for the metadata, readers, and full reads again"
    )
    counts.pop("gather_int", None)
    assert +counts == +Counter(expected)
    check(x[0], values()["/gas/rho"], mesh, P())
    check(x[3], values()["/stars/vel"], mesh, P())


def test_missing_chunks_of_several_arrays(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if each array warned by itself, or the one that lacks chunks were not named."""
    n, path = unit(), str(shared_tmp_path / "holes.h5")

    def write() -> None:
        with h5py.File(path, "w") as file:
            for k in range(4):
                made = file.create_dataset(f"x{k}", (4 * n,), "f4", chunks=(n,), fillvalue=-1)
                made[: (4 - k) * n] = np.arange((4 - k) * n)

    on_root(comm, write)
    names = {f"y{k}": f"x{k}" for k in range(4)}
    counts: Counter[str] = Counter()
    counted(monkeypatch, counts, Group, "least_ints")
    with warned_once(comm, MissingChunksWarning) as told:
        plan = shardload.plan(path, mesh_of(), P(), dataset=names, readers="parallel")
        x = plan.execute()
    assert counts["least_ints"] == 1
    for text in told:
        assert "array ['y1']: 1 of 4" in text and "array ['y3']: 3 of 4" in text and "['y0']" not in text
    assert [one.chunks_missing for one in plan.report.arrays] == [0, 1, 2, 3] and plan.report.chunks_missing == 6
    for k in range(4):
        expected = np.where(np.arange(4 * n) < (4 - k) * n, np.arange(4 * n), -1).astype("f4")
        check(x[f"y{k}"], expected, mesh_of(), P())
    call = lambda: shardload.load(path, mesh_of(), P(), dataset=names, missing="error")  # noqa: E731
    same_error(comm, call, SourceError, "array ['y1']", "Nothing was loaded")


def replaced_at(monkeypatch: pytest.MonkeyPatch, comm: Any, replace: Callable[[], None], is_early: bool = False) -> None:
    """Put another version of a file in its place when the arrays are planned, and ranks that are early have opened it."""
    original = endpoints.LoadSource.open

    def opens(source: Any, *args: Any) -> Any:
        found = original(source, *args) if is_early else None
        comm.barrier()
        on_root(comm, replace)
        return found if is_early else original(source, *args)

    monkeypatch.setattr(endpoints.LoadSource, "open", opens)


def version(path: Path, k: int) -> None:
    """A file, or store, of a number and two arrays, whose values are all `k`, in place of the one before."""
    new = path.with_name(f"{k}{path.name}")
    arrays = {"time": np.float32(k), "x": np.full((16, 3), k, "f4"), "y": np.full((16, 5), k, "f4")}
    if path.suffix == ".zarr":
        root = zarr.open_group(new, mode="w")
        for name, data in arrays.items():
            root.create_array(name, data=np.asarray(data), chunks=data.shape)
        if path.exists():
            path.rename(path.with_name(f"old{k}"))
    else:
        write_hdf5(new, arrays)
    new.rename(path)


@pytest.mark.parametrize("name", ["a.h5", "a.zarr"])
def test_a_small_array_of_an_older_file(
    comm: Any, shared_tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, tune: Any
) -> None:
    """Wrong if the values that came with the metadata were of the file before, and the others of the one after it."""
    path = shared_tmp_path / name
    on_root(comm, lambda: version(path, 1))
    tune(small_nbytes=4)
    load = lambda: shardload.load(path, mesh_of(), P(), dataset={"t": "time", "x": "x", "y": "y"})  # noqa: E731
    assert [float(one.addressable_data(0).max()) for one in load().values()] == [1, 1, 1]
    with monkeypatch.context() as changed:
        replaced_at(changed, comm, lambda: version(path, 2))
        same_error(comm, load, SourceError, "array ['t'], '/time' in", "changed while it was read")
    assert [float(one.addressable_data(0).max()) for one in load().values()] == [2, 2, 2]


@pytest.mark.mpi(min_size=2)
def test_each_rank_reads_another_array_of_a_file_that_is_replaced(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if the ranks' files were compared for each array only: each array has one reader, which sees one file."""
    path, devices = shared_tmp_path / "a.h5", jax.devices()
    on_root(comm, lambda: version(path, 1))
    meshes = [NamedSharding(Mesh(np.array([one]), "a"), P()) for one in (devices[0], devices[-1])]
    load = lambda: shardload.load(path, meshes, dataset=["x", "y"], readers="direct")  # noqa: E731
    with monkeypatch.context() as changed:
        replaced_at(changed, comm, lambda: version(path, 2), jax.process_index() == devices[0].process_index)
        same_error(comm, load, SourceError, str(path), "did not see the same file")
    assert len(load()) == 2
