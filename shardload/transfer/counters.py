"""What did reading and moving cost? Each task has its own counters; `SourceReader` and `Session` add them up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

MOST_NAMED = 3  # missing chunks that are named in a message


@dataclass
class Counters:
    """What reading and moving cost on this rank. Seconds are summed over the threads.

    `exchange_seconds` is how long exchanges took, `nbytes_received` what came from other ranks, `peak_nbytes` the most bytes in
    staging buffers at a time.
    """

    chunks_decoded: int = 0
    nbytes_read: int = 0
    nbytes_stored: int = 0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    copy_seconds: float = 0.0
    nbytes_copied: int = 0
    n_checksums: int = 0
    chunks_missing: int = 0
    exchange_seconds: float = 0.0
    nbytes_received: int = 0
    peak_nbytes: int = 0
    missing: list[int] = field(default_factory=list)  # numbers of the first few

    def add(self, other: Counters) -> None:
        """Add what one task, array or round counted."""
        peak_nbytes = max(self.peak_nbytes, other.peak_nbytes)
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.peak_nbytes = peak_nbytes
        self.missing = sorted(self.missing)[:MOST_NAMED]

    def add_missing(self, numbers: np.ndarray[Any, Any]) -> None:
        """Count missing chunks, given their numbers in ascending order."""
        self.chunks_missing += len(numbers)
        self.missing += numbers[: MOST_NAMED - len(self.missing)].tolist()
