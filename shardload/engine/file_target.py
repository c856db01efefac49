"""How do all ranks write one new file in rounds, of chunks that each has in memory?

Steps 2 to 10 of docs/design/save.md, for chunks that come from anywhere: from the shards of arrays, or from another file. Read
`formats.sink` first: a `Sink` is what the format plans of the file; that of rank 0 has the temporary open, and gives
chunks their places; a `Ticket` is what rank 0 tells the others of it. Each rank has an `Encoder` for each array, a `Writer`.

1. `begin`: rank 0 makes the temporary file, and all open it.
2. `take`, for each round: threads encode its chunks while the values of the next round are made, and write those whose places
   are known before. The sizes of the others go to rank 0, which says where they go, and the offsets come back. The threads
   write them while the next round is encoded.
3. `end`: all wait for the disk (fsync); rank 0 writes the metadata; each rank reads back what another one has written
   (`read_back`); rank 0 gives the file its name.

A rank that fails says so with the sizes of that round, and then all raise the same error: the temporary is removed, and what
had the name before is as it was.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Self, TypeVar

import deflate
import numpy as np

from shardload.comm.watchdog import Activity
from shardload.engine.read_back import N_FIELDS, ReadBack, WrittenChunk, checksum_of_values, plan_partners
from shardload.engine.session import Round, Session
from shardload.errors import StallError
from shardload.formats.sink import Sink, Ticket
from shardload.options import FILE, FULL, INDEX
from shardload.planning.region import Array, IntArray, Region, aligned, run_of
from shardload.planning.staging import KEPT_ROUNDS
from shardload.storage.target import as_write_error
from shardload.system.steps import steps_told_to
from shardload.system.thread_pool import Pool
from shardload.transfer.buffers import Piece, aligned_empty
from shardload.transfer.moves import ArrayMove

_N_COLUMNS = 4  # integers that rank 0 gets of a chunk: array, number, stored bytes, mask
_LEAVE_SECONDS = 5.0  # for ending what threads do, and removing the temporary, when the file system may hang
_TASKS_A_THREAD = 4  # tasks of a round for each thread, so that all end at about the same time
_DECODE_EVERY = 16  # with verify="file" one chunk in so many is decoded

Result = TypeVar("Result")

# What a thread does with a chunk: the phase whose seconds it counts for, in words, and how.
_Step = tuple[str, str, Callable[["Chunk"], None]]


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk on its way: first it has values, then stored bytes, then neither.

    Attributes
    ----------
    name : str
        Full name of its array, as in `Sink.arrays`.
    region : Region
        The chunk's elements, up to the array's edge. Of a contiguous array: any region that is one run of the file, such as
        rows of the first axis.
    values : ndarray
        Of the region's shape and the array's type, with any strides.
    array, number : int
        The number of the array, and of the chunk in its grid; of a contiguous array, of the first element.
    nbytes, nbytes_stored : int
        Bytes of its values, and of what is stored.
    is_sampled : bool
        Whether another rank shall decode it, to verify it.
    stored : bytes-like or None
        Its stored bytes, from when it is encoded until it is written.
    offset : int
        Where it is in the file; -1 until it has a place.
    crc, values_crc : int
        CRC-32 of the stored bytes, and of the values if it is sampled (else -1).
    """

    name: str
    region: Region
    values: Any
    # Set by `FileTarget`.
    array: int = -1
    number: int = -1
    nbytes: int = 0
    is_sampled: bool = False
    stored: Any = None
    offset: int = -1
    crc: int = 0
    values_crc: int = -1
    nbytes_stored: int = 0


@dataclass(frozen=True)
class WriteCounts:
    """What was written, in the whole job.

    Attributes
    ----------
    n_chunks, nbytes, nbytes_stored : int
        Chunks (and runs of contiguous arrays), bytes of their values, bytes in the file.
    n_read_back, n_decoded : int
        How many were read back by another rank, and how many of them were decoded.
    phases : mapping of str to float
        Seconds of this rank: ``"encode"``, ``"write"`` (summed over its threads), ``"sync"``, ``"finish"``, ``"read back"``.
    """

    n_chunks: int
    nbytes: int
    nbytes_stored: int
    n_read_back: int
    n_decoded: int
    phases: Mapping[str, float]


class FileTarget:
    """The `TargetEndpoint` of a new file, on one rank. `begin`, `take` and `end` are collective.

    A context manager: leaving it ends its threads and, if the file was not committed, removes the temporary.

    Parameters
    ----------
    session : Session
        Its ranks, whose watchdog has begun (`Watchdog.begin`), and its errors, which are kept until the ranks agree.
    sink : Sink
        What is in the new file: made on each rank of the same arguments.
    round_nbytes : int
        Bytes of the values that this rank receives in a round, each piece rounded up (`aligned`).
    verify : str
        ``"checksum"``: the stored bytes of each chunk are read back by another rank, and one chunk of each rank is
        decoded. ``"file"``: one in 16. ``"full"``: all. ``"index"``: nothing is read back.
    n_threads : int
        Threads that encode and write.
    on_progress : callable or None
        Called with the bytes of values that have been written, in the thread that makes the call.
    """

    def __init__(
        self,
        session: Session,
        sink: Sink,
        *,
        round_nbytes: int,
        verify: str,
        n_threads: int,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self._group, self._sink, self._errors, self._verify = session.group, sink, session.errors, verify
        self._n_threads, self._on_progress = n_threads, on_progress
        self._pool = Pool(self._n_threads, "shardload-save")
        self._encoders = list(sink.arrays.values())
        self._numbers = {name: number for number, name in enumerate(sink.arrays)}
        self._root_places = any(encoder.is_placed_by_root for encoder in self._encoders)
        # Memory for the values of rounds, in buffers that are used in turn, each from its beginning.
        self._round_nbytes, self._buffers = round_nbytes, list[Array]()
        self._turn = self._n_used = 0
        self._ticket = Ticket("")
        self._writer: Any = None
        self._catalog: Any = None  # on rank 0
        self._is_at_work = False  # rank 0's sink is in use by a thread
        self._is_stopped = False  # threads shall begin nothing more
        self._tasks: deque[list[Future[None]]] = deque()  # of threads, for each round whose values may still be in use
        self._chunks: list[Chunk] = []  # of the last round: rank 0 has to say yet where some go
        self._rows: list[IntArray] = []  # of what is written, for who reads it back
        self._n_chunks = self._nbytes = self._nbytes_stored = self._n_reported = 0
        self._seconds = dict.fromkeys(("encode", "write", "sync", "finish", "read back"), 0.0)
        self._lock = threading.Lock()
        self._doing: dict[int, tuple[str, Chunk]] = {}
        self._n_steps = self._n_checked = 0
        self._sampled: set[int] = set()  # arrays of which a chunk is decoded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the threads and, if the file was not committed, remove the temporary.

        After a stall the file system hangs, and after Ctrl-C it may: then what a thread has in hand stays, and so does the
        temporary. Otherwise threads have to end first: they may be making the temporary just now.
        """
        self._is_stopped = True
        stalled = kind is not None and issubclass(kind, StallError)
        interrupted = kind is not None and not issubclass(kind, Exception)
        may_hang = stalled or interrupted
        has_ended = self._pool.close(wait=not stalled, seconds=_LEAVE_SECONDS if may_hang else None)
        is_held = may_hang and not has_ended
        if self._writer is not None and not is_held:
            with suppress(Exception):
                self._writer.close()
        catalog = self._catalog
        if catalog is None or (is_held and self._is_at_work):
            return
        abandon, pool = partial(catalog.abandon, keeps=interrupted), Pool(1, "shardload-abandon")
        try:
            wait([pool.submit(abandon)], _LEAVE_SECONDS if may_hang else None)
        except RuntimeError:  # no thread can be started
            abandon()
        pool.close(wait=not may_hang)

    # --- the steps

    def begin(self) -> None:
        """Rank 0 makes the temporary, all ranks open it."""

        def create() -> bytes:
            # Noted by the thread itself: after Ctrl-C nobody takes its result, and the temporary must be removed.
            self._catalog = self._sink.create()
            return pickle.dumps(self._catalog.ticket)

        def open_writer() -> None:
            self._writer = self._sink.writer(self._ticket)

        self._group.watch.enter("create")
        self._ticket = pickle.loads(bytes(self._on_root(create)))  # of this job's rank 0, never of a file
        with self._errors, as_write_error(self._sink.path):
            self._in_thread(open_writer)
        self._agree()
        self._group.watch.enter("write")

    def make_room(self, moves: Sequence[ArrayMove]) -> None:
        """See `TargetEndpoint`. The memory is that of the round three before."""
        if len(self._tasks) == KEPT_ROUNDS:
            self._wait(self._tasks.popleft())
        if not self._buffers:
            self._buffers = [aligned_empty((self._round_nbytes,), np.dtype(np.uint8)) for _ in range(KEPT_ROUNDS)]
        self._turn, self._n_used = (self._turn + 1) % KEPT_ROUNDS, 0
        for move in moves:
            regions = ((number, move.flow.target(number)) for number in move.flow.targets(self._group.rank))
            move.targets = {number: self._piece(region, move.dtype) for number, region in regions if region is not None}

    def _piece(self, region: Region, dtype: np.dtype[Any]) -> Piece:
        """Memory for the values of a region. ValueError if the round has no more."""
        nbytes = region.size * dtype.itemsize
        data = self._buffers[self._turn][self._n_used : self._n_used + nbytes]
        self._n_used += aligned(nbytes)
        return Piece(region, data.view(dtype).reshape(region.shape))

    def take(self, round_: Round) -> None:
        """Have the chunks of a round encoded, and written where their places are known.

        Those of the round before which rank 0 places are written now: they are encoded, so that their sizes are known.
        """
        before, self._chunks = self._chunks, []
        self._group.watch.enter("write")
        self._tell_progress()
        self._tasks.append([])
        with self._errors:
            self._chunks = [self._prepare(chunk) for chunk in round_.values() if chunk.region.size]
            steps: list[_Step] = [("encode", "encoding", self._encode_one), ("write", "writing", self._put_if_placed)]
            self._tasks[-1] = self._share_out(self._chunks, steps)
        if len(self._tasks) > 1:
            self._place_and_write(before, -2)

    def end(self) -> WriteCounts:
        """Finish the file, read it back, and give it its name."""
        group = self._group
        if self._tasks:
            self._place_and_write(self._chunks, -1)
        for tasks in self._tasks:
            self._wait(tasks)
        self._tell_progress()
        if self._writer is not None and not self._errors:
            group.watch.enter("sync")
            with self._errors, self._timed("sync"):
                self._in_thread(self._writer.sync)
                self._writer.close()
        self._agree()
        group.watch.enter("finish")
        with self._timed("finish"):
            self._on_root(lambda: self._catalog.finish() or "")
        counts = [0, 0] if self._verify == INDEX else self._read_back()
        counts = [self._n_chunks, self._nbytes, self._nbytes_stored, *counts]
        n_chunks, nbytes, nbytes_stored, n_read_back, n_decoded = group.agree(self._errors.take(), counts)
        group.watch.enter("commit")
        self._on_root(lambda: self._catalog.commit() or "")
        return WriteCounts(n_chunks, nbytes, nbytes_stored, n_read_back, n_decoded, self._seconds)

    def _agree(self) -> None:
        self._group.agree(self._errors.take())

    def _on_root(self, call: Callable[[], str | bytes]) -> Any:
        """Do something with the sink on rank 0. If it fails, all ranks raise that error. Collective."""

        def run() -> str | bytes:
            self._is_at_work = True
            with as_write_error(self._sink.path):
                answer = self._in_thread(call)
            self._is_at_work = False
            return answer

        return self._group.tell(run, 0)

    def _tell_progress(self) -> None:
        done = self._nbytes  # threads go on counting
        n, self._n_reported = done - self._n_reported, done
        if n and self._on_progress is not None:
            with self._errors:
                self._on_progress(n)

    # --- chunks of a round

    def _prepare(self, chunk: Chunk) -> Chunk:
        """The chunk, with what follows from its region."""
        chunk.array = self._numbers[chunk.name]
        encoder = self._encoders[chunk.array]
        chunk.number, chunk.nbytes = encoder.number(chunk.region), chunk.values.nbytes
        if encoder.spec.chunks is None:
            run = run_of(encoder.spec.shape, chunk.region)
            if run is None:
                raise ValueError(f"region {chunk.region} of '{chunk.name}', of shape {encoder.spec.shape}, is not one run")
            chunk.number = run[0]
        chunk.is_sampled = self._sample(chunk.array)
        return chunk

    def _sample(self, array: int) -> bool:
        """Choose whether another rank shall decode the next chunk, which is of this array, and note it."""
        is_sampled = self._verify == FULL or (self._verify == FILE and self._n_checked % _DECODE_EVERY == 0)
        self._n_checked += 1
        if not is_sampled and array not in self._sampled and self._verify != INDEX:
            # The first of this rank, and the first of some arrays: those of the other ranks are other arrays'.
            is_sampled = not self._sampled or array % self._group.size == self._group.rank
        if is_sampled:
            self._sampled.add(array)
        return is_sampled

    def _place_and_write(self, chunks: Sequence[Chunk], turn: int) -> None:
        """Have the encoded chunks of a round (-1: the last one) written where rank 0 says, and note them to be read back.

        Raises what went wrong on any rank. Collective.
        """
        self._wait(self._tasks[turn])
        if self._root_places:
            placed = [chunk for chunk in chunks if self._encoders[chunk.array].is_placed_by_root]
            offsets = self._offsets_of(placed)
            with self._errors:  # the others go on, until they agree
                for chunk, offset in zip(placed, offsets, strict=True):
                    chunk.offset = offset
                self._tasks[turn] = self._share_out(placed, [("write", "writing", self._put_if_placed)])
        elif turn != -1:  # else all agree when the disk has it
            self._agree()
        if not self._errors:
            self._n_chunks += len(chunks)
            if self._verify != INDEX:
                rows = [WrittenChunk(c.array, c.number, c.offset, c.nbytes_stored, c.crc, c.values_crc) for c in chunks]
                self._rows.append(np.array(rows, dtype=np.int64).reshape(-1, N_FIELDS))

    def _offsets_of(self, chunks: Sequence[Chunk]) -> list[int]:
        """The offsets of chunks in the file, from rank 0. Raises what went wrong on any rank. Collective."""
        sizes = [(chunk.array, chunk.number, chunk.nbytes_stored, chunk.stored.mask) for chunk in chunks if not self._errors]
        message = np.array([bool(self._errors), *chain(*sizes)], dtype=np.int64)
        answer: list[int] = self._group.ask_root(message, self._answers).tolist()
        if answer[0]:
            self._agree()
        return answer[1:]

    def _answers(self, messages: list[IntArray]) -> list[IntArray]:
        """On rank 0: ``[must_stop, offset of each chunk]``, for ``[has_failed, (array, number, nbytes, mask) of each]``."""
        rows_by_rank = [message[1:].reshape(-1, _N_COLUMNS) for message in messages]
        rows, has_failed = np.concatenate(rows_by_rank), any(message[0] for message in messages)
        offsets = np.zeros(len(rows), dtype=np.int64)
        if not has_failed:
            with self._errors:
                for array in np.unique(rows[:, 0]).tolist():
                    of_array = np.flatnonzero(rows[:, 0] == array)
                    offsets[of_array] = self._catalog.allocate(self._encoders[array].name, *rows[of_array, 1:].T)
        must_stop = [int(bool(self._errors) or has_failed)]
        ends = np.cumsum([len(rows) for rows in rows_by_rank])
        return [np.concatenate([must_stop, offsets_of_rank]) for offsets_of_rank in np.split(offsets, ends[:-1])]

    def _read_back(self) -> list[int]:
        """Read back what another rank has written: how many chunks, and how many were decoded. Collective."""
        group = self._group
        group.watch.enter("read back")
        written, self._rows = np.concatenate([np.empty((0, N_FIELDS), np.int64), *self._rows]).reshape(-1), []
        partners = plan_partners(group.machine.leaders)
        source = partners.index(group.rank)
        rows = group.pass_on(written, partners[group.rank], source)
        del written
        with self._errors, self._timed("read back"):
            read = ReadBack(self._sink, self._ticket, rows, source, group.rank)
            self._compare(read)
            return [read.n_stored, read.n_values]
        return [0, 0]

    def _compare(self, read: ReadBack) -> None:
        """Compare what was read. Not in `_read_back`, where a variable would keep an error while the call goes on: `let_go`."""
        tasks = [self._pool.submit(self._counting, task) for task in read.stored()]
        self._wait(tasks)
        for task in tasks:
            task.result()
        self._in_thread(partial(read.compare_values, self._count_step))

    def _count_step(self) -> bool:
        """Note that a thread has done something. False if there is nothing more to do."""
        self._n_steps += 1
        return not self._is_stopped

    # --- the thread that owns it waits for the others

    def _activity(self) -> Activity:
        try:
            words, chunk = next(iter(self._doing.values()))
        except (StopIteration, RuntimeError):  # nothing, or another thread has changed it just now
            return Activity(self._n_steps, f"writing the metadata of '{self._sink.path}'" if self._is_at_work else "")
        return Activity(self._n_steps, f"{words} {chunk.region} of '{chunk.name}' in '{self._sink.path}'")

    def _wait(self, futures: Sequence[Future[Any]]) -> None:
        """Return when all have ended. Their errors are not raised. StallError if nothing moves."""
        if all(future.done() for future in futures):
            return
        watch = self._group.watch
        with watch.attend(self._activity):
            while wait(futures, min(0.5, watch.nap_seconds)).not_done:
                watch.look()
        watch.moved()

    def _in_thread(self, call: Callable[[], Result]) -> Result:
        """The result of a call that may take long or hang: a thread makes it, and this one watches over the job."""
        future = self._pool.submit(self._counting, call)
        self._wait([future])
        try:
            result: Result = future.result()
        finally:
            del future  # it has the error that is raised here: see `let_go`
        return result

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add the seconds that are spent inside to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - started

    def _share_out(self, chunks: Sequence[Chunk], steps: Sequence[_Step]) -> list[Future[None]]:
        """Start tasks that do some steps, in this order, with some chunks each."""
        n = min(len(chunks), _TASKS_A_THREAD * self._n_threads)
        return [self._pool.submit(self._do, chunks[k::n], steps) for k in range(n)]

    # --- its threads

    def _counting(self, call: Callable[[], Result]) -> Result:
        """The result of a call, whose steps are counted (`system.steps`)."""
        with steps_told_to(self._count_step):
            return call()

    def _do(self, chunks: Sequence[Chunk], steps: Sequence[_Step]) -> None:
        """Do some steps with each chunk, until one fails, or another rank has failed."""
        for chunk in chunks:
            for phase, words, step in steps:
                if self._is_stopped:
                    return
                self._doing[id(chunk)] = words, chunk
                started = time.perf_counter()
                try:
                    step(chunk)
                except Exception as error:
                    self._errors.keep(error)
                    return
                finally:
                    with self._lock:
                        del self._doing[id(chunk)]
                        self._n_steps += 1
                        self._seconds[phase] += time.perf_counter() - started

    def _encode_one(self, chunk: Chunk) -> None:
        encoder = self._encoders[chunk.array]
        if chunk.is_sampled:
            chunk.values_crc = checksum_of_values(chunk.values)
        stored = encoder.encode(chunk.region, chunk.values)
        chunk.values, chunk.stored, chunk.nbytes_stored = None, stored, stored.nbytes
        if self._verify != INDEX:
            chunk.crc = int(deflate.crc32(memoryview(stored.data).cast("B")))
        if not encoder.is_placed_by_root:
            first = chunk.number if encoder.spec.chunks is None else 0  # the element of a contiguous array
            chunk.offset = self._ticket.offsets[encoder.name] + first * encoder.spec.dtype.itemsize

    def _put_if_placed(self, chunk: Chunk) -> None:
        if chunk.offset < 0:
            return  # rank 0 has to say first where it goes: `_place_and_write`
        stored, chunk.stored = chunk.stored, None
        self._writer.put(chunk.name, chunk.number, chunk.offset, stored)
        with self._lock:
            self._nbytes += chunk.nbytes
            self._nbytes_stored += chunk.nbytes_stored
