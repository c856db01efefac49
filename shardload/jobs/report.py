"""What did a load do, what did it take, and what was proven? Figures for programs, and a line for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from shardload.arrays.verification import VerifyReport
from shardload.options import INDEX
from shardload.transfer.counters import Counters
from shardload.transfer.exchange import Moved
from shardload.units import format_nbytes

__all__ = ["LoadReport", "Phase", "join_proven", "make_report"]


@dataclass(frozen=True)
class Phase:
    """One phase of a load on this rank: seconds (summed over its threads) and bytes."""

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class LoadReport:
    """What an executed plan did.

    Attributes
    ----------
    seconds : float
        On this rank, from the start of `execute` to the assembled array.
    chunks_decoded : int
        Chunk decodes in the whole job, counted as they happened (0 where the file has no chunks).
    nbytes_read : int
        Bytes of values read from the file in the whole job.
    phases : mapping of str to Phase
        This rank's share: ``"read"`` (from the file, as stored), ``"decode"`` (with the reading, where the format's library
        does both), ``"exchange"`` (copies into the pieces), ``"device"`` (handing the pieces to JAX). They overlap.
    peak_staging_nbytes : int
        Most bytes that were in staging slots at a time on this rank (without the decoding threads' own).
    proven : VerifyReport
        What was proven of the array.
    chunks_missing : int
        Chunks of the selection that are not stored in the file, whose values are its fill value: in the whole job, each once.
        1 for an array without chunks that was never written.
    """

    seconds: float
    chunks_decoded: int
    nbytes_read: int
    phases: Mapping[str, Phase]
    peak_staging_nbytes: int
    proven: VerifyReport
    chunks_missing: int = 0

    def __str__(self) -> str:
        """For a person: one line."""
        parts = [f"{name} {p.seconds:.3g} s, {format_nbytes(p.nbytes)}" for name, p in self.phases.items() if p.nbytes]
        missing = f" ({self.chunks_missing:,} not stored)" if self.chunks_missing else ""
        return (
            f"{self.seconds:.3g} s; {self.chunks_decoded:,} chunks decoded{missing} and {format_nbytes(self.nbytes_read)} read "
            "in the job; "
            f"on this rank: {'; '.join(parts)}; staging at most {format_nbytes(self.peak_staging_nbytes)}; "
            f"{self.proven}"
        )


def make_report(counters: Counters, moved: Moved, device: Phase) -> LoadReport:
    """What one rank did, before the ranks have summed it up."""
    phases = {
        "read": Phase(counters.read_seconds, counters.nbytes_stored or counters.nbytes_read),
        "decode": Phase(counters.decode_seconds, counters.nbytes_read if counters.chunks_decoded else 0),
        "exchange": Phase(counters.copy_seconds + moved.seconds, counters.nbytes_copied + moved.nbytes),
        "device": device,
    }
    proven = VerifyReport(INDEX, n_parts=counters.n_checksums + moved.n_checksums)  # the rest is for all ranks together
    return LoadReport(
        0.0, counters.chunks_decoded, counters.nbytes_read, phases, moved.peak_nbytes, proven, counters.chunks_missing
    )


def join_proven(proven: Sequence[VerifyReport], n_parts: int) -> VerifyReport:
    """What was proven of all arrays of a job: the counts added up; the digest where there is one array.

    Parts are counted for the job as a whole: `n_parts`.
    """
    if len(proven) == 1:
        return replace(proven[0], n_parts=n_parts)
    names = [part.name for part in fields(VerifyReport) if part.name not in ("how", "digest")]
    sums = {name: sum(getattr(one, name) for one in proven) for name in names}
    return VerifyReport(proven[0].how, **{**sums, "n_parts": n_parts})
