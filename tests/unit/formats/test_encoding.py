"""Do the encoders of single chunks make what every decoder reads, also when a thread keeps one for its next chunk?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numcodecs
import numpy as np
import pytest
import zstandard

from shardload.formats.codecs import algorithms
from shardload.formats.codecs.algorithms import encode_zstd
from shardload.formats.codecs.chains import EncodeChain, Step

LEVELS = (-7, 0, 1, 3, 9, 19, 22)
SIZES = (1, 255, 256, 257, 4096, 65_791, 65_792, 100_000)  # a frame declares its size in 1, 2 or 4 bytes


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads begin anew."""
    monkeypatch.setattr(algorithms, "_of_thread", algorithms._ZstdOfThread())


def bytes_of(n: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that shrink, but not to nothing."""
    return np.random.default_rng(seed).integers(0, 20, n).astype(np.uint8)


def frame_of(stored: Any) -> tuple[int, int, bool]:
    """What a frame's header declares (RFC 8878, 3.1.1.1): decoded size (-1: none), bytes of the header, a checksum."""
    data = bytes(stored)
    assert data[:4] == b"\x28\xb5\x2f\xfd"
    descriptor = data[4]
    single = descriptor >> 5 & 1
    n = (single, 2, 4, 8)[descriptor >> 6]
    at = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    size = int.from_bytes(data[at : at + n], "little") + (256 if n == 2 else 0) if n else -1
    return size, at + n, bool(descriptor >> 2 & 1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_zstd_frame_declares_its_size_and_has_no_checksum(level: int) -> None:
    """Wrong if the metadata (no checksum) said something else than the frame, or if a reader could not know the size."""
    step = encode_zstd(level)
    for n in SIZES:
        raw = bytes_of(n, n)
        raw.flags.writeable = False  # as the memory of JAX
        for data in (raw, raw.tobytes(), memoryview(raw)):
            stored = step(data)
            assert frame_of(stored)[::2] == (n, False), n
            assert bytes(numcodecs.zstd.decompress(bytes(stored))) == raw.tobytes()
            assert bytes(zstandard.ZstdDecompressor().decompress(stored)) == raw.tobytes()


def test_a_kept_compressor_knows_nothing_of_the_chunks_before() -> None:
    """Wrong if a frame were made with another array's level, or referred to an earlier chunk."""
    steps = {level: encode_zstd(level) for level in LEVELS}
    order = np.random.default_rng(1).permutation([(level, n) for level in LEVELS for n in SIZES])
    found = [bytes(steps[level](bytes_of(n, n))) for level, n in order.tolist()]
    fresh = [
        zstandard.ZstdCompressor(level=level, write_checksum=False).compress(bytes_of(n, n)) for level, n in order.tolist()
    ]
    assert found == fresh
    of_size = [one for one, (_, n) in zip(found, order.tolist(), strict=True) if n == SIZES[-1]]
    assert len(set(map(len, of_size))) > 3  # levels do differ


def test_an_encoded_chunk_stays_what_it_is() -> None:
    """Wrong if a step gave memory that the next chunk is encoded into."""
    chain = EncodeChain([encode_zstd(1)], (300, 300), np.dtype("u1"), 0)
    values = [bytes_of(300 * 300, k).reshape(300, 300)[: 300 - k, : 300 - k] for k in range(5)]
    stored = [chain.encode(one) for one in values]
    for one, expected in zip(stored, values, strict=True):
        found = np.frombuffer(numcodecs.zstd.decompress(bytes(one)), np.uint8).reshape(300, 300)
        np.testing.assert_array_equal(found[: len(expected), : len(expected)], expected)


def test_threads_encode_at_the_same_time() -> None:
    """Wrong if two threads used one compressor: their frames would be mixed, or the process would end."""
    n_threads = 4
    steps: list[Step] = [encode_zstd(3), encode_zstd(1)]
    together = Barrier(n_threads)

    def work(mine: int) -> tuple[Any, list[bytes]]:
        together.wait(30)
        found = [bytes(steps[k // 8 % 2](bytes_of(50_000 - k, 100 * mine + k))) for k in range(32)]
        together.wait(30)  # so that no thread does the work of two
        return algorithms._of_thread.compress, found

    with ThreadPoolExecutor(n_threads) as pool:
        found = list(pool.map(work, range(n_threads)))
    assert len({id(getattr(one, "__self__", one)) for one, _ in found}) == n_threads
    for mine, (_, frames) in enumerate(found):
        for k, frame in enumerate(frames):
            assert bytes(numcodecs.zstd.decompress(frame)) == bytes_of(50_000 - k, 100 * mine + k).tobytes()


def test_a_whole_chunk_in_the_other_byte_order() -> None:
    """Wrong if values that need no padding were stored as they lie in memory."""
    values = np.arange(6, dtype="<i4").reshape(2, 3)
    chain = EncodeChain([], (2, 3), np.dtype(">i4"), 0)
    assert bytes(chain.encode(values)) == values.astype(">i4").tobytes()
