"""What does ``shardload bench-stream`` make of the times that it takes?"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self

import pytest

from shardload.comm.group import Group

bench_stream = importlib.import_module("shardload.cli.bench_stream")


class Opened:
    """A stream, of which the first batch comes after some seconds, each other one 0.25 s after it is asked for."""

    plan = SimpleNamespace(cost=(1.0, 1, 0))
    report = SimpleNamespace(chunks_decoded=1)

    def __init__(self, clock: list[float], first: float) -> None:
        self.clock, self.first = clock, first

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Iterator[int]:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __next__(self) -> int:
        self.clock.append(0.25 if self.clock else self.first)
        return 0


@pytest.mark.parametrize(("n", "first", "n_taken"), [(2, 1.0, 2), (5, 1.0, 5), (5, 100.0, 2)])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_a_rate_is_of_the_times_between_batches(
    n: int, first: float, n_taken: int, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if two batches, with one time between them, were twice as fast, or a first one that takes longer than all may
    take were all, at a million a second."""
    clock: list[float] = []
    times = SimpleNamespace(perf_counter=lambda: sum(clock), process_time=lambda: 0.0, sleep=clock.append)
    monkeypatch.setattr(bench_stream, "time", times)
    opened: Any = Opened(clock, first)
    figures = bench_stream._measure(opened, Group(None), 0.0, n, step)
    assert (figures["n_batches"], figures["first_batch"]) == (n_taken, first)
    assert figures["seconds_per_batch"] == 0.25 + step
    assert figures["stalled"] == pytest.approx(0.25 / (0.25 + step))
