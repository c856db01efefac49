"""Does the watchdog see the work that rank 0 does alone, at many arrays or files?

Time is what the work itself counts: the calls of functions that it makes. They are counted in one run, with those at which it
said that a step is done. Then `tests.unit.waiting` lets two ranks live through it: rank 0 does nothing but its steps, and
rank 1 waits for it. All of the work takes some timeouts, one array much less than one.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import shardload
from shardload.comm.group import Group
from shardload.comm.watchdog import Watchdog
from shardload.engine.call import watched
from shardload.engine.read_back import ReadBack
from shardload.formats.hdf5.sink import Hdf5PlacedChunks, Hdf5Sink
from shardload.formats.zarr.sink import ZarrSink
from shardload.jobs.joining.join import _find
from shardload.jobs.joining.request import PartsRequest
from shardload.system.steps import step_done, steps_told_to
from tests.unit.files import stored_in, write_hdf5
from tests.unit.saving import quick_fsync
from tests.unit.waiting import TICK, TIMEOUT, Job

N = 60  # arrays, or files
ALL_SECONDS = 5 * TIMEOUT  # rank 1 waits less than two timeouts

__all__ = ["quick_fsync"]


def steps_in(work: Callable[[], object]) -> list[float]:
    """When the work says that a step is done, in parts of the whole; last its end."""
    n_calls, at = 0, list[int]()

    def calls(_: Any, event: str, __: Any) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    with steps_told_to(lambda: at.append(n_calls)):
        sys.setprofile(calls)
        try:
            work()
        finally:
            sys.setprofile(None)
    return [k / n_calls for k in (*at, n_calls)]


def check(work: Callable[[], object]) -> None:
    """The watchdog takes rank 0 for one that works; and, if it heard of no step, for one that hangs."""
    for steps, is_seen in ((steps_in(work), True), ([1.0], False)):
        job = Job(2)
        job.held.add(0)  # it looks nowhere but at its steps
        start = job.now
        for step in steps:
            while job.now < start + step * ALL_SECONDS:
                job.tick(TICK)
            if not job.raised:
                job.watches[0].step_done()
        assert bool(job.raised) is not is_seen, job.raised


def test_files_that_are_joined(tmp_path: Path) -> None:
    def write_parts(folder: Path, n: int) -> str:
        folder.mkdir()
        for k in range(n):
            write_hdf5(folder / f"{k}.h5", {"x": np.arange(3.0) + 3 * k, "same": np.arange(5)})
        return str(folder / "*.h5")

    few, many = write_parts(tmp_path / "few", 2), write_parts(tmp_path / "many", N)
    _find(PartsRequest.check(few, word="along", progress=False))
    check(lambda: _find(PartsRequest.check(many, word="along", progress=False)))


# --- how a call hears of it


def test_who_works_alone_in_a_call_answers_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Wrong if rank 0, which finds arrays in the thread that makes the call, neither counted nor looked meanwhile."""
    caplog.set_level(logging.DEBUG, "shardload")
    now, alone = 0.0, Group(None)
    alone.watch = Watchdog(0, 1, clock=lambda: now)
    with watched(alone, "work", TIMEOUT):
        for _ in range(20):
            now += alone.watch.nap_seconds * 4
            step_done()
    step_done()
    beats = [text.partition(": ")[2] for text in caplog.messages if text.startswith("rank 0, call ")]
    assert beats == [f"step {k}, phase begin" for k in range(1, 21)]


class Beats(logging.Handler):
    """Lets a thread wait for the watchdog's next beat."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.n, self.is_over, self.changed = 0, False, threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.changed:
            self.n += record.levelno == logging.DEBUG
            self.changed.notify_all()

    def wait(self) -> None:
        with self.changed:
            goal = self.n + 1
            self.changed.wait_for(lambda: self.n >= goal or self.is_over)

    def end(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()


@pytest.fixture
def slow(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, str], Beats]]:
    """``slow(owner, name)``: from now on that method takes a beat, in every thread but the one that makes the call."""
    caplog.set_level(logging.DEBUG, "shardload")
    beats_seen, log = Beats(), logging.getLogger("shardload")
    log.addHandler(beats_seen)

    def slow_down(owner: Any, name: str) -> Beats:
        method = getattr(owner, name)

        def wait(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                beats_seen.wait()
            return method(*arguments, **options)

        monkeypatch.setattr(owner, name, wait)
        return beats_seen

    yield slow_down
    beats_seen.end()
    log.removeHandler(beats_seen)


@pytest.mark.usefixtures("quick_fsync")
@pytest.mark.parametrize(
    ("suffix", "owner", "name"),
    [
        (".h5", Hdf5Sink, "_make"),  # in `create`
        (".h5", Hdf5PlacedChunks, "compare"),  # in `finish`
        (".zarr", ZarrSink, "_check_keys"),
        (".zarr", ReadBack, "_compare_bytes"),
    ],
)
def test_threads_that_write_metadata_are_no_stall(
    tmp_path: Path, slow: Callable[[Any, str], Beats], suffix: str, owner: Any, name: str
) -> None:
    """Each array takes a beat, and there are more of them than beats in the timeout. Wrong if the steps of a thread did not
    count: StallError in the middle of a save that goes on.
    """
    n, new = 14, tmp_path / f"new{suffix}"
    arrays = {f"g{k % 7}/v{k}": np.arange(6, dtype="f4") + k for k in range(n)}
    source = write_hdf5(tmp_path / "old.h5", arrays, chunks=(3,), compression="gzip")
    beats_seen = slow(owner, name)
    shardload.copy(source, new, timeout=0.4, comm=MPI.COMM_SELF.Dup())  # a communicator of its own: a stall is for ever
    assert beats_seen.n >= n
    for array, values in arrays.items():
        np.testing.assert_array_equal(stored_in(new, array), values)
