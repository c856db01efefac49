"""Growing an HDF5 file without ranks, and all that was on disk meanwhile."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardload.formats.hdf5.growable import read_file
from shardload.formats.hdf5.growth import GrowthSink
from tests.unit.saving import write_all

Array = np.ndarray[Any, Any]


def sink_of(
    path: Path, values: Mapping[str, Array], axis: int = 0, dimensions: Mapping[str, int] | None = None, **how: Any
) -> GrowthSink:
    """What is added, so that arrays become `values`. Those of one axis grow along it."""
    known = json.loads(json.dumps(read_file(str(path), values)))  # as rank 0 tells it
    axes = {name: axis if one.ndim > 1 else 0 for name, one in values.items()}
    n_new = {name: one.shape[axes[name]] - known["arrays"][name]["shape"][axes[name]] for name, one in values.items()}
    return GrowthSink(str(path), known, axes, n_new, dimensions, **how)


def grow(path: Path, values: Mapping[str, Array], axis: int = 0, *, seed: int = 0, **how: Any) -> GrowthSink:
    """Append, so that arrays become `values`."""
    sink = sink_of(path, values, axis, **how)
    come = {
        name: one[tuple(slice(sink.arrays[name].base * (k == sink.arrays[name].axis), None) for k in range(one.ndim))]
        for name, one in values.items()
    }
    with sink.create() as catalog:
        write_all(sink, catalog, come, seed=seed)
        catalog.finish()
        catalog.commit()
    return sink


class Disk:
    """Notes each write to a file, and when it is synced.

    Attributes
    ----------
    writes : list of (int, bytes)
        Offset and bytes; ``None`` for those of a change of length, whose offset is the length.
    syncs : list of int
        How many writes there were at each fsync.
    """

    def __init__(self, path: Path) -> None:
        self.before, self._file = path.read_bytes(), os.stat(path)
        self.writes: list[tuple[int, bytes | None]] = []
        self.syncs: list[int] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what is written inside."""
        right_write, right_resize = os.pwrite, os.ftruncate

        def is_mine(descriptor: int) -> bool:
            return os.path.samestat(os.fstat(descriptor), self._file)

        def pwrite(descriptor: int, data: Any, offset: int) -> int:
            if is_mine(descriptor):
                self.writes.append((offset, bytes(data)))
            return right_write(descriptor, data, offset)

        def ftruncate(descriptor: int, length: int) -> None:
            if is_mine(descriptor):
                self.writes.append((length, None))
            right_resize(descriptor, length)

        def fsync(descriptor: int) -> None:
            if is_mine(descriptor):
                self.syncs.append(len(self.writes))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            patch.setattr(os, "ftruncate", ftruncate)
            patch.setattr(os, "fsync", fsync)
            yield

    def after(self, which: list[int] | range) -> bytes:
        """The file with some of the writes."""
        data = bytearray(self.before)
        for k in which:
            offset, new = self.writes[k]
            if new is None:
                data = data[:offset] + bytes(max(0, offset - len(data)))
            else:
                data += bytes(max(0, offset + len(new) - len(data)))
                data[offset : offset + len(new)] = new
        return bytes(data)

    def after_kills(self) -> Iterator[tuple[str, bytes]]:
        """The file after each single write: what a process that is killed leaves."""
        for n in range(len(self.writes) + 1):
            yield f"{n} writes", self.after(range(n))

    def after_power_cuts(self) -> Iterator[tuple[str, bytes]]:
        """The file as a machine can leave it that stops: of the writes since the last fsync any may be there. All choices of up
        to four; of more, each alone, and each missing.
        """
        for start, stop in itertools.pairwise([0, *self.syncs, len(self.writes)]):
            some = range(start, stop)
            if len(some) <= 4:
                choices = [list(one) for n in range(len(some)) for one in itertools.combinations(some, n)]
            else:
                choices = [[k] for k in some] + [[k for k in some if k != other] for other in some]
            for chosen in choices:
                yield f"{start} writes and {chosen}", self.after([*range(start), *chosen])
