"""`shardload doctor` under real launchers: in correct jobs, in wrong ones, and where a rank fails or hangs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs.launch import PATHS, ROOT, Done, job_environment, run_alone, run_job
from tests.jobs.preloaded import command_for
from tests.mpi.support import ramp
from tests.tiers import thorough
from tests.unit.cli.test_doctor import CASES
from tests.unit.files import write_hdf5

DOCTOR = ["-W", "error", "-m", "shardload", "doctor"]
ENV = {"PYTHONPATH": PATHS}


def names(report: dict[str, Any], level: str = "error") -> list[str]:
    return [finding["name"] for finding in report["findings"] if finding["level"] == level]


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in report["checks"]}


@pytest.mark.parametrize("mpi", thorough(["mpich", "openmpi"], ["openmpi"]))
def test_each_rank_is_a_row(mpi: str) -> None:
    job = run_job(DOCTOR, 2, timeout=240, mpi=mpi, env=ENV).check()
    assert [bool(out) for out in job.rank_stdout] == [True, False]
    lines = job.stdout.splitlines()
    assert lines[0].split()[:5] == ["host", "rank", "jax_process", "devices", "node"]
    for rank, line in enumerate(lines[1:3]):
        assert line.split()[1:3] == [f"{rank}", f"{rank}"]
        assert line.split()[4] == "0-1"
    assert lines[3] == ""
    for check in ("scatter", "all-reduce"):
        assert [line.startswith("ok: ") for line in lines if f" {check}: " in line] == [True]
    assert lines[-1].startswith("OK: 2 ranks on 1 node, 2 devices")
    assert "Gloo" not in job.stdout


@pytest.mark.parametrize(
    ("n", "devices", "per_node"), [(1, 3, ""), (3, 2, "2"), pytest.param(2, 1, "1", marks=pytest.mark.thorough)]
)
def test_json(n: int, devices: int, per_node: str) -> None:
    env = {**ENV, "SHARDLOAD_RANKS_PER_NODE": per_node}
    job = run_job([*DOCTOR, "--json"], n, timeout=240, devices_per_process=devices, env=env).check()
    report = json.loads(job.stdout)
    assert report["ok"] is True and names(report) == []
    rows = report["ranks"]
    assert [(row["rank"], row["jax_process"]) for row in rows] == [(k, k) for k in range(n)]
    assert {(row["mpi_size"], row["jax_processes"], row["n_devices"]) for row in rows} == {(n, n, n * devices)}
    assert {len(row["devices"]) for row in rows} == {devices}
    ids = [device for row in rows for device in row["devices"]]
    assert len(set(ids)) == n * devices
    size = int(per_node or n)
    assert [row["node"] for row in rows] == [[r for r in range(n) if r // size == k // size] for k in range(n)]
    checks = by_name(report)
    assert all(check["ok"] for check in checks.values())
    assert f"the sum over {n * devices} devices is " in checks["all-reduce"]["text"]
    assert set(checks) == {"devices", "scatter", "all-reduce"}


# --- launches that cannot work


def alone(**env: str) -> Done:
    """The doctor as one process without a launcher."""
    return run_alone([*DOCTOR, "--json"], env=[{**ENV, **env}])[0]


@pytest.mark.parametrize("library", ["found", "missing"])
def test_singletons_are_told_once(library: str) -> None:
    """Wrong if srun without its flag gave four tables, or said that all is well."""
    missing = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"} if library == "missing" else {}
    done = [alone(SLURM_STEP_NUM_TASKS="4", SLURM_PROCID=str(k), SLURM_JOB_ID="7", **missing) for k in range(2)]
    assert [task.returncode for task in done] == [1, 1], done
    assert [task.stderr for task in done] == ["", ""]
    assert done[1].stdout == ""
    report = json.loads(done[0].stdout)
    assert names(report) == ["singletons" if library == "found" else "no-mpi"]
    assert report["checks"] == [] and len(report["ranks"]) == 1
    assert library == "missing" or "--mpi=pmi2" in report["findings"][0]["fix"]


def test_the_number_of_a_task_that_is_left_over() -> None:
    """Wrong if one process, in a shell that a task of a job has opened, said nothing and that all is well."""
    done = alone(SLURM_PROCID="3")
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (0, True)


def test_slurm_without_mpi() -> None:
    """Wrong if tasks that do without MPI were called singletons, or could not send each other values."""
    step = {"SHARDLOAD_MPI": "0", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "5", "SLURM_STEP_NUM_TASKS": "3"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_STEP_NODELIST": "no-such-host[1-2]", "SLURM_NODEID": "0"}
    envs = [{**ENV, **step, "SLURM_PROCID": str(k), "SLURM_LOCALID": str(k)} for k in range(3)]
    ended = run_alone(*[[*DOCTOR, "--json"]] * 3, env=envs)
    assert [done.returncode for done in ended] == [0, 0, 0]
    assert [done.stdout for done in ended[1:]] == ["", ""]
    report = json.loads(ended[0].stdout)
    assert [(row["rank"], row["jax_process"], row["node"]) for row in report["ranks"]] == [(k, k, [0, 1, 2]) for k in range(3)]
    assert names(report) == [] and "no-mpi" in names(report, "warning")
    assert [check["ok"] for check in report["checks"]] == [True] * 3


@pytest.mark.parametrize("level", thorough(["single", "funneled"], ["single"]))
def test_mpi_without_threads(level: str) -> None:
    report = json.loads(alone(MPI4PY_RC_THREAD_LEVEL=level).stdout)
    assert report["ranks"][0]["mpi_threads"] == level.upper()
    assert (names(report), names(report, "warning")) == ([], ["mpi-threads"])


def test_one_process_without_mpi() -> None:
    done = alone(MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    report = json.loads(done.stdout)
    assert (done.returncode, names(report), names(report, "warning")) == (0, [], ["no-mpi"])
    assert by_name(report)["scatter"]["ok"]


def test_mpirun_of_the_other_library() -> None:
    """Open MPI's mpirun with MPICH below mpi4py: MPICH ends the process, and what to type is said nevertheless."""
    # Without run_job's choice mpi4py takes what stands beside it: MPICH.
    env = {**job_environment(2, mpi="openmpi"), **ENV}
    plain = ["-u", "MPI4PY_LIBMPI", *command_for(sys.executable, DOCTOR, env)]
    job = run_job(plain, 2, timeout=240, mpi="openmpi", env=ENV, python="/usr/bin/env")
    assert job.returncode != 0
    # Once; twice where the second rank comes when the first is gone and the launcher has not noticed.
    assert job.stderr.count("MPI ended this process while MPI was starting") in (1, 2)
    assert "--mpi=pmi2 for MPICH" in job.stderr


# --- the page about it

PAGE = ROOT / "docs" / "first-run.md"


def test_the_page_knows_every_finding() -> None:
    """Wrong if a misconfiguration were added without a line that says what it looks like."""
    table = PAGE.read_text().partition("## Symptom, cause, flag")[2]
    named = set(
        re.findall(r"`([a-z0-9-]+)`", " ".join(line.split("|")[2] for line in table.splitlines() if line.count("|") == 5))
    )
    assert named == {case[0] for case in CASES}


def test_the_first_load_of_the_page(tmp_path: Path) -> None:
    script = re.search(r"<!-- first\.py[^\n]*\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert script is not None
    (tmp_path / "first.py").write_text(script[1])
    write_hdf5(tmp_path / "first.h5", {"density": ramp((96, 64, 32)) % 1000}, chunks=(1, 64, 32), compression=4)
    job = run_job(tmp_path / "first.py", 4, timeout=240, env=ENV, cwd=tmp_path).check()
    said = [[line for line in out.splitlines() if line.startswith("I am ")] for out in job.rank_stdout]
    mean = (np.arange(96 * 64 * 32) % 1000).mean()
    for rank, lines in enumerate(said):
        assert lines == [f"I am {rank} of 4, I hold (96, 32, 16) of (96, 64, 32); the mean is {mean:.2f}"]


# --- ranks that fail or hang in the middle

SPOILED = """
import sys, time
from unittest import mock
from mpi4py import MPI
from shardload.cli import doctor

def fail(*args, **more):
    raise MemoryError("this rank has no memory left")

def scatter(array, *args, right=doctor.scatter, **more):
    return right(fail, *args, **more)

spoil = {{
    "devices": lambda: mock.patch.object(doctor.jax, "devices", fail),
    "scatter": lambda: mock.patch.object(doctor, "scatter", scatter),
    "hang": lambda: mock.patch.object(doctor, "_all_reduce", lambda x: time.sleep(600)),
}}
if MPI.COMM_WORLD.rank == {rank}:
    spoil[{what!r}]().start()
sys.exit(doctor.run({timeout}, is_json=True))
"""


def spoiled(what: str, rank: int, timeout: float = 100) -> list[str]:
    return ["-W", "error", "-c", SPOILED.format(what=what, rank=rank, timeout=timeout)]


@pytest.mark.parametrize(("what", "rank"), [("devices", 2), ("scatter", 0)])
def test_a_rank_that_fails_fails_all_and_nobody_waits(what: str, rank: int) -> None:
    """Wrong, too, if a root without values left the others waiting in the scatter."""
    job = run_job(spoiled(what, rank), 3, timeout=240, env=ENV)
    assert job.returncode == 1
    report = json.loads(job.stdout)
    check = by_name(report)[what]
    assert report["ok"] is False and check["ok"] is False
    assert f"on rank {rank} of 3: MemoryError: this rank has no memory left" in check["text"]


def test_a_rank_that_hangs_is_ended_and_named() -> None:
    """Wrong if the others waited until the job's time is up, without a word of who keeps them waiting."""
    job = run_job(spoiled("hang", 1, 10), 2, timeout=240, env=ENV)
    assert job.returncode != 0
    assert "still waiting for the check 'all-reduce'" in job.stderr
    assert job.stdout == ""
