"""How are the codecs of an array applied to one chunk after the other?

1. A format describes the encoding of a chunk as a chain of `Stage`, in the order in which they are undone.
2. `Chain.decode` runs the chain. The size of every result follows from the chunk's declared size (between two compressors: at
   most the size that a codec makes of a chunk), so damaged or hostile bytes cannot make it allocate more. The last stage writes
   straight into the caller's buffer.
3. A stage that finds damage raises `ValueError` with what it found. The caller knows the chunk and adds it to the message.
4. `EncodeChain` does the opposite: it puts the values into memory as the file has them (C order, its byte order, padded at the
   array's edge) and runs the steps of a format over these bytes.

All stages and steps except Fletcher-32 release the GIL while they work, so that several chunks can be decoded, or encoded, at
once. For the choice of libraries see docs/design/decode.md, and docs/design/save.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.formats.contract.by_chunks import has_missing
from shardload.formats.contract.dtypes import native_dtype
from shardload.system.scratch import shared_scratch

__all__ = ["Bytes", "Chain", "EncodeChain", "Many", "Stage", "Step", "decode_many", "have_other_sizes"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Many = Sequence[Any] | Bytes  # bytes-like objects: of several chunks, in order
Step = Callable[[Any], Any]  # bytes-like to bytes-like


@dataclass(frozen=True)
class Stage:
    """One step of encoding, and how it is undone.

    Attributes
    ----------
    name : str
        Name for messages: ``"gzip"``.
    undo : callable
        ``undo(data, out)`` writes the decoded bytes into `out`, which has exactly their size. It may return an array of them
        instead, if that costs no more. ValueError if `data` is damaged.
    n_more : int or None
        Bytes by which the encoded form is longer (a checksum); 0 if it has the same length; None if it may have any length.
    within : callable or None
        ``within(data, most)`` returns the decoded bytes, at most `most`; ValueError if there are more. For stacked compressors:
        the data between two compressors may have any length.
    undo_many : callable or None
        ``undo_many(data, out)`` does the same for several chunks, with less Python for each: `data` has one bytes-like object
        per chunk, and `out` a row. It writes the rows and returns `out`, or returns other objects that hold the decoded bytes.
        ValueError if one of them is damaged; it need not say which.
    """

    name: str
    undo: Callable[[Bytes, Bytes], Bytes | None]
    n_more: int | None
    within: Callable[[Bytes, int], Bytes] | None = None
    undo_many: Callable[[Many, Bytes], Many] | None = None


class Chain:
    """How the chunks of one array are decoded. Safe to use from several threads at once.

    Parameters
    ----------
    stages : sequence of Stage
        The stages in the order in which they are undone: the stage that was applied last comes first.
    nbytes : int
        Bytes of a decoded chunk.

    Raises
    ------
    ValueError
        If a stage before another compressor has no `within`: the file could choose any size for the data between them.

    Examples
    --------
    >>> import zlib
    >>> from shardload.formats.codecs.compressors import decode_zlib
    >>> from shardload.formats.codecs.transforms import decode_shuffle
    >>> chain = Chain([decode_zlib(), decode_shuffle(2)], nbytes=4)
    >>> out = np.empty(2, "<u2")
    >>> chain.decode(zlib.compress(bytes([1, 2, 0, 1])), out)
    >>> out.tolist()
    [1, 258]
    """

    def __init__(self, stages: Sequence[Stage], nbytes: int) -> None:
        open_ended = [stage for stage in stages if stage.n_more is None]
        if any(stage.within is None for stage in open_ended[:-1]):
            names = " and ".join(stage.name for stage in open_ended)
            raise ValueError(f"{names}: nothing says how long the data between the two should be")
        self._stages = tuple(stages)
        self._most_between = nbytes + nbytes // 4 + 4096  # no codec lengthens data that it cannot compress by more
        self._scratch = shared_scratch()
        self.nbytes = nbytes
        self._sizes = _sizes_after(stages, nbytes)
        self.takes_many = all(
            stage.undo_many is not None and (size is not None or bool(stage.n_more))
            for stage, size in zip(stages, self._sizes, strict=True)
        )
        """True if `decode_many` knows every stage, and the size of the data after each but a checksum."""

    @property
    def most_stored_nbytes(self) -> int:
        """The most bytes that a stored chunk may have. A longer chunk is not read.

        A codec lengthens data that it cannot compress by less than one percent, plus some bytes of header and checksum. Several
        codecs one after the other stay far below this limit.
        """
        return 2 * self.nbytes + (1 << 16)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in the order in which they are undone."""
        return self._stages

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stages, in the order in which they are undone."""
        return tuple(stage.name for stage in self._stages)

    def decode(self, encoded: Any, out: np.ndarray[Any, Any], skipped: frozenset[int] = frozenset()) -> None:
        """Decode one chunk into `out`.

        Parameters
        ----------
        encoded : bytes-like
            The stored chunk.
        out : ndarray
            C-contiguous, `nbytes` long, of any dtype.
        skipped : frozenset of int
            Stages that were not applied to this chunk, by their position in `stages` (HDF5 allows that per chunk).

        Raises
        ------
        ValueError
            If a stage finds damage, or the sizes do not fit.
        """
        stages, sizes = self._stages, self._sizes
        if skipped:
            stages = tuple(stage for k, stage in enumerate(stages) if k not in skipped)
            sizes = _sizes_after(stages, self.nbytes)
        data: Bytes = np.frombuffer(encoded, dtype=np.uint8)
        target: Bytes = out.reshape(-1).view(np.uint8)
        if target.nbytes != self.nbytes:
            raise ValueError(f"a buffer of {target.nbytes} bytes for a chunk of {self.nbytes}")
        for k, (stage, nbytes) in enumerate(zip(stages, sizes, strict=True)):
            if nbytes is None and stage.n_more is not None:  # before another compressor: the data without a checksum
                nbytes = max(len(data) - stage.n_more, 0)
            if nbytes is None:
                if stage.within is None:
                    raise ValueError(f"nothing says how long the data after {stage.name} should be")
                data = stage.within(data, self._most_between)
                continue
            room = target if k == len(stages) - 1 else self._room(k, nbytes)
            found = stage.undo(data, room)
            data = room if found is None else found
            if data.nbytes != nbytes:
                raise ValueError(f"{stage.name} gives {data.nbytes} bytes where {nbytes} were stored")
        if data is not target:
            if data.nbytes != target.nbytes:
                raise ValueError(f"{data.nbytes} bytes are stored for a chunk of {target.nbytes}")
            target[:] = data

    def decode_many(self, encoded: Many, out: np.ndarray[Any, Any]) -> None:
        """Decode several chunks, to which all stages were applied. Only if `takes_many`.

        Parameters
        ----------
        encoded : sequence of bytes-like
            The stored chunks, at least one.
        out : ndarray
            C-contiguous; the chunks lie in it one after the other.

        Raises
        ------
        ValueError
            If one of them is damaged. Some may have been written to `out`.
        """
        data, n = encoded, len(encoded)
        target: Bytes = out.reshape(-1).view(np.uint8).reshape(n, -1)
        if target.shape[1] != self.nbytes:
            raise ValueError(f"a buffer of {target.nbytes} bytes for {n} chunks of {self.nbytes}")
        for k, (stage, nbytes) in enumerate(zip(self._stages, self._sizes, strict=True)):
            if stage.undo_many is None:
                raise ValueError(f"{stage.name} decodes chunks one by one")
            if nbytes is None:  # a checksum, which is cut off
                data = stage.undo_many(data, np.empty((n, 0), dtype=np.uint8))
                continue
            is_last = k == len(self._stages) - 1
            data = stage.undo_many(data, target if is_last else self._scratch.bytes(f"many{k}", n * nbytes).reshape(n, nbytes))
            if data is not target and have_other_sizes(data, nbytes):
                raise ValueError(f"{stage.name} gives other sizes than the {nbytes} bytes that were stored")
        if data is not target:
            rows = target.reshape(-1).data
            for k, one in enumerate(data):
                rows[k * self.nbytes : (k + 1) * self.nbytes] = memoryview(one)  # ValueError unless the sizes are equal

    def _room(self, k: int, nbytes: int) -> Bytes:
        """This thread's memory for the result of stage `k`. Its next chunk, of any array, uses it again: new memory is slow."""
        return self._scratch.bytes(f"stage{k}", nbytes)


def _sizes_after(stages: Sequence[Stage], nbytes: int) -> list[int | None]:
    """Bytes that each stage must give, of a chunk of `nbytes`: what the later ones need; None before another compressor."""
    more = [stage.n_more for stage in stages]
    return [None if None in more[k + 1 :] else nbytes + sum(n for n in more[k + 1 :] if n) for k in range(len(more))]


def have_other_sizes(data: Many, nbytes: int) -> bool:
    """True unless each of several chunks has `nbytes` bytes."""
    return bool(set(map(len, data)) - {nbytes})


def decode_many(chain: Chain, stored: Many, out: np.ndarray[Any, Any], fill: np.ndarray[Any, Any]) -> None:
    """Decode several chunks, of which those that are None are missing: their values are `fill`."""
    if not has_missing(stored):
        chain.decode_many(stored, out)
        return
    for one, values in zip(stored, out.reshape(len(stored), -1), strict=True):
        if one is None:
            values[...] = fill
        else:
            chain.decode(one, values)


class EncodeChain:
    """How the chunks of one array are encoded. Safe to use from several threads at once.

    Parameters
    ----------
    steps : sequence of callable
        What is done to the bytes of a chunk, in order. Each takes a flat array of bytes and returns something bytes-like.
    chunk_shape : tuple of int or None
        Elements of a chunk along each axis; None if regions of any shape are encoded as they are.
    dtype : dtype
        The type as it is stored, in the file's byte order.
    fill : scalar
        What pads a chunk that reaches over the array's edge.

    Examples
    --------
    >>> chain = EncodeChain([], (2, 2), np.dtype(">i2"), 7)
    >>> bytes(chain.encode(np.array([[1], [2]], dtype="<i2"))).hex(" ", 2)
    '0001 0007 0002 0007'
    """

    def __init__(self, steps: Sequence[Step], chunk_shape: tuple[int, ...] | None, dtype: np.dtype[Any], fill: Any) -> None:
        self._steps, self._chunk_shape, self._dtype, self._fill = tuple(steps), chunk_shape, dtype, fill
        self._scratch = shared_scratch()

    def encode(self, values: np.ndarray[Any, Any]) -> Any:
        """The stored bytes of a chunk. Without steps they may be the memory of `values` itself."""
        data: Any = self._packed(values)
        for step in self._steps:
            data = step(data)
        # A step may leave its result in scratch memory, for the next step. After the last one it must stay what it is.
        is_scratch = bool(self._steps) and isinstance(data, np.ndarray) and data.base is not None
        return data.copy() if is_scratch else data

    def _packed(self, values: np.ndarray[Any, Any]) -> Bytes:
        # First, because in an array in one piece nothing else is done for a chunk.
        if values.dtype == self._dtype and values.flags.c_contiguous and self._chunk_shape in (None, values.shape):
            return values.reshape(-1).view(np.uint8)
        if native_dtype(values.dtype) != native_dtype(self._dtype):
            raise ValueError(f"values of type {values.dtype} for an array of {self._dtype}: nothing is converted silently")
        shape = values.shape if self._chunk_shape is None else self._chunk_shape
        is_whole = values.shape == shape
        if not is_whole and (len(values.shape) != len(shape) or any(n > m for n, m in zip(values.shape, shape, strict=True))):
            raise ValueError(f"values of shape {values.shape} for a chunk of {shape}")
        # Bytes that go on to a step are gone when `encode` returns, so that the next chunk can use their memory.
        nbytes = math.prod(shape) * self._dtype.itemsize
        room = self._scratch.bytes("encode", nbytes) if self._steps else np.empty(nbytes, dtype=np.uint8)
        out = room.view(self._dtype).reshape(shape)
        if not is_whole:
            _pad(out, values.shape, self._fill)
        out[tuple(slice(n) for n in values.shape)] = values
        return room


def _pad(out: np.ndarray[Any, Any], inner: tuple[int, ...], fill: Any) -> None:
    """Fill what of `out` lies outside of a box of shape `inner` at its start."""
    for k, n in enumerate(inner):
        out[(*(slice(m) for m in inner[:k]), slice(n, None))] = fill
