"""How do all ranks together write one new file, of chunks that each rank has in memory?

Steps 2 to 10 of docs/design/save.md, for chunks that come from anywhere: from the shards of arrays (`saving`), or from another
file. Each rank gives an iterator of *rounds*, and a round is a list of `Values`: the chunks that this rank owns, with their
values. `write_file` does the rest:

1. Rank 0 makes the temporary, and all open it.
2. In each round: threads encode while the values of the next round are made. The sizes go to rank 0, which says where the
   chunks go, and the offsets come back. The threads write while the next round is encoded.
3. All wait for the disk (fsync); rank 0 writes the metadata.
4. Each rank reads back what another one has written (`read_back`).
5. Rank 0 gives the file its name.

If a rank does not see the temporary that rank 0 made (another file system is mounted there), or if the caller asks for it, the
others send their stored chunks to rank 0, which writes all of them.

A rank that fails says so with the sizes of that round, and then all raise the same error: the temporary is removed, and what
had the name before is as it was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import deflate
import numpy as np

from shardload.comm.group import Group
from shardload.errors import StallError
from shardload.formats.sink import Catalog, Encoder, Sink, Stored, Ticket, Writer
from shardload.formats.target import named
from shardload.jobs.writing.read_back import Notes, ReadBack, checksum_of_values
from shardload.options import FILE, FULL, INDEX
from shardload.planning.blocks import run_of
from shardload.planning.partners import plan_partners
from shardload.planning.region import Region
from shardload.system.garbage import let_go
from shardload.system.interruption import let_interruption_pass
from shardload.system.thread_pool import Pool
from shardload.units import first_ranks

__all__ = ["KEPT_ROUNDS", "Values", "Written", "write_file"]

KEPT_ROUNDS = 3
"""A round's values may change when the third round after it is asked for: a ring of three buffers is enough. Their stored bytes
take up to two rounds more, so that memory is bounded by five rounds."""

_TASKS_A_THREAD = 4  # tasks of a round for each thread, so that all end at about the same time
_DECODED_IN_FILE = 16  # one chunk in so many is decoded by verify="file"
_N_COLUMNS = 4  # integers that rank 0 gets of a chunk: array, number, stored bytes, mask
_LEAVE_SECONDS = 5.0  # for ending what threads do, and removing the temporary, when the file system may hang

Array = np.ndarray[Any, Any]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Values:
    """One chunk of a round.

    Attributes
    ----------
    name : str
        Full name of its array, as in `Sink.arrays`.
    region : Region
        The chunk's elements, up to the array's edge. Of an array in one piece: any region that is one run of the file, such as
        rows of the first axis.
    values : ndarray
        Of the region's shape and the array's type, with any strides.
    """

    name: str
    region: Region
    values: Array


@dataclass(frozen=True)
class Written:
    """What was written, in the whole job; the seconds are those of this rank, summed over its threads.

    Attributes
    ----------
    n_chunks, nbytes, nbytes_stored : int
        Chunks (and pieces of arrays without chunks), bytes of their values, bytes in the file.
    n_read_back, n_decoded : int
        How many were read back by another rank, and how many of them were decoded.
    n_rounds : int
        Rounds.
    writers : str
        ``"all"``, or ``"root"`` and why.
    seconds : mapping of str to float
        ``"encode"``, ``"write"`` (in threads), ``"sync"``, ``"finish"``, ``"read back"``.
    """

    n_chunks: int
    nbytes: int
    nbytes_stored: int
    n_read_back: int
    n_decoded: int
    n_rounds: int
    writers: str
    seconds: dict[str, float]


def write_file(
    group: Group,
    sink: Sink,
    rounds: Iterable[Sequence[Values]],
    *,
    verify: str = "checksum",
    n_threads: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    allow_missing: bool = False,
    writers: str = "auto",
    is_single: bool = False,
) -> Written:
    """Write a new file. Collective over `group`, inside a call that all ranks make, when they have agreed on its arguments.

    Parameters
    ----------
    group : Group
        The ranks. Its watchdog has begun (`Watchdog.begin`).
    sink : Sink
        What is in the new file: made on each rank of the same arguments.
    rounds : iterable of sequence of Values
        The chunks that this rank writes. Ranks may have different numbers of rounds and of chunks, also none; each chunk of the
        file belongs to one rank. The iterator is asked for a round when there is room for it (see `KEPT_ROUNDS`), each time on
        all ranks that have more: it may make collective calls. An error that it raises is raised on all ranks.
    verify : str
        ``"checksum"``: the stored bytes of each chunk are read back by another rank, and one chunk of each rank is
        decoded. ``"file"``: one in 16. ``"full"``: all. ``"index"``: nothing is read back.
    n_threads : int, optional
        Threads that encode and write; default: the cores that a rank has.
    on_progress : callable, optional
        Called with the bytes of values that have been written, in the thread that calls this.
    allow_missing : bool
        Whether chunks may be left out. Their values are the fill value.
    writers : str
        ``"all"``: each rank writes its chunks. ``"root"``: rank 0 writes all. ``"auto"``: all, or rank 0 if a rank does not see
        the file that rank 0 makes.
    is_single : bool
        Whether all ranks have one round, and know it. Then they need not ask each other whether there is more. If rank 0 places
        chunks (`Encoder.is_asked`), a rank may have more rounds all the same, of chunks that it has without the others.

    Returns
    -------
    Written
        Counts of the whole job.

    Raises
    ------
    ConfigError, SourceError, PeerError, VerifyError
        On all ranks the same. The file was not saved, and what had its name is as it was.
    StallError
        Nothing moved on any rank for the call's timeout.
    """
    n = group.machine.n_threads if n_threads is None else n_threads
    return _Writing(group, sink, verify, n, on_progress, allow_missing, writers, is_single).run(iter(rounds))


@dataclass(slots=True, eq=False)
class _Chunk:
    """One chunk on its way."""

    array: int
    encoder: Encoder
    region: Region
    number: int
    nbytes: int
    values: Array | None
    is_decoded: bool
    stored: Stored | None = None
    offset: int = -1
    crc: int = 0
    values_crc: int = 0
    stored_nbytes: int = 0


@dataclass(eq=False)
class _Round:
    """The chunks of one round on this rank."""

    chunks: list[_Chunk] = field(default_factory=list)
    encoding: list[Future[None]] = field(default_factory=list)
    putting: list[Future[None]] = field(default_factory=list)

    @property
    def asked(self) -> list[_Chunk]:
        """Those of which rank 0 says where they go."""
        return [one for one in self.chunks if one.encoder.is_asked]


class _Doing:
    """Around what a thread does with one chunk. A class: generators take longer, and chunks are many."""

    __slots__ = ("_job", "_one", "_phase", "_started", "_what")

    def __init__(self, job: _Writing, what: str, phase: str, one: _Chunk) -> None:
        self._job, self._what, self._phase, self._one = job, what, phase, one

    def __enter__(self) -> None:
        self._job._begin(self._what, self._one)
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._job._end(self._phase, self._one, time.perf_counter() - self._started)


class _KeepingErrors:
    """Hand an error to `keep`, which keeps it until the ranks agree. A stall passes.

    (A generator of `contextlib` would be shorter. In Python 3.13 the frame of one that ended keeps that of its caller in
    `contextlib`, where the error is a variable: a cycle, see `let_go`.)
    """

    def __init__(self, keep: Callable[[BaseException], None]) -> None:
        self._keep = keep

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, StallError):
            return False
        let_interruption_pass(error)
        self._keep(error)
        return True


class _Writing:
    """One rank's part in writing one file."""

    def __init__(
        self,
        group: Group,
        sink: Sink,
        verify: str,
        n_threads: int,
        on_progress: Callable[[int], None] | None,
        allow_missing: bool,
        writers: str,
        is_single: bool = False,
    ) -> None:
        self._is_single = is_single
        self._group, self._sink, self._verify, self._n_threads = group, sink, verify, max(1, n_threads)
        self._on_progress, self._allow_missing, self._writers = on_progress, allow_missing, writers
        self._is_root = False  # rank 0 alone writes
        self._sees = [True] * group.size  # which ranks see the temporary
        self._arrays = {name: k for k, name in enumerate(sink.arrays)}
        self._encoders = list(sink.arrays.values())
        self._pool = Pool(self._n_threads, "shardload-save")
        self._catalog: Catalog | None = None
        self._writer: Writer | None = None
        self._ticket: Ticket | None = None
        self._is_apart = False  # rank 0's catalog is in use by a thread
        self._notes = Notes()
        self._error: BaseException | None = None
        self._is_stopped = False
        self._lock = threading.Lock()
        self._doing: dict[int, tuple[str, _Chunk]] = {}
        self._sampled: set[int] = set()
        self._n_steps = self._n_chunks = self._nbytes = self._nbytes_stored = self._n_rounds = self._n_told = 0
        self._n_read_back = self._n_decoded = self._n_given = 0
        self._offsets: list[list[int]] = []  # on rank 0, if it alone writes: those of the chunks of each rank in this round
        self._seconds = dict.fromkeys(("encode", "write", "sync", "finish", "read back"), 0.0)

    def run(self, rounds: Iterator[Sequence[Values]]) -> Written:
        """Do it all."""
        stalled, interrupted = False, False
        try:
            self._open()
            self._write(rounds)
            self._finish()
            if self._verify != INDEX:
                self._read_back()
            counts = [self._n_chunks, self._nbytes, self._nbytes_stored, self._n_read_back, self._n_decoded]
            n_chunks, nbytes, nbytes_stored, n_read_back, n_decoded = self._group.agree(self._error, counts)
            written = Written(
                n_chunks, nbytes, nbytes_stored, n_read_back, n_decoded, self._n_rounds, self._writers, self._seconds
            )
            self._group.watch.enter("commit")
            self._on_root(lambda catalog: catalog.commit())
            return written
        except Exception as error:
            stalled = isinstance(error, StallError)
            raise
        except BaseException:  # Ctrl-C
            interrupted = True
            raise
        finally:
            self._leave(stalled, interrupted)
            self._error = None  # the error has this object in its calls: see `let_go`

    def _leave(self, stalled: bool, interrupted: bool) -> None:
        """End the threads and, if the file was not committed, remove the temporary.

        After a stall the file system hangs, and after Ctrl-C it may: then what a thread has in hand stays, and so does the
        temporary. Otherwise threads have to end first: they may be making the temporary just now.
        """
        self._is_stopped = True
        may_hang = stalled or interrupted
        has_ended = self._pool.close(wait=not stalled, seconds=_LEAVE_SECONDS if may_hang else None)
        stalled = may_hang and not has_ended
        if self._writer is not None and not stalled:
            with suppress(Exception):
                self._writer.close()
        catalog = self._catalog
        if catalog is None or (stalled and self._is_apart):
            return
        end, pool = catalog.leave if interrupted else catalog.abandon, Pool(1, "shardload-abandon")
        try:
            wait([pool.submit(end)], _LEAVE_SECONDS if may_hang else None)
        except RuntimeError:  # no thread can be started
            end()
        pool.close(wait=not may_hang)

    # --- waiting

    def _now(self) -> tuple[int, str]:
        """A number that grows with the work of the threads, and what they do."""
        try:
            what, one = next(iter(self._doing.values()))
        except (StopIteration, RuntimeError):  # nothing, or another thread has changed it just now
            return self._n_steps, ""
        return self._n_steps, f"{what} {one.region} of '{one.encoder.name}' in '{self._sink.path}'"

    def _wait(self, futures: Sequence[Future[Any]]) -> None:
        """Return when all have ended. Their errors are not raised. StallError if nothing moves."""
        if all(future.done() for future in futures):
            return
        watch = self._group.watch
        with watch.attend(self._now):
            while wait(futures, min(0.5, watch.nap_seconds)).not_done:
                watch.look()
        watch.moved()

    def _apart(self, call: Callable[[], Found]) -> Found:
        """The result of a call that may take long or hang: a thread makes it, and this one watches over the job."""
        future = self._pool.submit(call)
        self._wait([future])
        try:
            found: Found = future.result()
        finally:
            del future  # it has the error that is raised here: see `let_go`
        return found

    def _on_root(self, call: Callable[[Catalog], Any]) -> None:
        """Do something with the catalog on rank 0. If it fails, all ranks raise that error. Collective."""

        def make() -> str:
            catalog = self._catalog
            if catalog is None:
                raise ValueError("there is no catalog")
            self._is_apart = True
            with named(self._sink.path):
                self._apart(lambda: call(catalog))
            self._is_apart = False
            return ""

        self._group.tell(make, 0)

    def _keep(self, error: BaseException) -> None:
        let_go(error)
        with self._lock:
            self._error = self._error or error

    # --- the steps

    def _open(self) -> None:
        """Rank 0 makes the temporary, all ranks open it."""
        group, sink = self._group, self._sink
        group.watch.enter("create")

        def create() -> str:
            with named(sink.path):
                return make()

        def make() -> str:
            def begin() -> Catalog:
                # Noted by the thread itself: after Ctrl-C nobody takes its result, and the temporary must be removed.
                self._catalog = catalog = sink.create()
                return catalog

            return self._apart(begin).ticket.to_json()

        self._ticket = Ticket.from_json(group.tell(create, 0))
        ticket = self._ticket

        def open_writer() -> None:
            self._writer = sink.writer(ticket)

        with _KeepingErrors(self._keep), named(sink.path):
            self._apart(open_writer)
        self._choose_writers()
        group.watch.enter("write")

    def _choose_writers(self) -> None:
        """Who writes, now that each rank has looked for the temporary. Collective."""
        group, asked = self._group, self._writers
        self._sees = [bool(v) for v in group.gather_int(int(self._error is None))]
        blind = [rank for rank, sees in enumerate(self._sees) if not sees]
        self._is_root = asked == "root" or (asked == "auto" and bool(blind) and self._sees[0])
        self._writers = "all"
        if self._is_root:
            why = "asked for" if asked == "root" else f"{first_ranks(blind)} do{'es' * (len(blind) == 1)} not see rank 0's file"
            self._writers = f"root ({why})"
            if group.rank > 0 or self._sees[0]:
                self._error = None
            if group.rank > 0 and self._writer is not None:
                with suppress(OSError):  # it has written nothing; and an error here would keep others waiting
                    self._writer.close()
                self._writer = None
        if blind:  # else no rank has an error, and all ranks know it
            group.agree(self._error)

    @property
    def _asks(self) -> bool:
        """Whether rank 0 must know of chunks: it places some, or writes them. The same on all ranks."""
        return self._is_root or any(one.is_asked for one in self._encoders)

    def _write(self, rounds: Iterator[Sequence[Values]]) -> None:
        """All rounds, up to the fsync."""
        history: list[_Round] = []
        before: _Round | None = None
        asks, is_first = self._asks, True
        while True:
            if len(history) == KEPT_ROUNDS:
                self._wait(history.pop(0).putting)
            self._tell_progress()
            current: _Round | None = None
            # Also if a thread has failed: the iterator may make collective calls, and this rank tells only below.
            with _KeepingErrors(self._keep):
                found = next(rounds, None)
                if found is not None:
                    current = self._start(found)
                    history.append(current)
                    self._n_rounds += 1
            # Of one round, what fails is told with its sizes; or, if nobody asks for any, when the disk has it.
            if is_first and self._is_single and asks:
                before, is_first = current, False
                continue
            if self._is_single and not asks:
                self._settle_alone(current)
                break
            if not self._settle(before, current is not None, asks):
                break
            before = current
        for one in history:
            self._wait([*one.encoding, *one.putting])
        self._tell_progress()
        writer = self._writer
        if self._error is None and writer is not None:
            self._group.watch.enter("sync")
            with _KeepingErrors(self._keep), self._timed("sync"):
                self._apart(writer.sync)
                writer.close()
        self._group.agree(self._error)

    def _start(self, found: Sequence[Values]) -> _Round:
        """Check a round, and have it encoded."""
        made = _Round([self._chunk(one) for one in found if one.values.size])
        made.encoding = [self._pool.submit(self._encode, some) for some in self._shared_out(made.chunks)]
        return made

    def _chunk(self, given: Values) -> _Chunk:
        array, region, values = self._arrays[given.name], given.region, given.values
        encoder = self._encoders[array]
        number = encoder.number(region)
        if encoder.spec.chunks is None:
            run = run_of(encoder.spec.shape, region)
            if run is None:
                raise ValueError(f"region {region} of '{given.name}', which has shape {encoder.spec.shape}, is not one run")
            number = run[0]
        is_decoded = self._verify == FULL or (self._verify == FILE and self._n_given % _DECODED_IN_FILE == 0)
        self._n_given += 1
        if not is_decoded and array not in self._sampled and self._verify != INDEX:
            # The first of this rank, and the first of some arrays: those of the other ranks are other arrays'.
            is_decoded = not self._sampled or array % self._group.size == self._group.rank
        if is_decoded:
            self._sampled.add(array)
        return _Chunk(array, encoder, region, number, values.nbytes, values, is_decoded)

    def _shared_out(self, chunks: list[_Chunk]) -> list[list[_Chunk]]:
        n = min(len(chunks), self._n_threads * _TASKS_A_THREAD)
        return [chunks[k::n] for k in range(n)]

    def _settle_alone(self, one: _Round | None) -> None:
        """Wait for chunks whose places are known: threads encode and write them."""
        if one is not None:
            self._wait(one.encoding)
        if one is not None and self._error is None:
            self._note(one.chunks)
            one.chunks = []

    def _settle(self, before: _Round | None, has_more: bool, asks: bool) -> bool:
        """Get the places of the chunks that were encoded, and have them written. False if that was the last round, or if any
        rank has failed. Collective.
        """
        if not asks:
            self._settle_alone(before)
            heads = self._group.gather_ints([int(self._error is not None), int(has_more)])
            self._is_stopped = bool(heads[:, 0].any())
            return not self._is_stopped and bool(heads[:, 1].any())
        if before is not None:
            self._wait(before.encoding)
        asked = [] if before is None else before.chunks if self._is_root else before.asked
        failed = self._error is not None
        rows = [] if failed else [(one.array, one.number, one.stored_nbytes, one.stored.mask) for one in asked if one.stored]
        sent = np.array([int(failed), int(has_more), *(number for row in rows for number in row)], dtype=np.int64)
        told = self._group.gather_rows(sent)
        answer = self._group.scatter_rows(None if told is None else self._answers(told))
        must_stop, goes_on = answer[:2].tolist()
        if must_stop:
            self._is_stopped = True
            return False
        if before is not None:
            for one, offset in zip(asked, answer[2:].tolist(), strict=True):
                one.offset = offset
        if self._is_root:
            self._send_to_root(asked, told)
            asked = asked if self._group.rank == 0 else []
        if before is not None:
            before.putting = [self._pool.submit(self._put, some) for some in self._shared_out(asked)]
            self._note(before.chunks)
            before.chunks = []
        return bool(goes_on)

    def _send_to_root(self, mine: Sequence[_Chunk], told: list[Int64s] | None) -> None:
        """Give rank 0 the stored bytes of this rank's chunks, one after the other. Rank 0 writes one while the next arrives."""
        group, writer = self._group, self._writer
        if told is None:
            for one in mine:
                if one.stored is not None:
                    stored, one.stored = one.stored, None
                    group.send(np.frombuffer(memoryview(stored.data).cast("B"), dtype=np.uint8), 0)
                    self._nbytes += one.nbytes
                    self._nbytes_stored += one.stored_nbytes
            return
        under_way: list[Future[None]] = []
        for rank, row in enumerate(told[1:], 1):
            for array, number, nbytes, mask, offset in zip(
                *row[2:].reshape(-1, _N_COLUMNS).T.tolist(), self._offsets[rank], strict=True
            ):
                if len(under_way) > 1:
                    self._wait([under_way.pop(0)])
                room = np.empty(nbytes, dtype=np.uint8)
                group.receive(room, rank)
                if writer is not None and self._error is None:
                    name = self._encoders[array].name
                    of = number if self._encoders[array].spec.chunks else 0
                    under_way.append(self._pool.submit(self._put_for, writer, name, of, offset, Stored(room, mask)))
        self._wait(under_way)

    def _put_for(self, writer: Writer, name: str, number: int, offset: int, stored: Stored) -> None:
        """On rank 0: write a chunk of another rank."""
        try:
            with self._timed("write"):
                writer.put(name, number, offset, stored)
        except Exception as error:
            self._keep(error)

    def _place(self, array: int, number: int) -> int:
        """The offset of a chunk of which the place is known."""
        encoder, ticket = self._encoders[array], self._ticket
        if ticket is None:
            raise ValueError("there is no ticket")
        places = ticket.places[encoder.name]
        return places[number] if encoder.spec.chunks is not None else places[0] + number * encoder.spec.dtype.itemsize

    def _answers(self, told: list[Int64s]) -> list[Int64s]:
        """On rank 0: what each rank is told, whether to stop, whether to go on, and where its chunks go."""
        must_stop, goes_on = any(row[0] for row in told), any(row[1] for row in told)
        asked = [row[2:].reshape(-1, _N_COLUMNS) for row in told]
        sizes = [len(rows) for rows in asked]
        offsets = np.zeros(sum(sizes), dtype=np.int64)
        if not must_stop:
            try:
                rows = np.concatenate(asked)
                for array in np.unique(rows[:, 0]).tolist():
                    which = np.flatnonzero(rows[:, 0] == array)
                    if not self._encoders[array].is_asked:  # rank 0 writes all
                        offsets[which] = [self._place(array, number) for number in rows[which, 1].tolist()]
                        continue
                    if self._catalog is None:
                        raise ValueError("there is no catalog")
                    name, some = self._encoders[array].name, rows[which]
                    offsets[which] = self._catalog.allocate(name, some[:, 1], some[:, 2], some[:, 3])
            except Exception as error:
                let_interruption_pass(error)
                self._keep(error)
                must_stop = True
        head = np.array([must_stop, goes_on], dtype=np.int64)
        parts = np.split(offsets, np.cumsum(sizes)[:-1])
        self._offsets = [part.tolist() for part in parts] if self._is_root else []
        return [np.concatenate([head, part]) for part in parts]

    def _note(self, chunks: list[_Chunk]) -> None:
        """Keep what another rank needs to read these chunks back."""
        self._n_chunks += len(chunks)
        if self._verify == INDEX:
            return
        self._notes.add([(one.array, one.number, one.offset, one.stored_nbytes, one.crc) for one in chunks])
        for one in chunks:
            if one.is_decoded:
                self._notes.add_values(one.array, one.region, one.values_crc)

    def _tell_progress(self) -> None:
        done = self._nbytes  # threads go on counting
        n, self._n_told = done - self._n_told, done
        if n and self._on_progress is not None:
            with _KeepingErrors(self._keep):
                self._on_progress(n)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[phase] += time.perf_counter() - started

    # --- what threads do

    def _encode(self, chunks: list[_Chunk]) -> None:
        """Encode chunks, and write those of which the place is known."""
        for one in chunks:
            if self._is_stopped:
                return
            try:
                with _Doing(self, "encoding", "encode", one):
                    self._encode_one(one)
                if not one.encoder.is_asked and not self._is_root:
                    self._put([one])
            except Exception as error:
                self._keep(error)
                return

    def _encode_one(self, one: _Chunk) -> None:
        values, encoder = one.values, one.encoder
        if values is None:
            raise ValueError("a chunk was encoded before")
        if one.is_decoded:
            one.values_crc = checksum_of_values(values)
        stored = encoder.encode(one.region, values)
        one.values, one.stored, one.stored_nbytes = None, stored, stored.nbytes
        if self._verify != INDEX:
            one.crc = int(deflate.crc32(memoryview(stored.data).cast("B")))
        if not encoder.is_asked:
            one.offset = self._place(one.array, one.number)

    def _put(self, chunks: list[_Chunk]) -> None:
        """Write encoded chunks."""
        for one in chunks:
            if self._is_stopped:
                return
            try:
                with _Doing(self, "writing", "write", one):
                    self._put_one(one)
            except Exception as error:
                self._keep(error)
                return

    def _put_one(self, one: _Chunk) -> None:
        writer, encoder = self._writer, one.encoder
        if writer is None or one.stored is None:
            raise ValueError("a chunk was written before it was encoded")
        stored, one.stored = one.stored, None
        if encoder.spec.chunks is None:
            writer.put_region(encoder.name, one.region, stored)
        else:
            writer.put(encoder.name, one.number, one.offset, stored)
        with self._lock:
            self._nbytes += one.nbytes
            self._nbytes_stored += one.stored_nbytes

    def _begin(self, what: str, one: _Chunk) -> None:
        """A thread begins something with a chunk: the main thread, which watches, can tell what."""
        self._doing[id(one)] = what, one

    def _end(self, phase: str, one: _Chunk, seconds: float) -> None:
        """It has ended, or failed."""
        with self._lock:
            del self._doing[id(one)]
            self._n_steps += 1
            self._seconds[phase] += seconds

    # --- afterwards

    def _finish(self) -> None:
        self._group.watch.enter("finish")
        with self._timed("finish"):
            self._on_root(lambda catalog: catalog.finish(allow_missing=self._allow_missing))

    def _read_back(self) -> None:
        """Read back what another rank has written. Collective. What fails is kept: the ranks agree when they count."""
        group, ticket = self._group, self._ticket
        if ticket is None:
            raise ValueError("there is no ticket")
        group.watch.enter("read back")
        mine, self._notes = self._notes.to_ints(), Notes()
        if self._is_root:
            given = self._share_out(mine)
        else:
            partners = plan_partners(group.machine.leaders)
            source = partners.index(group.rank)
            given = [(source, group.pass_on(mine, partners[group.rank], source))]
        del mine
        with _KeepingErrors(self._keep), self._timed("read back"):
            while given:
                source, notes = given.pop()
                self._read_back_of(ReadBack(self._sink, ticket, notes, source if not self._is_root else 0, group.rank))

    def _read_back_of(self, found: ReadBack) -> None:
        tasks = [self._pool.submit(task) for task in found.stored()]
        self._wait(tasks)
        for task in tasks:
            task.result()
        for decode in found.values():
            self._apart(decode)
        self._n_read_back += found.n_stored
        self._n_decoded += found.n_values

    def _share_out(self, mine: Int64s) -> list[tuple[int, Int64s]]:
        """If rank 0 has written all: the notes of each rank go to one that sees the file, not rank 0 if there is another."""
        group, rows = self._group, None
        told = group.gather_rows(mine)
        if told is not None:
            leaders = group.machine.leaders
            seeing = [rank for rank, sees in enumerate(self._sees) if sees and rank]
            far = [rank for rank in seeing if leaders[rank] != leaders[0]]
            readers = far or seeing or [0]
            shares: list[list[Int64s]] = [[np.empty(0, dtype=np.int64)] for _ in range(group.size)]
            for rank, notes in enumerate(told):
                shares[readers[rank % len(readers)]] += [np.array([rank, len(notes)], dtype=np.int64), notes]
            rows = [np.concatenate(share) for share in shares]
        row, found, at = group.scatter_rows(rows), [], 0
        while at < len(row):
            rank, n = row[at : at + 2].tolist()
            found.append((rank, row[at + 2 : at + 2 + n]))
            at += 2 + n
        return found
