"""The benchmark of stores: all ways load the values of the file, what they ask is counted, and the record becomes a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from benchmarks.cases.cells import OURS
from benchmarks.cases.layouts import make
from benchmarks.cases.stores import FETCH, store_cells
from benchmarks.peers.store_server import BUCKET, Counts
from benchmarks.reports.stores import plot_stores, stores_page
from benchmarks.runs import environments
from benchmarks.runs.stores import measure_stores
from tests.jobs.launch import job_command, job_environment
from tests.servers import ObjectServer

LAYOUTS = ["hdf5-gzip-planes", "zarr-zstd-cubes"]
WAYS = (OURS, "tensorstore", FETCH)


class CountingServer:
    """The server of the tests, as the benchmark sees one."""

    def __init__(self, root: Path) -> None:
        bucket = root.parent / f"{root.name}-server" / BUCKET
        bucket.parent.mkdir()
        bucket.symlink_to(root)
        self._server = ObjectServer(bucket.parent)
        self.url = self._server.url

    def __enter__(self) -> CountingServer:
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()

    def counts(self) -> Counts:
        return Counts(len(self._server.log), sum(request.nbytes for request in self._server.log), 0.0)


@pytest.mark.thorough
def test_every_way_is_checked_counted_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong values are an error of their way: `measure_stores` compares each shard with what was written."""

    def command(program: Any, n: int, **options: Any) -> list[str]:
        return job_command(program, n, env=job_environment(n), **options)

    monkeypatch.setattr(environments, "job_command", command)  # starts as the jobs of other tests do
    root, out = tmp_path / "data", tmp_path / "stores.json"
    files = make(root, 16, LAYOUTS)
    with CountingServer(root) as server:
        measure_stores(store_cells(LAYOUTS, ["-,a,b"]), files, WAYS, server, root, repeats=1, ranks=2, out=out)
    record = json.loads(out.read_text())
    assert [cell["layout"] for cell in record["cells"]] == LAYOUTS
    for cell in record["cells"]:
        assert sorted(cell["ways"]) == sorted(set(WAYS) - ({"tensorstore"} if "hdf5" in cell["layout"] else set()))
        for way, took in cell["ways"].items():
            assert "error" not in took, (way, took)
            (run,) = took["runs"]
            assert run["requests"] > 0 < run["seconds"]
            assert took["checked"] == (way != FETCH)
        fetched = cell["ways"][FETCH]["runs"][0]["fetched_nbytes"]
        assert 0.5 * cell["stored_nbytes"] < fetched <= cell["stored_nbytes"], "each stored byte once"
    assert str(tmp_path) not in out.read_text()
    page = stores_page(record)
    assert '| HDF5, gzip, planes | `P(None, "a", "b")` | shardload |' in page
    assert "| Zarr, zstd, cubes: at least 1.2x tensorstore |" in page
    plot_stores(record, tmp_path / "plot.svg")
    assert "shardload" in (tmp_path / "plot.svg").read_text()
