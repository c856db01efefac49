"""Do the programs that compare random calls on several ranks run, and does the first difference end them?"""

from __future__ import annotations

import os

import pytest

from tests.jobs.launch import ROOT, run_job

# One rank finds what the others do not: it expects another type.
SPOILED = """
import sys
from tests import fuzz_loads

compare = fuzz_loads.compare
another = "c16" if fuzz_loads.comm.rank == 1 else None
fuzz_loads.compare = lambda what, array, expected: compare(what, array, expected.astype(another or expected.dtype))
sys.argv[1:] = ["--loads", "5", "--saves", "1"]
fuzz_loads.main()
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (["tests.fuzz_loads", "--loads", "5", "--saves", "1"], "5 loads and 1 saves were compared on 2 ranks"),
        pytest.param(
            ["tests.fuzz_calls", "copy", "--cases", "2"],
            "2 times copy was compared on 2 ranks",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            ["tests.fuzz_timing", "--programs", "1", "--share", "0.0005"],
            "1 programs ran on 2 ranks",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_they_run_and_leave_nothing(program: list[str], said: str) -> None:
    """Wrong if a name that they use were changed: nothing else runs them."""
    before = left()
    job = run_job(["-W", "ignore", "-m", *program], 2, timeout=90, env={"PYTHONPATH": str(ROOT)}).check()
    assert said in job.stdout and left() <= before


def test_a_difference_that_one_rank_finds_ends_the_job() -> None:
    """Wrong if that rank ended by itself, and the others waited for it for ever, or it were said that all was compared."""
    before = left()
    job = run_job(["-W", "ignore", "-c", SPOILED], 2, timeout=60, env={"PYTHONPATH": str(ROOT)})
    assert job.returncode not in (0, None) and "WRONG" in job.stderr and "were compared" not in job.stdout, job.tail()
    assert left() <= before


def left() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("shardload-fuzz-")}
