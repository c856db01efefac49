"""Are files at URLs that `concat` takes for one loaded as their values are, and does only one rank ask for their metadata?"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakSet

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, SourceError
from shardload.formats.hdf5 import skeleton
from shardload.storage.block_cache import BlockCache
from tests.mpi.servers import Shared
from tests.mpi.support import check, mesh_of, on_root, ramp, same_error, unit

obstore = pytest.importorskip("obstore")
xr = pytest.importorskip("xarray")
pytestmark = [pytest.mark.any_library, pytest.mark.any_number]

LENGTHS = {"one grid": (4, 2, 6), "chunks cut at borders": (3, 1, 5), "no chunks": (4, 2, 6)}


def values_of(lengths: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return ramp((sum(lengths), 2 * unit(), 3 * unit()))


def write(shared: Shared, layout: str) -> list[str]:
    """Files in which the values lie one behind the other, with a time each."""
    values, urls, first = values_of(LENGTHS[layout]), [], 0
    for k, n in enumerate(LENGTHS[layout]):
        part, times = values[first : first + n], np.arange(first, first + n, dtype="f8")

        def make(file: h5py.File, part: Any = part, times: Any = times) -> None:
            options = {} if layout == "no chunks" else {"chunks": (2, *part.shape[1:]), "compression": "gzip"}
            file.create_dataset("x", data=part, maxshape=(None, *part.shape[1:]) if options else None, **options)
            file["time"] = times
            file["time"].attrs["units"] = "days since 2000-01-01"
            file["time"].make_scale("time")
            file["x"].dims[0].attach_scale(file["time"])

        urls.append(shared.write(f"{layout.replace(' ', '_')}{k}.h5", make)[0])
        first += n
    return urls


@pytest.mark.parametrize("spec", [P(None, "a", "b"), P("a"), P()], ids=str)
@pytest.mark.parametrize("layout", LENGTHS)
def test_files_at_urls_are_one_array(comm: Any, shared: Shared, layout: str, spec: P) -> None:
    urls, values = write(shared, layout), values_of(LENGTHS[layout])
    shared.asked()
    run = shardload.concat(urls, along="time", storage=shared.of_http)
    asked_to_find = shared.asked()
    for select in (None, {"time": slice(2, sum(LENGTHS[layout]) - 1)}):
        if spec == P("a") and (values.shape[0] - (0 if select is None else 3)) % unit():
            continue
        x = shardload.load(run, mesh_of(), spec, dataset="x", select=select)
        check(x, values if select is None else values[select["time"]], mesh_of(), spec)
    asked = shared.asked()
    if comm.rank == 0:
        heads = [request.key for request in asked_to_find if request.first == 0 and request.nbytes > 1]
        assert len(heads) == len(set(heads)) == len(urls), "each file is opened once"
        size = sum(Path(shared.folder, "b", url.rpartition("/")[2]).stat().st_size for url in urls)
        assert sum(request.nbytes for request in asked) <= 2 * size, "a rank has asked for what it need not read"


def test_what_else_takes_files_at_urls(comm: Any, shared: Shared, shared_tmp_path: Path) -> None:
    """Wrong if HDF5 compared, or copied, the fill values that it has for files which it cannot open."""
    urls, values = write(shared, "chunks cut at borders"), values_of(LENGTHS["chunks cut at borders"])
    run = shardload.concat(urls, along="time", storage=shared.of_http)
    x = shardload.load(run, mesh_of(), P(None, "a"), dataset="x", verify="full")
    check(x, values, mesh_of(), P(None, "a"))
    assert shardload.verify(x, run, dataset="x").n_elements > 0
    assert (
        shardload.open(run)["x"].shape == values.shape
        and shardload.plan(run, mesh_of(), P(), dataset="x").info.dims[0] == "time"
    )
    shardload.copy(run, str(shared_tmp_path / "copy.h5"))
    if comm.rank == 0:
        with h5py.File(shared_tmp_path / "copy.h5") as file:
            np.testing.assert_array_equal(file["x"][...], values)


def test_a_stream_and_a_dataset_of_files_at_urls(comm: Any, shared: Shared) -> None:
    urls, values = write(shared, "chunks cut at borders"), values_of(LENGTHS["chunks cut at borders"])
    run = shardload.concat(urls, along="time", storage=shared.of_http)
    steps = shardload.stream(run, mesh_of(), P(None, "a", "b"), dataset="x", along="time", batch=3, shuffle=7)
    batches = [np.asarray(jax.device_get(batch.addressable_shards[0].data)) for batch in steps]
    for k, batch in enumerate(batches):
        region = next(iter(mesh_of().local_devices))
        index = steps[k].sharding.devices_indices_map(steps[k].shape)[region]
        np.testing.assert_array_equal(batch, values[steps.order(0)[3 * k : 3 * k + 3]][index])
    ds = shardload.load_dataset(urls, mesh_of(), P(None, "a"), along="time", storage=shared.of_http)
    check(ds["x"].data, values, mesh_of(), P(None, "a"))
    assert str(ds.time.values[-1])[:10] == "2000-01-09"


def change(shared: Shared, url: str) -> None:
    """Write other values into the file at a URL."""

    def write_others() -> None:
        with h5py.File(shared.folder / "b" / url.rpartition("/")[2], "r+") as file:
            file["x"][...] = -1

    on_root(shared.comm, write_others)


def test_a_part_that_changed_is_one_error(comm: Any, shared: Shared) -> None:
    """Wrong if the places of chunks in the old file were read in the new one, or values compared with those of the new one."""
    urls, values = write(shared, "one grid"), values_of(LENGTHS["one grid"])
    run = shardload.concat(urls, along="time", storage=shared.of_http)
    x = shardload.load(run, mesh_of(), P(), dataset="x")
    change(shared, urls[1])
    same_error(comm, lambda: shardload.load(run, mesh_of(), P(), dataset="x"), SourceError, "it was replaced")
    same_error(comm, lambda: shardload.verify(x, run, dataset="x"), SourceError, "it was replaced")
    x = shardload.load(run, mesh_of(), P(), dataset="x", select={"time": slice(0, 4)})
    check(x, values[:4], mesh_of(), P())


@pytest.mark.parametrize("layout", ["one grid", "chunks cut at borders"])
def test_a_part_that_each_rank_opens_is_that_version(
    comm: Any, shared: Shared, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if values of a new version were given where rank 0 has too many chunks to tell of them."""
    monkeypatch.setattr(skeleton, "_MOST_TOLD", 0)
    urls, values = write(shared, layout), values_of(LENGTHS[layout])
    run = shardload.concat(urls, along="time", storage=shared.of_http)
    check(shardload.load(run, mesh_of(), P(), dataset="x"), values, mesh_of(), P())
    change(shared, urls[1])
    same_error(comm, lambda: shardload.load(run, mesh_of(), P(), dataset="x"), SourceError, "has changed since it was")


def test_what_is_kept_of_files_does_not_grow_with_their_number(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the values of all files that were compared were kept until the end: up to 32 MiB of each."""
    values, urls = ramp((24, unit(), 40_000)), list[str]()
    for k in range(len(values)):

        def make(file: h5py.File, k: int = k) -> None:
            file["x"], file["time"], file["same"] = values[k : k + 1], [float(k)], np.zeros(300_000)
            file["time"].make_scale("time")
            file["x"].dims[0].attach_scale(file["time"])

        urls.append(shared.write(f"large{k}.h5", make)[0])
    caches, most = WeakSet[BlockCache](), 0
    begin, read = BlockCache.__init__, BlockCache._read_blocks

    def begun(cache: BlockCache, stored: Any) -> None:
        begin(cache, stored)
        caches.add(cache)

    def noted(cache: BlockCache, numbers: range) -> list[bytes]:
        nonlocal most
        blocks = read(cache, numbers)
        most = max(most, sum(len(block) for cache in caches.copy() for block in list(cache._blocks.values())))
        return blocks

    monkeypatch.setattr(BlockCache, "__init__", begun)
    monkeypatch.setattr(BlockCache, "_read_blocks", noted)
    run = shardload.concat(urls, along="time", storage=shared.of_http)
    most_of_concat, most = most, 0
    check(shardload.load(run, mesh_of(), P(), dataset="x", verify="full"), values, mesh_of(), P())
    assert most_of_concat <= (len(urls) + 8) << 20, "more than the first MiB of each"
    assert most <= 10 << 20, "more than eight files and one"


def test_each_rank_reaches_the_store_in_its_own_way(comm: Any, shared: Shared) -> None:
    """Wrong if ranks read with what rank 0 passed, or if that were sent: a function cannot be."""
    urls, values = write(shared, "one grid"), values_of(LENGTHS["one grid"])
    keys = {"access_key_id": "AKIATEST", "secret_access_key": "TOPSECRET", "token": None, "expires_at": None}
    storage = {name: value for name, value in shared.storage.items() if "key" not in name}
    storage["credential_provider"] = lambda: keys
    run = shardload.concat([f"s3://b/{url.rpartition('/')[2]}" for url in urls], along="time", storage=storage)
    shared.asked()
    check(shardload.load(run, mesh_of(), P("a"), dataset="x", readers="direct"), values, mesh_of(), P("a"))
    assert {request.client for request in shared.asked()} == {f"rank {rank}" for rank in range(comm.size)}
    store = obstore.store.HTTPStore(shared.url, client_options={"allow_http": True})
    run = shardload.concat([(store, url.removeprefix(f"{shared.url}/")) for url in urls], along="time")
    check(shardload.load(run, mesh_of(), P("a"), dataset="x"), values, mesh_of(), P("a"))


def test_the_query_of_a_part_stays_secret(titles: list[str]) -> None:
    """Wrong if it were in the title of the call, which a rank that waits prints."""
    url = "https://me:TOPSECRET@example.org/a.h5?X-Amz-Signature=TOPSECRET"
    for parts in (url, [url, "b.h5"]):
        with pytest.raises(ConfigError, match="has a query or a signature"):
            shardload.concat(parts, along=0)
    assert len(titles) == 2 and "https://example.org/a.h5" in titles[0] and "TOPSECRET" not in " ".join(titles)


def test_what_is_no_part(comm: Any, shared: Shared) -> None:
    urls, how = write(shared, "no chunks"), {"along": "time", "storage": shared.of_http}
    for parts, message in (
        ([f"{urls[0]}?X-Amz-Signature=TOPSECRET", urls[1]], "/b/no_chunks0.h5' has a query or a signature"),
        ([f"{shared.url}/b/*.h5"], "is a pattern of URLs, for which nothing looks. Pass a list"),
        ([urls[0], urls[0]], "is among the parts twice"),
        ([urls[0], f"{shared.url}/b/absent.h5"], "absent.h5"),
    ):
        kind = SourceError if "absent" in message else ConfigError
        error = same_error(comm, lambda parts=parts: shardload.concat(parts, **how), kind, message)
        assert "TOPSECRET" not in str(error)


def test_types_that_hdf5_would_convert(comm: Any, shared: Shared) -> None:
    """Wrong if HDF5 were left to open a URL, for which it delivers fill values."""
    urls = []
    for k, precision in enumerate((16, 12)):

        def make(file: h5py.File, precision: int = precision) -> None:
            kind = h5py.h5t.STD_I16LE.copy()
            kind.set_precision(precision)
            made = h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((4, 6)))
            made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(24, dtype="i2").reshape(4, 6))

        urls.append(shared.write(f"bits{k}.h5", make)[0])
    loaded = shardload.load(shardload.concat(urls, along=0, storage=shared.of_http), mesh_of(), P(), dataset="x")
    expected = np.tile(np.arange(24, dtype="i2").reshape(4, 6), (2, 1))
    np.testing.assert_array_equal(np.asarray(loaded.addressable_data(0)), expected, strict=True)
