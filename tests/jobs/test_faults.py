"""Something breaks in the middle of a load: all ranks raise the same, or load right; and nothing is left behind."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import faults
from tests.jobs.launch import ROOT, run_job
from tests.tiers import quick_ones


# With the other library, every third: what breaks is the file, or the memory. Of the ways of reading, `make test` takes
# for each fault a third, for the next fault another one.
@pytest.mark.parametrize("third", [0, *(pytest.param(k, marks=pytest.mark.thorough) for k in (1, 2))])
@pytest.mark.parametrize(("mpi", "every"), quick_ones([("mpich", 1), ("openmpi", 3)], ("mpich", 1)))
def test_all_ranks_see_the_same(tmp_path: Path, mpi: str, every: int, third: int) -> None:
    """Wrong if one rank went on with what another could not read, or a file that changed gave a mixture."""
    cases = [*faults.EXPECTED][::every]
    faults.check_survivors(faults.survivors(tmp_path, cases, mpi, third), cases, third)


@pytest.mark.parametrize("phase", quick_ones(faults.DEATHS, "reading"))
def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path, phase: str) -> None:
    """Wrong if the others waited for it, or processes or files of ours were left."""
    before = ours_in_shared_memory()
    job = faults.dies(tmp_path, phase)
    assert job.returncode != 0 and "went on" not in job.stdout, job.tail()
    assert "Traceback" not in job.stderr, job.tail()
    assert "outlived mpiexec" not in job.stderr, job.stderr
    assert ours_in_shared_memory() <= before


# Ctrl-C in each second phase and an alarm in the others; then the other way round.
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_interrupted_on_all_ranks(tmp_path: Path, first: int) -> None:
    """Wrong if the next load met messages of the interrupted one, or MPI wrote into memory that was given back."""
    for rank in faults.interrupted(tmp_path, which=str(first)):
        expected = [(faults.SIGNALS[(k + first) % 2], phase, "interrupted") for k, phase in enumerate(faults.INTERRUPTS)]
        assert [(said["signal"], said["phase"], said["outcome"]) for said in rank] == expected


def ours_in_shared_memory() -> set[str]:
    """What is in /dev/shm, without what killed MPI libraries leave there, and the folders of tests that run beside."""
    beside = ("shardload-fuzz-", "shardload-tests-")
    foreign = (*beside, "mpich_shm", "vader_segment", "ompi", "prte", "pmix", "sm_segment", "dstore", "ucx_shm")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(foreign)}


def counted(tmp_path: Path, n: int, what: str, *more: str) -> list[dict[str, Any]]:
    """What each rank counted. What it has in memory is its own if the job is."""
    command = ["-W", "error", faults.SCRIPT.parent / "many.py", tmp_path, what, *more]
    job = run_job(command, n, timeout=240, env={"PYTHONPATH": str(ROOT)})
    return [lines[-1] for lines in job.check().said()]


@pytest.mark.parametrize("n", [60, pytest.param(200, marks=pytest.mark.thorough)])
def test_hundreds_of_loads(tmp_path: Path, n: int) -> None:
    """Wrong if a load left memory (of 200 loads: 16 KiB), descriptors, threads, shared memory or communicators behind."""
    for found in counted(tmp_path, 2, "loads", f"{n}"):
        assert found["loads"] == n
        for name in ("descriptors", "threads", "mappings", "communicators"):
            assert found["after"][name] <= found["before"][name], found
        assert found["after"]["rss"] - found["before"]["rss"] < 3 << 20, found


def test_two_threads_two_communicators_and_a_computation(tmp_path: Path) -> None:
    """Wrong if loads of two threads took each other's parts, or a load waited for a computation."""
    ranks = counted(tmp_path, 2, "threads")
    for found in ranks:
        assert found["right"] == {"0": 4, "1": 4} and found["computed"], found
        # Over one communicator: the right array, or an error that all ranks have; and no rank waits for a call of another.
        assert found["outcomes"] == ranks[0]["outcomes"], ranks
        for said in chain.from_iterable(found["outcomes"]):
            assert said == "right" or "give each thread its own" in said or "must pass the same path" in said, said
