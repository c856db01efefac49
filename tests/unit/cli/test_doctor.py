"""Does every rule of the doctor find its misconfiguration, and nothing in a correct job?"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from shardload.cli.doctor import rules
from shardload.cli.doctor.facts import Facts
from shardload.cli.doctor.rules import ERROR, NOTE, WARNING, diagnose

Rows = list[Facts]

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
VERSIONS = {"python": "3.12.1", "jax": "0.10.2", "mpi4py": "4.1.2"}


def job(n: int = 4, per_node: int = 2) -> Rows:
    """A job in which all is well: one rank per GPU, two to a node."""
    rows = []
    for rank in range(n):
        first = rank - rank % per_node
        environ = {
            "CUDA_VISIBLE_DEVICES": "0",  # each task's own, as Slurm hands them out
            "SLURM_JOB_ID": "77",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(n),
            "SLURM_STEP_NUM_TASKS": str(n),
            "SLURM_GPUS_ON_NODE": str(per_node),
        }
        rows.append(
            Facts(
                host=f"n{first // per_node}",
                task=rank,
                launcher="srun",
                n_launched=n,
                rank=rank,
                size=n,
                mpi_size=n,
                mpi_library="MPICH 5.0.2",
                mpi_threads="MULTIPLE",
                jax_process=rank,
                jax_processes=n,
                platform="gpu",
                devices=(rank,),
                n_devices=n,
                gpus=(f"GPU-{rank}",),
                n_gpus=per_node,
                environ=environ,
                cores=(8 * (rank % per_node), 8 * (rank % per_node) + 1),
                versions=dict(VERSIONS),
                node=tuple(range(first, min(n, first + per_node))),
            )
        )
    return rows


def alone(**more: Any) -> Rows:
    """A process by itself, without Slurm, with whatever else."""
    environ = more.pop("environ", {})
    (row,) = job(1, 1)
    return [replace(row, launcher="", n_launched=1, environ=environ, n_gpus=0, platform="cpu", gpus=(), **more)]


def singleton(**more: Any) -> Rows:
    return [replace(alone()[0], jax_process=None, jax_processes=None, platform="", devices=(), n_devices=0, **more)]


def changed(ranks: Iterable[int], **more: Any) -> Rows:
    """The job, with some rows changed; `environ` is added to what there is."""
    rows = job()
    environ = more.pop("environ", {})
    for rank in ranks:
        rows[rank] = replace(rows[rank], environ=rows[rank].environ | environ, **more)
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
        alone(environ={"CUDA_VISIBLE_DEVICES": ""}),
        alone(environ={"CUDA_VISIBLE_DEVICES": "-1"}),
        alone(environ={"SLURM_NTASKS": "4"}),
        changed(EVERY, mpi_threads="SERIALIZED"),
        changed(EVERY, cores=(0, 1)),
        [replace(row, jax_process=3 - row.rank) for row in job()],
        [replace(row, gpus=(f"{row.host}a", f"{row.host}b"), node=(row.rank,)) for row in job(2, 1)],
    ],
)
def test_a_job_that_was_started_right(rows: Rows) -> None:
    assert diagnose(rows) == []


WITHOUT_JAX: dict[str, Any] = {"jax_process": None, "jax_processes": None, "platform": "", "devices": ()}
CASES: list[tuple[str, str, Rows, tuple[int, ...], str, str]] = [
    # name, level, rows, ranks, what the text says, what the fix says
    ("singletons", ERROR, singleton(launcher="srun", n_launched=4), (0,), "srun started 4 tasks", "--mpi=pmi2"),
    (
        "singletons",
        ERROR,
        singleton(launcher="srun", n_launched=3, mpi_library="Open MPI v5.0.8"),
        (0,),
        "srun started 3 tasks",
        "srun --mpi=pmix ... is right for Open MPI v5.0.8",
    ),
    (
        "singletons",
        ERROR,
        singleton(launcher="srun", n_launched=2, mpi_library="CRAY MPICH version 8.1.28"),
        (0,),
        "srun started 2 tasks",
        "--mpi=cray_shasta",
    ),
    ("singletons", ERROR, singleton(launcher="mpirun", n_launched=2), (0,), "mpirun started 2", "MPI4PY_LIBMPI="),
    ("singletons", ERROR, singleton(launcher="mpiexec", n_launched=2), (0,), "mpiexec started 2", "comes with MPICH 5.0.2"),
    (
        "no-mpi",
        ERROR,
        singleton(launcher="srun", n_launched=4, mpi_problem="cannot load MPI library\nlibmpi.so"),
        (0,),
        "finds no MPI library (cannot load MPI library), and srun started 4 tasks",
        "module load",
    ),
    ("no-mpi", NOTE, alone(mpi_problem="cannot load"), (0,), "one process can load", "shardload[mpich]"),
    (
        "no-mpi",
        NOTE,
        changed(
            EVERY, mpi_size=1, mpi_library="", mpi_threads="", mpi_problem="off", host="n0", environ={"SHARDLOAD_MPI": "0"}
        ),
        (0, 1, 2, 3),
        "MPI is switched off: JAX's 4 processes send each other values slowly",
        "unset SHARDLOAD_MPI",
    ),
    (
        "jax-failed",
        ERROR,
        changed([2], **WITHOUT_JAX, jax_problem="RuntimeError: no driver\nmore"),
        (2,),
        "JAX could not be started: RuntimeError: no driver",
        "shardload[cuda12]",
    ),
    (
        "jax-failed",
        ERROR,
        changed(EVERY, **WITHOUT_JAX, jax_problem="AssertionError", environ={"JAX_PLATFORMS": "cuda"}),
        (0, 1, 2, 3),
        "JAX could not be started: AssertionError (JAX_PLATFORMS is 'cuda')",
        "JAX_PLATFORMS=cpu",
    ),
    ("jax-count", ERROR, changed(EVERY, jax_process=0, jax_processes=1), (0, 1, 2, 3), "4 ranks, but JAX", "initialize()"),
    ("jax-count", ERROR, alone(jax_processes=4), (0,), "1 rank, but JAX's number of processes is 4", "initialize()"),
    (
        "gpu-shared",
        ERROR,
        changed([2, 3], gpus=("GPU-2",)),
        (2, 3),
        "ranks 2-3 on n1 use the same GPUs (1 in all; CUDA_VISIBLE_DEVICES: 0)",
        "--gpus-per-task=1",
    ),
    ("gpu-shared", ERROR, [replace(row, gpus=GPUS) for row in job(3, 3)], (0, 1, 2), "(4 in all;", "initialize()"),
    ("gpus-unused", ERROR, changed(EVERY, platform="cpu", gpus=()), (0, 1, 2, 3), "2 GPUs", "shardload[cuda12]"),
    ("gpus-unused", ERROR, alone(environ={"CUDA_VISIBLE_DEVICES": "3,4,5"}), (0,), "3 GPUs", "JAX_PLATFORMS=cpu if"),
    (
        "gpus-unused",
        WARNING,
        changed(EVERY, platform="cpu", gpus=(), environ={"JAX_PLATFORMS": "cpu"}),
        (0, 1, 2, 3),
        "because JAX_PLATFORMS=cpu",
        "unset JAX_PLATFORMS",
    ),
    ("devices-unequal", WARNING, changed([0, 1, 3], devices=(1, 9)), (2,), "from 1 to 2", "--gpus-per-task"),
    ("few-cores", WARNING, changed([2, 3], cores=(5,)), (2, 3), "ranks 2-3 on n1 have 1 core", "--cpu-bind=cores"),
    (
        "few-cores",
        NOTE,
        [replace(row, cores=(0, 1), environ=row.environ | {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}) for row in job(3, 3)],
        (0, 1, 2),
        "2 cores together, fewer than ranks",
        "fewer ranks a node",
    ),
    ("mpi-threads", WARNING, changed([1], mpi_threads="FUNNELED"), (1,), "thread level FUNNELED", "MPI4PY_RC_THREAD_LEVEL"),
    (
        "versions-differ",
        ERROR,
        changed([1, 3], versions={**VERSIONS, "python": "3.11.9"}),
        (1, 3),
        "versions of python: 3.11.9, 3.12.1",
        "before srun",
    ),
    (
        "versions-differ",
        ERROR,
        changed([2], versions={k: v for k, v in VERSIONS.items() if k != "mpi4py"}),
        (2,),
        "mpi4py: 4.1.2, missing",
        "one environment",
    ),
    ("versions-differ", ERROR, changed([3], mpi_library="MPICH 4.2"), (3,), "of MPI: MPICH 4.2, MPICH 5.0.2", "modules"),
    ("memory-apart", WARNING, changed([2, 3], shares_memory=False), (2, 3), "each other's memory", "--pid=host"),
    ("memory-apart", WARNING, changed(EVERY, host="n0"), (0, 1, 2, 3), "ranks 0-3 on n0 cannot read", "--ipc=host"),
    (
        "memory-apart",
        WARNING,
        changed(EVERY, shares_memory=False, environ={"SHARDLOAD_SHARED_MEMORY": "0"}),
        (0, 1, 2, 3),
        "each other's memory",
        "unset SHARDLOAD_SHARED_MEMORY",
    ),
    (
        "no-step",
        WARNING,
        alone(environ={"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}),
        (0,),
        "in no step of job 77 (of 4 tasks)",
        "srun --mpi=",
    ),
    ("no-step", NOTE, alone(environ={"SLURM_JOB_ID": "77"}), (0,), "in no step of job 77", "srun"),
]


@pytest.mark.parametrize(
    ("name", "level", "rows", "ranks", "text", "fix"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)]
)
def test_what_is_wrong_is_found_and_nothing_else(
    name: str, level: str, rows: Rows, ranks: tuple[int, ...], text: str, fix: str
) -> None:
    (found,) = diagnose(rows)
    assert (found.name, found.level, found.ranks) == (name, level, ranks)
    assert text in found.text and fix in found.fix


def test_every_rule_has_a_case() -> None:
    """Wrong if a misconfiguration were added to the doctor and to no test."""
    names = set(re.findall(r'_finding\(\s*"([a-z0-9-]+)"', inspect.getsource(rules)))
    assert len(names) > 9 and names == {case[0] for case in CASES}


def test_pretended_nodes_are_no_misconfiguration() -> None:
    assert diagnose(changed(EVERY, host="n0", environ={"SHARDLOAD_RANKS_PER_NODE": "2"})) == []


def test_the_same_names_on_two_nodes_are_two_gpus() -> None:
    """Wrong if nodes of which each has a GPU called 0 were taken to share it: where the driver says no more than a number."""
    rows = [replace(row, gpus=("number 0",)) for row in job(2, 1)]
    assert diagnose(rows) == []


def test_the_worst_comes_first() -> None:
    rows = [replace(row, environ={}, cores=(3,), jax_process=0, jax_processes=1) for row in job(3, 3)]
    levels = [finding.level for finding in diagnose(rows)]
    assert levels == sorted(levels, key=(ERROR, WARNING, NOTE).index)
    assert set(levels) == {ERROR, WARNING}
