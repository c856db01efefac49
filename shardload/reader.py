"""How does one rank turn its reads into blocks in memory, inside the staging cap?

1. Where a block is wholly one piece of this rank's own and lies in it without gaps: read straight into the piece.
2. Where the values are in memory already (`scatter`): the block is a view, nothing is copied.
3. Else read into one of a few staging buffers, which are reused, casting there if another dtype was asked for.

It counts what it really read: chunks decoded and bytes. A failed read is explained: which chunk of the file it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardload.errors import ConfigError, ShardloadError, SourceError
from shardload.exchange import Block, Piece
from shardload.plan import Grid, Read
from shardload.region import Region, Selection
from shardload.sources.base import Source
from shardload.wire import sendable

__all__ = ["SourceReader", "aligned_empty"]

_ALIGNMENT = 64
_CAST_SIZE = 1 << 16  # elements: checking a cast takes temporaries of this size, not of a block's

Array = np.ndarray[Any, Any]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array on a 64-byte boundary, which JAX on CPU can use as it is instead of copying it."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


class SourceReader:
    """The blocks of one rank, read from one open source.

    Parameters
    ----------
    source : Source
        Open array.
    selection : Selection
        Which of its elements make up the array that is loaded.
    chunks : Grid
        The loaded array cut into the file's chunks.
    has_chunks : bool
        Whether these are real.
    block_size : int
        Most elements in a block.
    n_buffers : int
        Staging buffers: with two, one block is read while the one before is sent.
    dtype : dtype
        What blocks hold: the source's dtype, or what it is to be cast to.
    pieces : mapping of int to Piece
        This rank's pieces, by shard.
    rank : int
        This rank.
    """

    def __init__(
        self,
        source: Source,
        selection: Selection,
        chunks: Grid,
        *,
        has_chunks: bool,
        block_size: int,
        n_buffers: int,
        dtype: np.dtype[Any],
        pieces: Mapping[int, Piece],
        rank: int,
    ) -> None:
        self._source, self._selection, self._chunks, self._has_chunks = source, selection, chunks, has_chunks
        self._block_size, self._n_buffers, self._dtype, self._pieces, self._rank = (
            block_size,
            n_buffers,
            dtype,
            pieces,
            rank,
        )
        self._casts = source.dtype != dtype
        self._free: list[Array] = []
        self._n_staged = 0
        self._raw: Array | None = None
        self.chunks_decoded = 0
        self.nbytes_read = 0

    def has_room(self) -> bool:
        """Whether a staging buffer is free for another block."""
        return bool(self._free) or self._n_staged < self._n_buffers

    def fetch(self, read: Read) -> Block:
        """Read one block.

        Raises
        ------
        SourceError
            If the file cannot be read there; the text names the chunk.
        ConfigError
            If values do not fit into the dtype that was asked for.
        """
        try:
            return self._fetch(read)
        except (ShardloadError, MemoryError):
            raise
        except Exception as error:
            raise self._explain(error, read.region) from error

    def _fetch(self, read: Read) -> Block:
        own = self._own_piece(read)
        if own is not None:
            self._read(read.region, own)
            return Block(read, None, _nothing)
        view = None if self._casts else self._source.view(self._selection.to_file(read.region))
        if view is not None and sendable(view):
            return Block(read, self._drop_axes(view), _nothing)
        block = self._stage(read)
        self._fill(block)
        return block

    def _own_piece(self, read: Read) -> Array | None:
        """The part of this rank's own piece that is all of the block, where the values can be read straight into it."""
        if self._casts or len(read.parts) != 1:
            return None
        part = read.parts[0]
        if part.rank != self._rank or part.region != read.region:
            return None
        view = self._pieces[part.shard].view(part.region)
        return view if view.flags.c_contiguous else None

    def _fill(self, block: Block) -> None:
        if block.data is None:
            raise ValueError("only a staged block can be filled")
        region = block.read.region
        if not self._casts:
            self._read(region, block.data)
            return
        if self._raw is None:
            self._raw = np.empty(self._block_size, dtype=self._source.dtype)
        raw = self._raw[: region.size].reshape(region.shape)
        self._read(region, raw)
        _cast(raw, block.data, f"{self._source.info}, elements {self._selection.to_file(region)},")

    def _read(self, region: Region, out: Array) -> None:
        box = self._selection.to_file(region)
        self._source.read_into(box, out.reshape(box.shape))
        if self._has_chunks:
            self.chunks_decoded += self._chunks.n_meeting(region)
        self.nbytes_read += region.size * self._source.dtype.itemsize

    def _drop_axes(self, view: Array) -> Array:
        """A view with the file's axes, without those that the selection dropped."""
        kept = set(self._selection.kept)
        index: Any = (*(slice(None) if k in kept else 0 for k in range(view.ndim)), ...)  # an array, also when 0-d
        box: Array = view[index]
        return box

    def _stage(self, read: Read) -> Block:
        buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = aligned_empty((self._block_size,), self._dtype)
            self._n_staged += 1
        data = buffer[: read.region.size].reshape(read.region.shape)
        return Block(read, data, _returner(self._free, buffer))

    def _explain(self, error: Exception, region: Region) -> SourceError:
        """What went wrong, with the chunk it went wrong in."""
        info = self._source.info
        where, chunk = f"{self._selection.to_file(region)}", None
        for number in self._chunks.meeting(region) if self._has_chunks else ():
            cell = self._chunks.region(number).intersect(region)
            if cell is None:
                continue
            box = self._selection.to_file(cell)
            try:
                self._source.read_into(box, np.empty(box.shape, dtype=self._source.dtype))
            except Exception as closer:
                chunk = tuple(a // c for a, c in zip(box.start, info.chunks or box.shape, strict=True))
                where, error = str(box), closer
                break
        what = f"chunk {chunk} of {info}" if chunk is not None else str(info)
        return SourceError(
            f"{what} could not be read (elements {where}): {type(error).__name__}: {error}. The file is damaged, incomplete or "
            "out of reach there; nothing was loaded. Copy it again or make it anew",
            path=info.path,
            dataset=info.dataset,
            chunk=chunk,
        )


def _cast(raw: Array, out: Array, name: str) -> None:
    """Cast as the caller asked by name: it may round and cut off fractions, but a value that does not fit is an error."""
    flat, target = raw.reshape(-1), out.reshape(-1)
    for start in range(0, flat.size, _CAST_SIZE):
        if not _cast_fits(flat[start : start + _CAST_SIZE], target[start : start + _CAST_SIZE]):
            raise ConfigError(
                f"{name} have values that {out.dtype} cannot hold (too large, or not a number): pass a wider dtype, or none to "
                f"keep {raw.dtype}"
            )


def _cast_fits(raw: Array, out: Array) -> bool:
    try:
        with np.errstate(over="raise", invalid="raise"):
            np.copyto(out, raw, casting="unsafe")
    except FloatingPointError:
        return False
    if out.dtype.kind not in "iu":
        return True
    # NumPy tells of NaN and of what 32 bits cannot hold, but wraps -1.0 to 255, and integers, without a word.
    return np.array_equal(out, np.trunc(raw) if raw.dtype.kind == "f" else raw)


def _nothing() -> None:
    return None


def _returner(free: list[Array], buffer: Array) -> Callable[[], None]:
    return lambda: free.append(buffer)
