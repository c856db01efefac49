"""All ranks raise the same type with the same text, within the time, whatever goes wrong and wherever.

One job of 4 ranks makes all mistakes one after the other (`scripts/errors.py`) and loads well after each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launch import ROOT, run_job
from tests.tiers import IS_QUICK, thorough

SCRIPT = Path(__file__).parent / "scripts" / "errors.py"

Said = dict[str, Any]

CHUNK = "chunk (1, 2, 1) of '/group/x' in"
SAME = "all ranks must pass the same path, sharding and options"
ORDER = "all ranks must make the same calls in the same order"
ON = "on rank {} of 4"
# As in the script: readers, and verify=.
WAYS: tuple[tuple[str | int, str], ...] = (("root", "index"), ("parallel", "checksum"), ("direct", "index"), (2, "checksum"))

# For each case: type, rank in the error (None: no rank's in particular), and what the text must say, in this order.
EXPECTED: dict[str, tuple[str | None, int | None, tuple[str, ...]]] = {
    # the call
    "no such file": ("SourceError", 0, ("no file 'gud.h5'", "Near it: 'good.h5'")),
    "no such folder": ("SourceError", 0, ("no file 'nowhere/good.h5'", "folder 'nowhere'")),
    "not HDF5": ("SourceError", 0, ("'text.h5' is of an unknown format", "HDF5, Zarr")),
    "empty file": ("SourceError", 0, ("'empty.h5' is empty (0 bytes)",)),
    "folder that is no Zarr": ("SourceError", 0, ("'folder.zarr' is a folder, but not a Zarr store",)),
    "no such dataset": (
        "ConfigError",
        None,
        ("holds no array '/group/presure'", "nearest first", "'/group/pressure'", "'/group/velocity'", "'/density'"),
    ),
    "no such dataset, by colon": ("ConfigError", None, ("holds no array '/densty'", "nearest first", "'/density'")),
    "no such dataset in Zarr": ("ConfigError", None, ("holds no array '/group/y'", "'/group/x'")),
    "group": ("ConfigError", None, ("'/group' in 'several.h5' is a group", "'/group/pressure'", "'/group/velocity'")),
    "ambiguous": ("ConfigError", None, ("holds 3 arrays", "'/density'", "'/group/pressure'")),
    "strings": ("SourceError", 0, ("'/strings' in 'types.h5'", "strings")),
    "spec too long": ("ConfigError", None, ("P(None, None, None, 'a') has 4 entries", "3 axes")),
    "unknown mesh axis": ("ConfigError", None, ("P('a', 'q') names mesh axis 'q'", "'a' of size 2, 'b' of size 2")),
    "axis that does not divide": (
        "ConfigError",
        None,
        ("axis 0 of '/x' in 'odd.h5' has 7 elements", "P('a') splits it over 2 devices", "pad=0", "to 8"),
    ),
    "lossy float64": (
        "ConfigError",
        None,
        ("'/f8' in 'types.h5'", "float64", "half the digits", "'jax_enable_x64', True", "dtype='float32'"),
    ),
    "lossy int64": ("ConfigError", None, ("'/i8' in 'types.h5'", "int64", "wrap", "'jax_enable_x64', True", "dtype=")),
    "pad that does not fit": ("ConfigError", None, ("pad is nan", "int32", "pad=0")),
    "select out of range": ("ConfigError", None, ("select has 12 on axis 1", "12 elements", "'/x' in 'good.h5'")),
    "readers": ("ConfigError", None, ("readers is 'some'", "'parallel'")),
    "staging too small": (
        "ConfigError",
        None,
        ("one chunk of '/x' in 'good.h5' is 1.9 KiB", "staging is 1000", "Pass staging='"),
    ),
    "staging without unit": ("ConfigError", None, ("staging is 'many'", "'256MiB'")),
    "object of no format": ("ConfigError", None, ("object", "h5py.Dataset")),
    # the file
    "truncated": ("SourceError", 0, ("'truncated.h5'", "shorter than its own header says")),
    "damaged Zarr metadata": ("SourceError", 0, ("'lost.zarr'", "damaged")),
    "damaged chunk, cast and selected": ("SourceError", 3, (CHUNK, "'damaged.h5'", "[3:6, 11:12, 7:14]")),
    "a slow reader meets the damaged chunk last": ("SourceError", 2, (ON.format(2), CHUNK, "'damaged.h5'")),
    # what only some ranks see
    **{
        f"{what}, {way}": ("SourceError", rank, (ON.format(rank), *parts))
        for way in ("parallel", "direct")
        for what, rank, parts in (
            ("not on rank 2", 2, ("no file 'some.h5'",)),
            ("not on rank 0", 0, ("no file 'not-on-0.h5'",)),
            ("another file on rank 3", 3, ("'/x' in 'other.h5' has shape (7, 12, 20)", "(8, 12, 20)", "sees another file")),
        )
    },
    "open fails on ranks 1 and 3 alone": ("PeerError", 1, (ON.format(1), "1 more", "PermissionError: the disk went away")),
    "no memory for the pieces on rank 1": ("PeerError", 1, (ON.format(1), "MemoryError: cannot allocate 512 GiB")),
    "metadata cannot be read on rank 0": ("PeerError", 0, (ON.format(0), "PermissionError: the disk went away")),
    # ranks that pass something else
    "path differs": ("PeerError", 2, ("rank 2", "path = 'odd.h5'", "rank 0", "'good.h5'", SAME)),
    "spec differs": ("PeerError", 2, ("rank 2", "sharding = ", "P('b', 'a')", "rank 0", "P('a', 'b')", SAME)),
    "mesh differs": ("PeerError", 2, ("rank 2", "sharding = ", "devices [", "rank 0", "devices [", SAME)),
    "dataset differs": ("PeerError", 2, ("rank 2", "dataset = 'group/pressure'", "rank 0", "'density'", SAME)),
    "select differs": ("PeerError", 2, ("rank 2", "select = slice(0, 4", "rank 0", "slice(0, 8", SAME)),
    "dtype differs": ("PeerError", 2, ("rank 2", "dtype = float16", "rank 0", "None", SAME)),
    "pad differs": ("PeerError", 2, ("rank 2", "pad = 1", "rank 0", "0", SAME)),
    "readers differ": ("PeerError", 3, ("rank 3", "readers = 'direct'", "rank 0", "'root'", SAME)),
    "staging differs": ("PeerError", 2, ("rank 2", "staging = ", "rank 0", SAME)),
    "verify differs": ("PeerError", 2, ("rank 2", "verify = checksum", "rank 0", "index", SAME)),
    "timeout differs": ("PeerError", 2, ("rank 2", "timeout = 60.0", "rank 0", "900.0", SAME)),
    "rank 0 differs from all": ("PeerError", 1, ("rank 1", "P('a', 'b')", "rank 0", "P('b', 'a')", SAME)),
    "scatter cannot verify, on one rank": ("ConfigError", 2, (ON.format(2), "verify is 'full', but scatter has no file")),
    "an abstract mesh on one rank": ("ConfigError", 1, (ON.format(1), "load needs a mesh of devices, found an AbstractMesh")),
    "an argument that nobody thought of": ("ConfigError", 1, (ON.format(1),)),
    "a timeout beyond all numbers": ("ConfigError", 2, (ON.format(2), "OverflowError")),
    "what should be verified is no array, on one rank": ("ConfigError", 3, (ON.format(3), "x is a NoneType")),
    "a file cannot be closed on rank 1": ("PeerError", 1, (ON.format(1), "PermissionError: the disk went away")),
    "an alarm was handled before": ("SourceError", 0, ("no file 'gud.h5'",)),
    "one spec is wrong": ("ConfigError", 1, (ON.format(1), "P('a', 'q') names mesh axis 'q'")),
    "all wrong, each its own way": ("ConfigError", None, ("P('q0') names mesh axis 'q0'",)),
    "scatter root differs": ("PeerError", 2, ("rank 2", "scatter from rank 1", "rank 0", "scatter from rank 0", SAME)),
    "load here, scatter there": ("PeerError", 2, ("rank 2", "scatter from rank 0", "rank 0", "'good.h5'", SAME)),
    **{
        f"plans in another order, {way}, {sure}": ("PeerError", 1, ("rank 1", "'group/pressure'", "rank 0", "'density'", SAME))
        for way, sure in WAYS[:3]
    },
    "plans with other options": ("PeerError", 2, ("rank 2", "staging = 2097152", "rank 0", "1048576", SAME)),
    "load here, execute there": (
        "PeerError",
        3,
        ("rank 3 called load of 'several.h5'", "rank 0 called execute() of the plan for '/density' in 'several.h5'", ORDER),
    ),
    "execute on rank 0, verify elsewhere": ("PeerError", 1, ("rank 1 called verify", "rank 0 called execute()", ORDER)),
    "load here, verify there": ("PeerError", 1, ("rank 1 called verify of 'good.h5'", "rank 0 called load", ORDER)),
    "plan here, load there": ("PeerError", 2, ("rank 2 called plan of 'good.h5'", "rank 0 called load of 'good.h5'", ORDER)),
    "the caller fails between plan and execute on one rank": (
        "PeerError",
        2,
        ("rank 2 called plan", "rank 0 called exec", ORDER),
    ),
    **{
        f"{what}, {way}": ("SourceError", None, ("ranks that passed this array did not pass the same one", "shardload.scatter"))
        for what, ways in (
            ("NumPy arrays differ in an element", ("root", "parallel", "direct", "auto")),
            ("pieces in place of the array", ("root",)),
            ("HDF5 in memory differs", ("parallel",)),
            ("Zarr in memory differs", ("direct",)),
            ("open files differ", ("auto",)),
        )
        for way in ways
    },
    "memory maps differ": ("SourceError", None, ("did not pass the same one",)),
    "verify against other arrays": ("SourceError", None, ("did not pass the same one",)),
    "NumPy arrays differ outside of what is selected": (None, None, ()),  # no error
    "scatter's function raises": ("PeerError", 2, (ON.format(2), "FloatingPointError: the field diverged")),
    "scatter of a lossy array": ("ConfigError", None, ("the array on rank 1", "'jax_enable_x64', True", "dtype='float32'")),
    # a chunk that cannot be decoded
    **{
        f"damaged {what}, {way}, {sure}": ("SourceError", -1, parts)
        for way, sure in WAYS
        for what, parts in (
            ("chunk", (CHUNK, "'damaged.h5' could not be read", "filter")),
            ("Zarr chunk", (CHUNK, "'damaged.zarr' could not be read", "zstd")),
            ("Zarr v2 chunk", (CHUNK, "'damaged2.zarr' could not be read", "blosc")),
            ("Zarr shard", ("chunk (2, 2, 3) of '/' in", "'sharded.zarr' could not be read", "CRC-32C")),
        )
    },
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
MESSAGES, BOTH = {"SHARDLOAD_SHARED_MEMORY": "0"}, {"SHARDLOAD_RANKS_PER_NODE": "2"}
ONLY_MESSAGES = ("no memory for a block on rank 2", "no memory to pack on rank 0")


def make_mistakes(
    folder: Path, *names: str, mpi: str = "mpich", timeout: float = 240, env: Mapping[str, str] | None = None
) -> dict[str, list[Said]]:
    """What each rank raised in each case."""
    command = ["-W", "error", SCRIPT, folder, *names]
    job = run_job(command, 4, timeout=timeout, mpi=mpi, env={"PYTHONPATH": str(ROOT), **(env or {})}).check()
    ranks = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out in job.rank_stdout]
    return {said[0]["case"]: list(said) for said in zip(*ranks, strict=True)}


# Left to `make test-all`: three in four of the damaged chunks (of each kind, and each way of reading, there is one left), and
# ways of reading for what does not depend on them.
DAMAGED = ("chunk", "Zarr chunk", "Zarr v2 chunk", "Zarr shard")
ALL_DAMAGED = [[f"damaged {what}, {way}, {sure}" for what in DAMAGED] for way, sure in WAYS]
THOROUGH = {name for k, names in enumerate(ALL_DAMAGED) for at, name in enumerate(names) if at != k}
THOROUGH |= {"another file on rank 3, direct", "not on rank 0, parallel", "not on rank 2, direct"}
THOROUGH |= {f"plans in another order, {way}, {sure}" for way, sure in WAYS[1:3]}
THOROUGH |= {f"NumPy arrays differ in an element, {way}" for way in ("root", "direct", "auto")}
assert all(case in EXPECTED for case in THOROUGH)


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Said]]:
    names = [case for case in EXPECTED if case not in THOROUGH] if IS_QUICK else []
    return make_mistakes(tmp_path_factory.mktemp("errors"), *names)


# Most mistakes are found before anything is sent: with another library these are enough.
SOME = [*EXPECTED][::5]


@pytest.fixture(scope="module")
def mistakes_with_open_mpi(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Said]]:
    return make_mistakes(tmp_path_factory.mktemp("errors"), *SOME, mpi="openmpi")


def check(said: list[Said], kind: str | None, rank: int | None, parts: tuple[str, ...]) -> None:
    assert all(one == said[0] for one in said), "the ranks raise different errors"
    found = said[0]
    assert found["type"] == kind, found
    if kind is not None and rank != -1:  # -1: whichever reads the chunk
        assert found["rank"] == rank
    at = 0
    for part in parts:
        assert part in found["text"][at:], f"{part!r} does not follow in {found['text']!r}"
        at = found["text"].index(part, at)


@pytest.mark.parametrize("case", thorough(EXPECTED, THOROUGH))
def test_every_rank_raises_the_same(mistakes: dict[str, list[Said]], case: str) -> None:
    """Wrong if a rank went on by itself, waited for one that did not, or said something else."""
    check(mistakes[case], *EXPECTED[case])


@pytest.mark.thorough  # tests/mpi has errors with Open MPI, too
@pytest.mark.parametrize("case", SOME)
def test_every_rank_raises_the_same_with_open_mpi(mistakes_with_open_mpi: dict[str, list[Said]], case: str) -> None:
    """Wrong if a rank went on by itself, waited for one that did not, or said something else."""
    check(mistakes_with_open_mpi[case], *EXPECTED[case])


@pytest.mark.thorough  # where all cases are tried
def test_every_case_is_expected(mistakes: dict[str, list[Said]]) -> None:
    """Wrong if a case of the script were looked at by nobody."""
    assert set(mistakes) == set(EXPECTED)


@pytest.mark.parametrize("what", DAMAGED)
def test_the_damaged_chunk_is_named(mistakes: dict[str, list[Said]], what: str) -> None:
    """Wrong if a program could not tell which chunk of which array it was: the text is for people."""
    names = [name for names in ALL_DAMAGED for name in names if name.startswith(f"damaged {what},") and name in mistakes]
    assert names
    for name in names:
        for said in mistakes[name]:
            if what == "Zarr shard":
                assert (said["path"], said["dataset"], said["chunk"]) == ("sharded.zarr", "/", [2, 2, 3])
            else:
                assert (said["dataset"], said["chunk"]) == ("/group/x", [1, 2, 1])
                assert said["path"].startswith("damaged")


@pytest.fixture(scope="module", params=thorough(["mpich", "openmpi"], ["openmpi"]))
def by_messages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Said]]:
    return make_mistakes(tmp_path_factory.mktemp("messages"), *ALONE, mpi=request.param, timeout=90, env=MESSAGES)


@pytest.mark.parametrize("case", ALONE)
def test_rank_that_fails_in_the_middle(by_messages: dict[str, list[Said]], case: str) -> None:
    """Wrong if the others wait for the messages that it owes them: they would wait for ever."""
    check(by_messages[case], *ALONE[case])


NOTED = [case for case in ALONE if case not in ONLY_MESSAGES]


@pytest.fixture(
    scope="module", params=[pytest.param(("mpich", {}), marks=pytest.mark.thorough), ("openmpi", BOTH)], ids=["notes", "both"]
)
def by_notes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Said]]:
    mpi, env = request.param
    return make_mistakes(tmp_path_factory.mktemp("notes"), *NOTED, mpi=mpi, timeout=90, env=env)


@pytest.mark.parametrize("case", NOTED)
def test_rank_that_fails_in_the_middle_of_notes(by_notes: dict[str, list[Said]], case: str) -> None:
    """Wrong if the others wait for a note that never comes, or it for their answers."""
    check(by_notes[case], *ALONE[case])
