"""How are the bytes of one stored chunk turned back into values? With well-maintained libraries, outside a file format's lock.

1. A format describes the encoding of a chunk as a chain of `Stage`, in the order in which they are undone.
2. `Chain.decode` runs the chain. The size of every result follows from the chunk's declared size (between two compressors: at
   most the size that a codec makes of a chunk), so damaged or hostile bytes cannot make it allocate more. The last stage writes
   straight into the caller's buffer.
3. A stage that finds damage raises `ValueError` with what it found. The caller knows the chunk and adds it to the message.

All stages except Fletcher-32 release the GIL while they work, so that several chunks can be decoded at once. For the choice of
libraries see docs/design/decode.md.
"""

from __future__ import annotations

import contextlib
import importlib
import struct
import sys
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

from shardload.formats.base import UndecodedError, has_missing
from shardload.system.scratch import shared_scratch

__all__ = [
    "SWAP",
    "Chain",
    "Stage",
    "blosc",
    "blosc_error",
    "check_blosc",
    "crc32c",
    "decode_many",
    "fletcher32",
    "gunzip",
    "inflate",
    "numcodecs",
    "swap_bytes",
    "unshuffle",
    "unzstd",
]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_SMALL_NBYTES = 1 << 15
SWAP = "byte order"  # name of a stage

Many = Sequence[Any] | Bytes  # bytes-like objects: of several chunks, in order


@cache
def numcodecs() -> Any:
    """The library of this name. It takes as long to import as h5py, and most files need nothing of it."""
    return importlib.import_module("numcodecs")


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
    >>> chain = Chain([inflate(), unshuffle(2)], nbytes=4)
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
            if data is not target and _have_other_sizes(data, nbytes):
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


def _have_other_sizes(data: Many, nbytes: int) -> bool:
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


def inflate() -> Stage:
    """HDF5's gzip filter and Zarr's zlib: a zlib stream, with its Adler-32 checked. Uses libdeflate."""

    def within(data: Bytes, most: int) -> Bytes:
        stream = zlib.decompressobj()
        try:
            found = stream.decompress(data.tobytes(), most + 1)
        except zlib.error as error:
            raise ValueError(f"the gzip stream is damaged ({error})") from None
        if len(found) > most or not stream.eof:
            raise ValueError(f"the gzip stream is damaged, or longer than the {most} bytes that can be between two compressors")
        return np.frombuffer(found, dtype=np.uint8)

    return Stage("gzip", _inflater(deflate.zlib_decompress), None, within, _inflate_many)


def _inflate_many(data: Many, out: Bytes) -> Many:
    try:
        return [deflate.zlib_decompress(one, out.shape[1]) for one in data]
    except deflate.DeflateError as error:
        raise ValueError(f"a gzip stream is damaged, or longer than the chunk ({error})") from None


def gunzip() -> Stage:
    """Zarr's gzip: gzip members, with their CRC-32 checked. Uses libdeflate for a single member, zlib for several."""
    first = _inflater(deflate.gzip_decompress)

    def undo(data: Bytes, out: Bytes) -> Bytes | None:
        # libdeflate stops after the first member. The last member ends with its size, so a single member is easy to recognize.
        if len(data) >= 4 and int.from_bytes(data[-4:].tobytes(), "little") == len(out) & 0xFFFFFFFF:
            with contextlib.suppress(ValueError):
                found = first(data, out)
                if len(found) == len(out):
                    return found
        done = _gunzip_members(data, out)
        if done != len(out):
            raise ValueError(f"the gzip stream is damaged: it gives {done} bytes, the chunk has {len(out)}")
        return None

    def within(data: Bytes, most: int) -> Bytes:
        room = np.empty(most, dtype=np.uint8)
        try:
            return room[: _gunzip_members(data, room)]
        except ValueError as error:
            raise ValueError(f"between two compressors: {error}") from None

    return Stage("gzip", undo, None, within, _one_by_one(undo))


def _gunzip_members(data: Bytes, out: Bytes) -> int:
    """Decode gzip members (RFC 1952) one after the other into `out`; returns the decoded bytes. Zeros may follow them."""
    rest, done = data.tobytes(), 0
    try:
        while rest.strip(b"\0"):
            member = zlib.decompressobj(wbits=31)
            found = member.decompress(rest, len(out) - done + 1)  # one byte more than fits, because 0 would mean no limit
            if done + len(found) > len(out):
                raise ValueError(f"the gzip stream is longer than the chunk, which has {len(out)} bytes")
            if not member.eof:
                raise ValueError("the gzip stream is damaged (it ends too early)")
            out[done : done + len(found)] = np.frombuffer(found, dtype=np.uint8)
            done, rest = done + len(found), member.unused_data
    except zlib.error as error:
        raise ValueError(f"the gzip stream is damaged, or longer than the chunk ({error})") from None
    return done


def _inflater(decompress: Callable[[Any, int], bytearray]) -> Callable[[Bytes, Bytes], Bytes]:
    def undo(data: Bytes, out: Bytes) -> Bytes:
        try:
            return np.frombuffer(decompress(data, out.nbytes), dtype=np.uint8)
        except deflate.DeflateError as error:
            raise ValueError(f"the gzip stream is damaged, or longer than the chunk ({error})") from None

    return undo


def unshuffle(itemsize: int) -> Stage:
    """The byte shuffle: the first byte of each element, then the second, ... Bytes of an incomplete element come last."""

    def undo(data: Bytes, out: Bytes) -> None:
        n = len(out) // itemsize
        if len(data) != len(out):
            raise ValueError(f"shuffled data of {len(data)} bytes for {len(out)}")
        elements = out[: n * itemsize].reshape(n, itemsize)
        for k in range(itemsize):  # NumPy releases the GIL here; measured as fast as numcodecs, which does not release it
            elements[:, k] = data[k * n : (k + 1) * n]
        out[n * itemsize :] = data[n * itemsize :]

    def undo_many(data: Many, out: Bytes) -> Many:
        n = out.shape[1] // itemsize
        is_whole = n * itemsize == out.shape[1]
        if itemsize in (2, 4, 8, 16) and is_whole and out.flags.c_contiguous and _blosc_takes(*out.shape):
            _unshuffle_by_blosc(data, out, itemsize)
            return out
        planes = _joined(data, out)
        if itemsize in (2, 4, 8) and is_whole and sys.byteorder == "little":
            # Words are put together from the last byte to the first: NumPy does that in vector registers. Measured with 48
            # chunks of 4096 words: 3.2 microseconds a chunk, byte by byte as above 7.
            words = out.view(f"<u{itemsize}")
            np.copyto(words, planes[:, (itemsize - 1) * n :])
            for k in reversed(range(itemsize - 1)):
                np.left_shift(words, 8, out=words)
                np.bitwise_or(words, planes[:, k * n : (k + 1) * n], out=words)
            return out
        for one, row in zip(planes, out, strict=True):
            undo(one, row)
        return out

    return Stage("shuffle", undo, 0, None, undo_many)


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
    if len(data) != n or _have_other_sizes(data, nbytes):
        raise ValueError(f"data of other sizes than {nbytes} bytes")
    head, length = _blosc_head(n, nbytes, itemsize)
    parts = [length] * (2 * n)
    parts[0], parts[1::2] = head, data
    try:
        numcodecs().blosc.decompress(b"".join(parts), out.reshape(-1))
    except RuntimeError as error:
        raise ValueError(f"blosc cannot un-shuffle {n} chunks of {nbytes} bytes ({error})") from None


@lru_cache(maxsize=64)
def _blosc_head(n: int, nbytes: int, itemsize: int) -> tuple[bytes, bytes]:
    """What comes before the first of `n` shuffled blocks that are stored as they are, and what before each of the others.

    See c-blosc's README_CHUNK_FORMAT: version, version of the compressor (BloscLZ), flags (1: shuffled; 16: a block is one
    stream), bytes of an element; decoded bytes, bytes of a block, bytes of all; where each block begins.
    """
    first, length = 16 + 4 * n, struct.pack("<I", nbytes)
    size = first + n * (4 + nbytes)
    head = struct.pack("<BBBBIII", 2, 1, 1 | 16, itemsize, n * nbytes, nbytes, size)
    return head + struct.pack(f"<{n}I", *range(first, size, 4 + nbytes)) + length, length


def _joined(data: Many, out: Bytes) -> Bytes:
    """The bytes of several chunks as one array, with a row for each. ValueError unless each is as long as a row of `out`."""
    if isinstance(data, np.ndarray) and data.shape == out.shape:
        return data
    if _have_other_sizes(data, out.shape[1]):
        raise ValueError(f"data of other sizes than {out.shape[1]} bytes")
    return np.frombuffer(b"".join(data), dtype=np.uint8).reshape(out.shape)


def _one_by_one(undo: Callable[[Bytes, Bytes], Bytes | None]) -> Callable[[Many, Bytes], Many]:
    """The `undo_many` of a stage that is not worth more than a loop."""

    def undo_many(data: Many, out: Bytes) -> Many:
        found = []
        for one, row in zip(data, out, strict=True):
            values = undo(np.frombuffer(one, dtype=np.uint8), row)
            found.append(row if values is None else values)
        return found

    return undo_many


def fletcher32() -> Stage:
    """HDF5's Fletcher-32 checksum, after the data. Uses numcodecs."""
    codec = numcodecs().Fletcher32()

    def undo(data: Bytes, out: Bytes) -> Bytes:
        if len(data) < 4:
            raise ValueError(f"{len(data)} bytes are too few to hold a Fletcher-32 checksum")
        try:
            codec.decode(data)
        except RuntimeError as error:
            # HDF5 before 1.6.3 wrote the bytes of each half in the other order, and later versions accept both.
            a, b, c, d = data[-4:].tolist()
            try:
                codec.decode(np.concatenate([data[:-4], np.array([b, a, d, c], dtype=np.uint8)]))
            except RuntimeError:
                raise ValueError(f"Fletcher-32: {error}") from None
        return data[:-4]

    return Stage("fletcher32", undo, 4, None, _one_by_one(undo))


def crc32c() -> Stage:
    """Zarr's CRC-32C checksum, after the data. Uses google-crc32c, on which zarr-python depends."""

    def undo(data: Bytes, out: Bytes) -> Bytes:
        if len(data) < 4:
            raise ValueError(f"{len(data)} bytes are too few to hold a CRC-32C checksum")
        stored = int.from_bytes(data[-4:].tobytes(), "little")
        found = google_crc32c.value(data[:-4])  # takes arrays, but no memoryview
        if stored != found:
            raise ValueError(f"CRC-32C is {found:08x}, stored is {stored:08x}")
        return data[:-4]

    return Stage("crc32c", undo, 4, None, _one_by_one(undo))


def unzstd() -> Stage:
    """Zstandard frames. Uses numcodecs, which alone would leave the end of the buffer unwritten if a frame declares less."""

    def undo(data: Bytes, out: Bytes) -> None:
        _check_zstd(data, len(out))
        try:
            # Always decode into `out`: a frame written as a stream declares no size, and would get any amount of memory.
            numcodecs().zstd.decompress(data, out)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"the zstd data is damaged ({error})") from None

    def within(data: Bytes, most: int) -> Bytes:
        size = _zstd_size(data)
        if size is None or size > most:
            raise ValueError(f"the zstd frame declares {size or 'no'} bytes, between two compressors can be {most} at most")
        out = np.empty(size, dtype=np.uint8)
        undo(data, out)
        return out

    def undo_many(data: Many, out: Bytes) -> Many:
        nbytes, decompress = out.shape[1], _small_zstd()
        heads, rows = _zstd_heads(nbytes), out.reshape(-1).data
        try:
            for k, one in enumerate(data):
                is_declared = False
                for n, starts in heads:
                    if bytes(one[:n]) in starts:
                        is_declared = True
                        break
                if not is_declared:
                    _check_zstd(np.frombuffer(one, dtype=np.uint8), nbytes)
                if is_declared and nbytes <= _SMALL_NBYTES:
                    # A microsecond less than a buffer of ours, which numcodecs examines in Python.
                    rows[k * nbytes : (k + 1) * nbytes] = decompress(one)
                else:
                    numcodecs().zstd.decompress(one, out[k])
        except Exception as error:  # zstandard has an exception of its own
            if isinstance(error, MemoryError):
                raise
            raise ValueError(f"the zstd data is damaged ({error})") from None
        return out

    return Stage("zstd", undo, None, within, undo_many)


_zstd_of_thread = threading.local()


def _small_zstd() -> Callable[[Any], bytes]:
    """The decoder of small frames of this thread: ``decompress(data) -> bytes``.

    numcodecs makes a new context for each frame, which takes a third of the time for 16 KiB; zstandard keeps its context.
    """
    decompress: Callable[[Any], bytes] | None = getattr(_zstd_of_thread, "decompress", None)
    if decompress is None:
        decompress = _zstd_of_thread.decompress = partial(zstandard.ZstdDecompressor().decompress, allow_extra_data=False)
    return decompress


@lru_cache(maxsize=256)
def _zstd_heads(nbytes: int) -> tuple[tuple[int, frozenset[bytes]], ...]:
    """The first bytes of frames that declare `nbytes`, as writers make them of small chunks (one segment), and their number."""
    found = []
    for code, n in enumerate((1, 2, 4, 8)):
        value = nbytes - 256 if n == 2 else nbytes
        if 0 <= value < 256**n:
            descriptors = (code << 6 | 1 << 5, code << 6 | 1 << 5 | 4)  # without a checksum of the content, and with one
            starts = frozenset(_ZSTD_MAGIC + bytes([one]) + value.to_bytes(n, "little") for one in descriptors)
            found.append((len(_ZSTD_MAGIC) + 1 + n, starts))
    return tuple(found[:2])  # a writer takes the shortest, or the next


_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def _check_zstd(data: Bytes, nbytes: int) -> None:
    """Raise ValueError if `data` is not a Zstandard frame, or declares another decoded size than `nbytes`."""
    size = _zstd_size(data)
    if size is not None and size != nbytes:
        raise ValueError(f"the zstd frame declares {size} bytes, the chunk has {nbytes}")


def _zstd_size(data: Bytes) -> int | None:
    """The decoded size that a Zstandard frame (RFC 8878, 3.1.1.1) declares; None if it declares none."""
    head = data[:18].tobytes()
    if len(head) < 6 or head[:4] != _ZSTD_MAGIC:
        raise ValueError(f"no zstd frame: it starts with {head[:4]!r}")
    descriptor = head[4]
    is_single = descriptor >> 5 & 1
    at = 5 + (1 - is_single) + (0, 1, 2, 4)[descriptor & 3]
    n = (is_single, 2, 4, 8)[descriptor >> 6]
    return int.from_bytes(head[at : at + n], "little") + (256 if n == 2 else 0) if n else None


def blosc() -> Stage:
    """A Blosc 1 buffer, with any compressor (lz4, zstd, ...), shuffled or not. Uses numcodecs, which trusts its header."""

    def undo(data: Bytes, out: Bytes) -> None:
        check_blosc(data, len(out))
        try:
            numcodecs().blosc.decompress(data, out)
        except (RuntimeError, ValueError) as error:
            raise blosc_error(data, error) from None

    def within(data: Bytes, most: int) -> Bytes:
        size = int.from_bytes(data[4:8].tobytes(), "little")
        if size > most:
            raise ValueError(f"the blosc header declares {size} bytes, between two compressors can be {most} at most")
        out = np.empty(size, dtype=np.uint8)
        undo(data, out)
        return out

    def undo_many(data: Many, out: Bytes) -> Many:
        nbytes, one = out.shape[1], data[0]
        try:
            for one, row in zip(data, out, strict=True):
                if len(one) < 16 or struct.unpack_from("<III", one, 4)[::2] != (nbytes, len(one)):
                    check_blosc(np.frombuffer(one, dtype=np.uint8), nbytes)
                numcodecs().blosc.decompress(one, row)
        except RuntimeError as error:
            raise blosc_error(one, error) from None
        return out

    return Stage("blosc", undo, None, within, undo_many)


_IN_BLOSC = ("blosclz", "lz4", "snappy", "zlib", "zstd")  # by the highest bits of the flags; lz4hc makes lz4


def blosc_error(data: Any, error: Exception) -> ValueError:
    """The error about a buffer that numcodecs cannot decode: its build may lack what the header asks for."""
    version, flags = int(data[0]), int(data[2])
    name = dict(enumerate(_IN_BLOSC)).get(flags >> 5, f"a compressor of number {flags >> 5}")
    known = [one for one in numcodecs().blosc.list_compressors() if one != "lz4hc"]
    asks = f"Blosc's format {version} (numcodecs reads 2)" if version != 2 else f"Blosc with {name}"
    if version == 2 and (name in known or flags & 2):  # 2: stored as it is
        return ValueError(f"the blosc data is damaged ({error})")
    return UndecodedError(
        f"it says that it is encoded by {asks}, which numcodecs {numcodecs().__version__} here cannot decode: it has "
        f"{', '.join(known)}. Write the array again with one of these; other libraries may read it (TensorStore and hdf5plugin "
        "have Snappy)"
    )


def check_blosc(data: Any, nbytes: int | None = None) -> None:
    """Raise ValueError unless the header of a Blosc 1 buffer declares its stored length, and `nbytes` decoded bytes.

    The library trusts the header. If it declares more, the library reads and writes past the end of its buffers.
    """
    head = bytes(data[:16].tobytes())
    size, stored = (int.from_bytes(head[a : a + 4], "little") for a in (4, 12))
    if len(head) < 16 or stored != data.nbytes or nbytes not in (None, size):
        expected = "any number" if nbytes is None else nbytes
        raise ValueError(f"the blosc header declares {stored} bytes for {size}; {data.nbytes} are stored for {expected}")


def swap_bytes(itemsize: int) -> Stage:
    """The other byte order, for numbers (or real and imaginary parts) of `itemsize` bytes."""

    def undo(data: Bytes, out: Bytes) -> None:
        if len(data) != len(out):  # one element alone would be repeated
            raise ValueError(f"{len(data)} bytes are stored for a chunk of {len(out)}")
        kind = np.dtype(f"u{itemsize}")
        np.copyto(out.view(kind), data.view(kind.newbyteorder()))

    def undo_many(data: Many, out: Bytes) -> Many:
        undo(_joined(data, out).reshape(-1), out.reshape(-1))
        return out

    return Stage(SWAP, undo, 0, None, undo_many)
