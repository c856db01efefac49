"""``shardload verify``: what is proven of a file on this machine, by one process and by several, with exit code 0 or 1."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.jobs.launch import run_job
from tests.mpi.support import damage_chunk
from tests.unit.files import write_hdf5

VALUES = np.arange(8 * 12 * 20, dtype="f4").reshape(8, 12, 20)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write_hdf5(tmp_path / "run.h5", {"rho": VALUES, "other": VALUES}, chunks=(3, 5, 7), compression="gzip")


# What Gloo does when JAX's processes meet: it writes to the descriptor, in pieces, past Python.
NOISY = """
import os, sys
from shardload.cli import loads, main as cli

def plan(*args, plan=loads.plan, **options):
    os.write(1, b"[Gloo] Rank 0 is connected to ")
    return plan(*args, **options)

loads.plan = plan
sys.argv[0] = "shardload"
cli.main()
"""


@pytest.mark.parametrize(("n", "mpi", "start"), [(1, "mpich", ["-c", NOISY]), (2, "openmpi", ["-m", "shardload"])])
def test_it_says_what_was_proven(file: str, n: int, mpi: str, start: list[str]) -> None:
    """Wrong if it needed as many processes as devices, or several ranks printed, or others than shardload did."""
    job = run_job([*start, "verify", f"{file}:/rho", "--mesh", "a=2,b=2", "--spec", "-,b,a"], n, mpi=mpi, timeout=240).check()
    assert max(len(line) for line in job.stdout.splitlines() if file not in line) <= 80
    printed = " ".join(job.stdout.split())
    assert printed.startswith(f"'/rho' in '{file}': 8 x 12 x 20 float32 as pencil on 4 devices") and "Gloo" not in printed
    assert printed.count("verified by full: 4 shards") == 1
    assert f"{VALUES.size:,} elements" in printed


def test_json_is_one_document(file: str) -> None:
    command = ["-m", "shardload", "verify", f"{file}:/rho", "--mesh", "a=2,b=2", "--spec", "-,b,a", "--readers", "1", "--json"]
    job = run_job(command, 2, timeout=240).check()
    found = json.loads(job.stdout)
    assert (found["ok"], found["dataset"], found["shape"], found["n_devices"]) == (True, "/rho", [8, 12, 20], 4)
    assert (found["n_ranks"], found["readers"], found["n_readers"]) == (2, "parallel", 1)
    assert (found["report"]["proven"]["how"], found["report"]["proven"]["n_elements"]) == ("full", VALUES.size)
    assert found["report"]["chunks_decoded"] == 27


def test_a_damaged_file_is_one_message_and_exit_code_1(file: str) -> None:
    """Wrong if every rank told of it, or it ended as if all were well."""
    damage_chunk(file, "rho", 0, 0, 14)
    job = run_job(["-m", "shardload", "verify", f"{file}:/rho", "--mesh", "a=2", "--spec", "a", "--json"], 2, timeout=240)
    assert job.returncode == 1
    told = json.loads(job.stdout)
    assert (told["ok"], told["error"]) == (False, "SourceError") and "chunk (0, 0, 2) of '/rho'" in told["message"]
    assert job.stderr.count("error: ") == 1
    assert "chunk (0, 0, 2) of '/rho'" in job.stderr


def test_chunks_that_are_not_stored(tmp_path: Path) -> None:
    """Wrong if the flag were not handed on, or the warning had a keyword in its place, and a line of typer."""
    path = str(tmp_path / "gaps.h5")
    with h5py.File(path, "w") as opened:
        opened.create_dataset("rho", shape=VALUES.shape, dtype="f4", chunks=(3, 5, 7))[:3] = VALUES[:3]
    command = ["-m", "shardload", "verify", path, "--mesh", "a=2", "--spec", "a", "--missing"]
    job = run_job([*command, "error"], 1, timeout=240)
    assert job.returncode == 1 and "18 of 27 chunks are not stored" in job.stderr, job.stderr
    job = run_job([*command, "warn"], 2, timeout=240).check()
    assert job.stderr.count("shardload: 18 of 27 chunks are not stored") == 1 and "Pass --missing error" in job.stderr
    assert "typer" not in job.stderr
    assert run_job([*command, "fill"], 1, timeout=240).check().stderr.count("not stored") == 0
