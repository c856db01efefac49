"""A defect of our own is an error, not a wrong array: shardload is broken on purpose and must notice by itself.

One job of 4 ranks meets all defects one after the other (`scripts/wrong.py`) and loads well after each. What
``verify="index"`` cannot find, and what nothing can, is said by the tests' names: then the array that comes back is wrong,
and that is asserted too, so that nobody believes in more than there is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launch import ROOT, run_job

SCRIPT = Path(__file__).parent / "scripts" / "wrong.py"

Said = dict[str, Any]
Found = dict[tuple[str, str], list[Said]]

LAYOUT = ("ShardloadError", "but JAX's index map says that its devices hold")
LISTS = ("PeerError", "the sender's list of regions is not the one that was expected")
SUMS = ("PeerError", "its checksum is")

# Found always: the layout is compared with JAX's, the lists of messages with each other, the pieces with JAX's questions.
BY_INDEX = {
    "transposed layout": LAYOUT,
    "axes in a group exchanged": LAYOUT,
    "replicas forgotten": LAYOUT,
    "rank taken for process": LAYOUT,
    "device id taken for place in the mesh": LAYOUT,
    "pieces under another region": ("ShardloadError", "A wrong piece is never handed over"),
    "pieces of another type": ("ShardloadError", "dtype int32, expected (6, 6) and float32"),
    "two ranks get each other's part": LISTS,
    "blocks sent in another order": LISTS,
    "the last block dropped by all": ("ShardloadError", "32 elements arrived for the shard [6:12, 6:12], which has 36"),
}
# Found by verify="checksum" alone: the coordinates are all right, the values are not.
BY_CHECKSUM = {
    "two messages take each other's way": SUMS,
    "one bit changes on the way": SUMS,
    "one replica of four differs": SUMS,
    "one bit changes in a copy that stays": ("PeerError", "a checksum after the copy differs"),
    "staging buffer used again too early": SUMS,
}
# Found by no check of a load: the reader itself is wrong. That is what tests/mpi/test_sources.py is for.
BY_NONE = ("a read in the wrong place",)
# A rank waits for what nobody sends, or fails in the middle of an exchange. Each in a job of its own.
ALONE = ("a reader drops its last block", "a receiver expects a block too few", "blocks smaller than their parts")


def meet_defects(folder: Path, *names: str, mpi: str = "mpich", timeout: float = 120) -> Found:
    """What each rank says of each defect and way of verifying."""
    command = ["-W", "error", SCRIPT, folder, *names]
    job = run_job(command, 4, timeout=timeout, mpi=mpi, env={"PYTHONPATH": str(ROOT)}).check()
    ranks = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out in job.rank_stdout]
    return {(said[0]["case"], said[0]["verify"]): list(said) for said in zip(*ranks, strict=True)}


@pytest.fixture(scope="module", params=["mpich", "openmpi"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return meet_defects(tmp_path_factory.mktemp("wrong"), mpi=request.param)


def is_error(said: list[Said], kind: str, text: str) -> None:
    assert len({(one["type"], one["text"]) for one in said}) == 1, "the ranks raise different errors"
    assert said[0]["type"] == kind, said[0]
    assert text in said[0]["text"]


def is_wrong_and_unnoticed(said: list[Said]) -> None:
    assert {one["type"] for one in said} == {None}
    assert not all(one["right"] for one in said), "the defect did nothing, so it shows nothing"


@pytest.mark.parametrize("verify", ["index", "checksum"])
@pytest.mark.parametrize("case", BY_INDEX)
def test_found_always(found: Found, case: str, verify: str) -> None:
    """Wrong if an array came back."""
    is_error(found[case, verify], *BY_INDEX[case])


@pytest.mark.parametrize("case", BY_CHECKSUM)
def test_found_by_checksum(found: Found, case: str) -> None:
    """Wrong if an array came back although checksums were asked for."""
    is_error(found[case, "checksum"], *BY_CHECKSUM[case])


@pytest.mark.parametrize("case", BY_CHECKSUM)
def test_not_found_by_index(found: Found, case: str) -> None:
    """The limit of ``verify="index"``: places are checked, values are not."""
    is_wrong_and_unnoticed(found[case, "index"])


@pytest.mark.parametrize("verify", ["index", "checksum"])
@pytest.mark.parametrize("case", BY_NONE)
def test_not_found_at_all(found: Found, case: str, verify: str) -> None:
    """The limit of all checks of a load: they begin with what the reader delivers."""
    is_wrong_and_unnoticed(found[case, verify])


def test_every_defect_is_looked_at(found: Found) -> None:
    """Wrong if a defect of the script were asserted by nobody."""
    assert {case for case, _ in found} == {*BY_INDEX, *BY_CHECKSUM, *BY_NONE}


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
@pytest.mark.parametrize("case", ALONE)
def test_defect_that_leaves_a_rank_waiting(tmp_path: Path, case: str, mpi: str) -> None:
    """Wrong if the rank waited for ever: all must raise, whoever is at fault."""
    for said in meet_defects(tmp_path, case, mpi=mpi, timeout=40).values():
        assert len({(one["type"], one["text"]) for one in said}) == 1
        assert said[0]["type"] in ("PeerError", "ShardloadError")
