"""What do threads do with a chunk that is to be written, while the ranks go on? Encode it, and put it where it belongs.

A `Pipeline` is that of one rank. Its threads work, and the thread that owns it waits for them under the watchdog. Errors of
threads are kept until the ranks agree on them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import deflate
import numpy as np

from shardload.comm.group import Group
from shardload.errors import StallError
from shardload.formats.sink import Encoder, Sink, Stored, Ticket, Writer
from shardload.jobs.writing.read_back import checksum_of_values
from shardload.options import FILE, FULL, INDEX
from shardload.planning.blocks import run_of
from shardload.planning.region import Region
from shardload.system.garbage import let_go
from shardload.system.interruption import let_interruption_pass
from shardload.system.thread_pool import Pool

__all__ = ["Chunk", "KeepingErrors", "Pipeline", "Round", "Values"]

_TASKS_A_THREAD = 4  # tasks of a round for each thread, so that all end at about the same time
_DECODED_IN_FILE = 16  # one chunk in so many is decoded by verify="file"

Array = np.ndarray[Any, Any]
Result = TypeVar("Result")


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


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk on its way: first it has values, then stored bytes, then neither."""

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
class Round:
    """The chunks of one round on this rank, and the tasks that encode and write them."""

    chunks: list[Chunk] = field(default_factory=list)
    encoding: list[Future[None]] = field(default_factory=list)
    putting: list[Future[None]] = field(default_factory=list)


class KeepingErrors:
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


class Pipeline:
    """The threads of one rank that encode and write.

    Attributes
    ----------
    pool : Pool
        The threads.
    ticket : Ticket or None
        Where the file is, when rank 0 has made it.
    writer : Writer or None
        What writes; None before the file is open, and if this rank must not write.
    puts_at_once : bool
        Whether a chunk of which the place is known is written as soon as it is encoded.
    error : Exception or None
        The first error of this rank.
    is_stopped : bool
        Whether threads shall begin nothing more.
    nbytes, nbytes_stored : int
        Bytes of values of what is written, and of stored chunks.
    seconds : dict of str to float
        Seconds of each phase.
    """

    def __init__(self, group: Group, sink: Sink, verify: str, n_threads: int) -> None:
        self._group, self._sink, self._verify, self._n_threads = group, sink, verify, n_threads
        self.pool = Pool(n_threads, "shardload-save")
        self.ticket: Ticket | None = None
        self.writer: Writer | None = None
        self.puts_at_once = True
        self.error: BaseException | None = None
        self.is_stopped = False
        self.nbytes = self.nbytes_stored = 0
        self.seconds = dict.fromkeys(("encode", "write", "sync", "finish", "read back"), 0.0)
        self._numbers = {name: number for number, name in enumerate(sink.arrays)}
        self._encoders = list(sink.arrays.values())
        self._lock = threading.Lock()
        self._doing: dict[int, tuple[str, Chunk]] = {}
        self._n_steps = self._n_given = 0
        self._sampled: set[int] = set()  # arrays of which a chunk is decoded

    # --- the thread that owns it

    def _now(self) -> tuple[int, str]:
        """A number that grows with the work of the threads, and what they do."""
        try:
            what, chunk = next(iter(self._doing.values()))
        except (StopIteration, RuntimeError):  # nothing, or another thread has changed it just now
            return self._n_steps, ""
        return self._n_steps, f"{what} {chunk.region} of '{chunk.encoder.name}' in '{self._sink.path}'"

    def wait(self, futures: Sequence[Future[Any]]) -> None:
        """Return when all have ended. Their errors are not raised. StallError if nothing moves."""
        if all(future.done() for future in futures):
            return
        watch = self._group.watch
        with watch.attend(self._now):
            while wait(futures, min(0.5, watch.nap_seconds)).not_done:
                watch.look()
        watch.moved()

    def in_thread(self, call: Callable[[], Result]) -> Result:
        """The result of a call that may take long or hang: a thread makes it, and this one watches over the job."""
        future = self.pool.submit(call)
        self.wait([future])
        try:
            result: Result = future.result()
        finally:
            del future  # it has the error that is raised here: see `let_go`
        return result

    def keep(self, error: BaseException) -> None:
        """Keep the first error until the ranks agree."""
        let_go(error)
        with self._lock:
            self.error = self.error or error

    def keeping_errors(self) -> KeepingErrors:
        """Keep the error that is raised inside."""
        return KeepingErrors(self.keep)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds that are spent inside to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[phase] += time.perf_counter() - started

    def start(self, values: Sequence[Values]) -> Round:
        """Check the chunks of a round, and have them encoded; those of which the place is known are written, too."""
        chunks = [self._chunk(one) for one in values if one.values.size]
        return Round(chunks, self._share_out(self._encode, chunks))

    def put(self, chunks: Sequence[Chunk]) -> list[Future[None]]:
        """Have encoded chunks written."""
        return self._share_out(self._put, chunks)

    def _share_out(self, call: Callable[[Sequence[Chunk]], None], chunks: Sequence[Chunk]) -> list[Future[None]]:
        n = min(len(chunks), self._n_threads * _TASKS_A_THREAD)
        return [self.pool.submit(call, chunks[k::n]) for k in range(n)]

    def _chunk(self, given: Values) -> Chunk:
        array, region = self._numbers[given.name], given.region
        encoder = self._encoders[array]
        number = encoder.number(region)
        if encoder.spec.chunks is None:
            run = run_of(encoder.spec.shape, region)
            if run is None:
                raise ValueError(f"region {region} of '{given.name}', which has shape {encoder.spec.shape}, is not one run")
            number = run[0]
        return Chunk(array, encoder, region, number, given.values.nbytes, given.values, self._is_decoded(array))

    def _is_decoded(self, array: int) -> bool:
        """Whether another rank shall decode the next chunk, which is of this array."""
        is_decoded = self._verify == FULL or (self._verify == FILE and self._n_given % _DECODED_IN_FILE == 0)
        self._n_given += 1
        if not is_decoded and array not in self._sampled and self._verify != INDEX:
            # The first of this rank, and the first of some arrays: those of the other ranks are other arrays'.
            is_decoded = not self._sampled or array % self._group.size == self._group.rank
        if is_decoded:
            self._sampled.add(array)
        return is_decoded

    def offset_of(self, array: int, number: int) -> int:
        """The offset of a chunk of which the place is known."""
        encoder = self._encoders[array]
        if self.ticket is None:
            raise ValueError("there is no ticket")
        places = self.ticket.places[encoder.name]
        return places[number] if encoder.spec.chunks is not None else places[0] + number * encoder.spec.dtype.itemsize

    # --- its threads

    def _do(self, what: str, phase: str, call: Callable[[Chunk], None], chunk: Chunk) -> bool:
        """Do something with a chunk. False if there is nothing more to do: it failed, or another rank did."""
        if self.is_stopped:
            return False
        self._doing[id(chunk)] = what, chunk
        started = time.perf_counter()
        try:
            call(chunk)
        except Exception as error:
            self.keep(error)
            return False
        finally:
            with self._lock:
                del self._doing[id(chunk)]
                self._n_steps += 1
                self.seconds[phase] += time.perf_counter() - started
        return True

    def _encode(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if not self._do("encoding", "encode", self._encode_one, chunk):
                return
            if not chunk.encoder.is_asked and self.puts_at_once:
                self._put([chunk])

    def _encode_one(self, chunk: Chunk) -> None:
        if chunk.values is None:
            raise ValueError("a chunk was encoded before")
        if chunk.is_decoded:
            chunk.values_crc = checksum_of_values(chunk.values)
        stored = chunk.encoder.encode(chunk.region, chunk.values)
        chunk.values, chunk.stored, chunk.stored_nbytes = None, stored, stored.nbytes
        if self._verify != INDEX:
            chunk.crc = int(deflate.crc32(memoryview(stored.data).cast("B")))
        if not chunk.encoder.is_asked:
            chunk.offset = self.offset_of(chunk.array, chunk.number)

    def _put(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if not self._do("writing", "write", self._put_one, chunk):
                return

    def _put_one(self, chunk: Chunk) -> None:
        writer, name = self.writer, chunk.encoder.name
        if writer is None or chunk.stored is None:
            raise ValueError("a chunk was written before it was encoded")
        stored, chunk.stored = chunk.stored, None
        if chunk.encoder.spec.chunks is None:
            writer.put_region(name, chunk.region, stored)
        else:
            writer.put(name, chunk.number, chunk.offset, stored)
        with self._lock:
            self.nbytes += chunk.nbytes
            self.nbytes_stored += chunk.stored_nbytes
