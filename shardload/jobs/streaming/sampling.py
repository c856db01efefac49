"""What does a stream give, apart from arrays? The options that no load has, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardload.options import OPTIONS

Window = int | tuple[int, ...]
IGNORE = "ignore"  # of `gaps`


@dataclass(frozen=True)
class Sampling:
    """The options of a stream that no load has. `shardload.stream` says what they mean.

    `window` and `scale`, which each array of a batch has for itself, are not among them.
    """

    along: str | int
    batch: int | None
    shuffle: int | None
    epochs: int | None
    remainder: str
    border: str
    gaps: str
    pool: int | str
    prefetch: int

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> Sampling:
        """Check the options. ConfigError names the one that is wrong."""
        return cls(**{field.name: OPTIONS[field.name].check(given[field.name]) for field in fields(cls)})
