"""When a program leaves a stream, dies or hangs in it, do all others learn of it, and does each process end by itself?

Each case is a job of its own (`scripts/streams.py`), which the harness kills if it hangs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs.launch import ROOT, Job, run_job
from tests.tiers import quick_ones
from tests.unit.files import write_hdf5

SCRIPT = Path(__file__).parent / "scripts" / "streams.py"
N, LAST = 3, 2
PREFETCH = pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.thorough), 2])


def run(case: str, folder: Path, prefetch: int, mpi: str = "mpich", n: int = N, **env: str) -> Job:
    job = run_job(
        [SCRIPT, folder, case, str(prefetch)], n, timeout=90, mpi=mpi, env={"PYTHONPATH": str(ROOT), **env}, cwd=folder
    )
    assert "outlived" not in job.stderr, "a process did not end by itself"
    return job


def said_by(job: Job, rank: int) -> dict[str, Any]:
    """All that a rank said."""
    return {key: value for line in job.said()[rank] for key, value in line.items()}


LEFT = [(0, "mpich"), (2, "mpich"), (2, "openmpi")]


@pytest.mark.parametrize(("prefetch", "mpi"), quick_ones(LEFT, *LEFT[1:]))
def test_a_stream_that_is_left_open(tmp_path: Path, prefetch: int, mpi: str) -> None:
    """Wrong if the end of the interpreter waited for a thread, or a thread called MPI after it was finalized."""
    job = run("left_open", tmp_path, prefetch, mpi).check()
    assert [said_by(job, rank)["batch"] for rank in range(N)] == [1] * N
    assert "rror" not in job.stderr, job.stderr


IMPORTS = """
import sys, threading
import jax, numpy as np, shardload
from jax.sharding import Mesh, PartitionSpec as P

class Watch:
    def find_spec(self, name, *_):
        if name == "h5py":
            print('{"thread": "%s"}' % threading.current_thread().name, flush=True)

shardload.initialize()
sys.meta_path.insert(0, Watch())
mesh = Mesh(np.array(jax.devices()), ("data",))
with iter(shardload.stream(sys.argv[1], mesh, P("data"), dataset="x", batch=4)) as batches:
    next(batches)
"""


def test_libraries_are_imported_before_threads_begin(tmp_path: Path) -> None:
    """Wrong if a thread did: the process that ends meanwhile crashes in h5py, which HDF5 calls when Python is gone."""
    write_hdf5(tmp_path / "x.h5", {"x": np.arange(64.0, dtype="f4").reshape(16, 4)}, chunks=(1, 4))
    job = run_job(["-c", IMPORTS, tmp_path / "x.h5"], 2, timeout=90, preloaded=False).check()
    assert job.said() == [[{"thread": "MainThread"}]] * 2


@PREFETCH
def test_alone(tmp_path: Path, prefetch: int) -> None:
    run("left_open", tmp_path, prefetch, n=1).check()


@pytest.mark.parametrize("case", ["breaks", "breaks_later"])
def test_a_rank_that_leaves_while_others_are_in_a_step(tmp_path: Path, case: str) -> None:
    """Wrong if nobody said anything: a step that computes over all devices waits for that rank, until JAX gives up."""
    job = run(case, tmp_path, 2)
    assert all("left the stream after 2 batches" in said_by(job, rank)["text"] for rank in range(LAST))
    warning = (tmp_path / "warned").read_text()
    by_it, by_another = f"the end of the stream of '/x' in 'x.h5', which rank {LAST} has left early", "asks for no batch"
    assert by_it in warning or (case == "breaks" and f"rank {LAST}" in warning and by_another in warning)


@PREFETCH
def test_a_rank_that_hangs(tmp_path: Path, prefetch: int) -> None:
    """Wrong if the others waited for ever, or were told another rank."""
    job = run("hangs", tmp_path, prefetch)
    said = [said_by(job, rank) for rank in range(N)]
    assert {(one["type"], one["rank"]) for one in said[:LAST]} == {("StallError", LAST)}
    assert all(f"rank {LAST} did not come to this call" in one["text"] for one in said[:LAST])
    assert all("of the stream of '/x' in 'x.h5'" in one["text"] for one in said[:LAST])
    assert max(one["seconds"] for one in said[:LAST]) < 30
    assert job.returncode != 0


@PREFETCH
def test_a_rank_that_comes_to_its_end(tmp_path: Path, prefetch: int) -> None:
    job = run("departs", tmp_path, prefetch)
    said = [said_by(job, rank) for rank in range(N)]
    assert {one["rank"] for one in said[:LAST]} == {LAST}, said
    assert job.returncode != 0


@PREFETCH
def test_all_compute_for_long(tmp_path: Path, prefetch: int) -> None:
    """Wrong if the readers waited for the program where the watchdog looks on."""
    job = run("computes", tmp_path, prefetch).check()
    assert [said_by(job, rank)["batch"] for rank in range(N)] == [11] * N


@PREFETCH
def test_interrupted(tmp_path: Path, prefetch: int) -> None:
    """Wrong if Ctrl-C waited for the batch, or left a thread, or the interpreter did not end."""
    job = run("interrupted", tmp_path, prefetch)
    said = [said_by(job, rank) for rank in range(N)]
    assert all(one["interrupted"] for one in said), job.tail()
    assert [one["threads"] for one in said] == [[]] * N
    assert job.returncode == 0, job.tail()


def test_mpi_without_threads(tmp_path: Path) -> None:
    """Wrong if a thread called an MPI that allows none, or reading without threads were refused."""
    job = run("threads", tmp_path, 0, MPI4PY_RC_THREAD_LEVEL="serialized").check()
    for rank in range(N):
        assert "THREAD_SERIALIZED" in said_by(job, rank)["text"] and "prefetch=0" in said_by(job, rank)["text"]
        assert said_by(job, rank)["batch"] == 1
