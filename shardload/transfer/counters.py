"""What did reading cost? Each task has its own counters, and `SourceReader` adds them up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["MOST_NAMED", "Counters"]

MOST_NAMED = 3  # missing chunks that are named in a message


@dataclass
class Counters:
    """What reading cost. Seconds are summed over the threads."""

    chunks_decoded: int = 0
    nbytes_read: int = 0
    nbytes_stored: int = 0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    copy_seconds: float = 0.0
    nbytes_copied: int = 0
    n_checksums: int = 0
    chunks_missing: int = 0
    missing: list[int] = field(default_factory=list)  # numbers of the first few

    def add(self, other: Counters) -> None:
        """Add what one task counted."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.missing = sorted(self.missing)[:MOST_NAMED]

    def add_missing(self, numbers: np.ndarray[Any, Any]) -> None:
        """Count missing chunks, given their numbers in ascending order."""
        self.chunks_missing += len(numbers)
        self.missing += numbers[: MOST_NAMED - len(self.missing)].tolist()
