"""Is on disk what was to be written? Another rank reads it back, by the checksum of its bytes, and decodes some of it.

1. Each owner notes a row for each chunk: where it is, and the CRC-32 of its stored bytes; of some chunks, or of all, also
   that of the values. The CRCs are made before the bytes leave the encoder.
2. The rows go to another rank (`plan_partners`), on another node where there is one, so that no cache of the writer's
   node answers in place of the disk or the file server.
3. That rank reads the stored bytes (`ReadBack.stored`). Then it has the format's own library read some values from the new
   file (`ReadBack.compare_values`), which proves that the file leads there and that the chunk decodes to what the devices had.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import groupby
from typing import NamedTuple

import deflate
import numpy as np

from shardload.errors import SourceError, VerifyError
from shardload.formats.access import Access
from shardload.formats.contract.array import native_dtype
from shardload.formats.contract.format import OpenFile
from shardload.formats.lookup import format_of
from shardload.formats.sink import Decode, Sink, Ticket
from shardload.planning.region import Array, IntArray, Region, unravel
from shardload.storage.objects import StoredObject
from shardload.storage.remote import RemoteFolder
from shardload.system.scratch import shared_scratch
from shardload.system.steps import step_done
from shardload.transfer.checksum import checksum

_ANY_FILTER = Access(allow_filters=frozenset({"all"}))
_AT_ONCE_NBYTES = 1 << 20
_TASK_NBYTES = 8 << 20
_AS_IT_WAS = "Nothing was saved, and what had this name before is as it was"


class WrittenChunk(NamedTuple):
    """What the rank that reads a chunk back must know of it: integers, which travel as a row.

    Attributes
    ----------
    array, number : int
        Number of the array, and of the chunk; of a part of a contiguous array its first element, in C order.
    offset, nbytes : int
        Where the stored bytes are, and how many.
    crc, values_crc : int
        CRC-32 of the stored bytes, and of the values, or -1 if they are not decoded.
    """

    array: int
    number: int
    offset: int
    nbytes: int
    crc: int
    values_crc: int


N_FIELDS = len(WrittenChunk._fields)


def plan_partners(leaders: Sequence[int]) -> list[int]:
    """For each rank, the rank that reads back what it wrote. Each rank reads what one other rank wrote.

    Parameters
    ----------
    leaders : sequence of int
        For each rank a number of its node (`comm.group.Topology.leaders`).

    Examples
    --------
    Two nodes with two ranks each; three ranks of one node and one of another; one rank alone:

    >>> plan_partners([0, 0, 2, 2]), plan_partners([0, 0, 0, 3]), plan_partners([0])
    ([2, 3, 0, 1], [3, 0, 1, 2], [0])
    """
    n, of_node = len(leaders), Counter(leaders)
    # In this order a step as long as the largest node leads out of every node, or, if one node has more than half of the ranks,
    # out of it as often as that is possible.
    order = sorted(range(n), key=lambda rank: (-of_node[leaders[rank]], leaders[rank], rank))
    n_largest = max(of_node.values())
    step = n_largest if n_largest < n else 1
    partners = [0] * n
    for k, rank in enumerate(order):
        partners[rank] = order[(k + step) % n]
    return partners


def checksum_of_values(values: Array) -> int:
    """CRC-32 of values in C order, in the machine's byte order."""
    return checksum(np.asarray(values).astype(native_dtype(values.dtype), copy=False))


class ReadBack:
    """What one rank reads back of what another rank has written.

    Parameters
    ----------
    sink : Sink
        The new file.
    ticket : Ticket
        Where it is now.
    rows : ndarray of int
        A row for each `WrittenChunk` of the rank that wrote, one after the other.
    writer, reader : int
        That rank, and this one, for messages.

    Attributes
    ----------
    n_stored, n_values : int
        Chunks whose stored bytes are compared, and chunks that are decoded.
    """

    def __init__(self, sink: Sink, ticket: Ticket, rows: IntArray, writer: int, reader: int) -> None:
        self._sink, self._ticket, self._writer, self._reader = sink, ticket, writer, reader
        self._folder = sink.stored(ticket)
        self._encoders = list(sink.arrays.values())
        rows = rows.reshape(-1, N_FIELDS)
        self._rows = rows[np.lexsort(rows.T[::-1])]  # a `WrittenChunk` takes ten times as much: only those in hand are made
        self._decoded = self._rows[self._rows[:, -1] >= 0]
        self.n_stored, self.n_values = len(self._rows), len(self._decoded)
        self._scratch = shared_scratch()

    def stored(self) -> Iterator[Callable[[], None]]:
        """Tasks for threads: each reads stored bytes, and compares them. VerifyError if they differ."""
        task_nbytes = 1 if isinstance(self._folder, RemoteFolder) else _TASK_NBYTES  # there each chunk waits for its answer
        ends = np.cumsum(self._rows[:, WrittenChunk._fields.index("nbytes")]) // task_nbytes
        for rows in _alike(self._rows, ends):
            yield partial(self._compare_stored, rows)

    def _compare_stored(self, rows: IntArray) -> None:
        chunks = [WrittenChunk(*row) for row in rows.tolist()]
        chunk = chunks[0]
        try:
            for key, of_key in groupby(chunks, self._key_of):
                chunks_of_key = list(of_key)
                chunk = chunks_of_key[0]
                stored = self._folder.open(key, min(chunk.nbytes, _AT_ONCE_NBYTES))
                if stored is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                with closing(stored):
                    for chunk in chunks_of_key:
                        self._compare_bytes(stored, chunk)
                        step_done()
        except OSError as error:
            chunk_name, index = self._place(chunk)
            raise SourceError(
                f"{chunk_name}, which rank {self._writer} wrote, cannot be read back on rank {self._reader}: "
                f"{error.strerror or error}. {_AS_IT_WAS}",
                path=self._sink.path,
                dataset=self._encoders[chunk.array].name,
                chunk=index,
            ) from error

    def _key_of(self, chunk: WrittenChunk) -> str:
        encoder = self._encoders[chunk.array]
        return self._sink.key_of(self._ticket, encoder.name, chunk.number if encoder.spec.chunks else 0)

    def _compare_bytes(self, stored: StoredObject, chunk: WrittenChunk) -> None:
        crc_found, n_read = 0, 0
        while n_read < chunk.nbytes:
            buffer = self._scratch.bytes("read back", _AT_ONCE_NBYTES)[: chunk.nbytes - n_read]
            stored.read_into(buffer, chunk.offset + n_read)
            crc_found, n_read = int(deflate.crc32(buffer.data, crc_found)), n_read + len(buffer)
        if crc_found != chunk.crc:
            raise VerifyError(
                f"{self._place(chunk)[0]}, {chunk.nbytes} bytes at {chunk.offset}, was written by rank {self._writer}, and "
                f"rank {self._reader} reads something else there: CRC-32 {crc_found:08x} in place of {chunk.crc:08x}. "
                f"{_AS_IT_WAS}. If it happens again, suspect the storage, or that its nodes do not see each other's writes",
                rank=self._reader,
            )

    def _place(self, chunk: WrittenChunk) -> tuple[str, tuple[int, ...] | None]:
        """A chunk in words, and its index."""
        encoder = self._encoders[chunk.array]
        where = f"'{encoder.name}' in '{self._sink.path}'"
        if encoder.spec.chunks is None:
            return f"the part from element {unravel(chunk.number, encoder.spec.shape)} on of {where}", None
        index = unravel(chunk.number, encoder.spec.grid)
        return f"chunk {index} of {where}", index

    def compare_values(self, go_on: Callable[[], bool]) -> None:
        """Have the format's own library decode the chunks of which values are compared. Takes one thread.

        The file is opened once, and of its arrays one at a time: what is open is looked through whenever h5py closes a file.
        `go_on` is called after each chunk, and says whether there is still need.
        """
        file: OpenFile | None = None
        path = self._ticket.temporary
        with ExitStack() as opened:
            for rows in _alike(self._decoded, self._decoded[:, 0]):  # of each array
                name = self._encoders[rows[0, 0]].name
                chunks = (WrittenChunk(*row.tolist()) for row in rows)
                with ExitStack() as of_array:
                    with self._naming_unreadable(name, "values"):
                        decoding = self._sink.decoding(self._ticket, name)
                        if decoding is not None:
                            decode = of_array.enter_context(decoding)
                        else:
                            file = file or opened.enter_context(format_of(path).open_file(path, _ANY_FILTER))
                            source = of_array.enter_context(closing(file.open(name)))
                            decode = source.plain
                            if len(rows) == 1:  # else it lists the places of all chunks of the array
                                source.expect(self._region(WrittenChunk(*rows[0].tolist())))
                    for chunk in chunks:
                        self._compare_values(chunk, decode)
                        if not go_on():
                            return

    @contextmanager
    def _naming_unreadable(self, name: str, part: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise SourceError(
                f"the new file of '{self._sink.path}' cannot be read: {part} of '{name}': {type(error).__name__}: {error}. "
                f"{_AS_IT_WAS}",
                path=self._sink.path,
                dataset=name,
            ) from error

    def _region(self, chunk: WrittenChunk) -> Region:
        encoder, spec = self._encoders[chunk.array], self._encoders[chunk.array].spec
        if spec.chunks:
            return encoder.region(unravel(chunk.number, spec.grid))
        return _run(spec.shape, chunk.number, chunk.nbytes // spec.dtype.itemsize)

    def _compare_values(self, chunk: WrittenChunk, decode: Decode) -> None:
        encoder, region = self._encoders[chunk.array], self._region(chunk)
        name, spec = encoder.name, encoder.spec
        with self._naming_unreadable(name, str(region)):
            values = np.asarray(decode(region)).reshape(region.shape).astype(native_dtype(spec.dtype), copy=False)
        if checksum_of_values(values) != chunk.values_crc:
            raise VerifyError(
                f"{region} of '{name}' in '{self._sink.path}', which rank {self._writer} wrote, is decoded by the format's "
                f"library on rank {self._reader} as other values than those that were to be saved. {_AS_IT_WAS}. This is a "
                f"defect in shardload or in a compressor; please report it with the array's type {spec.dtype}, its chunks "
                f"{spec.chunks} and its compression {spec.compression}",
                rank=self._reader,
                index=region.start,
            )


def _alike(rows: IntArray, keys: IntArray) -> list[IntArray]:
    """The rows in parts: those that follow each other and have the same key, 0 or more.

    >>> [part.tolist() for part in _alike(np.arange(5), np.array([0, 0, 2, 3, 3]))]
    [[0, 1], [2], [3, 4]]
    """
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    return np.split(rows, begins[1:]) if len(begins) else []


def _run(shape: Sequence[int], first: int, size: int) -> Region:
    """The region of `size` elements from number `first` on, which follow each other in an array in C order.

    >>> str(_run((4, 6), 6, 12)), str(_run((4, 6), 8, 2))
    ('[1:3, 0:6]', '[1:2, 2:4]')
    """
    start, stop = unravel(first, shape), []
    for a, n in zip(reversed(start), reversed(shape), strict=True):
        stop.append(a + min(n, size))
        size = -(-size // n)
    return Region(start, tuple(reversed(stop)))
