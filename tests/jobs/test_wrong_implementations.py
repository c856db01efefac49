"""A defect of our own is an error, not a wrong array: shardload is broken on purpose and must notice by itself.

One job of 4 ranks meets all defects one after the other (`scripts/wrong.py`) and loads well after each: with each MPI, and in
each way that parts can travel, because each has checks of its own. What a level of ``verify=`` cannot find is said by
`Travelled.expected`: then the array that comes back is wrong, and that is asserted too, so that nobody believes in more than
there is.
Wrong notes of where to look in shared memory: `tests/unit/transfer/test_notes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launch import ROOT, run_job
from tests.tiers import thorough

SCRIPT = Path(__file__).parent / "scripts" / "wrong.py"

Said = dict[str, Any]
ShardFindings = dict[tuple[str, str], list[Said]]

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
    "one bit changes on the way": SUMS,
    "one replica of four differs": SUMS,
    "one bit changes in a copy that stays": ("PeerError", "a checksum after the copy differs"),
    "staging buffer used again too early": SUMS,
    "one bit changes on a device": ("VerifyError", "does not hold what the host's piece holds of [0:6, 6:12]"),
    "replicas differ after they have arrived": ("VerifyError", "likelier wrong: rank 3"),
}
# Which the file finds, too.
ON_DEVICES = dict.fromkeys([*BY_CHECKSUM][-2:], ("VerifyError", "on rank"))
# Two messages of the same size look alike; two notes do not.
SWAPPED = "two parts take each other's way"
# What was read is wrong, or what has arrived is written over: only the file can say.
READ = "this is the first. If the array was changed since it was loaded"
BY_FILE = {
    "a read in the wrong place": ("VerifyError", READ),
    "chunks decoded wrongly": ("VerifyError", READ),
    "a piece is used again": ("VerifyError", "shard [0:6, 6:12] of '/x' in"),
    "padding filled wrongly": ("VerifyError", "is -2.0 (bytes 000000c0), but the padding has -3.0"),
}
# One element of a large array: a few boxes miss it.
BY_FULL = {"one element read wrongly": ("VerifyError", "element (9, 100, 75) is -160331.0")}
# A rank waits for what nobody sends, or fails in the middle of an exchange. In a program of their own.
ALONE = ("a reader drops its last block", "a receiver expects a block too few", "blocks smaller than their parts")


# How parts travel between the 4 ranks.
WAYS: dict[str, dict[str, str]] = {
    "shared memory": {},
    "messages": {"SHARDLOAD_SHARED_MEMORY": "0"},
    "both": {"SHARDLOAD_RANKS_PER_NODE": "2"},
}


def meet_defects(
    folder: Path, *names: str, mpi: str, way: str = "", env: Mapping[str, str] | None = None, timeout: float = 240
) -> ShardFindings:
    """What each rank says of each defect and way of verifying."""
    command = ["-W", "error", SCRIPT, folder, *names]
    env = {"PYTHONPATH": str(ROOT), **(WAYS[way] if env is None else env)}
    job = run_job(command, 4, timeout=timeout, mpi=mpi, env=env, devices_per_process=2).check()
    return {(said[0]["case"], said[0]["verify"]): list(said) for said in zip(*job.said(), strict=True)}


@dataclass
class Travelled:
    """What was said where parts travelled in this way, and what is right there."""

    way: str
    said: ShardFindings

    def expected(self, verify: str) -> dict[str, tuple[str, str] | None]:
        """What a level says of each defect that meets it. None is its limit: places are checked, values are not; checksums
        begin with what the reader delivers, and end with the piece; there are only a few boxes."""
        by_index, by_checksum = dict(BY_INDEX), dict(BY_CHECKSUM)
        if self.way == "shared memory":
            by_index[SWAPPED] = LISTS
        else:
            by_checksum[SWAPPED] = SUMS
        return {
            "index": by_index | dict.fromkeys([*by_checksum, *BY_FILE, *BY_FULL]),
            "checksum": by_index | by_checksum | dict.fromkeys([*BY_FILE, *BY_FULL]),
            "file": BY_FILE | ON_DEVICES | dict.fromkeys(BY_FULL),
            "full": BY_FILE | ON_DEVICES | BY_FULL,
        }[verify]


# In the last one, all that the others have: in `make test` it is enough.
TRAVELS = [("mpich", "shared memory"), ("mpich", "messages"), ("openmpi", "both")]


@pytest.fixture(scope="module", params=thorough(TRAVELS, TRAVELS[:2]), ids=" ".join)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Travelled:
    mpi, way = request.param
    return Travelled(way, meet_defects(tmp_path_factory.mktemp("wrong"), mpi=mpi, way=way))


def check(said: list[Said], error: tuple[str, str] | None) -> None:
    assert len({(one["type"], one["text"]) for one in said}) == 1, "the ranks raise different errors"
    if error is None:
        assert said[0]["type"] is None, said[0]
        assert not all(one["right"] for one in said), "the defect did nothing, so it shows nothing"
    else:
        assert said[0]["type"] == error[0] and error[1] in said[0]["text"], said[0]


@pytest.mark.parametrize("verify", ["index", "checksum", "file", "full"])
def test_what_each_level_finds(found: Travelled, verify: str) -> None:
    """Wrong if an array came back that this level looks at, or if a defect of the script were asserted by nobody."""
    expected, failed = found.expected(verify), []
    assert {case for case, level in found.said if level == verify} == set(expected)
    for case, error in expected.items():
        try:
            check(found.said[case, verify], error)
        except AssertionError as why:
            failed.append(f"{case}: {why}")
    assert not failed, "\n".join(failed)


WAITS = [("mpich", "shared memory"), ("openmpi", "messages")]


@pytest.fixture(scope="module", params=thorough(WAITS, WAITS[1:]), ids=" ".join)
def left_waiting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ShardFindings:
    mpi, way = request.param
    return meet_defects(tmp_path_factory.mktemp("waiting"), *ALONE, mpi=mpi, way=way, timeout=90)


@pytest.mark.parametrize("case", ALONE)
def test_defect_that_leaves_a_rank_waiting(left_waiting: ShardFindings, case: str) -> None:
    """Wrong if the rank waited for ever: all must raise, whoever is at fault."""
    for said in (said for (name, _), said in left_waiting.items() if name == case):
        assert len({(one["type"], one["text"]) for one in said}) == 1
        assert said[0]["type"] in ("PeerError", "ShardloadError")
