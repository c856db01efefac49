"""How is a chunk compressed, and decompressed? Both ways: ``decode_NAME`` gives a stage, ``encode_NAME`` a step.

Each step makes exactly what the format's own library reads; docs/design/save.md has the table.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import deflate
import numpy as np
import zstandard

from shardload.formats.codecs.chains import Bytes, Many, Stage, Step
from shardload.formats.codecs.transforms import numcodecs, one_by_one
from shardload.formats.contract.format import UndecodedError

__all__ = [
    "blosc_error",
    "check_blosc",
    "decode_blosc",
    "decode_gzip",
    "decode_zlib",
    "decode_zstd",
    "encode_blosc",
    "encode_gzip",
    "encode_lz4",
    "encode_zlib",
    "encode_zstd",
]

_SMALL_NBYTES = 1 << 15
_LZ4_BLOCK = 1 << 30


def decode_zlib() -> Stage:
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


def encode_zlib(level: int) -> Step:
    """HDF5's gzip filter: a zlib stream. Uses libdeflate."""
    return (lambda data: deflate.zlib_compress(data, level)) if level else _not_compressed(15)


def decode_gzip() -> Stage:
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

    return Stage("gzip", undo, None, within, one_by_one(undo))


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


def encode_gzip(level: int) -> Step:
    """Zarr's gzip: one gzip member. Uses libdeflate."""
    return (lambda data: deflate.gzip_compress(data, level)) if level else _not_compressed(31)


def _not_compressed(wbits: int) -> Step:
    """Level 0, which not every version of deflate has."""

    def step(data: Any) -> Any:
        stream = zlib.compressobj(0, wbits=wbits)
        return stream.compress(data) + stream.flush()

    return step


def decode_zstd() -> Stage:
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


class _ZstdOfThread(threading.local):
    """zstandard's compressor of this thread: two threads must not use one. One for all arrays, because each takes megabytes."""

    level: int | None = None
    compress: Step | None = None


_encoder_of_thread = _ZstdOfThread()


def encode_zstd(level: int) -> Step:
    """One Zstandard frame that declares its size, without a checksum of the content.

    Uses zstandard: its library is newer than that of numcodecs, and its context is kept for the next chunk.
    """

    def step(data: Any) -> Any:
        mine = _encoder_of_thread
        compress = mine.compress
        if compress is None or mine.level != level:
            mine.compress = None  # free the old memory before asking for more
            kept = zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True)
            compress = mine.compress = kept.compress
            mine.level = level
        return compress(data)

    return step


def decode_blosc() -> Stage:
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


def encode_blosc(cname: str, level: int, shuffling: int, itemsize: int) -> Step:
    """A Blosc 1 buffer. Uses numcodecs; ``shuffling`` is 0, 1 (bytes) or 2 (bits)."""
    name, kind = cname.encode(), np.dtype(f"V{itemsize}")

    def step(data: Any) -> Any:
        elements = np.frombuffer(data, dtype=np.uint8).view(kind)  # numcodecs takes the size of an element from it
        return numcodecs().blosc.compress(elements, name, level, shuffling, 0)

    return step


def encode_lz4() -> Step:
    """HDF5's LZ4 filter: sizes in big-endian order, then blocks of at most 1 GiB; one that does not shrink is stored as it is.
    Uses numcodecs.
    """

    def step(data: Any) -> Any:
        whole = memoryview(data).cast("B")
        size = min(len(whole), _LZ4_BLOCK)
        parts: list[Any] = [len(whole).to_bytes(8, "big"), size.to_bytes(4, "big")]
        for at in range(0, len(whole), size or 1):
            block = whole[at : at + size]
            packed = memoryview(numcodecs().lz4.compress(block))[4:]  # without the size that numcodecs puts first
            best = packed if len(packed) < len(block) else block
            parts += [len(best).to_bytes(4, "big"), best]
        return b"".join(parts)

    return step
