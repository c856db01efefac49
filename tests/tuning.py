"""Other sizes than the measured ones, so that small arrays are moved as large ones are. In a test: the fixture `tune`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from shardload.planning import tuning

__all__ = ["as_large", "as_usual", "tune", "tuned"]

_for_good = ExitStack()


@contextmanager
def tuned(**changes: Any) -> Iterator[tuning.Tuning]:
    """Let all jobs of this process go by these sizes meanwhile, in any thread."""
    before = tuning._default
    tuning._default = replace(before, **changes)
    try:
        yield tuning._default
    finally:
        tuning._default = before


def tune(**changes: Any) -> None:
    """From now on, in this process, jobs go by these sizes (`shardload.planning.tuning.Tuning`)."""
    _for_good.enter_context(tuned(**changes))


def as_large(**more: Any) -> None:
    """Reads and blocks are shared, chunks decoded alone or in batches and in threads, however small they are."""
    tune(**({"worth_sharing_nbytes": 0, "min_chunk_nbytes": 1, "inline_nbytes": -1, "reader_nbytes": 1} | more))


def as_usual() -> None:
    """Take it all back: the measured sizes."""
    _for_good.close()
