"""How do rounds and batches follow each other, and which thread does what?

Without prefetch all is done inside `next`: rounds until the batch is there, then the batch. With it there are two threads:

- the *reader* does the rounds, one after the other, in the same order on all ranks. It alone calls MPI, over a communicator
  that nobody else has. It begins a round when the first batch of the round before is made, so steps of two rounds are held at
  most.
- the *maker* makes batches of steps, hands them to the devices, and puts them into a queue. It calls no MPI.

Each rank ends its rounds with one agreement more, its farewell: a rank that leaves early is named to those that wait for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from shardload.comm.group import Group
from shardload.engine.session import Round, Session, shared_nbytes
from shardload.errors import ConfigError, ShardloadError, StallError
from shardload.jobs.streaming.endpoints import BatchTarget, StreamSource, moves_of
from shardload.jobs.streaming.plan import EpochRounds, RoundReadings, StreamPlan


@dataclass(frozen=True)
class Batch:
    """A batch, and where it is in the stream.

    Attributes
    ----------
    arrays : list of jax.Array
        One for each leaf.
    epoch, first_sample, n_samples : int
        Its samples.
    """

    arrays: list[jax.Array]
    epoch: int
    first_sample: int
    n_samples: int


@dataclass
class _Run:
    """The rounds of an epoch, and the number of its first batch among all that are given."""

    epoch: EpochRounds
    first: int


class RoundReader:
    """The rounds of a stream on one rank, from some sample on.

    Parameters
    ----------
    plan : StreamPlan
        The stream.
    group : Group
        The ranks, over a communicator that nobody else uses.
    digest : str
        What the ranks have agreed on.
    timeout : float or None
        Seconds without progress after which all ranks fail.
    epoch, first_sample : int
        Where to begin.
    n_batches : int, optional
        How many batches to give; by default all.
    """

    def __init__(
        self,
        plan: StreamPlan,
        group: Group,
        digest: str,
        timeout: float | None,
        epoch: int,
        first_sample: int,
        n_batches: int | None = None,
    ) -> None:
        self.plan, self._group, self._timeout = plan, group, timeout
        self._digest, self._n_batches = digest, n_batches
        self._epoch, self._first_sample = epoch, first_sample
        self._opened = ExitStack()
        self._target: BatchTarget | None = None
        self._runs = self._make_runs()
        self._current: _Run | None = None
        self._pending: list[tuple[_Run, RoundReadings]] = []
        self._maker_runs: list[_Run] = []
        self.n_ready = 0  # batches of which all steps are there
        self.n_made = 0
        self.is_done = False
        self.failed: tuple[int, BaseException] | None = None
        self._is_gone = False

    def _make_runs(self) -> Iterator[_Run]:
        plan, epoch, sample, first, left = self.plan, self._epoch, self._first_sample, 0, self._n_batches
        while plan.epochs is None or epoch < plan.epochs:
            rounds = EpochRounds(plan, epoch, sample)
            if left is not None and rounds.n_batches > left:
                rounds = EpochRounds(plan, epoch, sample, left)
            yield _Run(rounds, first)
            first += rounds.n_batches
            left = None if left is None else left - rounds.n_batches
            epoch, sample = epoch + 1, 0
            if left == 0 or (not rounds.n_batches and plan.epochs is None and epoch > self._epoch + 1):
                return

    # --- rounds: collective

    def begin(self) -> None:
        """Make the session. Collective."""
        plan, group = self.plan, self._group
        self._opened.enter_context(group.call(self._timeout))
        group.watch.begin("the first round of a stream", self._timeout)
        _ = group.machine
        nbytes = shared_nbytes(plan.staging) if group.size > 1 else None
        checksums = plan.arrays[0].options.checksums
        session = Session(group, self._digest, shared_nbytes=nbytes, checksums=checksums)
        self.session = self._opened.enter_context(session)
        self.source = StreamSource(plan, group.rank)
        self._target = BatchTarget(plan, group.rank, self.session)
        self._target.watch(self.source)
        self._next_run()

    def _next_run(self) -> bool:
        run = next(self._runs, None)
        if run is None:
            return False
        self._current = run
        self._pending = [(run, round_) for round_ in run.epoch.rounds]
        self._maker_runs.append(run)
        return True

    @property
    def next_batch(self) -> int | None:
        """The first batch that needs the next round; None if there is none."""
        while not self._pending:
            if self._current is not None:
                self.n_ready = self._current.first + self._current.epoch.n_batches
            if not self._next_run():
                return None
        run, round_ = self._pending[0]
        return run.first + round_.batch

    def read_round(self) -> None:
        """Do the next round. Collective. ShardloadError, the same on all ranks, once single readings were tried one by one."""
        batch = self.next_batch
        if batch is None:
            return
        run, round_ = self._pending.pop(0)
        self._group.watch.begin(f"batch {batch} of a stream", self._timeout)
        try:
            self._read(run, round_)
        except StallError:
            raise
        except ShardloadError:
            if len(round_.readings) == 1 or self._is_gone:
                raise
            # The batches before the damaged chunk can be given all the same.
            single = round_.one_by_one(run.epoch.batches_of(round_))
            self._pending[:0] = [(run, one) for one in single]
            return
        self._group.watch.close()
        after = self.next_batch
        self.n_ready = self.n_ready if after is None else after

    def _read(self, run: _Run, round_: RoundReadings) -> None:
        if self._target is None:
            raise ConfigError("the stream has not begun")
        moves = moves_of(self.plan, run.epoch, round_)
        staged = Round(moves, self.plan.staging, self._group.size > 1)
        self.session.move(staged, self.source, self._target)
        self._target.take(staged)

    def farewell(self, error: BaseException | None = None) -> None:
        """Take part in the agreement that another rank's next round, or its farewell, begins with. Collective."""
        self._is_gone = True
        if self._group.size > 1:
            self._group.watch.begin("the end of a stream", self._timeout)
            self._group.agree(error)
            self._group.watch.close()

    def close(self, error: BaseException | None = None) -> None:
        """End threads and close files. Not collective."""
        kind = None if error is None else type(error)
        if self._target is not None:
            self.source.close(kind)
        self._opened.__exit__(kind, error, None)

    # --- batches: not collective

    def make_batch(self) -> Batch | None:
        """Make the next batch of steps that are there; None at the end."""
        while self._maker_runs and self.n_made >= self._maker_runs[0].first + self._maker_runs[0].epoch.n_batches:
            if len(self._maker_runs) == 1:
                return None
            self._maker_runs.pop(0)
        if not self._maker_runs or self._target is None:
            return None
        run = self._maker_runs[0]
        number = self.n_made - run.first
        arrays = self._target.batch(run.epoch, number)
        self.n_made += 1
        batch = self.plan.batch
        n_samples = min(batch, len(run.epoch.anchors) - number * batch)
        return Batch(arrays, run.epoch.epoch, run.epoch.first_sample + number * batch, n_samples)


_END: Any = object()


class Inline:
    """Batches that are read when they are asked for."""

    def __init__(self, reader: RoundReader) -> None:
        self._reader, self._is_open = reader, True
        reader.begin()

    def next(self) -> Batch | None:
        """The next batch; None at the end. Collective."""
        reader = self._reader
        try:
            while True:
                batch = reader.next_batch
                if batch is None or batch > reader.n_made:
                    break
                reader.read_round()
            return reader.make_batch()
        except BaseException as error:
            self._is_open = False
            reader.close(error)
            raise

    def close(self, is_early: bool, wait: bool = True) -> None:
        """End the stream."""
        if self._is_open:
            self._is_open = False
            self._reader.close()


class Ahead:
    """Batches that two threads make ahead.

    Parameters
    ----------
    reader : RoundReader
        What they do.
    prefetch : int
        Batches that are made ahead.
    """

    def __init__(self, reader: RoundReader, prefetch: int) -> None:
        self._reader = reader
        self._queue: queue.Queue[Any] = queue.Queue(prefetch)
        self._changed = threading.Condition()
        self._is_stopped = self._is_read = False
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), name=f"shardload-stream-{name}", daemon=True)
            for name, run in (("reader", self._read), ("maker", self._make))
        ]
        for thread in self._threads:
            thread.start()

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> bool:
        """Wait until something is so; False if the stream is stopped first."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or is_so())
            return not self._is_stopped

    def _read(self) -> None:
        reader, error = self._reader, None
        began = 0  # the first batch of the round before
        try:
            reader.begin()
            while (batch := reader.next_batch) is not None:
                if not self._wait(partial(self._has_made, began)):
                    break
                reader.read_round()
                began = batch
                with self._changed:
                    self._changed.notify_all()
            with self._changed:
                self._is_read = reader.next_batch is None
                self._changed.notify_all()
            left = (
                None
                if self._is_read
                else ConfigError(
                    f"rank {reader._group.rank} has left the stream after batch {reader.n_made}, but others wait for its part: "
                    "take the same number of batches on all ranks"
                )
            )
            try:
                reader.farewell(left)
            except StallError:
                raise
            except ShardloadError:
                pass  # told to those who wait; this rank has all it wants
        except BaseException as failed:
            error = failed
            raise
        finally:
            reader.close(error)

    def _has_made(self, n_batches: int) -> bool:
        return self._reader.n_made >= n_batches

    def _make(self) -> None:
        reader = self._reader
        while True:
            if not self._wait(lambda: self._is_read or self._error is not None or reader.n_made < reader.n_ready):
                return
            if self._error is not None and reader.n_made >= reader.n_ready:
                self._put(self._error)
                return
            batch = reader.make_batch()
            with self._changed:
                self._changed.notify_all()
            if not self._put(_END if batch is None else batch) or batch is None:
                return

    def _put(self, item: Any) -> bool:
        while not self._is_stopped:
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def next(self) -> Batch | None:
        """The next batch; None at the end."""
        while True:
            try:
                item = self._queue.get(timeout=0.2)
            except queue.Empty:
                if self._error is not None and not self._threads[1].is_alive() and self._queue.empty():
                    raise self._error from None
                continue
            if isinstance(item, BaseException):
                raise item
            return None if item is _END else item

    def close(self, is_early: bool, wait: bool = True) -> None:
        """End the stream: the threads end after the round that is under way."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        if wait:
            for thread in self._threads:
                thread.join()
