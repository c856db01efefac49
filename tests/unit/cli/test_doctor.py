"""Does every rule of the doctor find its misconfiguration, and nothing in a correct job?"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import pytest

from shardload.cli import findings
from shardload.cli.findings import ERROR, WARNING, diagnose

Rows = list[dict[str, Any]]

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
VERSIONS = ["python 3.12.1", "MPICH 5.0.2", "jax 0.10.2", "mpi4py 4.1.2"]


def job(n: int = 4, per_node: int = 2) -> Rows:
    """A job in which all is well: one rank per GPU, two to a node."""
    rows = []
    for rank in range(n):
        first = rank - rank % per_node
        row: dict[str, Any] = {"host": f"n{first // per_node}", "rank": rank, "launcher": "srun", "n_tasks": n}
        row |= {"mpi_size": n, "mpi_library": "MPICH 5.0.2", "mpi_threads": "MULTIPLE", "mpi_problem": ""}
        row |= {"jax_process": rank, "jax_processes": n, "jax_problem": "", "platform": "gpu"}
        row |= {"devices": [rank], "n_devices": n, "gpus": [f"GPU-{rank}"], "n_gpus": per_node, "versions": VERSIONS}
        row |= {"cores": [8 * (rank % per_node), 8 * (rank % per_node) + 1], "shares_memory": True}
        row |= {"node": [*range(first, min(n, first + per_node))]}
        row |= {"CUDA_VISIBLE_DEVICES": "0"}  # each task's own, as Slurm hands them out
        rows.append(row | {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(n)})
    return rows


def alone(**more: Any) -> Rows:
    """A process by itself, without Slurm, with whatever else."""
    (row,) = job(1, 1)
    row = {name: value for name, value in row.items() if name.islower()}
    return [row | {"launcher": "", "n_gpus": 0, "platform": "cpu", "gpus": []} | more]


WITHOUT_JAX: dict[str, Any] = {"jax_process": None, "jax_processes": None, "platform": "", "devices": []}


def singleton(**more: Any) -> Rows:
    return [row | WITHOUT_JAX | {"n_devices": 0} | more for row in alone()]


def changed(ranks: Iterable[int], **more: Any) -> Rows:
    """The job, with some rows changed."""
    rows = job()
    for rank in ranks:
        rows[rank] |= more
    return rows


EVERY = range(4)


@pytest.mark.parametrize(
    "rows",
    [
        job(),
        job(1, 1),
        job(6, 3),
        job(8, 8),
        alone(),
        alone(CUDA_VISIBLE_DEVICES=""),
        alone(SLURM_JOB_ID="77"),
        alone(SLURM_JOB_ID="77", SLURM_NTASKS="1"),
        changed(EVERY, mpi_threads="SERIALIZED"),
        changed(EVERY, cores=[0, 1]),
        changed(EVERY, host="n0"),
        [row | {"jax_process": 3 - row["rank"]} for row in job()],
        [row | {"gpus": [f"{row['host']}a", f"{row['host']}b"]} for row in job(2, 1)],
        [row | {"gpus": ["number 0"]} for row in job(2, 1)],  # where the driver says no more than a number
        [row | {"cores": [0, 1], "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"} for row in job(3, 3)],
    ],
)
def test_a_job_that_was_started_right(rows: Rows) -> None:
    assert diagnose(rows) == []


CASES: list[tuple[str, str, Rows, list[int], str, str]] = [
    # name, level, rows, ranks, what the text says, what the fix says
    ("singletons", ERROR, singleton(launcher="srun", n_tasks=4), [0], "srun started 4 tasks", "--mpi=pmi2"),
    (
        "singletons",
        ERROR,
        singleton(launcher="srun", n_tasks=3, mpi_library="Open MPI v5.0.8"),
        [0],
        "srun started 3 tasks",
        "srun --mpi=pmix ... is right for Open MPI v5.0.8",
    ),
    (
        "singletons",
        ERROR,
        singleton(launcher="srun", n_tasks=2, mpi_library="CRAY MPICH version 8.1.28"),
        [0],
        "srun started 2 tasks",
        "--mpi=cray_shasta",
    ),
    ("singletons", ERROR, singleton(launcher="mpirun", n_tasks=2), [0], "mpirun started 2", "MPI4PY_LIBMPI="),
    ("singletons", ERROR, singleton(launcher="mpiexec", n_tasks=2), [0], "mpiexec started 2", "comes with MPICH 5.0.2"),
    (
        "no-mpi",
        ERROR,
        singleton(launcher="srun", n_tasks=4, mpi_problem="cannot load MPI library\nlibmpi.so"),
        [0],
        "finds no MPI library (cannot load MPI library), and srun started 4 tasks",
        "module load",
    ),
    ("no-mpi", WARNING, alone(mpi_problem="cannot load"), [0], "one process can load", "shardload[mpich]"),
    (
        "no-mpi",
        WARNING,
        changed(EVERY, mpi_size=1, mpi_library="", mpi_threads="", mpi_problem="off", SHARDLOAD_MPI="0"),
        [0, 1, 2, 3],
        "MPI is switched off: one process can load, several send each other values slowly",
        "unset SHARDLOAD_MPI",
    ),
    (
        "jax-failed",
        ERROR,
        changed([2], **WITHOUT_JAX, gpus=[], jax_problem="RuntimeError: no driver\nmore"),
        [2],
        "JAX could not be started: RuntimeError: no driver",
        "shardload[cuda12]",
    ),
    (
        "jax-failed",
        ERROR,
        changed(EVERY, **WITHOUT_JAX, jax_problem="AssertionError", JAX_PLATFORMS="cuda"),
        [0, 1, 2, 3],
        "JAX could not be started: AssertionError (JAX_PLATFORMS is 'cuda')",
        "JAX_PLATFORMS=cpu",
    ),
    (
        "gpu-shared",
        ERROR,
        changed([2, 3], gpus=["GPU-2"]),
        [2, 3],
        "ranks use the same GPUs, such as GPU-2 (CUDA_VISIBLE_DEVICES: 0)",
        "--gpus-per-task=1",
    ),
    ("gpu-shared", ERROR, [row | {"gpus": [*GPUS]} for row in job(3, 3)], [0, 1, 2], "GPU-a (", "initialize()"),
    ("gpus-unused", ERROR, changed(EVERY, platform="cpu", gpus=[]), [0, 1, 2, 3], "2 GPUs", "shardload[cuda12]"),
    (
        "gpus-unused",
        WARNING,
        changed(EVERY, platform="cpu", gpus=[], JAX_PLATFORMS="cpu"),
        [0, 1, 2, 3],
        "because JAX_PLATFORMS=cpu",
        "unset JAX_PLATFORMS",
    ),
    ("few-cores", WARNING, changed([2, 3], cores=[5]), [2, 3], "2 ranks of a node have 1 core", "--cpu-bind=cores"),
    ("mpi-threads", WARNING, changed([1], mpi_threads="FUNNELED"), [1], "thread level FUNNELED", "MPI4PY_RC_THREAD_LEVEL"),
    (
        "versions-differ",
        ERROR,
        changed([1, 3], versions=["python 3.11.9", *VERSIONS[1:]]),
        [1, 3],
        "different versions: python 3.11.9, python 3.12.1",
        "before srun",
    ),
    ("versions-differ", ERROR, changed([2], versions=VERSIONS[:-1]), [2], "versions: mpi4py 4.1.2", "one environment"),
    ("memory-apart", WARNING, changed([2, 3], shares_memory=False), [2, 3], "each other's memory", "--pid=host"),
    ("no-step", WARNING, alone(SLURM_JOB_ID="77", SLURM_NTASKS="4"), [0], "in no step of its Slurm job of 4", "srun --mpi="),
]


@pytest.mark.parametrize(
    ("name", "level", "rows", "ranks", "text", "fix"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)]
)
def test_what_is_wrong_is_found_and_nothing_else(
    name: str, level: str, rows: Rows, ranks: list[int], text: str, fix: str
) -> None:
    (found,) = diagnose(rows)
    assert (found["name"], found["level"], found["ranks"]) == (name, level, ranks)
    assert text in found["text"] and fix in found["fix"]


def test_every_rule_has_a_case() -> None:
    """Wrong if a misconfiguration were added to the doctor and to no test."""
    names = set(re.findall(r'_finding\(\s*"([a-z0-9-]+)"', inspect.getsource(findings)))
    assert len(names) > 8 and names == {case[0] for case in CASES}


def test_errors_come_first() -> None:
    rows = [row | {"cores": [3], "gpus": ["GPU-0"], "shares_memory": False} for row in job(3, 3)]
    assert [finding["level"] for finding in diagnose(rows)] == [ERROR, WARNING, WARNING]
