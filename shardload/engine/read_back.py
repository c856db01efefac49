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
from operator import itemgetter
from typing import Any

import deflate
import numpy as np

from shardload.errors import SourceError, VerifyError
from shardload.formats.access import Access
from shardload.formats.contract.array import native_dtype
from shardload.formats.contract.format import OpenFile
from shardload.formats.lookup import format_of
from shardload.formats.sink import Decode, Sink, Ticket
from shardload.planning.region import Region, unravel
from shardload.storage.objects import StoredObject
from shardload.system.scratch import shared_scratch
from shardload.transfer.checksum import checksum

WIDTH = 6
"""Integers of a row: number of the array, number of the chunk (of a part of a contiguous array: its first element, in C
order), offset, bytes, CRC-32 of the bytes, and CRC-32 of the values, or -1 if they are not decoded."""

_ANY_FILTER = Access(allow_filters=frozenset({"all"}))
_AT_ONCE_NBYTES = 1 << 20
_TASK_NBYTES = 8 << 20

Array = np.ndarray[Any, Any]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
Row = list[int]


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
    most = max(of_node.values())
    step = most if most < n else 1
    found = [0] * n
    for k, rank in enumerate(order):
        found[rank] = order[(k + step) % n]
    return found


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
    notes : ndarray of int
        The rows of the rank that wrote.
    writer, reader : int
        That rank, and this one, for messages.

    Attributes
    ----------
    n_stored, n_values : int
        Chunks whose stored bytes are compared, and chunks that are decoded.
    """

    def __init__(self, sink: Sink, ticket: Ticket, notes: Int64s, writer: int, reader: int) -> None:
        self._sink, self._ticket, self._writer, self._reader = sink, ticket, writer, reader
        self._folder = sink.stored(ticket)
        self._encoders = list(sink.arrays.values())
        rows = notes.reshape(-1, WIDTH)
        self._rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
        self._decoded: list[Row] = self._rows[self._rows[:, 5] >= 0].tolist()
        self.n_stored, self.n_values = len(self._rows), len(self._decoded)
        self._scratch = shared_scratch()

    def stored(self) -> Iterator[Callable[[], None]]:
        """Tasks for threads: each reads stored bytes, and compares them. VerifyError if they differ."""
        ends = np.cumsum(self._rows[:, 3]) // _TASK_NBYTES
        for rows in np.split(self._rows, np.flatnonzero(np.diff(ends)) + 1) if len(ends) else ():
            yield partial(self._compare_stored, rows.tolist())

    def _compare_stored(self, rows: Sequence[Row]) -> None:
        row = rows[0]
        try:
            for key, of_object in groupby(rows, self._key_of):
                chunks = list(of_object)
                row = chunks[0]
                found = self._folder.open(key)
                if found is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                with closing(found):
                    for row in chunks:
                        self._compare_bytes(found, row)
        except OSError as error:
            what, index = self._place(row)
            raise SourceError(
                f"{what} cannot be read back: {error.strerror or error}. What had this name before is as it was",
                path=self._sink.path,
                dataset=self._encoders[row[0]].name,
                chunk=index,
            ) from error

    def _key_of(self, row: Row) -> str:
        encoder = self._encoders[row[0]]
        return self._sink.key_of(self._ticket, encoder.name, row[1] if encoder.spec.chunks else 0)

    def _compare_bytes(self, stored: StoredObject, row: Row) -> None:
        _, _, offset, nbytes, crc, _ = row
        found, n_found = 0, 0
        while n_found < nbytes:
            room = self._scratch.bytes("read back", min(_AT_ONCE_NBYTES, nbytes - n_found), _AT_ONCE_NBYTES)
            try:
                stored.read_into(room, offset + n_found)
            except OSError:
                if stored.nbytes >= offset + n_found + len(room):
                    raise
                n_found = max(0, stored.nbytes - offset)
                break
            found, n_found = int(deflate.crc32(room.data, found)), n_found + len(room)
        if found != crc or n_found != nbytes:
            how = f"{n_found} of {nbytes} bytes are there" if n_found < nbytes else f"CRC-32 {found:08x} in place of {crc:08x}"
            raise VerifyError(
                f"{self._place(row)[0]}, {nbytes} bytes at {offset}, was written by rank {self._writer}, and rank "
                f"{self._reader} reads something else there: {how}. Nothing was saved, and what had this name before is as it "
                "was. If it happens again, suspect the storage, or that its nodes do not see each other's writes",
                rank=self._reader,
            )

    def _place(self, row: Row) -> tuple[str, tuple[int, ...] | None]:
        """A chunk in words, and its index."""
        encoder = self._encoders[row[0]]
        where = f"'{encoder.name}' in '{self._sink.path}'"
        if encoder.spec.chunks is None:
            return f"the part from element {unravel(row[1], encoder.spec.shape)} on of {where}", None
        index = unravel(row[1], encoder.spec.grid)
        return f"chunk {index} of {where}", index

    def compare_values(self, go_on: Callable[[], bool]) -> None:
        """Have the format's own library decode the chunks of which values are compared. Takes one thread.

        The file is opened once, and of its arrays one at a time: what is open is looked through whenever h5py closes a file.
        `go_on` is called after each chunk, and says whether there is still need.
        """
        file: OpenFile | None = None
        path = self._ticket.temporary
        with ExitStack() as opened:
            for array, rows in groupby(self._decoded, itemgetter(0)):
                name = self._encoders[array].name
                with ExitStack() as of_array:
                    with self._naming_what_is_unread(name, "values"):
                        decoding = self._sink.decoding(self._ticket, name)
                        if decoding is not None:
                            decode = of_array.enter_context(decoding)
                        else:
                            file = file or opened.enter_context(format_of(path).open_file(path, _ANY_FILTER))
                            decode = of_array.enter_context(closing(file.open(name))).plain
                    for row in rows:
                        self._compare_values(row, decode)
                        if not go_on():
                            return

    @contextmanager
    def _naming_what_is_unread(self, name: str, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise SourceError(
                f"the new file of '{self._sink.path}' cannot be read: {what} of '{name}': {type(error).__name__}: {error}. "
                "Nothing was saved, and what had this name before is as it was",
                path=self._sink.path,
                dataset=name,
            ) from error

    def _compare_values(self, row: Row, decode: Decode) -> None:
        encoder = self._encoders[row[0]]
        name, spec = encoder.name, encoder.spec
        region = (
            encoder.region(unravel(row[1], spec.grid))
            if spec.chunks
            else _run(spec.shape, row[1], row[3] // spec.dtype.itemsize)
        )
        with self._naming_what_is_unread(name, str(region)):
            values = np.asarray(decode(region)).reshape(region.shape).astype(native_dtype(spec.dtype), copy=False)
        if checksum_of_values(values) != row[5]:
            raise VerifyError(
                f"{region} of '{name}' in '{self._sink.path}', which rank {self._writer} wrote, is decoded by the format's "
                f"library on rank {self._reader} as other values than those that were to be saved. Nothing was saved, and what "
                "had this name before is as it was. This is a defect in shardload or in a compressor; please report it with "
                f"the array's type {spec.dtype}, its chunks {spec.chunks} and its compression {spec.compression}",
                rank=self._reader,
                index=region.start,
            )


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
