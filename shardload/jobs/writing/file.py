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

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.comm.group import Group
from shardload.errors import StallError
from shardload.formats.sink import Catalog, Sink, Stored, Ticket, Writer
from shardload.jobs.writing.pipeline import Chunk, Pipeline, Round, Values
from shardload.jobs.writing.read_back import Notes, ReadBack
from shardload.options import INDEX
from shardload.planning.partners import plan_partners
from shardload.planning.rounds import KEPT_ROUNDS
from shardload.storage.target import named
from shardload.system.interruption import let_interruption_pass
from shardload.system.thread_pool import Pool
from shardload.units import first_ranks

__all__ = ["Values", "Written", "write_file"]

_N_COLUMNS = 4  # integers that rank 0 gets of a chunk: array, number, stored bytes, mask
_LEAVE_SECONDS = 5.0  # for ending what threads do, and removing the temporary, when the file system may hang

Int64s = np.ndarray[Any, np.dtype[np.int64]]


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
    return _Writing(group, sink, verify, n, on_progress, writers, is_single).run(iter(rounds))


class _Writing:
    """One rank's part in writing one file."""

    def __init__(
        self,
        group: Group,
        sink: Sink,
        verify: str,
        n_threads: int,
        on_progress: Callable[[int], None] | None,
        writers: str,
        is_single: bool = False,
    ) -> None:
        self._group, self._sink, self._verify, self._is_single = group, sink, verify, is_single
        self._on_progress, self._writers = on_progress, writers
        self._pipeline = Pipeline(group, sink, verify, max(1, n_threads))
        self._is_root = False  # rank 0 alone writes
        self._sees = [True] * group.size  # which ranks see the temporary
        self._encoders = list(sink.arrays.values())
        self._catalog: Catalog | None = None
        self._is_apart = False  # rank 0's catalog is in use by a thread
        self._notes = Notes()
        self._n_chunks = self._n_rounds = self._n_told = self._n_read_back = self._n_decoded = 0
        self._offsets: list[list[int]] = []  # on rank 0, if it alone writes: those of the chunks of each rank in this round

    def run(self, rounds: Iterator[Sequence[Values]]) -> Written:
        """Do it all."""
        stalled, interrupted = False, False
        try:
            self._open()
            self._write(rounds)
            self._finish()
            if self._verify != INDEX:
                self._read_back()
            counts = [self._n_chunks, self._pipeline.nbytes, self._pipeline.nbytes_stored, self._n_read_back, self._n_decoded]
            n_chunks, nbytes, nbytes_stored, n_read_back, n_decoded = self._group.agree(self._pipeline.error, counts)
            written = Written(
                n_chunks, nbytes, nbytes_stored, n_read_back, n_decoded, self._n_rounds, self._writers, self._pipeline.seconds
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
            self._pipeline.error = None  # the error has this object in its calls: see `let_go`

    def _leave(self, stalled: bool, interrupted: bool) -> None:
        """End the threads and, if the file was not committed, remove the temporary.

        After a stall the file system hangs, and after Ctrl-C it may: then what a thread has in hand stays, and so does the
        temporary. Otherwise threads have to end first: they may be making the temporary just now.
        """
        self._pipeline.is_stopped = True
        may_hang = stalled or interrupted
        has_ended = self._pipeline.pool.close(wait=not stalled, seconds=_LEAVE_SECONDS if may_hang else None)
        stalled = may_hang and not has_ended
        if self._pipeline.writer is not None and not stalled:
            with suppress(Exception):
                self._pipeline.writer.close()
        catalog = self._catalog
        if catalog is None or (stalled and self._is_apart):
            return
        end, pool = catalog.leave if interrupted else catalog.abandon, Pool(1, "shardload-abandon")
        try:
            wait([pool.submit(end)], _LEAVE_SECONDS if may_hang else None)
        except RuntimeError:  # no thread can be started
            end()
        pool.close(wait=not may_hang)

    def _on_root(self, call: Callable[[Catalog], Any]) -> None:
        """Do something with the catalog on rank 0. If it fails, all ranks raise that error. Collective."""

        def make() -> str:
            catalog = self._catalog
            if catalog is None:
                raise ValueError("there is no catalog")
            self._is_apart = True
            with named(self._sink.path):
                self._pipeline.in_thread(lambda: call(catalog))
            self._is_apart = False
            return ""

        self._group.tell(make, 0)

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

            return self._pipeline.in_thread(begin).ticket.to_json()

        self._pipeline.ticket = Ticket.from_json(group.tell(create, 0))
        ticket = self._pipeline.ticket

        def open_writer() -> None:
            self._pipeline.writer = sink.writer(ticket)

        with self._pipeline.keeping_errors(), named(sink.path):
            self._pipeline.in_thread(open_writer)
        self._choose_writers()
        group.watch.enter("write")

    def _choose_writers(self) -> None:
        """Who writes, now that each rank has looked for the temporary. Collective."""
        group, asked = self._group, self._writers
        self._sees = [bool(v) for v in group.gather_int(int(self._pipeline.error is None))]
        blind = [rank for rank, sees in enumerate(self._sees) if not sees]
        self._is_root = asked == "root" or (asked == "auto" and bool(blind) and self._sees[0])
        self._writers = "all"
        if self._is_root:
            why = "asked for" if asked == "root" else f"{first_ranks(blind)} do{'es' * (len(blind) == 1)} not see rank 0's file"
            self._writers = f"root ({why})"
            self._pipeline.puts_at_once = False
            if group.rank > 0 or self._sees[0]:
                self._pipeline.error = None
            if group.rank > 0 and self._pipeline.writer is not None:
                with suppress(OSError):  # it has written nothing; and an error here would keep others waiting
                    self._pipeline.writer.close()
                self._pipeline.writer = None
        if blind:  # else no rank has an error, and all ranks know it
            group.agree(self._pipeline.error)

    @property
    def _asks(self) -> bool:
        """Whether rank 0 must know of chunks: it places some, or writes them. The same on all ranks."""
        return self._is_root or any(one.is_asked for one in self._encoders)

    def _write(self, rounds: Iterator[Sequence[Values]]) -> None:
        """All rounds, up to the fsync."""
        history: list[Round] = []
        before: Round | None = None
        asks, is_first = self._asks, True
        while True:
            if len(history) == KEPT_ROUNDS:
                self._pipeline.wait(history.pop(0).putting)
            self._tell_progress()
            current: Round | None = None
            # Also if a thread has failed: the iterator may make collective calls, and this rank tells only below.
            with self._pipeline.keeping_errors():
                found = next(rounds, None)
                if found is not None:
                    current = self._pipeline.start(found)
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
            self._pipeline.wait([*one.encoding, *one.putting])
        self._tell_progress()
        writer = self._pipeline.writer
        if self._pipeline.error is None and writer is not None:
            self._group.watch.enter("sync")
            with self._pipeline.keeping_errors(), self._pipeline.timed("sync"):
                self._pipeline.in_thread(writer.sync)
                writer.close()
        self._group.agree(self._pipeline.error)

    def _settle_alone(self, one: Round | None) -> None:
        """Wait for chunks whose places are known: threads encode and write them."""
        if one is not None:
            self._pipeline.wait(one.encoding)
        if one is not None and self._pipeline.error is None:
            self._note(one.chunks)
            one.chunks = []

    def _settle(self, before: Round | None, has_more: bool, asks: bool) -> bool:
        """Get the places of the chunks that were encoded, and have them written. False if that was the last round, or if any
        rank has failed. Collective.
        """
        if not asks:
            self._settle_alone(before)
            heads = self._group.gather_ints([int(self._pipeline.error is not None), int(has_more)])
            self._pipeline.is_stopped = bool(heads[:, 0].any())
            return not self._pipeline.is_stopped and bool(heads[:, 1].any())
        if before is not None:
            self._pipeline.wait(before.encoding)
        asked = [] if before is None else [chunk for chunk in before.chunks if self._is_root or chunk.encoder.is_asked]
        failed = self._pipeline.error is not None
        rows = [] if failed else [(one.array, one.number, one.stored_nbytes, one.stored.mask) for one in asked if one.stored]
        sent = np.array([int(failed), int(has_more), *(number for row in rows for number in row)], dtype=np.int64)
        told = self._group.gather_rows(sent)
        answer = self._group.scatter_rows(None if told is None else self._answers(told))
        must_stop, goes_on = answer[:2].tolist()
        if must_stop:
            self._pipeline.is_stopped = True
            return False
        if before is not None:
            for one, offset in zip(asked, answer[2:].tolist(), strict=True):
                one.offset = offset
        if self._is_root:
            self._send_to_root(asked, told)
            asked = asked if self._group.rank == 0 else []
        if before is not None:
            before.putting = self._pipeline.put(asked)
            self._note(before.chunks)
            before.chunks = []
        return bool(goes_on)

    def _send_to_root(self, mine: Sequence[Chunk], told: list[Int64s] | None) -> None:
        """Give rank 0 the stored bytes of this rank's chunks, one after the other. Rank 0 writes one while the next arrives."""
        group, writer = self._group, self._pipeline.writer
        if told is None:
            for one in mine:
                if one.stored is not None:
                    stored, one.stored = one.stored, None
                    group.send(np.frombuffer(memoryview(stored.data).cast("B"), dtype=np.uint8), 0)
                    self._pipeline.nbytes += one.nbytes
                    self._pipeline.nbytes_stored += one.stored_nbytes
            return
        under_way: list[Future[None]] = []
        for rank, row in enumerate(told[1:], 1):
            for array, number, nbytes, mask, offset in zip(
                *row[2:].reshape(-1, _N_COLUMNS).T.tolist(), self._offsets[rank], strict=True
            ):
                if len(under_way) > 1:
                    self._pipeline.wait([under_way.pop(0)])
                room = np.empty(nbytes, dtype=np.uint8)
                group.receive(room, rank)
                if writer is not None and self._pipeline.error is None:
                    name = self._encoders[array].name
                    of = number if self._encoders[array].spec.chunks else 0
                    under_way.append(self._pipeline.pool.submit(self._put_for, writer, name, of, offset, Stored(room, mask)))
        self._pipeline.wait(under_way)

    def _put_for(self, writer: Writer, name: str, number: int, offset: int, stored: Stored) -> None:
        """On rank 0: write a chunk of another rank."""
        try:
            with self._pipeline.timed("write"):
                writer.put(name, number, offset, stored)
        except Exception as error:
            self._pipeline.keep(error)

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
                        offsets[which] = [self._pipeline.offset_of(array, number) for number in rows[which, 1].tolist()]
                        continue
                    if self._catalog is None:
                        raise ValueError("there is no catalog")
                    name, some = self._encoders[array].name, rows[which]
                    offsets[which] = self._catalog.allocate(name, some[:, 1], some[:, 2], some[:, 3])
            except Exception as error:
                let_interruption_pass(error)
                self._pipeline.keep(error)
                must_stop = True
        head = np.array([must_stop, goes_on], dtype=np.int64)
        parts = np.split(offsets, np.cumsum(sizes)[:-1])
        self._offsets = [part.tolist() for part in parts] if self._is_root else []
        return [np.concatenate([head, part]) for part in parts]

    def _note(self, chunks: list[Chunk]) -> None:
        """Keep what another rank needs to read these chunks back."""
        self._n_chunks += len(chunks)
        if self._verify == INDEX:
            return
        self._notes.add([(one.array, one.number, one.offset, one.stored_nbytes, one.crc) for one in chunks])
        for one in chunks:
            if one.is_decoded:
                self._notes.add_values(one.array, one.region, one.values_crc)

    def _tell_progress(self) -> None:
        done = self._pipeline.nbytes  # threads go on counting
        n, self._n_told = done - self._n_told, done
        if n and self._on_progress is not None:
            with self._pipeline.keeping_errors():
                self._on_progress(n)

    # --- afterwards

    def _finish(self) -> None:
        self._group.watch.enter("finish")
        with self._pipeline.timed("finish"):
            self._on_root(lambda catalog: catalog.finish())

    def _read_back(self) -> None:
        """Read back what another rank has written. Collective. What fails is kept: the ranks agree when they count."""
        group, ticket = self._group, self._pipeline.ticket
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
        with self._pipeline.keeping_errors(), self._pipeline.timed("read back"):
            while given:
                source, notes = given.pop()
                self._read_back_of(ReadBack(self._sink, ticket, notes, source if not self._is_root else 0, group.rank))

    def _read_back_of(self, found: ReadBack) -> None:
        tasks = [self._pipeline.pool.submit(task) for task in found.stored()]
        self._pipeline.wait(tasks)
        for task in tasks:
            task.result()
        for decode in found.values():
            self._pipeline.in_thread(decode)
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
