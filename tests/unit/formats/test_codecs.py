"""Does a chain of codecs restore what was encoded, and report damaged bytes? Do encoders make what every decoder reads?"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
import pytest
import zstandard

from shardload.formats.codecs import algorithms
from shardload.formats.codecs.algorithms import (
    Chain,
    Stage,
    Step,
    decode_blosc,
    decode_byte_order,
    decode_crc32c,
    decode_fletcher32,
    decode_gzip,
    decode_lz4,
    decode_shuffle,
    decode_zstd,
    encode_lz4,
    encode_zstd,
)
from tests.unit.files import python_memory_below

Encode = Callable[[bytes], bytes]


def shuffle(size: int) -> Encode:
    """Byte by byte, as HDF5 documents it; what makes up no element comes last."""

    def encode(raw: bytes) -> bytes:
        n = len(raw) // size * size
        return b"".join(raw[k:n:size] for k in range(size)) + raw[n:]

    return encode


def with_crc32c(raw: bytes) -> bytes:
    return raw + google_crc32c.value(raw).to_bytes(4, "little")


def with_fletcher32(raw: bytes) -> bytes:
    """After the algorithm's definition: sums of big-endian 16-bit words modulo 65535, which is never 0 but for no data."""
    padded = raw + bytes(len(raw) % 2)
    one = two = 0
    for k in range(0, len(padded), 2):
        one += int.from_bytes(padded[k : k + 2], "big")
        two += one
    folded = [(n - 1) % 65535 + 1 if n else 0 for n in (one, two)]
    return raw + (folded[1] << 16 | folded[0]).to_bytes(4, "little")


COMPRESSORS: dict[str, tuple[Stage, Encode]] = {
    "zlib": (decode_gzip(is_zlib=True), zlib.compress),
    "gzip": (decode_gzip(), gzip.compress),
    "zstd": (decode_zstd(), lambda raw: bytes(numcodecs.Zstd(level=1).encode(raw))),
    "blosc": (decode_blosc(), lambda raw: bytes(numcodecs.Blosc(cname="lz4").encode(raw))),
    "lz4": (decode_lz4(), encode_lz4()),
}


def values(n: int = 300) -> np.ndarray[Any, Any]:
    return (np.arange(n) * 7 % 1000).astype("<i4")


@pytest.mark.each_value
@pytest.mark.parametrize("n", [*range(1, 12), 359, 360, 361, 719, 720, 721, 100_001])
@pytest.mark.parametrize("byte", [None, 0, 255])
def test_fletcher32_after_its_definition(n: int, byte: int | None) -> None:
    raw = bytes([byte]) * n if byte is not None else bytes(k * k % 256 for k in range(n))
    out = np.empty(n, "u1")
    Chain([decode_fletcher32()], n).decode([with_fletcher32(raw)], out)
    assert out.tobytes() == raw
    for where in (0, n - 1, n, n + 3):
        damaged = bytearray(with_fletcher32(raw))
        damaged[where] ^= 0x20
        with pytest.raises(ValueError, match="Fletcher-32"):
            Chain([decode_fletcher32()], n).decode([damaged], out)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_damaged_byte_gives_the_values_or_a_value_error(name: str) -> None:
    """Never another exception, another size, or a crash; zlib and gzip carry checksums, and let nothing through."""
    stage, encode = COMPRESSORS[name]
    data = values()
    chain, encoded = Chain([stage, decode_shuffle(4)], data.nbytes), encode(shuffle(4)(data.tobytes()))
    refused = 0
    for at in range(0, len(encoded), 1 + len(encoded) // 400):
        damaged = bytearray(encoded)
        damaged[at] ^= 0x55
        out = np.empty(data.shape, "<i4")
        try:
            chain.decode([damaged], out)
        except ValueError:
            refused += 1
        else:
            # gzip's header has a time and a system, which no checksum covers.
            assert name in ("zstd", "blosc", "lz4") or np.array_equal(out, data)
    assert refused > 3


@pytest.mark.each_value
@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("nbytes", [0, 1, 3, 7, 15, 100])
def test_cut_short(name: str, nbytes: int) -> None:
    stage, encode = COMPRESSORS[name]
    out = np.empty(300, "<i4")
    with pytest.raises(ValueError, match=r"damaged|no zstd frame|header"):
        Chain([stage], 1200).decode([encode(values().tobytes())[:nbytes]], out)


@pytest.mark.each_value
@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("n", [299, 301, 1])
def test_another_size_than_the_chunk(name: str, n: int) -> None:
    stage, encode = COMPRESSORS[name]
    out = np.empty(300, "<i4")
    with pytest.raises(ValueError, match=r"longer than|bytes"):
        Chain([stage], 1200).decode([encode(values(n).tobytes())], out)
    with pytest.raises(ValueError, match=r"longer than|bytes"):
        Chain([stage, decode_shuffle(4)], 1200).decode([encode(values(n).tobytes())], out)


def zstd_stream(*blocks: bytes | tuple[int, int]) -> bytes:
    """A Zstandard frame (RFC 8878) without a declared size, of plain blocks and of (byte, times)."""
    frame = b"\x28\xb5\x2f\xfd\x00\x58"
    for k, block in enumerate(blocks):
        length, kind, data = (len(block), 0, block) if isinstance(block, bytes) else (block[1], 1, bytes([block[0]]))
        frame += (length << 3 | kind << 1 | (k == len(blocks) - 1)).to_bytes(3, "little") + data
    return frame


def test_zstd_without_a_declared_size_is_bounded_by_the_chunk() -> None:
    raw, out = values().tobytes(), np.zeros(300, "<i4")
    chain = Chain([decode_zstd()], 1200)
    for good in (zstd_stream(raw), zstd_stream(raw[:500], raw[500:]), zstd_stream(raw[:500]) + zstd_stream(raw[500:])):
        out[:] = 0
        chain.decode([good], out)
        np.testing.assert_array_equal(out, values())
    bomb = zstd_stream(*[(7, 1 << 17)] * 4096)  # half a GiB in 16 KiB
    assert len(bomb) < 1 << 15
    for bad in (bomb, zstd_stream(raw[:1199]), zstd_stream(raw, b"x"), zstd_stream(raw) + zstd_stream(raw)):
        with python_memory_below(1 << 20), pytest.raises(ValueError, match="zstd data is damaged"):
            chain.decode([bad], out)


def test_gzip_of_several_members_is_an_error() -> None:
    """Nobody writes such chunks. Wrong if the first member were taken for the chunk, or could give more than the chunk has."""
    raw, out = values().tobytes(), np.zeros(300, "<i4")
    for bad in (gzip.compress(raw[:400]) + gzip.compress(raw[400:]), gzip.compress(bytes(1 << 22))):
        with pytest.raises(ValueError, match="gzip"):
            Chain([decode_gzip()], 1200).decode([bad], out)


def test_sizes_that_do_not_come_out() -> None:
    out = np.empty(300, "<i4")
    raw = values().tobytes()
    for stages, data in (
        ([], raw[:-1]),
        ([], raw[:1]),
        ([decode_byte_order(4)], raw[:4]),
        ([decode_shuffle(4)], raw[:4]),
        ([decode_crc32c()], with_crc32c(raw[:-4])),
        ([decode_crc32c()], b"abc"),
        ([decode_fletcher32()], b"abc"),
        ([decode_fletcher32()], with_fletcher32(raw + raw)),
    ):
        with pytest.raises(ValueError, match="bytes"):
            Chain(stages, 1200).decode([data], out)
    with pytest.raises(ValueError, match="reshape"):
        Chain([], 1200).decode([raw], out[:-1])


def test_two_compressors_are_refused() -> None:
    with pytest.raises(ValueError, match="gzip and zstd: nothing says how long"):
        Chain([decode_gzip(is_zlib=True), decode_shuffle(2), decode_zstd()], 100)


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Chunks are decoded in threads; in the main one Blosc is not asked, because it would start threads of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


@pytest.mark.parametrize("lengths", [(16, 15), (16, 17), (8, 24), (16,), (16, 16, 16), (32,)])
def test_shuffled_chunks_of_other_lengths_are_refused(lengths: tuple[int, ...]) -> None:
    """Also if together they are as long as expected."""
    undo, data = decode_shuffle(4).undo, [bytes(n) for n in lengths]
    for run in (in_a_thread, lambda work: work()):
        with pytest.raises(ValueError):
            run(partial(undo, data, np.zeros((2, 16), np.uint8)))


def test_so_many_shuffled_chunks_that_blosc_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real, undo = [], algorithms._unshuffle_by_blosc, decode_shuffle(4).undo

    def by_blosc(data: Any, out: Any, itemsize: int) -> None:
        asked.append(len(out))
        real(data, out, itemsize)

    monkeypatch.setattr(algorithms, "_unshuffle_by_blosc", by_blosc)
    for n in (1024, 1025):
        stored = np.arange(n * 8, dtype=np.uint32).view(np.uint8).reshape(n, 32)
        out = np.zeros_like(stored)
        in_a_thread(partial(undo, stored, out))
        np.testing.assert_array_equal(out, stored.reshape(n, 4, 8).swapaxes(1, 2).reshape(n, -1))
        undo(stored, out)  # in the main thread
    assert asked == [1024]


# --- encoders of single chunks, also where a thread keeps one for its next chunk


ZSTD_LEVELS = (-7, 0, 1, 3, 9, 19, 22)
FRAME_SIZES = (1, 255, 256, 257, 4096, 65_791, 65_792, 100_000)  # a frame declares its size in 1, 2 or 4 bytes


@pytest.fixture
def fresh_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads begin anew."""
    monkeypatch.setattr(algorithms, "_zstd", algorithms._ZstdOfThread())


def bytes_of(n: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that shrink, but not to nothing."""
    return np.random.default_rng(seed).integers(0, 20, n).astype(np.uint8)


@pytest.mark.usefixtures("fresh_threads")
def test_a_kept_compressor_knows_nothing_of_the_chunks_before() -> None:
    """Wrong if a frame were made with another array's level, or referred to an earlier chunk."""
    steps = {level: encode_zstd(level) for level in ZSTD_LEVELS}
    order = np.random.default_rng(1).permutation([(level, n) for level in ZSTD_LEVELS for n in FRAME_SIZES])
    found = [bytes(steps[level](bytes_of(n, n))) for level, n in order.tolist()]
    fresh = [
        zstandard.ZstdCompressor(level=level, write_checksum=False).compress(bytes_of(n, n)) for level, n in order.tolist()
    ]
    assert found == fresh
    of_size = [one for one, (_, n) in zip(found, order.tolist(), strict=True) if n == FRAME_SIZES[-1]]
    assert len(set(map(len, of_size))) > 3  # levels do differ


@pytest.mark.usefixtures("fresh_threads")
def test_threads_encode_at_the_same_time() -> None:
    """Wrong if two threads used one compressor: their frames would be mixed, or the process would end."""
    n_threads = 4
    steps: list[Step] = [encode_zstd(3), encode_zstd(1)]
    together = Barrier(n_threads)

    def work(mine: int) -> tuple[Any, list[bytes]]:
        together.wait(30)
        found = [bytes(steps[k // 8 % 2](bytes_of(50_000 - k, 100 * mine + k))) for k in range(32)]
        together.wait(30)  # so that no thread does the work of two
        return algorithms._zstd.compress, found

    with ThreadPoolExecutor(n_threads) as pool:
        found = list(pool.map(work, range(n_threads)))
    assert len({id(getattr(one, "__self__", one)) for one, _ in found}) == n_threads
    for mine, (_, frames) in enumerate(found):
        for k, frame in enumerate(frames):
            assert bytes(numcodecs.zstd.decompress(frame)) == bytes_of(50_000 - k, 100 * mine + k).tobytes()
