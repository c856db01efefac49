"""What did a load do, what did it cost, and what was proven? A `LoadReport` has the numbers, and one line for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from shardload.arrays.verification import VerifyReport
from shardload.transfer.counters import Counters
from shardload.units import PrintedReport, counted, format_nbytes, number_text


@dataclass(frozen=True)
class Phase:
    """One phase of a load on this rank: seconds (summed over its threads) and bytes."""

    seconds: float
    nbytes: int


@dataclass(frozen=True, repr=False)
class ArrayReport(PrintedReport):
    """What a load did for one array of a tree, in the whole job.

    Attributes
    ----------
    where : str
        Its place in the tree: ``"['gas']"``.
    name : str
        Its name in the file: ``"'/gas' in 'snap.h5'"``.
    chunks_decoded, nbytes_read, chunks_missing : int
        As in `LoadReport`.
    proven : VerifyReport
        What was proven of it.
    """

    where: str
    name: str
    chunks_decoded: int
    nbytes_read: int
    chunks_missing: int
    proven: VerifyReport

    def __str__(self) -> str:
        """For a person: one line."""
        decoded = f"{counted(self.chunks_decoded, 'chunk')} decoded, " if self.chunks_decoded else ""
        missing = f"{self.chunks_missing:,} not stored, " if self.chunks_missing else ""
        return f"{self.where} {self.name}: {decoded}{missing}{format_nbytes(self.nbytes_read)} read; {self.proven}"


@dataclass(frozen=True, repr=False)
class LoadReport(PrintedReport):
    """What an executed plan did.

    Attributes
    ----------
    seconds : float
        Seconds on this rank, from the start of `execute` to the assembled array.
    chunks_decoded : int
        Chunk decodes in the whole job, counted as they happened (0 if the file has no chunks).
    nbytes_read : int
        Bytes of values read from the file in the whole job.
    phases : mapping of str to Phase
        Phases of this rank: ``"read"`` (from the file, as stored), ``"decode"`` (includes reading, if the format's library
        does both), ``"exchange"`` (copies into the pieces), ``"device"`` (handing the pieces to JAX). They overlap.
    peak_staging_nbytes : int
        Most bytes in staging buffers at a time on this rank (without the memory of the decoding threads).
    proven : VerifyReport
        What was proven of the array.
    chunks_missing : int
        Missing chunks in the selection, each counted once in the whole job: they are not stored in the file, and their values
        are its fill value. 1 for an array without chunks that was never written.
    arrays : tuple of ArrayReport
        For a tree: the report of each array. Empty for a load of one array.
    n_requests, nbytes_fetched, n_retries : int
        Requests to stores while values were loaded, in the whole job: how many, what they brought, and how many of them had
        failed before. 0 of local files.
    """

    seconds: float
    chunks_decoded: int
    nbytes_read: int
    phases: Mapping[str, Phase]
    peak_staging_nbytes: int
    proven: VerifyReport
    chunks_missing: int = 0
    arrays: tuple[ArrayReport, ...] = ()
    n_requests: int = 0
    nbytes_fetched: int = 0
    n_retries: int = 0

    def __str__(self) -> str:
        """For a person: one line, and for a tree one line more for each array."""
        lines = [self._total(), *(f"  {one}" for one in self.arrays)]
        return "\n".join(lines)

    def _total(self) -> str:
        parts = [
            f"{name} {number_text(p.seconds, 3)} s, {format_nbytes(p.nbytes)}" for name, p in self.phases.items() if p.nbytes
        ]
        missing = f" ({self.chunks_missing:,} not stored)" if self.chunks_missing else ""
        decoded = f"{counted(self.chunks_decoded, 'chunk')} decoded{missing}"
        asked = (
            f"; {counted(self.n_requests, 'request')}, {format_nbytes(self.nbytes_fetched)} fetched" if self.n_requests else ""
        )
        asked += f", {self.n_retries:,} again" if self.n_retries else ""
        return (
            f"{number_text(self.seconds, 3)} s; {decoded} and {format_nbytes(self.nbytes_read)} read{asked} in the job; "
            f"on this rank: {'; '.join(parts)}; staging at most {format_nbytes(self.peak_staging_nbytes)}; "
            f"{self.proven}"
        )


def phases_of(counters: Counters, device: Phase) -> dict[str, Phase]:
    """The phases of this rank."""
    return {
        "read": Phase(counters.read_seconds, counters.nbytes_stored or counters.nbytes_read),
        "decode": Phase(counters.decode_seconds, counters.nbytes_read if counters.chunks_decoded else 0),
        "exchange": Phase(counters.copy_seconds, counters.nbytes_copied + counters.nbytes_received),
        "device": device,
    }


def join_proven(proven: Sequence[VerifyReport], n_parts: int) -> VerifyReport:
    """What was proven of all arrays of a job: the sums of the counts, and the digest if there is one array.

    `n_parts` is the count of parts in the whole job.
    """
    if len(proven) == 1:
        return replace(proven[0], n_parts=n_parts)
    names = [part.name for part in fields(VerifyReport) if part.name not in ("how", "digest", "n_parts")]
    return VerifyReport(proven[0].how, n_parts=n_parts, **{name: sum(getattr(one, name) for one in proven) for name in names})
