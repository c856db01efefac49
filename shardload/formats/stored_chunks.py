"""How are stored chunks read and decoded, whatever the format? Each format says where they are; the rest is the same.

1. `StoredChunks.locate` says in which objects the chunks of a box are, at which offsets, in how many bytes. Each format looks
   that up in its own way: in an index of HDF5, the index of a Zarr shard, references to ranges of other files.
2. `fetch` compares these with the objects' sizes, and with the most bytes that such a chunk can have, and reads them with few
   requests.
3. `decode` undoes the codecs (`codecs.algorithms.Chain`) straight into the caller's buffer. The values of a missing chunk are
   the fill value.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.formats.codecs.algorithms import Chain
from shardload.formats.contract.chunk_reader import ChunkReader, Encoded, Room, check_box, fresh
from shardload.storage.objects import Ints, Ranges, StoredObject
from shardload.storage.remote import expect as read_ahead

_LEAST_NBYTES = 1 << 14  # of a request on average, to read plain chunks in place: else fetching and decoding is as fast


@dataclass(slots=True)
class ChunkRanges:
    """Where one object stores its chunks of a box.

    Attributes
    ----------
    stored : StoredObject
        The object.
    offsets, sizes : ndarray of int64
        Of each chunk.
    numbers : ndarray or None
        The numbers of these chunks in the box; None for all of them, in C order.
    skipped : mapping
        By a chunk's number in the box: the stages of the chain that were left out when it was stored.
    """

    stored: StoredObject
    offsets: Ints
    sizes: Ints
    numbers: Ints | None = None
    skipped: Mapping[int, frozenset[int]] = field(default_factory=dict)


class StoredChunks(ChunkReader):
    """The chunks of one open array.

    Parameters
    ----------
    counts : tuple of int
        Chunks along each axis.
    dtype : dtype
        Type of the decoded values, in native byte order.
    chain : Chain
        Undoes the codecs.
    fill : ndarray
        The value of missing chunks, as a 0-d array.
    """

    def __init__(self, counts: tuple[int, ...], dtype: np.dtype[Any], chain: Chain, fill: np.ndarray[Any, Any]) -> None:
        self.counts, self.dtype, self.chain, self.fill = counts, dtype, chain, fill

    @abc.abstractmethod
    def locate(self, box: Sequence[range]) -> list[ChunkRanges]:
        """Where the stored chunks of a box are, which is in the grid. A chunk that no `ChunkRanges` has is missing.

        OSError or ValueError if that cannot be told.
        """

    def fetch(self, box: Sequence[range], room: Room = fresh) -> Encoded:
        """Read a box of chunks as they are stored.

        Raises
        ------
        OSError
            If an object ends before a chunk does, or cannot be read.
        ValueError
            If the box is outside the grid, or a chunk is declared longer than such a chunk can be.
        """
        check_box(box, self.counts)
        of_objects = self.locate(box)
        for chunks in of_objects:
            self._check_within_object(chunks)
        ranges = [Ranges(chunks.offsets, chunks.sizes, chunks.stored.most_gap_nbytes) for chunks in of_objects]
        memory, begin = room(sum(wanted.nbytes for wanted in ranges)), 0
        if len(of_objects) == 1 and of_objects[0].numbers is None:
            return Encoded(of_objects[0].stored.read_ranges(ranges[0], memory), of_objects[0].skipped)
        encoded: list[Any] = [None] * math.prod(map(len, box))
        skipped: dict[int, frozenset[int]] = {}
        for chunks, wanted in zip(of_objects, ranges, strict=True):
            buffers = chunks.stored.read_ranges(wanted, memory[begin : begin + wanted.nbytes])
            begin += wanted.nbytes
            numbers = range(len(encoded)) if chunks.numbers is None else chunks.numbers.tolist()
            for number, buffer in zip(numbers, buffers, strict=True):
                encoded[number] = buffer
            skipped.update(chunks.skipped)
        return Encoded(encoded, skipped)

    def expect(self, boxes: Iterator[Sequence[range]]) -> None:
        """See `ChunkReader`: the same ranges are fetched ahead, in larger pieces."""

        def ranges() -> Iterator[tuple[StoredObject, Ints, Ints]]:
            for box in boxes:
                for chunks in self.locate(box):
                    self._check_within_object(chunks)  # before it is cut into requests, which may be billions
                    yield chunks.stored, chunks.offsets, chunks.sizes

        read_ahead(ranges())

    def _check_within_object(self, chunks: ChunkRanges) -> None:
        offsets, sizes = chunks.offsets.view(np.uint64), chunks.sizes.view(np.uint64)  # what is negative is far too large
        if not len(offsets):
            return
        most, end_of_object = self.chain.most_stored_nbytes, chunks.stored.nbytes
        largest, last_offset = (int(sizes[0]), int(offsets[0])) if len(sizes) == 1 else (int(sizes.max()), int(offsets.max()))
        if largest > most:
            raise ValueError(
                f"a chunk is declared to be stored in {largest} bytes; its codecs can make {most} at most of the "
                f"{self.chain.nbytes} that it has: the index of chunks is damaged"
            )
        last_stop = last_offset + largest  # at most: where the last chunk would end if it were the largest
        if last_stop > end_of_object >= last_offset:
            last_stop = int((offsets + sizes).max())
        if last_stop > end_of_object:
            raise OSError(f"the file ends at byte {end_of_object}, but a chunk is stored up to byte {last_stop}")

    def decode(self, encoded: Encoded, out: np.ndarray[Any, Any]) -> None:
        """Decode what `fetch` returned into `out`. ValueError if a chunk is damaged."""
        n = len(encoded.data)
        if out.dtype != self.dtype or not out.flags.c_contiguous or out.nbytes != n * self.chain.nbytes:
            raise ValueError(
                f"a buffer of {out.nbytes} bytes of {out.dtype} for {n} chunks of {self.chain.nbytes} of {self.dtype}"
            )
        if not encoded.skipped and not encoded.has_missing:
            self.chain.decode(encoded.data, out)
            return
        for number, (data, values) in enumerate(zip(encoded.data, out.reshape(n, -1), strict=True)):
            if data is None:
                values[...] = self.fill
            else:
                self.chain.decode([data], values, encoded.skipped.get(number, frozenset()))

    def read_plain(self, box: Sequence[range], out: np.ndarray[Any, Any]) -> bool:
        """Read chunks that are stored as plain values straight into `out`: see `ChunkReader`."""
        if self.chain.names:
            return False
        check_box(box, self.counts)
        of_objects = self.locate(box)
        if len(of_objects) != 1 or of_objects[0].numbers is not None:
            return False
        (chunks,) = of_objects
        offsets, sizes = chunks.offsets, chunks.sizes
        ranges = Ranges(offsets, sizes, most_gap=0)
        if ranges.nbytes != out.nbytes or not ranges.are_in_order or len(ranges.requests) * _LEAST_NBYTES > ranges.nbytes:
            return False
        if len(sizes) > 1 and (sizes != self.chain.nbytes).any():
            return False
        self._check_within_object(chunks)
        chunks.stored.read_ranges(ranges, out.reshape(-1).view(np.uint8))
        return True
