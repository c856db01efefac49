"""Is a file at a URL loaded as the same file on disk is, on any number of ranks, and who asks the server for what?"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardload
from shardload.storage.new_folder import NewFolder
from tests.mpi.servers import Shared
from tests.mpi.sources import CHUNKS, NAME, netcdf4
from tests.mpi.support import check, cube, mesh_of, on_root, ramp, same_error, unit

obstore = pytest.importorskip("obstore")
pytestmark = [pytest.mark.any_library, pytest.mark.any_number]

SPECS = {"pencils": P(None, "a", "b"), "slabs": P("a"), "copies": P()}


def filled(**options: Any) -> Any:
    return lambda file: file.create_dataset(NAME, data=ramp(cube()), **options)


def some_chunks(file: h5py.File) -> None:
    made = file.create_dataset(NAME, cube(), "f4", chunks=CHUNKS, fillvalue=-3, compression="gzip")
    made[2:, :5] = ramp(cube())[2:, :5]


def bitshuffle(file: h5py.File) -> None:
    import hdf5plugin  # on the rank that writes: the others find the filter when they need it

    filled(chunks=CHUNKS, **hdf5plugin.Bitshuffle())(file)


LAYOUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "gzip": ({}, filled(chunks=CHUNKS, compression="gzip", shuffle=True)),
    "latest": ({"libver": "latest"}, filled(chunks=CHUNKS, compression="gzip", maxshape=(None, *cube()[1:]))),
    "plain chunks": ({}, filled(chunks=CHUNKS)),
    "checksum": ({}, filled(chunks=CHUNKS, fletcher32=True)),
    "one piece": ({"userblock_size": 512}, filled()),
    "lzf": ({}, filled(chunks=CHUNKS, compression="lzf")),
    "scaleoffset": ({}, lambda file: file.create_dataset(NAME, data=ramp(cube(), "i4"), chunks=CHUNKS, scaleoffset=0)),
    "bitshuffle": ({}, bitshuffle),
    "some chunks": ({}, some_chunks),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_on_disk(shared: Shared, layout: str) -> None:
    """Wrong if a shard had other values, or if another rank than 0 read the beginning of the file, where its metadata are."""
    how, make = LAYOUTS[layout]
    url, path = shared.write("a.h5", make, **how)

    def read() -> tuple[Any, int]:
        with h5py.File(path) as file:
            ends = file[NAME].id.get_offset() or file[NAME].id.get_chunk_info(0).byte_offset
            return np.asarray(file[NAME][...]), int(ends)

    expected, ends = on_root(shared.comm, read)  # which may have a filter that the others have not
    mesh, given = (
        mesh_of(),
        {"storage": shared.of_http, "missing": "fill", "allow_filters": ("scaleoffset", "bitshuffle"), "dataset": NAME},
    )
    for spec in SPECS.values():
        shared.asked()
        x = shardload.load(url, mesh, spec, readers="parallel", **given)
        asked = shared.asked()
        check(x, expected, mesh, spec, layout)
        of_metadata = [r for r in asked if r.first < min(ends, 512)]
        assert [(r.client, r.status) for r in of_metadata] == [("rank 0", 206)], asked
        assert sum(r.nbytes for r in asked) <= 1.05 * Path(path).stat().st_size + (2 << 20)
    part = (slice(2, 5), slice(None), slice(4, 11))
    y = shardload.load(url, mesh, P(None, "a"), select=part, **given)
    check(y, expected[part], mesh, P(None, "a"))
    z = shardload.load(url, mesh, P("b", "a"), verify="full", **given)
    check(z, expected, mesh, P("b", "a"))


def test_a_plan_says_what_lies_between_rows(shared: Shared) -> None:
    """Wrong if it counted the selected bytes alone: of a column nearly all is fetched, of far rows each takes a request, and so
    does each chunk of a column of chunks.
    """
    near, _ = shared.write("near.h5", lambda file: file.create_dataset(NAME, data=np.zeros((1500, 400), "f4")))
    far, _ = shared.write("far.h5", lambda file: file.create_dataset(NAME, data=np.zeros((30, 9000), "f4")))
    far_planes, _ = shared.write("planes.h5", lambda file: file.create_dataset(NAME, data=np.zeros((30, 90, 100), "f4")))
    chunks, _ = shared.write(
        "chunks.h5", lambda file: file.create_dataset(NAME, data=np.zeros((30, 18000), "f4"), chunks=(1, 3000))
    )
    for url, promise, nbytes in (
        (near, "some 1 request for 2.3 MiB", 1500 * 1600),
        (far, "some 30 requests for 120 B", 30 * 4),
        (far_planes, "some 30 requests for 46.9 KiB", 30 * 1600),
        (chunks, "some 30 requests for 351.6 KiB", 30 * 12000),
    ):
        select = (slice(None), slice(5, 9), 7) if url == far_planes else (slice(None), 5)
        plan = shardload.plan(url, mesh_of(), P(), select=select, readers="root", storage=shared.of_http)
        assert promise in str(plan)
        shared.asked()
        plan.execute()
        asked = shared.asked()
        assert len(asked) == plan.report.n_requests == int(promise.split()[1])
        assert sum(request.nbytes for request in asked) == nbytes


def test_an_array_in_a_store_beside_one_on_disk(shared: Shared) -> None:
    """Wrong if two arrays alike, one in a store, shared a plan: what is fetched ahead was not in it."""
    url, path = shared.write("a.h5", filled(chunks=CHUNKS, compression="gzip"))
    plan = shardload.plan({"a": path, "b": url}, mesh_of(), P("a"), dataset=NAME, storage=shared.of_http)
    assert [leaf.ahead_nbytes > 0 for leaf in plan.leaves] == [False, True]


def test_a_file_of_the_netcdf_library(comm: Any, shared: Shared) -> None:
    (shared.folder / "b").mkdir(exist_ok=True)
    path = on_root(comm, lambda: netcdf4(shared.folder / "b", cube()))
    x = shardload.load(f"{shared.url}/b/{Path(path).name}:/{NAME}", mesh_of(), P("a", "b"), storage=shared.of_http)
    check(x, ramp(cube()), mesh_of(), P("a", "b"))


def climate(file: h5py.File) -> None:
    """A netCDF4 file as netCDF4 libraries see it: packed, with dates, names of axes, and names as coordinates."""
    n, ny, nx = cube()
    file["time"] = np.arange(n, dtype="f4") * 24
    file["time"].attrs["units"] = "hours since 2001-01-01"
    file["time"].make_scale("time")
    file["name"] = np.array([f"station {k}".encode() for k in range(ny)])
    made = file.create_dataset("t2m", data=(ramp((n, ny, nx)) % 3000).astype("i2"), chunks=CHUNKS, compression="gzip")
    made.attrs["scale_factor"], made.attrs["add_offset"], made.attrs["_FillValue"] = (
        np.float32(0.5),
        np.float32(10),
        np.int16(7),
    )
    made.attrs["coordinates"] = "name"
    made.dims[0].attach_scale(file["time"])
    file.attrs["_NCProperties"] = "version=2"


def test_what_else_takes_a_path(comm: Any, shared: Shared) -> None:
    """Wrong if one of them gave or said of the URL another thing than of the file."""
    url, path = shared.write("run.nc", climate)
    mesh, spec, n = mesh_of(), P(None, "a", "b"), cube()[0]
    of_url: dict[str, Any] = {"dataset": "t2m", "decode": True, "storage": shared.of_http}
    with h5py.File(path) as file:
        stored = file["t2m"][...]
    expected = np.where(stored == 7, np.float32(np.nan), stored * np.float32(0.5) + np.float32(10))
    x = shardload.load(url, mesh, spec, **of_url)
    check(x, expected, mesh, spec)
    store = obstore.store.HTTPStore(shared.url, client_options={"allow_http": True})
    check(shardload.load((store, "b/run.nc"), mesh, spec, dataset="t2m", decode=True), expected, mesh, spec)
    dates = {"time": shardload.between("2001-01-02", "2001-01-04")}
    plan = shardload.plan(url, mesh, spec, select=dates, **of_url)
    check(plan.execute(), expected[1:4], mesh, spec)
    assert plan.info.dims[0] == "time" and plan.info.coords["time"].values is not None
    tree = shardload.load(url, mesh, P(), dataset={"a": "t2m", "b": "time"}, decode=False, storage=shared.of_http)
    np.testing.assert_array_equal(np.asarray(tree["a"]), stored)
    np.testing.assert_array_equal(np.asarray(tree["b"]), np.arange(n) * 24)
    shardload.verify(x, url, **of_url)
    y = shardload.load(path, mesh, spec, dataset="t2m", select=slice(3), decode=True)
    same_error(comm, lambda: shardload.verify(y, url, select=slice(1, 4), **of_url), shardload.VerifyError, "/t2m")
    contents, local = shardload.open(url, storage=shared.of_http), shardload.open(path)
    assert list(contents) == list(local) and contents["t2m"].attrs == local["t2m"].attrs
    assert contents["t2m"].dims == local["t2m"].dims and contents["t2m"].packing == local["t2m"].packing
    batches = shardload.stream(url, mesh, P(None, "a", "b"), along="time", batch=2, shuffle=None, epochs=1, **of_url)
    n_batches = 0
    for k, batch in enumerate(batches):
        check(batch, expected[2 * k : 2 * k + 2], mesh, P(None, "a", "b"))
        n_batches += 1
    assert n_batches == n // 2
    # Of the file in the store only the selected chunks are told.
    how: dict[str, Any] = {"dataset": "t2m", "decode": True, "select": dates, "batch": 1}
    states = [iter(shardload.stream(p, mesh, P(), storage=shared.of_http, **how)).get_state() for p in (url, path)]
    assert states[0] == states[1] and "checksum 00000000" not in str(states)


def test_copies(comm: Any, shared: Shared, shared_tmp_path: Path) -> None:
    url, path = shared.write("run.nc", climate)
    target = shared_tmp_path / "copy.h5"
    shared.asked()
    shardload.copy(url, str(target), timeout=60.0, comm=comm, progress=False, storage=shared.of_http)
    asked = shared.asked()
    with h5py.File(path) as file, h5py.File(target) as copied:
        for name in ("time", "t2m", "name"):
            np.testing.assert_array_equal(copied[name][...], file[name][...])
        assert dict(copied["t2m"].attrs)["scale_factor"] == 0.5 and copied["t2m"].dims[0][0].name == "/time"
    assert {r.client for r in asked if r.first < 512} == {"rank 0"}


def test_what_is_signed_stays_secret(
    comm: Any, shared: Shared, shared_tmp_path: Path, monkeypatch: Any, titles: list[str]
) -> None:
    """Wrong if the signature of a URL were in a warning, in the title of a call, which a rank that waits prints, or in what a
    copy that may be resumed keeps on disk.
    """

    def make(file: h5py.File) -> None:
        filled(chunks=CHUNKS)(file)
        file[NAME.rpartition("/")[0]]["names"] = ["x", "y"]

    url = f"{shared.write('signed.h5', make)[0]}?X-Amz-Signature=TOPSECRET"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shardload.load_dataset(f"{url}:/{NAME.strip('/').partition('/')[0]}", mesh_of(), storage=shared.of_http)
    told = " ".join(comm.allgather(" ".join(str(warning.message) for warning in said)))
    assert "signed.h5': left out, because they hold no numbers" in told and ": /group/names" in told and "TOPSECRET" not in told

    kept: list[bytes] = []
    create = NewFolder.create

    def noted(folder: NewFolder) -> str:
        place = create(folder)
        kept.extend(path.read_bytes() for path in Path(place).iterdir() if path.is_file())
        return place

    monkeypatch.setattr(NewFolder, "create", noted)
    shardload.copy(url, str(shared_tmp_path / "out.zarr"), dataset=None, storage=shared.of_http)
    on_disk = b"".join(b"".join(each) for each in comm.allgather(kept))
    assert b"/b/signed.h5" in on_disk and b"TOPSECRET" not in on_disk
    shardload.load(url, like={"group": {"field": ramp(cube())}}, storage=shared.of_http)
    assert {title.split()[0] for title in titles} >= {"load_dataset", "copy", "load"} and "TOPSECRET" not in " ".join(titles)


def test_files_that_the_query_of_a_url_names(shared: Shared) -> None:
    """Wrong if they were taken for one file, because their URLs are alike without the query: a stream gave one for both."""
    n, values = 4 * unit(), ramp((4 * unit(), 3))
    for name, sign in (("one.h5", 1), ("two.h5", -1)):
        shared.write(name, lambda file, sign=sign: file.create_dataset("x", data=sign * values, chunks=(2, 3)))
    urls = {"x": f"{shared.url}/get?file=b/one.h5", "y": f"{shared.url}/get?file=b/two.h5"}
    how = {"dataset": "x", "storage": shared.of_http}
    expected = {"x": values, "y": -values}
    for name, x in shardload.load(urls, mesh_of(), P("a"), **how).items():
        check(x, expected[name], mesh_of(), P("a"))
    stream = shardload.stream(urls, mesh_of(), P("a"), batch=n // 2, **how)
    for k in range(2):
        for name, x in stream[k].items():
            check(x, expected[name][k * n // 2 : (k + 1) * n // 2], mesh_of(), P("a"), name)


@pytest.mark.filterwarnings("ignore:not saved")
def test_a_save_like_a_file_at_a_url(comm: Any, shared: Shared, shared_tmp_path: Path) -> None:
    """Wrong if it were asked for without what `storage` says, as long as the new file is none at a URL itself."""
    url, path = shared.write("run.nc", climate)
    shared.asked()
    with h5py.File(path) as file:
        stored, units = file["t2m"][...], file["t2m"].attrs["scale_factor"]
    out = shared_tmp_path / "new.nc"
    shardload.save(out, {"t2m": stored}, like=f"{url}:/t2m", storage=shared.of_http)
    assert {r.client for r in shared.asked()} == {"rank 0"}
    with h5py.File(out) as file:
        assert file["t2m"].attrs["scale_factor"] == units and file["t2m"].dims[0][0].name == "/time"
