"""How do rounds and batches follow each other, and which thread does what?

Without prefetch all is done inside `next`: rounds until the batch is there, then the batch. With it there are two threads:

- the *reader* does the rounds, one after the other, in the same order on all ranks. It alone calls MPI, over a communicator
  that nobody else has. Round r + 1 starts once every batch that precedes the first batch of round r is made. So steps of at
  most two rounds are in memory. If a rank has nothing to do in round r before it is over, it begins to read blocks of r + 1.
- the *maker* makes batches of steps, and hands them to the devices, as long as fewer than `prefetch` wait for the program. It
  calls no MPI.

The reader of each rank ends with one agreement more, its farewell. A rank that leaves early is named to those that wait for it:
its farewell is their next round's agreement. Without prefetch a rank says it only if it leaves with an exception, in `close`;
else the watchdog names it.

The reader waits for the program in no call, so a program may compute for as long as it likes, if it does on all ranks.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import jax
import numpy as np

from shardload.comm.group import Group
from shardload.comm.heartbeat import leave_all
from shardload.comm.mpi import call_before_finalize, thread_level
from shardload.comm.watchdog import NOTICE_SECONDS
from shardload.engine.call import watched
from shardload.engine.session import Round, Session, shared_nbytes
from shardload.errors import PeerError, ShardloadError, SourceError, StallError
from shardload.formats.lookup import import_format
from shardload.jobs.consistency import check_same_objects, is_open
from shardload.jobs.streaming.endpoints import BatchTarget, StreamMove, StreamSource
from shardload.jobs.streaming.plan import EpochRounds, RoundReadings, StreamPlan
from shardload.system.garbage import let_go
from shardload.system.undo import Undo
from shardload.units import counted, format_nbytes

_log = logging.getLogger("shardload")
_FAREWELL_SECONDS = 5.0  # `close` waits so long for ranks that still compute; the farewell goes on without it
_ROUNDS_AHEAD = 8  # that are fetched from a store, as far as there is memory for it, while one is decoded


@dataclass(frozen=True)
class Batch:
    """A batch, and where it is in the stream.

    Attributes
    ----------
    arrays : list of jax.Array
        One for each leaf.
    anchors : ndarray of int
        The anchors of its samples.
    epoch, first_sample : int
        Its epoch, and the place of its first sample in it.
    """

    arrays: list[jax.Array]
    anchors: np.ndarray[Any, np.dtype[np.int64]]
    epoch: int
    first_sample: int


@dataclass
class StreamReport:
    """What the batches of an iterator have cost until now, with all that was read ahead.

    Attributes
    ----------
    chunks_decoded : int
        Chunk decodes in the whole job, counted as they happened (0 if the file has no chunks).
    nbytes_read : int
        Bytes of values read from the file in the whole job.
    rounds : int
        How often the ranks have read chunks together.
    waited_seconds : float
        Seconds that the program has waited for batches, on this rank.
    """

    chunks_decoded: int = 0
    nbytes_read: int = 0
    rounds: int = 0
    waited_seconds: float = 0.0

    def __str__(self) -> str:
        """For a person: one line."""
        return (
            f"{counted(self.chunks_decoded, 'chunk')} decoded, {format_nbytes(self.nbytes_read)} read in "
            f"{counted(self.rounds, 'round')}; waited {self.waited_seconds:.3g} s"
        )


class RoundReader:
    """The rounds of a stream on one rank, from some sample on.

    Rounds are read in one thread, and batches made in the same or another one.

    Parameters
    ----------
    plan : StreamPlan
        The stream.
    group : Group
        The ranks, over a communicator that nobody else uses. It is freed by `close`.
    digest : str
        What the ranks have agreed on.
    timeout : float or None
        Seconds without progress after which all ranks fail.
    epoch, first_sample : int
        Where to begin.
    n_batches : int, optional
        How many batches to give; by default all.

    Attributes
    ----------
    n_ready, n_made : int
        Batches of which all steps are there, and batches that are made.
    report : StreamReport
        What the rounds have cost.
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
        self.plan, self._group, self._timeout, self._digest = plan, group, timeout, digest
        self.rank = group.rank
        self._target = BatchTarget(plan, group.rank)
        self._runs = _runs(plan, epoch, first_sample, n_batches)
        self._next_run = next(self._runs, None)  # that is not planned yet
        self._epochs: deque[EpochRounds] = deque()  # those of which batches are still to be made
        self._pending: deque[RoundReadings] = deque()  # their rounds that are still to be done
        # How many rounds are fetched from a store while one is done.
        self._n_fetched = _ROUNDS_AHEAD if any(array.info.is_in_store for array in plan.arrays) else 0
        self._ahead: dict[RoundReadings, Round] = {}  # next rounds: what they move is known before it is their turn
        self._opened = ExitStack()
        self._versions: dict[str, Any] = {}  # see `check_same_objects`: of all ranks
        self.n_ready = self.n_made = 0
        self.report = StreamReport()
        self._title = f"the stream of {plan.arrays[0].info}"

    # --- rounds: collective

    def begin(self) -> None:
        """Make the session. Collective."""
        plan, group = self.plan, self._group
        self._opened.callback(group.free)
        if not plan.sampling.prefetch:  # else a farewell tells the others, also at the end of the program
            group.watch_departures()
        with watched(group, f"the beginning of {self._title}", self._timeout):
            _ = group.machine
            shared = shared_nbytes(plan.staging) if group.size > 1 else None
            session = Session(group, self._digest, shared_nbytes=shared, checksums=plan.arrays[0].options.checksums)
        self._session = self._opened.enter_context(session)
        self._source = StreamSource(plan, group.rank)
        self._opened.push(self._source.kept.close)
        # As the last, which is called first: before what closes files and shared memory.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        call_before_finalize(_end_all)

    def first_batch_of_next_round(self) -> int | None:
        """The number of the first batch that needs the next round; None if there is none. Plans the next epoch, if its rounds
        may begin: one at a time, because an epoch takes memory, and none while the program waits for the first batch.
        """
        if self._next_run is not None and (not self._pending or self._is_next_epoch_near()):
            epoch = EpochRounds(self.plan, *self._next_run)
            self._pending.extend(epoch.rounds())
            self._epochs.append(epoch)
            self._next_run = next(self._runs, None)
        return self._next_batch

    def _is_next_epoch_near(self) -> bool:
        is_planned = self._pending[0].epoch is not self._pending[-1].epoch
        n_before_their_turn = max(self._n_fetched, 1 if self.plan.sampling.prefetch else 0)  # see `_coming`
        return len(self._pending) <= n_before_their_turn and not is_planned and self.report.rounds > 0

    @property
    def _next_batch(self) -> int | None:
        """The same, also where the next epoch is not planned, or could not be."""
        if self._pending:
            return self._pending[0].batch
        return None if self._next_run is None else self._next_run[-1]

    def read_round(self) -> None:
        """Do the next round, which there must be. Collective.

        Raises
        ------
        ShardloadError
            The same on all ranks. If it is an error of the file, all batches that do not need the chunk are ready.
        """
        batch = self.first_batch_of_next_round()
        round_ = self._pending.popleft()
        try:
            with watched(self._group, f"batch {batch} of {self._title}", self._timeout):
                staged = self._read(round_)
        except SourceError:
            if round_.is_single:
                raise
            self._session.release()  # buffers that the failed exchange may still have
            self._source.kept.close()  # which the error may have interrupted
            self._ahead.clear()
            self._pending.extendleft(reversed(round_.epoch.one_by_one(round_)))
            return
        self._target.take(staged)  # not in the call of all ranks: after an error they could not hear of it any more
        self.report.rounds += 1
        batch = self._next_batch
        self.n_ready = round_.epoch.first_batch + round_.epoch.n_batches if batch is None else batch

    def _read(self, round_: RoundReadings) -> Round:
        staged = self._round(round_)
        del self._ahead[round_]
        try:
            self._session.move(staged, self._source, self._target, partial(self._coming, round_))
            versions: Mapping[str, Sequence[Any]] = {}
            with self._session.errors:
                self._source.check(staged.moves)
                versions_read = self._source.kept.versions_read.items()
                versions = {key: version for key, version in versions_read if self._versions.get(key) != [*version]}
            counts = [self._source.n_decoded, self._source.nbytes_read, len(versions)]
            decoded, nbytes, n_versions = self._session.agree(counts)
            if n_versions:
                check_same_objects(self._group, versions, self._versions)
        except SourceError as error:
            if round_.is_single:
                error.args = (f"{error}\n{self._needed_for(round_)}",)
            raise
        self._source.n_decoded = self._source.nbytes_read = 0
        self.report.chunks_decoded += decoded
        self.report.nbytes_read += nbytes
        return staged

    def _round(self, round_: RoundReadings) -> Round:
        """The `Round` of some readings. Of arrays in stores it knows what moves in the next ones, too."""
        following = islice((pending for pending in self._pending if pending is not round_), self._n_fetched)
        staged, *later = map(self._planned_round, (round_, *following))
        moves: Sequence[Any] = staged.moves
        for move in moves:
            move.later = [each for later_round in later for each in later_round.moves if each.array == move.array]
        return staged

    def _planned_round(self, round_: RoundReadings) -> Round:
        """The same, planned when it is first asked for."""
        if round_ not in self._ahead:
            moves: list[StreamMove] = []
            with self._session.errors:
                moves = [
                    StreamMove(array, self.plan.arrays[array], round_.epoch.flows(array, places), round_.epoch, places)
                    for array, places in round_.readings.items()
                ]
            # A rank that has failed until here answers the next agreement of the others, of whichever kind their round is.
            is_shared = self._group.size > 1 and not all(flow.stays for move in moves for flow in move.flows)
            self._ahead[round_] = Round(moves, self.plan.staging, is_shared)
        return self._ahead[round_]

    def _coming(self, round_: RoundReadings) -> Round | None:
        """The round after `round_`, if it may begin: without prefetch never, because it takes memory."""
        may_begin = self.plan.sampling.prefetch and self._pending and self.n_made >= round_.batch
        return self._round(self._pending[0]) if may_begin and not self._session.errors else None

    def _needed_for(self, round_: RoundReadings) -> str:
        """For which sample of which batch a round of one reading is done."""
        ((array, places),), epoch = round_.readings.items(), round_.epoch
        _, steps, samples = epoch.readings[array].uses(places.start, places.stop)
        first, size = int(samples.min()), self.plan.batch
        step, anchor = int(steps[samples == first][0]), int(epoch.anchors[first])
        return (
            f"It is needed for sample {first % size} of batch {epoch.first_batch + first // size} (step {step}, for the anchor "
            f"{anchor}; sample {epoch.first_sample + first} of epoch {epoch.epoch})"
        )

    def farewell_error(self, n_given: int, exit_reason: str) -> PeerError | None:
        """What the others are told if they wait for more of this rank; None if no round is left."""
        if self._next_batch is None:
            return None
        return PeerError(
            f"the program has left the stream after {n_given} batches{exit_reason}, but others go on, and all ranks read the "
            f"chunks for batch {self._next_batch} together: take the same number of batches on all ranks"
        )

    def say_farewell(self, error: BaseException | None) -> None:
        """Take part in the agreement with which another rank's next round, or its farewell, begins. Collective.

        `error` is for those who wait: this rank has all it wants. They may never hear of it: if they compute over all devices,
        they wait in JAX. So this rank warns of that. StallError if another one does not come.
        """
        if self._group.size == 1:
            return
        title = f"the end of {self._title}" + ("" if error is None else f", which rank {self._group.rank} has left early")
        try:
            with watched(self._group, title, self._timeout, warns=error is not None):
                self._group.agree(error, [0, 0, 0])  # as many counts as a session's
        except StallError:
            raise
        except ShardloadError:
            pass

    def close(self, error: BaseException | None = None) -> None:
        """End threads, close files, and free the communicator. Not collective."""
        self._opened.__exit__(None if error is None else type(error), error, None)

    # --- batches: not collective

    def make_batch(self) -> Batch | None:
        """Make the next batch of steps that are there; None at the end."""
        while self._epochs and self.n_made >= self._epochs[0].first_batch + self._epochs[0].n_batches:
            self._epochs.popleft()
        if not self._epochs:
            return None
        epoch, size = self._epochs[0], self.plan.batch
        number = self.n_made - epoch.first_batch
        arrays = self._target.batch(epoch, number)
        self.n_made += 1
        first = number * size
        return Batch(arrays, epoch.anchors[first : first + size], epoch.epoch, epoch.first_sample + first)


def _runs(plan: StreamPlan, epoch: int, sample: int, n_left: int | None) -> Iterator[tuple[int, int, int, int]]:
    """The epochs from some sample on, or only the next batches: of each its number, its first sample, how many batches are
    given, and how many were before.
    """
    n_before = 0
    while n_left != 0 and (plan.sampling.epochs is None or epoch < plan.sampling.epochs):
        n_batches = plan.n_batches(plan.n_samples - sample)
        n_batches = n_batches if n_left is None else min(n_left, n_batches)
        if n_batches:
            yield epoch, sample, n_batches, n_before
        elif not sample:
            return  # no epoch has a batch
        n_before += n_batches
        n_left = None if n_left is None else n_left - n_batches
        epoch, sample = epoch + 1, 0


def _reason_of(error: BaseException | None) -> str:
    """The error with which a program has left a stream, in words; empty without one."""
    if error is None:
        return ""
    text = f": {error}" if str(error) else ""  # Ctrl-C and many assertions have none
    return f" with {type(error).__name__}{text}"


class Inline:
    """Batches that are read when they are asked for, in the thread that asks."""

    def __init__(self, reader: RoundReader) -> None:
        self._reader: RoundReader | None = reader
        self._thread = threading.get_ident()
        self._is_error_shared = False  # all ranks have it, so that nobody waits
        _open.add(self)
        with Undo(lambda: self.close(sys.exc_info()[1])):
            reader.begin()

    def next(self) -> Batch | None:
        """The next batch; None at the end. Collective."""
        reader, began = self._reader, time.perf_counter()
        if reader is None:
            return None
        try:
            while reader.n_made >= reader.n_ready and reader.first_batch_of_next_round() is not None:
                try:
                    reader.read_round()
                except ShardloadError:
                    self._is_error_shared = True
                    raise
            return reader.make_batch()
        finally:
            reader.report.waited_seconds += time.perf_counter() - began

    def close(self, error: BaseException | None = None, wait: bool = True) -> None:
        """End the stream on this rank: `error` is what the program left it with. Not collective."""
        reader, self._reader = self._reader, None
        this_thread = threading.get_ident()
        for pair in [pair for pair in _readers_to_close if pair[0] == this_thread]:  # that were dropped in other threads
            _readers_to_close.remove(pair)
            pair[1].close()
        if reader is None:
            return
        if this_thread == self._thread or thread_level() in ("", "MULTIPLE"):
            if isinstance(error, Exception) and not self._is_error_shared:
                farewell = reader.farewell_error(reader.n_made, _reason_of(error))
                try:
                    if farewell is not None:
                        reader.say_farewell(farewell)
                except StallError as stall:
                    error = stall
            reader.close(error)
        else:
            _readers_to_close.append((self._thread, reader))  # garbage is collected in any thread, and only one may call MPI

    end = close


_readers_to_close: list[tuple[int, RoundReader]] = []  # each with the thread that may


class ReadAhead:
    """Batches that two threads make ahead.

    Parameters
    ----------
    reader : RoundReader
        What they do.
    prefetch : int
        Batches that are made ahead.
    """

    def __init__(self, reader: RoundReader, prefetch: int) -> None:
        for array in reader.plan.arrays:
            if not is_open(array.handle):
                import_format(array.info, array.options.access)
        self._report, self._prefetch, self._rank = reader.report, prefetch, reader.rank
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._is_stopped = False
        self._is_read = self._is_made = False  # the threads have come to their ends
        self._error: BaseException | None = None  # why
        self._is_told = False  # the program asks for a batch, and gets the error
        self._exit_reason = ""
        self._n_given = 0
        self._threads = [
            threading.Thread(target=self._run, args=(main, reader), name=f"shardload-stream-{name}", daemon=True)
            for name, main in (("reader", self._read), ("maker", self._make))
        ]
        _open.add(self)
        try:
            for thread in reversed(self._threads):  # the reader last: without it this thread may tell the others
                thread.start()
        except RuntimeError as error:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self.close()
            Inline(reader).close(error)
            raise

    def _run(self, main: Callable[[RoundReader], None], reader: RoundReader) -> None:
        """What a thread does."""
        try:
            main(reader)
        except BaseException as error:
            let_go(error)
            with self._changed:
                self._error = self._error or error
        with self._changed:
            self._is_made |= main == self._make
            self._is_read |= main == self._read
            self._changed.notify_all()
        if main == self._read and isinstance(self._error, PeerError):
            self._warn_of(self._error)

    def _warn_of(self, error: PeerError) -> None:
        """Warn of another rank's error if the program does not come for it: it may wait in JAX for that rank."""
        with self._changed:
            is_told = self._changed.wait_for(lambda: self._is_stopped or self._is_told, NOTICE_SECONDS)
        if not is_told and self._rank == (1 if error.rank == 0 else 0):
            _log.warning("%s. The program here asks for no batch: if it computes over all devices, it may wait for ever", error)

    def _wait(self, is_so: Callable[[], bool]) -> bool:
        """Wait until `is_so` is true; False if the stream ends before."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._error is not None or is_so())
            return not self._is_stopped and self._error is None

    # --- the reader

    def _read(self, reader: RoundReader) -> None:
        try:
            reader.begin()
            try:
                self._read_all(reader)
            except ShardloadError:
                raise  # all ranks have it
            except Exception as error:
                self._error = self._error or error
            reader.say_farewell(self._error or reader.farewell_error(self._n_given, self._exit_reason))
        finally:
            reader.close(sys.exc_info()[1])

    def _read_all(self, reader: RoundReader) -> None:
        began = 0  # the first batch of the round before
        while (batch := reader.first_batch_of_next_round()) is not None and self._wait(lambda: reader.n_made >= began):  # noqa: B023
            reader.read_round()
            began = batch
            with self._changed:
                self._changed.notify_all()

    # --- the maker

    def _make(self, reader: RoundReader) -> None:
        def is_my_turn() -> bool:
            has_room = len(self._batches) < self._prefetch
            can_or_never_will = self._is_read or self._error is not None or reader.n_made < reader.n_ready
            return self._is_stopped or (has_room and can_or_never_will)

        while True:
            with self._changed:
                self._changed.wait_for(is_my_turn)
                if self._is_stopped or reader.n_made >= reader.n_ready:
                    return
            batch = reader.make_batch()
            with self._changed:
                if batch is not None and not self._is_stopped:
                    self._batches.append(batch)
                self._changed.notify_all()
            del batch  # it is the program's

    # --- the program

    def next(self) -> Batch | None:
        """The next batch; None at the end."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._is_made or self._is_stopped)
            batch = self._batches.popleft() if self._batches and not self._is_stopped else None
            self._n_given += batch is not None
            self._changed.notify_all()
        self._report.waited_seconds += time.perf_counter() - began
        if batch is None and self._error is not None:
            with self._changed:
                self._is_told = True
                self._changed.notify_all()
            for thread in self._threads:
                thread.join(_FAREWELL_SECONDS)
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error
        return batch

    def close(self, error: BaseException | None = None, wait: bool = True) -> None:
        """End the stream on this rank, as `Inline.close`. The threads end after the round that is under way, and the farewell.

        Other ranks may compute for a while before they take part in that, or never come. Then the reader is left to itself, and
        ends by itself: at the latest when nothing has moved for `timeout` seconds. The end of the interpreter waits for it.
        """
        with self._changed:
            self._exit_reason = _reason_of(error)
            self._is_stopped = True
            self._batches.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for thread in self._threads if wait else ():
            thread.join(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Close, and wait until the threads have ended, however long it takes."""
        self.close()
        for thread in self._threads:
            thread.join()


_open: weakref.WeakSet[Inline | ReadAhead] = weakref.WeakSet()


def _end_all() -> None:
    """At exit, or before MPI ends: end the streams that are open. After that no thread may call MPI.

    Other ranks may take long to come to their farewell, or wait for this one in another call: they hear that it never comes.
    """
    for batches in [*_open]:
        batches.close()
    leave_all()
    for batches in [*_open]:
        batches.end()
