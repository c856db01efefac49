"""``shardload copy`` in jobs of their own: no JAX on any rank, bounded memory, and SIGKILL in a round, then ``--resume``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401
import numpy as np
import pytest
import zarr

from tests.jobs.launch import run_job
from tests.tiers import quick_ones
from tests.unit.files import write_hdf5

VALUES = np.arange(64 * 48 * 40, dtype="f4").reshape(64, 48, 40)

PEAK = """
import atexit, resource, sys
atexit.register(lambda: print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr))
"""

# Runs the command; then says what each rank has imported. A rank may be killed when it is asked for a round.
PROGRAM = """
import atexit, os, signal, sys
from shardload.engine.session import Session
from shardload.storage import new_folder
from shardload.jobs.copying import copy as copying

new_folder._MOST_OPEN = 4
copying._LEAST_READING_NBYTES = 1 << 14
rank, at, who = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0))), *map(int, sys.argv[1:3])
move = Session.move

def dies(self, *more):
    if self._n_rounds == at and rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    move(self, *more)

Session.move = dies
sys.argv[:] = ["shardload", "copy", *sys.argv[3:]]
atexit.register(lambda: print("jax is imported:", "jax" in sys.modules, file=sys.stderr))  # after all others at exit
from shardload.cli.main import main
main()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(write_hdf5(tmp_path / "in.h5", {"rho": VALUES}, chunks=(5, 48, 40), compression="gzip"))


@pytest.mark.parametrize(("at", "who", "n_after"), quick_ones([(3, 1, 1), (5, 0, 2)], (5, 0, 2)))
def test_a_job_that_was_killed_goes_on(file: Path, tmp_path: Path, at: int, who: int, n_after: int) -> None:
    """Wrong if a kill left a file with the target's name, or the next job, of another size, believed too much or nothing."""
    target = tmp_path / "out.zarr"
    options = [file, target, "--chunks", "7,9,11", "--compression", "zstd", "--staging", "300KiB"]
    killed = run_job(["-c", PROGRAM, str(at), str(who), *map(str, options)], 2, timeout=240)
    assert killed.returncode != 0
    assert not target.exists()
    left = [one for one in os.listdir(tmp_path) if ".unfinished" in one]
    assert [one.rpartition(".")[2] for one in left] == ["unfinished"]
    job = run_job(
        ["-c", PROGRAM, "-1", "-1", *map(str, options), "--resume", "--verify", "full", "--json"], n_after, timeout=240
    ).check()
    told = json.loads(job.stdout)
    n_all = 10 * 6 * 4
    assert 0 < told["chunks_resumed"] < n_all
    assert told["written"]["n_chunks"] == n_all - told["chunks_resumed"]
    assert told["written"]["n_read_back"] == n_all - told["chunks_resumed"]
    assert sorted(os.listdir(tmp_path)) == ["in.h5", "out.zarr"]
    np.testing.assert_array_equal(zarr.open_group(str(target), mode="r")["rho"][...], VALUES)


def test_no_rank_imports_jax_and_memory_is_bounded(tmp_path: Path) -> None:
    """Wrong if a rank imported JAX, or held more than its staging memory beyond what the libraries take."""
    values = np.zeros((32, 512, 512), "f4")  # 32 MiB
    values[:] = np.arange(32, dtype="f4")[:, None, None]
    write_hdf5(tmp_path / "in.h5", {"rho": values}, chunks=(1, 512, 512), compression="gzip", compression_opts=1)
    options = [tmp_path / "in.h5", tmp_path / "out.h5", "--chunks", "16,32,512", "--compression", "zstd:1"]
    peaks = []
    for more in (["--dry-run"], []):
        command = ["-c", PEAK + PROGRAM, "-1", "-1", *map(str, options), "--staging", "16MiB", *more]
        job = run_job(command, 2, timeout=240, preloaded=False).check()
        assert job.stderr.count("jax is imported: False") == 2
        peaks.append(max(int(one) for one in re.findall(r"peak (\d+)", job.stderr)))
    assert peaks[1] - peaks[0] < 16 * 1024 * 1.25, peaks
    with h5py.File(tmp_path / "out.h5") as found:
        np.testing.assert_array_equal(found["rho"][...], values)
