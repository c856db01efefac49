"""Growing an HDF5 file without ranks, and all that was on disk meanwhile."""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardload.formats.hdf5.growth import Hdf5Growth, read_file
from tests.unit.saving import write_all

Array = np.ndarray[Any, Any]
Content = dict[str, bytes]


def sink_of(
    path: Path, values: Mapping[str, Array], axis: int = 0, dimensions: Mapping[str, int] | None = None, **how: Any
) -> Hdf5Growth:
    """What is added, so that arrays become `values`. Those of one axis grow along it."""
    known = json.loads(json.dumps(read_file(str(path), values)))  # as rank 0 tells it
    axes = {name: axis if one.ndim > 1 else 0 for name, one in values.items()}
    n_new = {name: one.shape[axes[name]] - known["arrays"][name]["shape"][axes[name]] for name, one in values.items()}
    return Hdf5Growth(str(path), known, axes, n_new, dimensions, **how)


def coming(sink: Hdf5Growth, values: Mapping[str, Array]) -> dict[str, Array]:
    """What is written: from the old edge on."""
    return {
        name: array[tuple(slice(sink.arrays[name].base * (k == sink.arrays[name].axis), None) for k in range(array.ndim))]
        for name, array in values.items()
    }


def grow(path: Path, values: Mapping[str, Array], axis: int = 0, *, seed: int = 0, **how: Any) -> Hdf5Growth:
    """Append, so that arrays become `values`."""
    sink = sink_of(path, values, axis, **how)
    with sink.create() as catalog:
        write_all(sink, catalog, coming(sink, values), seed=seed)
        catalog.finish()
        catalog.commit()
    return sink


class Disk:
    """Notes each change of a folder that has one file at first, and when it is synced.

    Attributes
    ----------
    before : bytes
        That file.
    events : list of tuple
        What happened: ``("write", file, offset, bytes)``, ``("length", file, n)``, ``("name", name, file)``, with None for a
        name that goes. Files are numbers.
    syncs : list of (int, int or None)
        How many events there were at each fsync, and of which file it was; None for the folder's names.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.folder, self.before = path, path.parent, path.read_bytes()
        self.file = os.stat(path).st_ino
        self.events: list[tuple[Any, ...]] = []
        self.syncs: list[tuple[int, int | None]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what happens inside."""
        pwrite, ftruncate, create, rename, unlink = os.pwrite, os.ftruncate, os.open, os.rename, os.unlink

        def note_write(descriptor: int, data: Any, offset: int) -> int:
            self.events.append(("write", os.fstat(descriptor).st_ino, offset, bytes(data)))
            return pwrite(descriptor, data, offset)

        def note_length(descriptor: int, length: int) -> None:
            self.events.append(("length", os.fstat(descriptor).st_ino, length))
            ftruncate(descriptor, length)

        def note_open(path: Any, flags: int, *more: Any, **how: Any) -> int:
            descriptor = create(path, flags, *more, **how)
            if flags & os.O_CREAT and os.path.dirname(path) == str(self.folder):
                self.events.append(("name", os.path.basename(path), os.fstat(descriptor).st_ino))
            return descriptor

        def note_rename(old: str, new: str) -> None:
            rename(old, new)
            # One event for both names: a file system changes them together.
            self.events.append(("name", os.path.basename(new), os.stat(new).st_ino, os.path.basename(old)))

        def note_unlink(path: str) -> None:
            unlink(path)
            self.events.append(("name", os.path.basename(path), None))

        def note_sync(descriptor: int) -> None:
            found = os.fstat(descriptor)
            self.syncs.append((len(self.events), None if stat.S_ISDIR(found.st_mode) else found.st_ino))

        noted = {"pwrite": note_write, "ftruncate": note_length, "open": note_open, "rename": note_rename}
        with pytest.MonkeyPatch.context() as patch:
            for name, function in (noted | {"unlink": note_unlink, "fsync": note_sync}).items():
                patch.setattr(os, name, function)
            yield

    def after(self, which: list[int] | range) -> Content:
        """What is in the folder after some of the events, by name."""
        files: dict[int, bytearray] = {self.file: bytearray(self.before)}
        names: dict[str, int] = {self.path.name: self.file}
        for kind, *more in (self.events[k] for k in which):
            if kind == "name":
                name, file = more[:2]
                for gone in (*more[2:], name):
                    names.pop(gone, None)
                if file is not None:
                    names[name] = file
                continue
            data = files.setdefault(more[0], bytearray())
            stop = more[1] + (len(more[2]) if kind == "write" else 0)
            data += bytes(max(0, stop - len(data)))
            if kind == "write":
                data[more[1] : stop] = more[2]
            else:
                del data[stop:]
        return {name: bytes(files.get(file, b"")) for name, file in names.items()}

    def after_kills(self) -> Iterator[tuple[str, Content]]:
        """The folder after each single event: what a process that is killed leaves."""
        for n in range(len(self.events) + 1):
            yield f"{n} events", self.after(range(n))

    def after_power_cuts(self) -> Iterator[tuple[str, Content]]:
        """The folder as a machine can leave it that stops: of the events that no fsync has confirmed any may be there. All
        choices of up to four; of more, each alone, and each missing.
        """
        for stop in sorted({n for n, _ in self.syncs} | {len(self.events)}):
            safe = [k for k in range(stop) if self._is_synced(k, stop)]
            some = [k for k in range(stop) if k not in safe]
            if len(some) <= 4:
                choices = [list(chosen) for n in range(len(some) + 1) for chosen in itertools.combinations(some, n)]
            else:
                choices = [[k] for k in some] + [[k for k in some if k != other] for other in some]
            for chosen in choices:
                yield f"{stop} events, of which {chosen} were not synced", self.after(sorted([*safe, *chosen]))

    def _is_synced(self, event: int, stop: int) -> bool:
        kind, file = self.events[event][0], self.events[event][1]
        return any(event < n < stop and synced == (None if kind == "name" else file) for n, synced in self.syncs)

    def put(self, content: Content) -> None:
        """Make the folder anew."""
        for old in self.folder.iterdir():
            old.unlink()
        for name, data in content.items():
            (self.folder / name).write_bytes(data)
