"""All ranks raise the same type with the same text, within the time, whatever goes wrong and wherever.

One job of 4 ranks makes all mistakes one after the other (`scripts/errors.py`) and loads well after each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launch import ROOT, run_job
from tests.tiers import thorough

SCRIPT = Path(__file__).parent / "scripts" / "errors.py"

Said = dict[str, Any]

CHUNK = "chunk (1, 2, 1) of '/group/x' in"
SAME = "all ranks must pass the same path, sharding and options"
ORDER = "all ranks must make the same calls in the same order"
ON = "on rank {} of 4"
# For each case: type, rank in the error (None: no rank's in particular), and what the text must say, in this order.
EXPECTED: dict[str, tuple[str, int | None, tuple[str, ...]]] = {
    # the file
    "truncated": ("SourceError", 0, ("'truncated.h5'", "shorter than its own header says")),
    "damaged chunk, cast and selected": ("SourceError", 3, (CHUNK, "'damaged.h5'", "[3:6, 11:12, 7:14]")),
    "a slow reader meets the damaged chunk last": ("SourceError", 2, (ON.format(2), CHUNK, "'damaged.h5'")),
    # what only some ranks see
    "not on rank 2": ("SourceError", 2, (ON.format(2), "no file 'some.h5'")),
    "not on rank 0": ("SourceError", 0, (ON.format(0), "no file 'not-on-0.h5'")),
    "another file on rank 3": (
        "SourceError",
        3,
        (ON.format(3), "'/x' in 'other.h5' has shape (7, 12, 20)", "(8, 12, 20)", "sees another file"),
    ),
    "open fails on ranks 1 and 3 alone": ("PeerError", 1, (ON.format(1), "1 more", "PermissionError: the disk went away")),
    "no memory for the pieces on rank 1": ("PeerError", 1, (ON.format(1), "MemoryError: cannot allocate 512 GiB")),
    "metadata cannot be read on rank 0": ("PeerError", 0, (ON.format(0), "PermissionError: the disk went away")),
    # ranks that pass something else
    "path differs": ("PeerError", 2, ("rank 2", "path = 'odd.h5'", "rank 0", "'good.h5'", SAME)),
    "spec differs": ("PeerError", 2, ("rank 2", "sharding = ", "P('b', 'a')", "rank 0", "P('a', 'b')", SAME)),
    "mesh differs": ("PeerError", 2, ("rank 2", "sharding = ", "devices [", "rank 0", "devices [", SAME)),
    "readers differ": ("PeerError", 3, ("rank 3", "readers = 'direct'", "rank 0", "'root'", SAME)),
    "rank 0 differs from all": ("PeerError", 1, ("rank 1", "P('a', 'b')", "rank 0", "P('b', 'a')", SAME)),
    "scatter cannot verify, on one rank": ("ConfigError", 2, (ON.format(2), "verify is 'full', but scatter has no file")),
    "an abstract mesh on one rank": ("ConfigError", 1, (ON.format(1), "load needs a mesh of devices, found an AbstractMesh")),
    "an argument that nobody thought of": ("ConfigError", 1, (ON.format(1),)),
    "what should be verified is no array, on one rank": ("ConfigError", 3, (ON.format(3), "x is a NoneType")),
    "a file cannot be closed on rank 1": ("PeerError", 1, (ON.format(1), "PermissionError: the disk went away")),
    "one spec is wrong": ("ConfigError", 1, (ON.format(1), "P('a', 'q') names mesh axis 'q'")),
    "all wrong, each its own way": ("ConfigError", None, ("P('q0') names mesh axis 'q0'",)),
    "scatter root differs": ("PeerError", 2, ("rank 2", "scatter from rank 1", "rank 0", "scatter from rank 0", SAME)),
    "load here, scatter there": ("PeerError", 2, ("rank 2", "scatter from rank 0", "rank 0", "'good.h5'", SAME)),
    "plans in another order": ("PeerError", 1, ("rank 1", "'group/pressure'", "rank 0", "'density'", SAME)),
    "plans with other options": ("PeerError", 2, ("rank 2", "staging = 2097152", "rank 0", "1048576", SAME)),
    "load here, execute there": (
        "PeerError",
        3,
        ("rank 3 called load of 'several.h5'", "rank 0 called execute() of the plan for '/density' in 'several.h5'", ORDER),
    ),
    "execute on rank 0, verify elsewhere": ("PeerError", 1, ("rank 1 called verify", "rank 0 called execute()", ORDER)),
    "plan here, load there": ("PeerError", 2, ("rank 2 called plan of 'good.h5'", "rank 0 called load of 'good.h5'", ORDER)),
    "the caller fails between plan and execute on one rank": (
        "PeerError",
        2,
        ("rank 2 called plan", "rank 0 called exec", ORDER),
    ),
    **{
        case: ("SourceError", None, ("ranks that passed this array did not pass the same one", "shardload.scatter"))
        for case in (
            "pieces in place of the array, root",
            "HDF5 in memory differs, parallel",
            "Zarr in memory differs, direct",
        )
    },
    "verify against other arrays": ("SourceError", None, ("did not pass the same one",)),
    "scatter's function raises": ("PeerError", 2, (ON.format(2), "FloatingPointError: the field diverged")),
    # a chunk that cannot be decoded
    "damaged chunk": ("SourceError", -1, (CHUNK, "'damaged.h5' could not be read", "damaged")),
    "damaged Zarr chunk": ("SourceError", -1, (CHUNK, "'damaged.zarr' could not be read", "zstd")),
    "damaged Zarr shard": ("SourceError", -1, ("chunk (2, 2, 3) of '/' in", "'sharded.zarr' could not be read", "CRC-32C")),
}

# A rank whose memory is gone in the middle of an exchange. In jobs of their own: should one hang, it takes no others with it.
ALONE: dict[str, tuple[str, int, tuple[str, ...]]] = {
    name: ("PeerError", rank, (ON.format(rank), "MemoryError: cannot allocate 512 GiB"))
    for name, rank in (
        ("no memory for a block on rank 2", 2),
        ("no memory to pack on rank 0", 0),
        ("no memory for a checksum on rank 0", 0),
        ("no memory for a note or message on rank 0", 0),
        ("no memory to decode a chunk on rank 1", 1),
        ("assembly fails on rank 3", 3),
    )
}


# Memory for these is taken only where parts travel as messages; what else fails is tried in each way.
ONLY_MESSAGES = ("no memory for a block on rank 2", "no memory to pack on rank 0")
WAYS = {
    "messages": ("mpich", {"SHARDLOAD_SHARED_MEMORY": "0"}),
    "messages, Open MPI": ("openmpi", {"SHARDLOAD_SHARED_MEMORY": "0"}),
    "notes": ("mpich", {}),
    "both, Open MPI": ("openmpi", {"SHARDLOAD_RANKS_PER_NODE": "2"}),
}


def make_mistakes(
    folder: Path, *names: str, mpi: str = "mpich", timeout: float = 240, env: Mapping[str, str] | None = None
) -> dict[str, list[Said]]:
    """What each rank raised in each case."""
    command = ["-W", "error", SCRIPT, folder, *names]
    job = run_job(command, 4, timeout=timeout, mpi=mpi, env={"PYTHONPATH": str(ROOT), **(env or {})}).check()
    return {said[0]["case"]: list(said) for said in zip(*job.said(), strict=True)}


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Said]]:
    return make_mistakes(tmp_path_factory.mktemp("errors"))


def check(said: list[Said], kind: str, rank: int | None, parts: tuple[str, ...]) -> None:
    assert all(one == said[0] for one in said), "the ranks raise different errors"
    found = said[0]
    assert found["type"] == kind, found
    if rank != -1:  # -1: whichever reads the chunk
        assert found["rank"] == rank
    at = 0
    for part in parts:
        assert part in found["text"][at:], f"{part!r} does not follow in {found['text']!r}"
        at = found["text"].index(part, at)


@pytest.mark.parametrize("case", EXPECTED)
def test_every_rank_raises_the_same(mistakes: dict[str, list[Said]], case: str) -> None:
    """Wrong if a rank went on by itself, waited for one that did not, or said something else."""
    check(mistakes[case], *EXPECTED[case])


def test_every_case_is_expected(mistakes: dict[str, list[Said]]) -> None:
    """Wrong if a case of the script were looked at by nobody."""
    assert set(mistakes) == set(EXPECTED)


def test_the_damaged_chunk_is_named(mistakes: dict[str, list[Said]]) -> None:
    """Wrong if a program could not tell which chunk of which array it was: the text is for people."""
    names = ("path", "dataset", "chunk")
    for what in ("damaged chunk", "damaged Zarr chunk"):
        for said in mistakes[what]:
            assert [said[name] for name in names[1:]] == ["/group/x", [1, 2, 1]] and said["path"].startswith("damaged")
    for said in mistakes["damaged Zarr shard"]:
        assert [said[name] for name in names] == ["sharded.zarr", "/", [2, 2, 3]]


@pytest.fixture(scope="module", params=thorough(WAYS, ["messages, Open MPI", "notes"]))
def in_the_middle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Said]]:
    mpi, env = WAYS[request.param]
    cases = [case for case in ALONE if "messages" in request.param or case not in ONLY_MESSAGES]
    return make_mistakes(tmp_path_factory.mktemp("middle"), *cases, mpi=mpi, timeout=90, env=env)


@pytest.mark.parametrize("case", ALONE)
def test_rank_that_fails_in_the_middle(in_the_middle: dict[str, list[Said]], case: str) -> None:
    """Wrong if the others wait for the messages or notes that it owes them, or it for their answers: for ever."""
    if case in in_the_middle:
        check(in_the_middle[case], *ALONE[case])
