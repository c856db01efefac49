"""How is each codec applied, and undone? ``encode_NAME`` gives a step, ``decode_NAME`` a stage.

Shuffle, byte order and checksums first, then compressors. Each step makes exactly what the format's own library reads;
docs/design/save.md has the table.

The codecs of an array are undone one after the other:

1. A format describes the encoding of a chunk as a chain of `Stage`, in the order in which they are undone.
2. `Chain.decode` runs the chain over several chunks at once. The size of every result follows from the chunk's declared size,
   so damaged or hostile bytes cannot make it allocate more. The last stage writes straight into the caller's buffer.
3. A stage that finds damage raises `ValueError` with what it found. The caller decodes the same chunks one by one, to name it.

All stages and steps except Fletcher-32 release the GIL while they work, so that several chunks can be decoded, or encoded, at
once. For the choice of libraries see docs/design/decode.md, and docs/design/save.md.
"""

from __future__ import annotations

import importlib
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import deflate
import google_crc32c
import numpy as np
import zstandard

from shardload.system.scratch import shared_scratch

_WORTH_RELEASING = 1 << 15  # bytes of a chunk from which NumPy copies it: that releases the GIL, and takes a microsecond more

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Many = Sequence[Any] | Bytes  # bytes-like objects, one for each of several chunks, in order
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
    >>> from shardload.formats.codecs.algorithms import decode_gzip
    >>> from shardload.formats.codecs.algorithms import decode_shuffle
    >>> chain = Chain([decode_gzip(is_zlib=True), decode_shuffle(2)], nbytes=4)
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
        self.names = tuple(stage.name for stage in stages)
        self._scratch = shared_scratch()
        self.nbytes = nbytes
        # A longer chunk is not read. A codec lengthens data that it cannot compress by less than one percent, plus some bytes
        # of header and checksum. Several codecs one after the other stay far below this limit.
        self.most_stored_nbytes = 2 * nbytes + (1 << 16)

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
        target: Bytes = out.reshape(-1).view(np.uint8).reshape(n, self.nbytes)
        stages = [stage for k, stage in enumerate(self._stages) if k not in skipped]
        for k, stage in enumerate(stages):
            later = [stage.n_more for stage in stages[k + 1 :]]
            if None in later:  # what a compressor made has any length
                n_less = stage.n_more or 0
                data = [stage.undo([chunk], np.empty((1, max(0, len(chunk) - n_less)), dtype=np.uint8))[0] for chunk in data]
                continue
            nbytes = self.nbytes + sum(n_more for n_more in later if n_more)
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
        for chunk, row in zip(data, rows, strict=True):
            row[...] = np.frombuffer(chunk, dtype=np.uint8)
        return
    whole = rows.reshape(-1).data
    for k, chunk in enumerate(data):
        whole[k * nbytes : (k + 1) * nbytes] = memoryview(chunk)


def have_other_sizes(data: Many, nbytes: int) -> bool:
    """True unless each of several chunks has `nbytes` bytes."""
    return bool(set(map(len, data)) - {nbytes})


@cache
def numcodecs() -> Any:
    """The library of this name. It takes as long to import as h5py, and most files need nothing of it."""
    return importlib.import_module("numcodecs")


def decode_shuffle(itemsize: int) -> Stage:
    """The byte shuffle: the first byte of each element, then the second, ... Bytes of an incomplete element come last."""

    def undo(data: Many, out: Bytes) -> Many:
        n, nbytes = out.shape[1] // itemsize, out.shape[1]
        if have_other_sizes(data, nbytes):
            raise ValueError(f"shuffled data of other sizes than {nbytes} bytes")
        if itemsize in (2, 4, 8, 16) and n * itemsize == nbytes and out.flags.c_contiguous and _blosc_takes(*out.shape):
            _unshuffle_by_blosc(data, out, itemsize)
            return out
        for chunk, row in zip(data, out, strict=True):
            planes, elements = np.frombuffer(chunk, dtype=np.uint8), row[: n * itemsize].reshape(n, itemsize)
            for k in range(itemsize):  # NumPy releases the GIL here; measured as fast as numcodecs, which does not release it
                elements[:, k] = planes[k * n : (k + 1) * n]
            row[n * itemsize :] = planes[n * itemsize :]
        return out

    return Stage("shuffle", undo, 0)


_MOST_BLOCKS, _MOST_BY_BLOSC = 1024, 1 << 26  # chunks, and bytes: it counts with 32 bits


def _blosc_takes(n: int, nbytes: int) -> bool:
    """True if Blosc may un-shuffle `n` chunks. In the main thread it would start threads of its own."""
    is_little = 0 < n <= _MOST_BLOCKS and 0 < n * nbytes <= _MOST_BY_BLOSC
    return is_little and threading.current_thread() is not threading.main_thread()


def _unshuffle_by_blosc(data: Many, out: Bytes, itemsize: int) -> None:
    """Un-shuffle chunks as long as the rows of `out`, with Blosc's code for vector registers: 0.9 microseconds for 16 KiB.

    They become the blocks of one Blosc 1 buffer. A block that could not be compressed is stored as it is, with its length
    before it, and is then only un-shuffled.
    """
    n, nbytes = out.shape
    head, length = _blosc_head(n, nbytes, itemsize)
    parts = [length] * (2 * n)
    parts[0], parts[1::2] = head, data
    numcodecs().blosc.decompress(b"".join(parts), out.reshape(-1))


@lru_cache(maxsize=64)
def _blosc_head(n: int, nbytes: int, itemsize: int) -> tuple[bytes, bytes]:
    """The bytes before the first of `n` shuffled blocks that are stored as they are, and those before each of the others.

    See c-blosc's README_CHUNK_FORMAT: version, version of the compressor (BloscLZ), flags (1: shuffled; 16: a block is one
    stream), bytes of an element; decoded bytes, bytes of a block, bytes of all; where each block begins.
    """
    first, length = 16 + 4 * n, struct.pack("<I", nbytes)
    all_nbytes = first + n * (4 + nbytes)
    head = struct.pack("<BBBBIII", 2, 1, 1 | 16, itemsize, n * nbytes, nbytes, all_nbytes)
    return head + struct.pack(f"<{n}I", *range(first, all_nbytes, 4 + nbytes)) + length, length


def encode_shuffle(itemsize: int) -> Step:
    """The byte shuffle: the first byte of each element, then the second, ... Bytes of an incomplete element come last."""
    scratch = shared_scratch()

    def step(data: Any) -> Any:
        source = np.frombuffer(data, dtype=np.uint8)
        n = len(source) // itemsize
        out = scratch.bytes("shuffled", len(source))
        elements = source[: n * itemsize].reshape(n, itemsize)
        for k in range(itemsize):  # NumPy releases the GIL here, numcodecs does not
            out[k * n : (k + 1) * n] = elements[:, k]
        out[n * itemsize :] = source[n * itemsize :]
        return out

    return step


def decode_byte_order(itemsize: int) -> Stage:
    """The other byte order, for numbers (or real and imaginary parts) of `itemsize` bytes."""
    kind = np.dtype(f"u{itemsize}")

    def undo(data: Many, out: Bytes) -> Many:
        if have_other_sizes(data, out.shape[1]):
            raise ValueError(f"other sizes are stored than the {out.shape[1]} bytes of a chunk")
        for chunk, row in zip(data, out, strict=True):
            np.copyto(row.view(kind), np.frombuffer(chunk, kind.newbyteorder()))
        return out

    return Stage("byte order", undo, 0)


def _checked(name: str, check: Callable[[Bytes], None]) -> Stage:
    """A stage that takes away a checksum of 4 bytes. `check` gets the data with it, and raises ValueError if it is wrong."""

    def undo(data: Many, out: Bytes) -> Many:
        chunks = [np.frombuffer(encoded, dtype=np.uint8) for encoded in data]
        for chunk in chunks:
            if len(chunk) < 4:
                raise ValueError(f"{len(chunk)} bytes are too few to hold a checksum of {name}")
            check(chunk)
        return [chunk[:-4] for chunk in chunks]

    return Stage(name, undo, 4)


def decode_fletcher32() -> Stage:
    """HDF5's Fletcher-32 checksum, after the data. Uses numcodecs."""
    codec = numcodecs().Fletcher32()

    def check(data: Bytes) -> None:
        try:
            codec.decode(data)
        except RuntimeError as error:
            # HDF5 before 1.6.3 wrote the bytes of each half in the other order, and later versions accept both.
            a, b, c, d = data[-4:].tolist()
            try:
                codec.decode(np.concatenate([data[:-4], np.array([b, a, d, c], dtype=np.uint8)]))
            except RuntimeError:
                raise ValueError(f"Fletcher-32: {error}") from None

    return _checked("fletcher32", check)


def encode_fletcher32() -> Step:
    """HDF5's Fletcher-32 checksum, after the data. Uses numcodecs."""
    codec = numcodecs().Fletcher32()
    return lambda data: codec.encode(np.frombuffer(data, dtype=np.uint8))


def decode_crc32c() -> Stage:
    """Zarr's CRC-32C checksum, after the data. Uses google-crc32c, on which zarr-python depends."""

    def check(data: Bytes) -> None:
        stored = int.from_bytes(data[-4:].tobytes(), "little")
        computed = google_crc32c.value(data[:-4])  # takes arrays, but no memoryview
        if stored != computed:
            raise ValueError(f"CRC-32C is {computed:08x}, stored is {stored:08x}")

    return _checked("crc32c", check)


def encode_crc32c() -> Step:
    """Zarr's CRC-32C checksum, after the data. Uses google-crc32c."""

    def step(data: Any) -> Any:
        source = np.frombuffer(data, dtype=np.uint8)
        crc = int(google_crc32c.value(source)).to_bytes(4, "little")
        return np.concatenate([source, np.frombuffer(crc, dtype=np.uint8)])

    return step


_SMALL_NBYTES = 1 << 15
_LZ4_BLOCK_NBYTES = 1 << 30


def decode_gzip(*, is_zlib: bool = False) -> Stage:
    """Zarr's gzip: one gzip member, with its CRC-32 checked. Or HDF5's gzip filter and Zarr's zlib: a zlib stream, with its
    Adler-32 checked. Uses libdeflate.
    """
    decompress = deflate.zlib_decompress if is_zlib else deflate.gzip_decompress

    def undo(data: Many, out: Bytes) -> Many:
        try:
            return [decompress(chunk, out.shape[1]) for chunk in data]
        except deflate.DeflateError as error:
            raise ValueError(f"the gzip stream is damaged, or longer than the chunk ({error})") from None

    return Stage("gzip", undo, None)


def encode_zlib(level: int) -> Step:
    """HDF5's gzip filter: a zlib stream. Uses libdeflate, but not every version of it has level 0."""
    return (lambda data: deflate.zlib_compress(data, level)) if level else partial(zlib.compress, level=0)


def encode_gzip(level: int) -> Step:
    """Zarr's gzip: one gzip member. Uses libdeflate, as `encode_zlib`."""
    return (lambda data: deflate.gzip_compress(data, level)) if level else partial(zlib.compress, level=0, wbits=31)


def decode_zstd() -> Stage:
    """Zstandard frames. Uses numcodecs, which alone would leave the end of the buffer unwritten if a frame declares less.

    numcodecs makes a new context for each frame: a third of the time for 16 KiB. So small frames go to zstandard, which keeps
    one.
    """

    def undo(data: Many, out: Bytes) -> Many:
        nbytes, rows = out.shape[1], out.reshape(-1).data
        try:
            for k, chunk in enumerate(data):
                size = zstandard.frame_content_size(chunk)
                if size not in (nbytes, -1):
                    raise ValueError(f"the frame declares {size} bytes, the chunk has {nbytes}")
                if size == nbytes <= _SMALL_NBYTES:
                    rows[k * nbytes : (k + 1) * nbytes] = _zstd.decompress(chunk, allow_extra_data=False)
                else:
                    # Always into `out`: a frame written as a stream declares no size, and would get any amount of memory.
                    numcodecs().zstd.decompress(chunk, out[k])
        except (RuntimeError, ValueError, zstandard.ZstdError) as error:
            raise ValueError(f"the zstd data is damaged ({error})") from None
        return out

    return Stage("zstd", undo, None)


class _ZstdOfThread(threading.local):
    """zstandard's contexts of this thread: two threads must not use one. One for all arrays, because each takes megabytes."""

    level: int | None = None
    compress: Step | None = None

    def __init__(self) -> None:
        self.decompress = zstandard.ZstdDecompressor().decompress


_zstd = _ZstdOfThread()


def encode_zstd(level: int) -> Step:
    """One Zstandard frame that declares its size, without a checksum of the content.

    Uses zstandard: its library is newer than that of numcodecs, and its context is kept for the next chunk.
    """

    def step(data: Any) -> Any:
        if _zstd.compress is None or _zstd.level != level:
            _zstd.compress = None  # free the old memory before asking for more
            context = zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True)
            _zstd.compress, _zstd.level = context.compress, level
        return _zstd.compress(data)

    return step


NOT_BLOSC = "damaged, or encoded by a compressor that numcodecs does not have, such as Snappy"
"""Why numcodecs cannot decode a buffer, whose header fits."""


def decode_blosc() -> Stage:
    """A Blosc 1 buffer, with any compressor (lz4, zstd, ...), shuffled or not. Uses numcodecs, which trusts its header."""

    def undo(data: Many, out: Bytes) -> Many:
        for chunk, row in zip(data, out, strict=True):
            check_blosc(chunk, out.shape[1])
            try:
                numcodecs().blosc.decompress(chunk, row)
            except (RuntimeError, ValueError) as error:
                raise ValueError(f"the blosc data is {NOT_BLOSC} ({error})") from None
        return out

    return Stage("blosc", undo, None)


def check_blosc(data: Any, nbytes: int | None = None) -> None:
    """Raise ValueError unless the header of a Blosc 1 buffer declares its stored length, and `nbytes` decoded bytes.

    The library trusts the header. If it declares more, the library reads and writes past the end of its buffers.
    """
    size, _, stored = struct.unpack_from("<III", data, 4) if len(data) >= 16 else (0, 0, 0)
    if not stored or stored != len(data) or nbytes not in (None, size):
        expected = "any number" if nbytes is None else nbytes
        raise ValueError(f"the blosc header declares {stored} bytes for {size}; {len(data)} are stored for {expected}")


def encode_blosc(inner: str, level: int, shuffle: int, itemsize: int) -> Step:
    """A Blosc 1 buffer. Uses numcodecs; ``shuffle`` is 0, 1 (bytes) or 2 (bits)."""
    name, kind = inner.encode(), np.dtype(f"V{itemsize}")

    def step(data: Any) -> Any:
        elements = np.frombuffer(data, dtype=np.uint8).view(kind)  # numcodecs takes the size of an element from it
        return numcodecs().blosc.compress(elements, name, level, shuffle, 0)

    return step


def decode_lz4() -> Stage:
    """HDF5's LZ4 filter: see `encode_lz4`. Uses numcodecs, which takes the decoded size of a block from 4 bytes before it."""

    def undo(data: Many, out: Bytes) -> Many:
        for chunk, row in zip(data, out, strict=True):
            start, stored = 12, memoryview(chunk)
            size, block_nbytes = struct.unpack_from(">QI", stored) if len(stored) >= 12 else (0, 0)
            if size != len(row) or (size and not block_nbytes):
                raise ValueError(f"the lz4 header declares {size} bytes in blocks of {block_nbytes}, the chunk has {len(row)}")
            for first in range(0, size, block_nbytes or 1):
                block = row[first : first + block_nbytes]
                end = start + 4 + int.from_bytes(stored[start : start + 4], "big")
                if not start + 4 < end <= len(stored):
                    nbytes = end - start - 4
                    raise ValueError(f"an lz4 header declares a block of {nbytes} bytes at byte {start} of {len(stored)}")
                packed = stored[start + 4 : end]
                if len(packed) == len(block):  # stored as it is
                    block[...] = packed
                else:
                    try:
                        numcodecs().lz4.decompress(len(block).to_bytes(4, "little") + bytes(packed), block)
                    except (RuntimeError, ValueError) as error:
                        raise ValueError(f"the lz4 data is damaged ({error})") from None
                start = end
        return out

    return Stage("lz4", undo, None)


def encode_lz4() -> Step:
    """HDF5's LZ4 filter: sizes in big-endian order, then blocks of at most 1 GiB; one that does not shrink is stored as it is.
    Uses numcodecs.
    """

    def step(data: Any) -> Any:
        whole = memoryview(data).cast("B")
        block_nbytes = min(len(whole), _LZ4_BLOCK_NBYTES)
        parts: list[Any] = [len(whole).to_bytes(8, "big"), block_nbytes.to_bytes(4, "big")]
        for first in range(0, len(whole), block_nbytes or 1):
            block = whole[first : first + block_nbytes]
            packed = memoryview(numcodecs().lz4.compress(block))[4:]  # without the size that numcodecs puts first
            stored = packed if len(packed) < len(block) else block
            parts += [len(stored).to_bytes(4, "big"), stored]
        return b"".join(parts)

    return step
