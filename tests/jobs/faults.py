"""What do all ranks see when something breaks? `docs/design/faults.md` shows it: each row of its first table is a job of 4
ranks, or a case of one (`scripts/faults.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.jobs.launch import ROOT, Job, run_job

__all__ = ["DEATHS", "EXPECTED", "INTERRUPTS", "check_survivors", "dies", "interrupted", "survivors"]

SCRIPT = Path(__file__).parent / "scripts" / "faults.py"
PHASES = ("metadata", "planning", "opening", "reading", "exchange", "assembly")
DEATHS = ("metadata", "reading", "assembly")
INTERRUPTS, SIGNALS = PHASES, ("SIGINT", "SIGALRM")
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


def survivors(
    folder: Path, cases: Sequence[str] = tuple(EXPECTED), mpi: str = "mpich", third: int | None = None
) -> list[list[dict[str, Any]]]:
    """What each rank said in each case that a job survives; it loaded well after each. All ways of reading, or a third."""
    env = {} if third is None else {"FAULTS_THIRD": str(third)}
    return start(folder, *cases, timeout=240, mpi=mpi, env=env).check().said()


def check_survivors(
    ranks: list[list[dict[str, Any]]], cases: Sequence[str] = tuple(EXPECTED), third: int | None = None
) -> None:
    """Every rank saw the same, in each case and way of reading, and it is what `EXPECTED` has."""
    found = list(zip(*ranks, strict=True))
    assert {one[0]["case"] for one in found} == set(cases)
    ways = ([False] * 4 + [True], [False] * 2 + [True])  # in a tree or not, of damaged files and others
    for k, case in enumerate(cases):
        expected = [few if third is None else few[(k + third) % 3 :: 3] for few in ways]
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


def dies(folder: Path, phase: str, mpi: str = "mpich") -> Job:
    """A job of which one rank is killed (rank 0 reads metadata, rank 2 does the rest)."""
    return start(folder, "die", phase, "0" if phase == "metadata" else "2", mpi=mpi)


def interrupted(
    folder: Path,
    mpi: str = "mpich",
    phases: Sequence[str] = INTERRUPTS,
    which: str = "all",
) -> list[list[dict[str, Any]]]:
    """What each rank said after each signal in each phase; it loaded well after each. With `which`, one of both: ``0`` or
    ``1`` says whether in the first phase it is Ctrl-C or an alarm; in the next phase it is the other."""
    return start(folder, "interrupt", which, *phases, mpi=mpi).check().said()
