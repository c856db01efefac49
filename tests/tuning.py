"""For scripts of jobs: let small files take the way of large ones."""

from __future__ import annotations

from dataclasses import replace

from shardload.transfer import tuning

__all__ = ["tune"]


def tune(**sizes: int) -> None:
    """Change sizes of `shardload.transfer.tuning.Tuning` in this process, until they are changed again."""
    tuning.TUNING = replace(tuning.TUNING, **sizes)
