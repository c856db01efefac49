"""What do all ranks see when something breaks? `docs/design/faults.md`, made anew: ``python -m tests.jobs.faults``.

Each row of the first one is a job, or a case of one, of 4 ranks (`scripts/faults.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.jobs import write_faults
from tests.jobs.launch import ROOT, Job, run_job

__all__ = ["DEATHS", "EXPECTED", "INTERRUPTS", "Row", "check_survivors", "dies", "interrupted", "rows", "survivors"]

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


@dataclass(frozen=True)
class Row:
    """One fault, and what came of it: the same on every rank, or `seen` says what differs."""

    fault: str
    where: str
    seen: str
    seconds: float


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


def rows() -> Iterator[Row]:
    """All faults."""
    with tempfile.TemporaryDirectory() as name:
        for k, one in enumerate(zip(*survivors(_folder(name, "all")), strict=True)):
            first = one[0]
            same = all((s["type"], s["text"]) == (first["type"], first["text"]) for s in one)
            seen = f"{first['type']}: {first['text'][:90]}..." if first["type"] else "the right array"
            where = f"readers={first['readers']!r}{', in a tree' if first['tree'] else ''}"
            yield Row(first["case"], where, seen if same else f"ranks differ ({k})", max(s["seconds"] for s in one))
        for phase in DEATHS:
            job = dies(_folder(name, f"die-{phase}"), phase)
            yield Row("SIGKILL of a rank", phase, f"the job ended with status {job.returncode}", job.seconds)
        for one in zip(*interrupted(_folder(name, "interrupt")), strict=True):
            outcomes = ", ".join(sorted({said["outcome"] for said in one}))
            seen = f"{outcomes}; loaded well afterwards"
            names = {"SIGINT": "SIGINT (Ctrl-C) to all ranks", "SIGALRM": "an alarm that raises no `Exception`, on all ranks"}
            yield Row(names[one[0]["signal"]], one[0]["phase"], seen, max(said["seconds"] for said in one))


def _folder(parent: str, name: str) -> Path:
    folder = Path(parent, name)
    folder.mkdir()
    return folder


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| fault | where | what each of 4 ranks saw | seconds |\n|---|---|---|--:|", flush=True)
    for row in rows():
        print(f"| {row.fault} | {row.where} | {row.seen} | {row.seconds:.2f} |", flush=True)
    print("\n| a rank is killed in | when it comes to | what is there then | beside it |\n|---|---|---|---|", flush=True)
    for row_of_writes in write_faults.rows():
        print(f"| {' | '.join(row_of_writes)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
