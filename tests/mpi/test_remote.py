"""Objects in stores, read by all ranks: each byte once in the job, in large pieces, of one version. Nothing secret is said."""

from __future__ import annotations

import functools
import tempfile
import threading
import time
import traceback
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import SourceError
from shardload.jobs.streaming.plan import EpochRounds
from shardload.storage.remote.client import Client
from tests.mpi.servers import SharedServer
from tests.mpi.support import check, mesh_of, same_error

pytest.importorskip("obstore")
pytestmark = pytest.mark.any_library

SHAPE, CHUNKS = (1000, 64, 256), (1, 64, 256)  # 1,000 chunks of 64 KiB
VALUES = np.arange(np.prod(SHAPE), dtype="f4").reshape(SHAPE)
SOME = VALUES[:252]


@functools.cache
def objects() -> dict[str, bytes]:
    """An HDF5 file whose chunks are in turn and in another order, and a sharded Zarr store."""
    with tempfile.TemporaryDirectory() as folder:
        bucket = Path(folder, "bucket")
        bucket.mkdir()
        with h5py.File(bucket / "run.h5", "w", libver="latest") as file:
            file.create_dataset("x", data=VALUES, chunks=CHUNKS)
            file["contiguous"] = SOME
            turned = file.create_dataset("turned", SOME.shape, "f4", chunks=CHUNKS)
            for k in np.random.default_rng(1).permutation(len(SOME)):
                turned[k] = SOME[k]
        group = zarr.open_group(bucket / "run.zarr", mode="w")
        sharded = {"chunks": CHUNKS, "shards": (63, 64, 256), "compressors": None}
        group.create_array("x", shape=SOME.shape, dtype="f4", **sharded)[...] = SOME
        files = [path for path in bucket.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def server(comm, shared_tmp_path):
    server = SharedServer(comm, shared_tmp_path, objects)
    yield server
    server.end()


MOST = {"x": (VALUES, 16), "contiguous": (SOME, 8), "turned": (SOME, 252), "zarr": (SOME, 8 + 4 * 2)}  # requests


@pytest.mark.parametrize("spec", [P("a", "b"), P(None, "a", "b")])
@pytest.mark.parametrize("name", MOST)
def test_each_byte_is_fetched_once_in_large_pieces(comm, server, name, spec):
    url = "s3://bucket/run.zarr:/x" if name == "zarr" else f"s3://bucket/run.h5:/{name}"
    plan = shardload.plan(url, mesh_of(), spec, storage=server.storage, pad=0)
    server.asked()
    x = plan.execute()
    asked = [request for request in server.asked() if request.key.endswith("run.h5") or "/c/" in request.key]
    values, most = MOST[name]
    check(x, values, mesh_of(), spec)
    assert len(asked) <= most * (comm.size if name == "zarr" else 1)
    assert values.nbytes <= sum(request.nbytes for request in asked) <= 1.05 * values.nbytes + (2 << 20)
    assert {request.client for request in asked} == {f"rank {rank}" for rank in range(comm.size)}
    report = plan.report
    assert report.n_requests >= len(asked) and report.nbytes_fetched >= values.nbytes and report.n_retries == 0
    assert f"{report.n_requests} requests, " in str(report)


class Live:
    """Bytes of bodies that are in memory now, and the most that were."""

    def __init__(self, monkeypatch: Any) -> None:
        self.lock, self.now, self.most, get = threading.Lock(), 0, 0, Client._get

        def watched(*arguments: Any) -> Any:
            answer = get(*arguments)
            self.add(answer[0].nbytes)
            weakref.finalize(answer[0], self.add, -answer[0].nbytes)
            return answer

        monkeypatch.setattr(Client, "_get", watched)

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.now += nbytes
            self.most = max(self.most, self.now)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("run.h5:/x", P("a", "b")),
        ("run.h5:/contiguous", P(None, "a", "b")),
        ("run.h5:/turned", P(None, "a", "b")),
        ("run.zarr:/x", P("a", "b")),
        ("run.zarr:/x", P(None, "a", "b")),
    ],
)
def test_memory_of_what_is_fetched_is_bounded_and_in_the_plan(comm, server, monkeypatch, name, spec):
    """Here all is a 32nd of what it is: 64 MiB beside the memory of a local load, 48 of them fetched before they are needed."""
    plan = shardload.plan(f"s3://bucket/{name}", mesh_of(), spec, storage=server.storage, pad=0, staging="4MiB")
    assert plan.ahead_nbytes == 48 << 20 and "48.0 MiB at most fetched ahead" in str(plan)
    without = replace(plan._layouts["parallel"], ahead_nbytes=0).cost(plan.staging_nbytes)
    assert plan.costs["parallel"].peak_nbytes == without.peak_nbytes + min(48 << 20, without.reader_nbytes)
    for limit, nbytes in (("MOST_AHEAD_NBYTES", 48 << 15), ("_AT_ONCE_NBYTES", 16 << 15), ("PIECE_NBYTES", 8 << 15)):
        monkeypatch.setattr(f"shardload.storage.remote.ahead.{limit}", nbytes)
    live = Live(monkeypatch)
    check(plan.execute(), VALUES if name == "run.h5:/x" else SOME, mesh_of(), spec)
    assert max(comm.allgather(live.most)) <= (64 << 15) + (1 << 14)  # indexes of shards are as large as ever


@pytest.mark.parametrize("name", ["run.h5:/turned", "run.zarr:/x"])
def test_what_later_rounds_of_a_stream_need_is_fetched_meanwhile(server, monkeypatch, name):
    """Once, while nobody asks for another batch; also what the next epoch begins with."""
    monkeypatch.setattr("shardload.jobs.streaming.plan._ROUND_NBYTES", 1 << 18)
    options = {"batch": 4, "storage": server.storage, "prefetch": 0, "epochs": 2}
    stream = shardload.stream(f"s3://bucket/{name}", mesh_of(), P(None, "a", "b"), **options)
    n_rounds = len(EpochRounds(stream.plan, 0, 0).rounds())
    assert n_rounds >= 15

    def fetched(there: Any) -> int:
        return sum(request.nbytes for request in there.gets("run.h5") + there.gets("/c/"))

    def wait(n_rounds_fetched: int, there: Any) -> None:
        while fetched(there) < n_rounds_fetched * SOME.nbytes // n_rounds:  # else the time limit of tests
            time.sleep(0.01)

    server.on_server(lambda there: there.clear())
    with iter(stream) as batches:
        found = [next(batches)]
        server.on_server(partial(wait, 6))
        found += islice(batches, len(SOME) // 4 - 1)
        server.on_server(partial(wait, n_rounds + 4))
        found += batches
    assert server.on_server(fetched) <= 2.12 * SOME.nbytes
    assert len(found) == 2 * (len(SOME) // 4)
    for k, batch in enumerate(found):
        first = 4 * k % len(SOME)
        check(batch, SOME[first : first + 4], mesh_of(), P(None, "a", "b"))


@pytest.mark.parametrize("name", ["run.h5:/x", "run.zarr:/x"])
def test_a_rank_that_reads_nothing_asks_for_nothing(server, name):
    shardload.load(f"s3://bucket/{name}", mesh_of(), P("a"), storage=server.storage, pad=0, readers="root")
    assert {request.client for request in server.asked()} == {"rank 0"}


def test_a_busy_store_is_right_and_counted(server):
    plan = shardload.plan("s3://bucket/run.h5:/turned", mesh_of(), P("a"), storage=server.storage, pad=0)
    server.asked()
    server.fails(busy=0.2)
    check(plan.execute(), SOME, mesh_of(), P("a"))
    n_busy = server.on_server(lambda there: sum(request.status == 503 for request in there.log))
    assert plan.report.n_retries == n_busy > 0 and ", " in str(plan.report)


@pytest.mark.parametrize("path", ["run.h5", "run.zarr"])
def test_an_object_that_changes_is_one_error_on_all_ranks(comm, server, path):
    """After the first rank has seen it, and before the others read."""
    plan = shardload.plan(f"s3://bucket/{path}", mesh_of(), P("a"), dataset="x", storage=server.storage, pad=0)
    key = f"bucket/{path}" if path == "run.h5" else f"bucket/{path}/x/zarr.json"
    server.on_server(lambda there: there.objects.update({key: there.objects[key] + b" "}))
    said = "is another object than it was when the first rank" if path == "run.h5" else "changed while it was read"
    same_error(comm, plan.execute, SourceError, f"s3://bucket/{path}", said)


@pytest.mark.parametrize("path", ["run.h5", "run.zarr"])
def test_nothing_secret_is_said(comm, server, path, caplog, capfd):
    mesh, said = mesh_of(), list[Any]()
    caplog.set_level(0)
    for url, storage in (
        (f"{server.url}/bucket/{path}?X-Amz-Signature=TOPSIGN", None),
        (f"s3://bucket/{path}", {**server.storage, "session_token": "TOPTOKEN"}),
    ):
        load = partial(shardload.load, url, mesh, P("a"), storage=storage, pad=0)
        plan = shardload.plan(url, mesh, P("a"), dataset="x", storage=storage, pad=0, progress=True)
        plan.execute()
        batches = shardload.stream(
            f"{url}:/x" if storage else url, mesh, P(), dataset=None if storage else "x", batch=100, storage=storage
        )
        said += [
            plan,
            plan.info,
            plan.report,
            batches,
            batches.plan,
            shardload.plan({"a": url}, mesh, P("a"), dataset={"a": "x"}, storage=storage, pad=0),
        ]
        said += [shardload.open(url, storage=storage)] if storage else []
        with_keys = [{"dataset": "x", "untrusted": True}] if storage else []
        for wrong in ({"dataset": "nosuch"}, {"dataset": "x", "dtype": "i1"}, *with_keys):
            with pytest.raises(shardload.ShardloadError) as caught:
                load(**wrong)
            said += [caught.value, *traceback.format_exception(caught.value)]
        server.fails(status=403)
        error = same_error(comm, partial(load, dataset="x"), SourceError, "access is denied (403)")
        said += [error, *traceback.format_exception(error)]
        server.fails(status=0)
    said += [caplog.text, *capfd.readouterr(), *(record.getMessage() for record in caplog.records)]
    text = " ".join(f"{part} {part!r}" for part in said)
    assert Counter(secret for secret in ("TOP", "AKIATEST", "X-Amz") if secret in text) == {}
