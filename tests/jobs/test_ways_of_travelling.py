"""Is a load right in whichever way parts travel, and did they really travel so?

`make test` runs all of `tests/mpi`, whose arrays are small, as if these were large (`scripts/ways.py`): chunks are decoded one
by one, and parts go by notes of where to look in shared memory (`make test-mpi`), by messages alone (`make test-oldest`), or by
both in the same load (`make test-openmpi`). In the end each of these asks whether they did. Here are the ways that none has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.jobs.launch import ROOT, run_job
from tests.tiers import IS_QUICK

# What covers the exchange: every layout and reader, padding, selections, casts, checksums, small blocks. By file: every rank
# would import all the others too, to find that it runs none of their tests.
FEW = {
    "test_values": "(test_tiny_staging and chunks1) or test_selection_padding",
    "test_calls": "test_open_array",
    "test_scatter": "test_decomposition",
}


def run_suite(
    folder: Path,
    which: Mapping[str, str],
    n: int,
    more: Mapping[str, str],
    *,
    devices: int = 1,
    share: str = "",
) -> list[dict[str, int]]:
    """Run tests of some files of `tests/mpi` on `n` ranks; what each rank counted."""
    files = [f"tests/mpi/{name}.py" for name in which]
    these = " or ".join(f"({name}.py and ({tests}))" for name, tests in which.items())
    command = ["-m", "pytest", "-p", "tests.jobs.scripts.ways", "--with-mpi", "-q", *files, "-k", these]
    command += ["-W", "ignore:Module already imported"]  # a library whose plugin is not used here
    env = {"PYTHONPATH": str(ROOT), "WAYS_COUNTS": str(folder), **more}
    # All parameters or a share of them; which stage of `make test` this is does not matter.
    env |= {"TESTS_SHARE": share, "TESTS_TURN": ""}
    job = run_job(command, n, timeout=300, env=env, cwd=ROOT, devices_per_process=devices).check()
    assert " passed" in job.rank_stdout[0] and "failed" not in job.rank_stdout[0], job.tail()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n)]


def test_memory_that_one_rank_cannot_share(tmp_path: Path) -> None:
    """Wrong if the ranks disagreed: some would send notes of memory that others cannot see."""
    found = run_suite(tmp_path, FEW, 4, {"WAYS_WITHOUT": "1"}, share="0/8" if IS_QUICK else "")
    assert [one.get("segments refused", 0) > 0 for one in found] == [False, True, False, False]
    for one in found:
        assert one["messages sent"] > 20 and "notes sent" not in one, one


def test_many_threads_several_devices_and_both_ways_in_one_load(tmp_path: Path) -> None:
    """Wrong if chunks that threads decode beside each other got into each other's way, a block left before its last one, a rank
    that gets notes from some and messages from others lost one of them, ranks that follow each other were taken to be on one
    node (ranks 0 and 2 are), or a rank with several pieces put what a note names into one of the others."""
    env = {"WAYS_THREADS": "3", "SHARDLOAD_RANKS_PER_NODE": "0,1,0"}
    first, second, third = run_suite(tmp_path, FEW, 3, env, devices=2, share="0/2" if IS_QUICK else "")
    for found in (first, second, third):
        assert found["boxes decoded"] > 50 and found["messages sent"] > 20, found
    assert "notes sent" not in second, second
    for found in (first, third):
        assert min(found["notes sent"], found["tiles taken"]) > 10, found


@pytest.mark.thorough
def test_nodes_of_different_sizes(tmp_path: Path) -> None:
    """Wrong if ranks that follow each other were taken to be on one node: six ranks on five nodes. Saves on six ranks run here
    too, for this job's sake."""
    env = {"SHARDLOAD_RANKS_PER_NODE": "3,0,1,0,4,2"}
    which = {
        "test_meshes": "test_three_axes",
        "test_values": "test_tiny_staging and chunks1",
        "test_saves_on_six_ranks": "test_a_grid_of_saves",
    }
    found = run_suite(tmp_path, which, 6, env, share="0/2")
    assert ["notes sent" in one for one in found] == [False, True, False, True, False, False]  # ranks 1 and 3 share memory
    assert min(one["messages sent"] for one in found) > 10, found
