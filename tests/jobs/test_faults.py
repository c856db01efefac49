"""Something breaks in the middle of a load: all ranks raise the same, or load right; and nothing is left behind.

The first table of `docs/design/faults.md`: each row is a job of 4 ranks, or a case of one (`scripts/faults.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launch import ROOT, Job, run_job
from tests.tiers import quick_ones

SCRIPT = Path(__file__).parent / "scripts" / "faults.py"
PHASES = ("metadata", "planning", "opening", "reading", "exchange", "assembly")
DEATHS = ("metadata", "reading", "assembly")
SIGNALS = "SIGINT", "SIGALRM"
N = 4

CHANGED = "changed while it was read"
# For each case: the type of the error (None: the right array), and a part of its text.
EXPECTED: dict[str, tuple[str | None, str]] = {
    "EIO at a reader's 2nd chunk, HDF5": ("SourceError", "Input/output error"),
    "EIO at a reader's 2nd chunk, Zarr": ("SourceError", "Input/output error"),
    "no memory at a reader's 2nd chunk": ("PeerError", "MemoryError"),
    "reads of 7 bytes at a time": (None, ""),
    "no space for shared memory on rank 1": (None, ""),
    "file truncated during the load": ("SourceError", "the file ends at byte"),
    "file replaced during the load": (None, ""),
    "file written during the load": ("SourceError", CHANGED),
    "store replaced during the load": ("SourceError", CHANGED),
    "chunk cut short, gzip in HDF5": ("SourceError", "chunk (1, 2, 0) of '/x' in 'cut.h5'"),
    "chunk cut short, zstd in Zarr": ("SourceError", "chunk (1, 2, 0) of '/' in 'cut.zarr'"),
    "flipped bit, gzip in HDF5": ("SourceError", "chunk (1, 2, 0) of '/x' in 'flipped.h5'"),
    "flipped bit, Fletcher-32 in HDF5": ("SourceError", "chunk (1, 2, 0) of '/x' in 'flipped-checked.h5'"),
    "flipped bit, CRC-32C in Zarr": ("SourceError", "chunk (1, 2, 0) of '/' in 'flipped.zarr'"),
}
# What else may be said, since the ranks are not equally far when it happens.
OR: dict[str, tuple[str, ...]] = {
    "file truncated during the load": (CHANGED, "shorter than its own header"),
    "file written during the load": ("did not see the same file",),
    # The last is what a rank says that opens it when the old store has lost its name and the new one has none yet.
    "store replaced during the load": ("did not see the same file", "could not be read", "found in it before. It changed"),
}
# Where each rank reads for itself, one may open the file after the fault. Never a mixture.
OR_REFUSED = ("file replaced during the load", "SourceError", "did not see the same file")
# Where each rank reads for itself, no memory is shared.
UNMET = ("no space for shared memory on rank 1", "direct")


def start(folder: Path, *what: str, timeout: float = 90, mpi: str = "mpich", env: Mapping[str, str] | None = None) -> Job:
    """Run the script."""
    command = ["-W", "error", SCRIPT, folder, *what]
    return run_job(command, N, timeout=timeout, mpi=mpi, env={"PYTHONPATH": str(ROOT), **(env or {})})


def check_survivors(ranks: list[list[dict[str, Any]]], cases: Sequence[str], third: int) -> None:
    """Every rank saw the same, in each case and way of reading, and it is what `EXPECTED` has."""
    found = list(zip(*ranks, strict=True))
    assert {one[0]["case"] for one in found} == set(cases)
    ways = ([False] * 4 + [True], [False] * 2 + [True])  # in a tree or not, of damaged files and others
    for k, case in enumerate(cases):
        expected = [few[(k + third) % 3 :: 3] for few in ways]
        assert [one[0]["tree"] for one in found if one[0]["case"] == case] in expected, case
    for one in found:
        if one[0]["tree"] and one[0]["type"] is not None:  # the third array of five
            assert "array ['2, bad']" in one[0]["text"], one[0]
        case, kind, text = (one[0][name] for name in ("case", "type", "text"))
        assert len({(other["type"], other["text"]) for other in one}) == 1, one
        if EXPECTED[case][0] is None and (case, one[0]["readers"]) != UNMET:  # an error says itself that it has happened
            assert any(other["met"] for other in one), one[0]
        if (case, kind) == OR_REFUSED[:2] and one[0]["readers"] == "direct":
            assert OR_REFUSED[2] in text
        else:
            assert kind == EXPECTED[case][0] and any(part in text for part in (EXPECTED[case][1], *OR.get(case, ()))), one[0]


# With the other library, every third: what breaks is the file, or the memory. Of the ways of reading, `make test` takes
# for each fault a third, for the next fault another one.
@pytest.mark.parametrize("third", [0, *(pytest.param(k, marks=pytest.mark.thorough) for k in (1, 2))])
@pytest.mark.parametrize(("mpi", "every"), quick_ones([("mpich", 1), ("openmpi", 3)], ("mpich", 1)))
def test_all_ranks_see_the_same(tmp_path: Path, mpi: str, every: int, third: int) -> None:
    """Wrong if one rank went on with what another could not read, or a file that changed gave a mixture. The first third is as
    if the ranks were on two nodes.
    """
    cases = [*EXPECTED][::every]
    env = {"FAULTS_THIRD": f"{third}"} | ({"SHARDLOAD_RANKS_PER_NODE": "2"} if third == 0 else {})
    check_survivors(start(tmp_path, *cases, timeout=240, mpi=mpi, env=env).check().said(), cases, third)


@pytest.mark.parametrize("phase", quick_ones(DEATHS, "reading"))
def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path, phase: str) -> None:
    """Wrong if the others waited for it, or processes or files of ours were left."""
    before = ours_in_shared_memory()
    job = start(tmp_path, "die", phase, "0" if phase == "metadata" else "2")  # who reads metadata, and who the rest
    assert job.returncode != 0 and "went on" not in job.stdout, job.tail()
    assert "Traceback" not in job.stderr, job.tail()
    assert "outlived mpiexec" not in job.stderr, job.stderr
    assert ours_in_shared_memory() <= before


# Ctrl-C in each second phase and an alarm in the others; then the other way round.
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_interrupted_on_all_ranks(tmp_path: Path, first: int) -> None:
    """Wrong if the next load met messages of the interrupted one, or MPI wrote into memory that was given back."""
    for rank in start(tmp_path, "interrupt", f"{first}").check().said():
        expected = [(SIGNALS[(k + first) % 2], phase, "interrupted") for k, phase in enumerate(PHASES)]
        assert [(said["signal"], said["phase"], said["outcome"]) for said in rank] == expected


def ours_in_shared_memory() -> set[str]:
    """What is in /dev/shm, without what killed MPI libraries leave there, and the folders of tests that run beside."""
    beside = ("shardload-fuzz-", "shardload-tests-")
    foreign = (*beside, "mpich_shm", "vader_segment", "ompi", "prte", "pmix", "sm_segment", "dstore", "ucx_shm")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(foreign)}


def counted(tmp_path: Path, n: int, what: str, *more: str) -> list[dict[str, Any]]:
    """What each rank counted. What it has in memory is its own if the job is."""
    command = ["-W", "error", SCRIPT.parent / "many.py", tmp_path, what, *more]
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
