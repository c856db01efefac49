"""When one rank is held up, do all others raise the same StallError, which names it, and does the job end by itself?

Each case is a job of its own (`scripts/stall.py`), which the harness kills if it hangs: after a stall nothing can be called.
The jobs wait nearly all the time, so some of them run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launch import ROOT, Job, run_job
from tests.tiers import IS_QUICK, thorough

SCRIPT = Path(__file__).parent / "scripts" / "stall.py"
SECONDS = 90
END = "these processes can make no call together any more: end the job"
ADVICE = "Look whether the late process still runs"

# For each case: the rank that is held up, whether it can still speak, the rank in the error, and what its text must say.
CASES: dict[str, tuple[int, bool, int | None, tuple[str, ...]]] = {
    "thread parallel": (2, True, 2, ("rank 2 is reading chunk", "other rank", ADVICE)),
    "thread direct": (2, True, 2, ("rank 2 is reading chunk", "3 other ranks wait (phase: ", ADVICE)),
    "inline parallel": (2, False, 2, ("rank 2 ", "held up", "other rank", ADVICE)),
    "metadata": (0, False, 0, ("for 4 s (call: load of 'x.h5')", "nothing was heard of rank 0", ADVICE)),
    "absent": (3, False, 3, ("rank 3 did not come to this call", "other rank", "(phase: ", ADVICE)),
    "duplicated": (0, False, None, ("(call: the first message over a communicator)", "nothing was heard of rank 0", ADVICE)),
    "scatter": (1, False, 1, ("(call: scatter from rank 1)", "rank 1 did not come to this call, or is held up", ADVICE)),
}
OPEN_MPI = ("thread parallel", "absent")
LEFT = ("0", "1,3")
SAVING = ("saving encode", "saving metadata", "saving interrupted")
# Left to `make test-all`: what is like "thread parallel", with MPICH, in a scatter like "absent", the same with the other
# library, and what is like rank 0 that leaves. (A rank that never makes its first call: test_modes_of_launch.)
THOROUGH = (
    ("thread direct", "mpich", 4),
    ("absent", "mpich", 4),
    ("scatter", "mpich", 4),
    ("thread parallel", "openmpi", 4),
    ("left 1,3", "mpich", 4),
)

What = tuple[str, str, int]  # the case, the MPI library, the number of ranks
ALL: tuple[What, ...] = (  # what takes longest comes first
    ("slow", "mpich", 4),
    *((case, "openmpi", 4) for case in OPEN_MPI),
    *((case, "mpich", 4) for case in CASES),
    *((case, "mpich", 1) for case in ("thread parallel", "inside parallel", *SAVING)),
    *((f"left {ranks}", "mpich", 4) for ranks in LEFT),
)
N_AT_A_TIME = 3


@pytest.fixture(scope="module")
def hold_up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    """``hold_up(case, mpi, n)``: the job, when it has ended. If all tests here are to run, all jobs start now."""

    def run(case: str, mpi: str, n: int) -> Job:
        folder = folders[case, mpi, n]
        env = {"PYTHONPATH": str(ROOT)}
        return run_job([SCRIPT, folder, *case.split()], n, timeout=SECONDS, mpi=mpi, env=env, cwd=folder)

    folders = {what: tmp_path_factory.mktemp("stall") for what in ALL}
    n_tests = sum(item.path == request.path for item in request.session.items)
    wanted = [what for what in ALL if not (IS_QUICK and what in THOROUGH)]
    with ThreadPoolExecutor(N_AT_A_TIME) as pool:
        jobs = {what: pool.submit(run, *what) for what in wanted if n_tests >= len(wanted)}

        def job(case: str, mpi: str = "mpich", n: int = 4) -> Job:
            what = (case, mpi, n)
            return jobs[what].result() if what in jobs else run(*what)

        yield job
        for future in jobs.values():
            future.cancel()


def said_by(job: Job, rank: int) -> dict[str, Any]:
    """All that a rank said."""
    return {key: value for line in job.said()[rank] for key, value in line.items()}


def check(job: Job, held: int, speaks: bool, rank: int | None, parts: tuple[str, ...]) -> None:
    said = [said_by(job, k) for k in range(len(job.rank_stdout))]
    assert said[held]["held"] == held
    speakers = [k for k in range(len(said)) if speaks or k != held]
    assert [k for k in range(len(said)) if "text" in said[k]] == speakers, job.tail()
    (text,) = {said[k]["text"] for k in speakers}
    for k in speakers:
        assert (said[k]["type"], said[k]["rank"], said[k]["again"], said[k]["same"]) == ("StallError", rank, "StallError", True)
        assert job.rank_stderr[k].count(f"StallError: {text}") == 1, "the process ended before it said why"
    where = 0
    for part in (*parts, END):
        where = text.find(part, where)
        assert where >= 0, f"{part!r} is not in, or not in its place in: {text}"
    if "chunk" in said[held]:
        assert f"reading chunk {tuple(said[held]['chunk'])} of '/x' in 'x.h5'" in text
    assert job.returncode != 0
    assert "outlived" not in job.stderr, "a process did not end by itself"


@pytest.mark.parametrize("what", thorough((what for what in ALL if what[0] in CASES and what[2] == 4), THOROUGH), ids=str)
def test_a_rank_that_is_held_up(hold_up: Callable[..., Job], what: What) -> None:
    check(hold_up(*what), *CASES[what[0]])


def test_alone_there_is_nobody_to_ask(hold_up: Callable[..., Job]) -> None:
    """Wrong if a process alone waited for ever for its own thread, or could not end because of it."""
    parts = ("nothing has moved for 4 s (call: '/x' in 'x.h5'): rank 0 is reading chunk", ADVICE)
    check(hold_up("thread parallel", n=1), 0, True, 0, parts)


@pytest.mark.parametrize("case", ["inside parallel", *SAVING])
def test_alone_inside_the_library(hold_up: Callable[..., Job], case: str) -> None:
    """Wrong if the end of the interpreter waited for the library's lock, which that thread has. Also of threads that write, and
    after Ctrl-C.
    """
    job = hold_up(case, n=1)
    what = "KeyboardInterrupt" if "interrupted" in case else "StallError: nothing has moved"
    assert job.rank_stderr[0].count(f"\n{what}") + job.rank_stderr[0].count(f"errors.{what}") == 1, job.tail()
    assert job.returncode != 0


@pytest.mark.parametrize("ranks", thorough(LEFT, ["1,3"]))
def test_ranks_that_leave(hold_up: Callable[..., Job], ranks: str) -> None:
    """Wrong if the others waited out the timeout, or JAX's shutdown in those that have left came to its own end first."""
    job, left = hold_up(f"left {ranks}"), [*map(int, ranks.split(","))]
    said = [said_by(job, rank) for rank in range(4)]
    assert [rank for rank in range(4) if "held" in said[rank]] == left
    others = [one for rank, one in enumerate(said) if rank not in left]
    (text,) = {one["text"] for one in others}
    names = "rank 0 has" if left == [0] else "ranks 1, 3 have"
    assert text.startswith(f"{names} come to the end of") and "'x.h5'" in text and END in text
    assert {(one["type"], one["rank"], one["again"], one["same"]) for one in others} == {
        ("StallError", left[0], "StallError", True)
    }
    assert job.returncode != 0 and "outlived" not in job.stderr


def test_slow_is_not_still(hold_up: Callable[..., Job]) -> None:
    """Each chunk takes a beat, and there are more of them than beats in the timeout; the script compares the values."""
    job = hold_up("slow").check()
    n_beats = [said_by(job, rank)["beats"] for rank in range(4)]
    assert min(n_beats) > 16, "the load took less than twice the timeout, and shows nothing"
    assert "StallError" not in job.stdout + job.stderr
