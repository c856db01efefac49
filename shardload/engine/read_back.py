"""Is on disk what was to be written? Another rank reads it back, by the checksum of its bytes, and decodes some of it.

1. Each owner notes of each chunk where it is, and the CRC-32 of its stored bytes (`Notes.add`); of some chunks, or of all, also
   that of the values (`Notes.add_values`). The CRCs are made before the bytes leave the encoder.
2. The notes go to another rank (`planning.partners`), on another node where there is one, so that no cache of the writer's
   node answers in place of the disk or the file server.
3. That rank reads the stored bytes (`ReadBack.stored`). Then it has the format's own library read some values from the new
   file (`ReadBack.values`), which proves that the file leads there and that the chunk decodes to what the devices had.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import deflate
import numpy as np

from shardload.errors import SourceError, VerifyError
from shardload.formats.access import Access
from shardload.formats.contract.dtypes import native_dtype
from shardload.formats.contract.format import OpenFile
from shardload.formats.lookup import format_of
from shardload.formats.sink import Decode, Sink, Ticket
from shardload.planning.grid import unravel
from shardload.planning.region import Region
from shardload.storage.local import read_at
from shardload.system.scratch import shared_scratch
from shardload.transfer.checksum import checksum

_WIDTH = 5  # integers of a stored chunk: array, number, offset, bytes, CRC-32
_AT_ONCE_NBYTES = 1 << 20
_TASK_NBYTES = 8 << 20

Array = np.ndarray[Any, Any]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
Task = Callable[[], int]


def checksum_of_values(values: Array) -> int:
    """CRC-32 of values in C order, in the machine's byte order."""
    return checksum(np.asarray(values).astype(native_dtype(values.dtype), copy=False))


@dataclass
class Notes:
    """What one rank has written.

    Attributes
    ----------
    stored : list of ndarray
        Rows of five integers for each chunk: number of its array, its own number (of a part of an array in one piece: its first
        element, in C order), offset, bytes, CRC-32.
    values : list of int
        For each region that is to be decoded: number of its array, CRC-32 of the values, number of axes, start, stop.
    """

    stored: list[Int64s] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def add(self, rows: list[tuple[int, ...]]) -> None:
        """Note chunks that will be written."""
        if rows:
            self.stored.append(np.array(rows, dtype=np.int64))

    def add_values(self, array: int, region: Region, crc: int) -> None:
        """Note that a region is to be decoded."""
        self.values += [array, crc, region.ndim, *region.start, *region.stop]

    def to_ints(self) -> Int64s:
        """All of it, for another rank."""
        n = sum(len(rows) for rows in self.stored)
        rows = [rows.reshape(-1) for rows in self.stored]
        return np.concatenate([np.array([n], dtype=np.int64), *rows, np.array(self.values, dtype=np.int64)])


class ReadBack:
    """What one rank reads back of what another rank has written.

    Parameters
    ----------
    sink : Sink
        The new file.
    ticket : Ticket
        Where it is now.
    notes : ndarray of int
        `Notes.to_ints` of the rank that wrote.
    writer, reader : int
        That rank, and this one, for messages.
    """

    def __init__(self, sink: Sink, ticket: Ticket, notes: Int64s, writer: int, reader: int) -> None:
        self._sink, self._ticket, self._writer, self._reader = sink, ticket, writer, reader
        self._names = list(sink.arrays)
        n = int(notes[0])
        rows = notes[1 : 1 + n * _WIDTH].reshape(n, _WIDTH)
        self._rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))] if n else rows
        self._regions = sorted(_regions_of(notes[1 + n * _WIDTH :].tolist()), key=itemgetter(0))
        self._file: OpenFile | None = None
        self._decoding: tuple[int, Decode] | None = None  # the array that is open, and how its values are read
        self._scratch = shared_scratch()

    @property
    def n_stored(self) -> int:
        """Chunks whose stored bytes are compared."""
        return len(self._rows)

    @property
    def n_values(self) -> int:
        """Regions that are decoded."""
        return len(self._regions)

    def stored(self) -> Iterator[Task]:
        """Tasks for threads: each reads stored bytes, compares them, and returns their number. VerifyError if they differ."""
        ends = np.cumsum(self._rows[:, 3]) // _TASK_NBYTES
        for rows in np.split(self._rows, np.flatnonzero(np.diff(ends)) + 1) if len(ends) else ():
            yield partial(self._compare_stored, rows.tolist())

    def _compare_stored(self, rows: list[list[int]]) -> int:
        path, descriptor, total = "", -1, 0
        try:
            for array, number, offset, nbytes, crc in rows:
                name = self._names[array]
                where = self._sink.file_of(self._ticket, name, number if self._sink.arrays[name].spec.chunks else 0)
                try:
                    if where != path:
                        if descriptor >= 0:
                            os.close(descriptor)
                        descriptor, path = -1, where
                        descriptor = os.open(where, os.O_RDONLY)
                    found, n_found = self._crc(descriptor, offset, nbytes)
                except OSError as error:
                    raise self._unreadable(name, number, error) from error
                if found != crc or n_found != nbytes:
                    raise self._differs(name, number, offset, nbytes, crc, found, n_found)
                total += nbytes
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return total

    def _crc(self, descriptor: int, offset: int, nbytes: int) -> tuple[int, int]:
        """CRC-32 of bytes of a file, and how many there are."""
        crc, done = 0, 0
        while done < nbytes:
            room = self._scratch.bytes("read back", min(_AT_ONCE_NBYTES, nbytes - done), _AT_ONCE_NBYTES)
            n = read_at(descriptor, room, offset + done)
            crc, done = int(deflate.crc32(room[:n].data, crc)), done + n
            if n < len(room):
                break
        return crc, done

    def _place(self, name: str, number: int) -> tuple[str, tuple[int, ...] | None]:
        spec = self._sink.arrays[name].spec
        if spec.chunks is None:
            return f"'{name}' from element {unravel(number, spec.shape)} on, in '{self._sink.path}'", None
        index = unravel(number, spec.grid)
        return f"chunk {index} of '{name}' in '{self._sink.path}'", index

    def _unreadable(self, name: str, number: int, error: OSError) -> SourceError:
        what, index = self._place(name, number)
        return SourceError(
            f"{what} cannot be read back: {error.strerror or error}. What had this name before is as it was",
            path=self._sink.path,
            dataset=name,
            chunk=index,
        )

    def _differs(self, name: str, number: int, offset: int, nbytes: int, crc: int, found: int, n_found: int) -> VerifyError:
        what, _ = self._place(name, number)
        how = f"{n_found} of {nbytes} bytes are there" if n_found < nbytes else f"CRC-32 {found:08x} in place of {crc:08x}"
        return VerifyError(
            f"{what}, {nbytes} bytes at {offset}, was written by rank {self._writer}, and rank {self._reader} reads something "
            f"else there: {how}. Nothing was saved, and what had this name before is as it was. If it happens again, suspect "
            "the storage, or that its nodes do not see each other's writes",
            rank=self._reader,
        )

    def values(self) -> Iterator[Task]:
        """Tasks for one thread, to be done in this order: each decodes a region with the format's own library, and returns the
        number of bytes.

        The file is opened once, and of its arrays one at a time: what is open is looked through whenever h5py closes a file.
        """
        with ExitStack() as file, ExitStack() as one:
            for array, region, crc in self._regions:
                yield partial(self._compare_values, file, one, array, region, crc)

    def _decoder(self, name: str, file: ExitStack, one: ExitStack) -> Decode:
        """Reads values of an array of the new file, by the format's own library."""
        own = self._sink.decoding(self._ticket, name)
        if own is not None:
            return one.enter_context(own)
        if self._file is None:
            path = self._ticket.temporary
            self._file = file.enter_context(format_of(path).open_file(path, Access(allow_filters=frozenset({"all"}))))
        source = self._file.open(name)
        one.callback(source.close)
        return source.plain

    def _compare_values(self, file: ExitStack, one: ExitStack, array: int, region: Region, crc: int) -> int:
        name = self._names[array]
        try:
            if self._decoding is None or self._decoding[0] != array:
                one.close()
                self._decoding = array, self._decoder(name, file, one)
            found = np.asarray(self._decoding[1](region))
        except Exception as error:
            raise SourceError(
                f"the new file of '{self._sink.path}' cannot be read: {region} of '{name}': {type(error).__name__}: {error}. "
                "Nothing was saved, and what had this name before is as it was",
                path=self._sink.path,
                dataset=name,
            ) from error
        spec = self._sink.arrays[name].spec
        values = found.reshape(region.shape).astype(native_dtype(spec.dtype), copy=False)
        if checksum_of_values(values) != crc:
            raise VerifyError(
                f"{region} of '{name}' in '{self._sink.path}', which rank {self._writer} wrote, is decoded by the format's "
                f"library on rank {self._reader} as other values than those that were to be saved. Nothing was saved, and what "
                "had this name before is as it was. This is a defect in shardload or in a compressor; please report it with "
                f"the array's type {spec.dtype}, its chunks {spec.chunks} and its compression {spec.compression}",
                rank=self._reader,
                index=region.start,
            )
        return values.nbytes


def _regions_of(ints: list[int]) -> Iterator[tuple[int, Region, int]]:
    at = 0
    while at < len(ints):
        array, crc, ndim = ints[at : at + 3]
        bounds = ints[at + 3 : at + 3 + 2 * ndim]
        yield array, Region(tuple(bounds[:ndim]), tuple(bounds[ndim:])), crc
        at += 3 + 2 * ndim
