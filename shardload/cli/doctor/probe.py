"""How fast is what one rank can reach: a file system, its memory, its decoders? Within given seconds and bytes.

Nothing here knows of other ranks. Every loop ends with its time (`System.now`), and its first step is small: the size of a
write, a read or a copy grows only while the last one took little time. So even a file system that is a thousand times slower
than others ends a step about on time. Only a single call that hangs cannot be ended.
"""

from __future__ import annotations

import os
import statistics
import time
import zlib
from collections.abc import Callable, Iterator

import numcodecs.blosc
import numcodecs.zstd
import numpy as np

from shardload.formats.codecs import Chain, blosc, inflate, unshuffle, unzstd

__all__ = ["Probe", "System", "growing"]

_FIRST_NBYTES, _PIECE_NBYTES = 1 << 16, 1 << 20  # of a write or a long read: at first, and at most
_QUICK_SECONDS = 0.1  # after a step that took less, the next one is twice as large
_SMALL_NBYTES = 4096
_CHUNK_NBYTES = 1 << 20  # of decoded values
_COPY_NBYTES = 32 << 20


class System:
    """What the operating system does for a probe. Tests have one of their own, with a clock that costs no time."""

    now = staticmethod(time.perf_counter)
    cpu = staticmethod(time.process_time)
    """Seconds of this process on all cores: other ranks that share them do not count."""

    def open(self, path: str) -> int:
        """A descriptor for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def create(self, path: str) -> int:
        """A descriptor of a new file."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    close = staticmethod(os.close)

    def write(self, file: int, data: bytes) -> None:
        """Write all of it at the end, and wait until it is there."""
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)

    def read(self, file: int, into: memoryview, offset: int) -> int:
        """Bytes read."""
        return os.preadv(file, [into], offset)

    def size(self, file: int) -> int:
        """Bytes of a file."""
        return os.fstat(file).st_size

    def forget(self, file: int, is_random: bool = False) -> None:
        """Ask the kernel to drop what it has of a file, and if `is_random` not to read ahead."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            if is_random:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def growing(now: Callable[[], float], end: float, first: int, most: int) -> Iterator[int]:
    """Sizes of steps until `end`: from `first`, doubled after each quick one, up to `most`. At least one."""
    size = first
    while True:
        began = now()
        yield size
        ended = now()
        if ended >= end:
            return
        if ended - began < _QUICK_SECONDS:
            size = min(most, 2 * size)


class Probe:
    """Measures what this rank can reach.

    Parameters
    ----------
    system : System
        Files and clocks.
    """

    def __init__(self, system: System | None = None) -> None:
        self.system = system or System()

    def write(self, path: str, nbytes: int, seconds: float, seed: int) -> int:
        """Write a file that does not compress, of up to `nbytes`; its bytes."""
        system, random, written = self.system, np.random.default_rng(seed), 0
        file = system.create(path)
        try:
            for size in growing(system.now, system.now() + seconds, min(_FIRST_NBYTES, nbytes), nbytes):
                size = min(size, nbytes - written)
                system.write(file, random.bytes(size))
                written += size
                if written >= nbytes:
                    break
            system.forget(file)
        finally:
            system.close(file)
        return written

    def forget(self, path: str) -> None:
        """Ask the kernel to drop what it has of a file."""
        file = self.system.open(path)
        try:
            self.system.forget(file)
        finally:
            self.system.close(file)

    def read(self, path: str, seconds: float) -> tuple[int, float]:
        """Read a file on and on; the bytes, and the seconds that took."""
        system, into, n_read = self.system, memoryview(bytearray(_PIECE_NBYTES)), 0
        file = system.open(path)
        try:
            began = system.now()
            for size in growing(system.now, began + seconds, _FIRST_NBYTES, _PIECE_NBYTES):
                n = system.read(file, into[:size], n_read)
                n_read += n
                if n < size:
                    break
            return n_read, system.now() - began
        finally:
            system.close(file)

    def open(self, paths: list[str], seconds: float) -> float:
        """Median seconds of an open."""
        system, times = self.system, []
        end = system.now() + seconds
        for path in paths:
            began = system.now()
            system.close(system.open(path))
            times.append(system.now() - began)
            if system.now() >= end:
                break
        return statistics.median(times)

    def small(self, path: str, seed: int, n: int, seconds: float) -> list[float]:
        """Seconds of each of up to `n` small reads here and there."""
        system, times, into = self.system, [], memoryview(bytearray(_SMALL_NBYTES))
        file = system.open(path)
        try:
            n_places = max(1, system.size(file) // _SMALL_NBYTES)
            system.forget(file, is_random=True)
            end = system.now() + seconds
            for place in np.random.default_rng(seed).permutation(n_places)[:n].tolist():
                began = system.now()
                system.read(file, into, place * _SMALL_NBYTES)
                times.append(system.now() - began)
                if system.now() >= end:
                    break
        finally:
            system.close(file)
        return times

    def copy(self, seconds: float) -> float:
        """Bytes per second that this rank reads and writes in memory."""
        now = self.system.now
        source = np.ones(_COPY_NBYTES, dtype=np.uint8)
        into = np.empty_like(source)
        into[...] = source
        began, n_copied = now(), 0
        for n in growing(now, began + seconds, len(source) // 16, len(source)):
            into[:n] = source[:n]
            n_copied += n
            if n_copied >= 4 * len(source):
                break
        return 2 * n_copied / max(1e-9, now() - began)

    def decode(self, seconds: float) -> dict[str, float]:
        """Decoded bytes per second of one core, by codec: of values as a simulation writes them, with noise in the low bits."""
        noise = np.random.default_rng(1).integers(0, 1 << 10, _CHUNK_NBYTES // 4) / (1 << 12)
        smooth = np.sin(np.linspace(0, 8 * np.pi, len(noise)))
        values = (np.round((smooth + noise) * (1 << 14)) / (1 << 14)).astype(np.float32)
        shuffled = values.view(np.uint8).reshape(-1, 4).T.tobytes()
        encoded = {
            "gzip": (zlib.compress(shuffled, 4), [inflate(), unshuffle(4)]),
            "zstd": (numcodecs.zstd.compress(shuffled, 3), [unzstd(), unshuffle(4)]),
            "blosc": (numcodecs.blosc.compress(values, b"lz4", 5, 1), [blosc()]),
        }
        found, out = {}, np.empty_like(values)
        for name, (data, stages) in encoded.items():
            chain = Chain(stages, values.nbytes)
            chain.decode(data, out)
            if not np.array_equal(out, values):
                raise RuntimeError(f"{name} does not give back the values that it was given")
            began, n_decoded, end = self.system.cpu(), 0, self.system.now() + seconds / len(encoded)
            while True:
                chain.decode(data, out)
                n_decoded += values.nbytes
                if self.system.now() >= end:
                    break
            found[name] = n_decoded / max(1e-9, self.system.cpu() - began)
        return found
