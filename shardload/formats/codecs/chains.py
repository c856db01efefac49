"""How are the codecs of an array applied to one chunk after the other?

1. A format describes the encoding of a chunk as a chain of `Stage`, in the order in which they are undone.
2. `Chain.decode` runs the chain over several chunks at once. The size of every result follows from the chunk's declared size,
   so damaged or hostile bytes cannot make it allocate more. The last stage writes straight into the caller's buffer.
3. A stage that finds damage raises `ValueError` with what it found. The caller decodes the same chunks one by one, to name it.
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

from shardload.formats.contract.dtypes import native_dtype
from shardload.system.scratch import shared_scratch

_WORTH_RELEASING = 1 << 15  # bytes of a chunk from which NumPy copies it: that releases the GIL, and takes a microsecond more

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
        ``undo(data, out)`` takes one bytes-like object per chunk and an array with a row for each, exactly as long as the
        decoded bytes. It writes the rows and returns `out`, or returns other objects that hold the decoded bytes if that costs
        no more. ValueError if one of them is damaged; it need not say which.
    n_more : int or None
        Bytes by which the encoded form is longer (a checksum); 0 if it has the same length; None if it may have any length.
    """

    name: str
    undo: Callable[[Many, Bytes], Many]
    n_more: int | None


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
        If chunks are compressed twice: the file could choose any size for the data between the two.

    Examples
    --------
    >>> import zlib
    >>> from shardload.formats.codecs.algorithms import decode_zlib
    >>> from shardload.formats.codecs.algorithms import decode_shuffle
    >>> chain = Chain([decode_zlib(), decode_shuffle(2)], nbytes=4)
    >>> out = np.empty((2, 2), "<u2")
    >>> chain.decode([zlib.compress(bytes([1, 2, 0, 1])), zlib.compress(bytes(4))], out)
    >>> out.tolist()
    [[1, 258], [0, 0]]
    """

    def __init__(self, stages: Sequence[Stage], nbytes: int) -> None:
        compressors = [stage.name for stage in stages if stage.n_more is None]
        if len(compressors) > 1:
            raise ValueError(f"{' and '.join(compressors)}: nothing says how long the data between the two should be")
        self._stages = tuple(stages)
        self._scratch = shared_scratch()
        self.nbytes = nbytes

    @property
    def most_stored_nbytes(self) -> int:
        """The most bytes that a stored chunk may have. A longer chunk is not read.

        A codec lengthens data that it cannot compress by less than one percent, plus some bytes of header and checksum. Several
        codecs one after the other stay far below this limit.
        """
        return 2 * self.nbytes + (1 << 16)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stages, in the order in which they are undone."""
        return tuple(stage.name for stage in self._stages)

    def decode(self, encoded: Many, out: np.ndarray[Any, Any], skipped: frozenset[int] = frozenset()) -> None:
        """Decode chunks.

        Parameters
        ----------
        encoded : sequence of bytes-like
            The stored chunks.
        out : ndarray
            C-contiguous, of any dtype; the chunks lie in it one after the other.
        skipped : frozenset of int
            Stages that were not applied to these chunks, by their position (HDF5 allows that per chunk).

        Raises
        ------
        ValueError
            If one of them is damaged, or the sizes do not fit. Some may have been written to `out`.
        """
        data, n = encoded, len(encoded)
        target: Bytes = out.reshape(-1).view(np.uint8)
        if target.nbytes != n * self.nbytes:
            raise ValueError(f"a buffer of {target.nbytes} bytes for {n} chunks of {self.nbytes}")
        target = target.reshape(n, self.nbytes)
        stages = [stage for k, stage in enumerate(self._stages) if k not in skipped]
        for k, stage in enumerate(stages):
            rest = [later.n_more for later in stages[k + 1 :]]
            if None in rest:  # what a compressor made has any length
                n_less = stage.n_more or 0
                data = [stage.undo([one], np.empty((1, max(0, len(one) - n_less)), dtype=np.uint8))[0] for one in data]
                continue
            nbytes = self.nbytes + sum(more for more in rest if more)
            rows = target if k == len(stages) - 1 else self._scratch.bytes(f"stage{k}", n * nbytes).reshape(n, nbytes)
            data = stage.undo(data, rows)
            if data is not rows and have_other_sizes(data, nbytes):
                raise ValueError(f"{stage.name} gives other sizes than the {nbytes} bytes that were stored")
        if data is not target:
            if have_other_sizes(data, self.nbytes):
                raise ValueError(f"other sizes are stored than the {self.nbytes} bytes of a chunk")
            _copy_rows(data, target)


def _copy_rows(data: Many, rows: Bytes) -> None:
    nbytes = rows.shape[1]
    if nbytes >= _WORTH_RELEASING:
        for one, row in zip(data, rows, strict=True):
            row[...] = np.frombuffer(one, dtype=np.uint8)
        return
    whole = rows.reshape(-1).data
    for k, one in enumerate(data):
        whole[k * nbytes : (k + 1) * nbytes] = memoryview(one)


def have_other_sizes(data: Many, nbytes: int) -> bool:
    """True unless each of several chunks has `nbytes` bytes."""
    return bool(set(map(len, data)) - {nbytes})


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
        # First, because in a contiguous array nothing else is done for a chunk.
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
