"""How does an HDF5 or netCDF4 file grow along an axis, so that every reader finds the old arrays or the new ones?

Nothing that the old metadata lead to is changed before the new metadata are whole:

1. `growable.read_file` says how arrays are stored, and refuses what could not grow safely: on one rank, which tells the others.
2. Chunks that come, and those at the old edge with their old rows, are written behind the end of the file, by all ranks.
3. `finish` writes the new nodes of each index of chunks behind them (`chunk_tree`), and notes which few bytes are to be changed
   in place (`on_disk`). It has the HDF5 library read the file as it will be: the same bytes, with these on top (`Overlay`).
4. `commit` changes them, each by one write that cannot be cut: the end of the file; then where each index is (an index with
   more chunks than the old shape has means nothing to a reader); then the shapes, those of coordinates last. Between these it
   waits for the disk. So a kill at any moment leaves each array with its old length, or with its new one.

Nobody else may write meanwhile: `AppendLock` keeps other appends away, the lock that HDF5 itself takes (`FileLock`) others.
docs/design/save.md says what is on disk after a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats.base import state_of
from shardload.formats.growing import Growing, GrowingSink
from shardload.formats.hdf5.chunk_tree import Grown
from shardload.formats.hdf5.growable import Facts, Overlay, Spots, file_state, spec_of, superblock_of, unfit
from shardload.formats.hdf5.on_disk import PAGE, Move, Patch, Spot, UnknownError, check_moves
from shardload.formats.hdf5.sink import Hdf5Encoder, Hdf5Writer, Noted, limit_cache, tell_chunks
from shardload.formats.leftovers import GROWTH_MARK
from shardload.formats.locks import AppendLock, FileLock
from shardload.formats.sink import Catalog, Decode, Ticket, Writer
from shardload.formats.target import MARK_NBYTES, Target, mark, named, not_undone, put_at, sync_folder
from shardload.planning.grid import unravel

__all__ = ["GrowthCatalog", "GrowthEncoder", "GrowthSink"]

Json = dict[str, Any]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
_KINDS = ("end", "move", "index", "shape")  # of writes that change the file, in order


class GrowthEncoder(Hdf5Encoder, Growing):
    """See `Encoder` and `Growing`."""

    def __init__(self, path: str, name: str, known: Json, axis: int, n_new: int) -> None:
        if known["why_not"][axis] is not None:
            raise unfit(f"'{name}' in '{path}'", known["why_not"][axis])
        shape = self.begin(tuple(known["shape"]), axis, known["chunks"][axis], n_new)
        super().__init__(path, name, spec_of(known, shape), known["format"])

    @property
    def is_asked(self) -> bool:
        """See `Encoder`."""
        return True


class GrowthSink(GrowingSink):
    """What is added to a file: see this module.

    Parameters
    ----------
    path : str
        The file.
    known : mapping
        What `read_file` says: ``"arrays"`` (those that grow) and ``"state"``.
    axes : mapping of str to int
        Along which axis each array grows.
    n_new : mapping of str to int
        By how much.
    dimensions : mapping of str to int
        Dimensions of netCDF without values: their new lengths.
    alignment : int
        As for `Hdf5Sink`.
    """

    def __init__(
        self,
        path: str,
        known: Mapping[str, Any],
        axes: Mapping[str, int],
        n_new: Mapping[str, int],
        dimensions: Mapping[str, int] | None = None,
        alignment: int = 1,
    ) -> None:
        self.path, self.mode, self.state, self.alignment = path, "w", list(known["state"]), alignment
        self.arrays: dict[str, GrowthEncoder] = {
            name: GrowthEncoder(path, name, one, axes[name], n_new[name])
            for name, one in known["arrays"].items()
            if name in axes
        }
        self.dimensions = dict(dimensions or {})

    @property
    def file(self) -> str:
        """The path without links."""
        return os.path.realpath(self.path)

    @property
    def order(self) -> list[str]:
        """In which order arrays get their new shape: coordinates, which have one axis, last."""
        return sorted(self.arrays, key=lambda name: (len(self.arrays[name].old_shape) == 1, name))

    def changed(self) -> ConfigError:
        """The error about a file that is not what was planned for any more."""
        return ConfigError(f"'{self.path}' was changed by somebody else during this append. Nothing was appended; run it again")

    def create(self) -> Catalog:
        """See `Sink`."""
        return GrowthCatalog(self)

    def writer(self, ticket: Ticket) -> Writer:
        """See `Sink`."""
        return _GrowthWriter(self, ticket)

    def file_of(self, ticket: Ticket, name: str, number: int) -> str:
        """See `Sink`."""
        return self.file

    @contextlib.contextmanager
    def decoding(self, ticket: Ticket, name: str) -> Iterator[Decode]:
        """See `Sink`: the HDF5 library reads the file as it will be."""
        with open(ticket.temporary, "rb") as notes:
            notes.seek(MARK_NBYTES + len(GROWTH_MARK))
            patches = [Patch(at, b"", bytes.fromhex(new)) for at, new in json.loads(notes.read())]
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            with h5py.File(Overlay(descriptor, patches), "r") as file:
                dataset, one = file[name], self.arrays[name]
                yield lambda region: np.asarray(dataset[one.in_file(region).slices()])
        finally:
            os.close(descriptor)


class _GrowthWriter(Hdf5Writer):
    """See `Writer`: chunks go into the file itself, behind its end. Nobody has written to it before all writers are open."""

    def __init__(self, sink: GrowthSink, ticket: Ticket) -> None:
        super().__init__(sink, ticket)  # looks for the token, in the temporary beside the file
        self._close()
        with named(sink.path):
            self._descriptor = os.open(sink.file, os.O_RDWR)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        if file_state(self._descriptor) != sink.state:  # another file has the name by now, and there the place is not free
            self._close()
            raise sink.changed()


@dataclass
class _Change:
    """What changes in one dataset: its header's numbers and its index."""

    facts: Facts
    spots: Spots
    axis: int
    attrs: list[str]
    tree: Grown | None = None


class GrowthCatalog(Catalog):
    """See `Catalog`. Its temporary is a small file beside the one that grows: what will be changed, for who reads back."""

    def __init__(self, sink: GrowthSink) -> None:
        self._sink, self._path = sink, sink.file
        self._descriptor, self._is_begun, self._is_finished = -1, False, False
        self._size: int | None = None
        self._before: dict[int, bytes] = {}  # what says how the file is, by the place
        self._target = Target(self._path, "w")
        self._lock = AppendLock(self._path)
        self._patches: dict[str, list[Patch]] = {kind: [] for kind in (*_KINDS, "links")}
        try:
            with named(sink.path):
                self._descriptor = os.open(self._path, os.O_RDWR)
            self._held = FileLock(self._descriptor, self._path)
            self._held.share()  # others may read meanwhile, and ranks of this job do
            self._find()
            temporary = self._target.create()
            with named(sink.path):
                self._note([])
        except BaseException:
            self.abandon()
            raise
        self.ticket = Ticket(temporary, self._target.token)

    def _find(self) -> None:
        """Look at the file again, now that nobody changes it."""
        self._size = os.fstat(self._descriptor).st_size
        if file_state(self._descriptor) != self._sink.state:
            raise self._sink.changed()
        read = Overlay(self._descriptor).piece
        superblock = self._superblock = superblock_of(self._sink.path, read)
        self._end = _aligned(superblock.end, max(8, self._sink.alignment))
        self._noted = {name: Noted(one.spec) for name, one in self._sink.arrays.items()}
        self._changes: dict[str, _Change] = {}
        start, stop = superblock.end_spot.range
        self._before = {start: read(start, stop - start)}
        with self._opened() as file:
            shapes = {name: one.old_shape for name, one in self._sink.arrays.items()}
            for name in (*shapes, *self._sink.dimensions):
                dataset = file[name]
                facts = Facts.of(dataset, superblock)
                axis = self._sink.arrays[name].axis if name in shapes else 0
                try:
                    spots = facts.spots(read)
                    for spot in spots.of(axis):
                        check_moves(read, facts.address, spot)
                except UnknownError as error:
                    raise unfit(f"'{name}' in '{self._sink.path}'", error) from error
                if dataset.shape != shapes.get(name, dataset.shape):
                    raise self._sink.changed()
                self._changes[name] = _Change(facts, spots, axis, sorted(dataset.attrs))
                self._before |= {one.offset: one.data for one in spots.header}

    @contextlib.contextmanager
    def _opened(self, patches: Sequence[Patch] = ()) -> Iterator[h5py.File]:
        try:
            with h5py.File(Overlay(self._descriptor, patches), "r") as file:
                limit_cache(file)
                yield file
        except (OSError, RuntimeError, KeyError) as error:
            raise SourceError(f"'{self._sink.path}' cannot be read by HDF5: {error}", path=self._sink.path) from error

    def _note(self, patches: Iterable[Patch]) -> None:
        """Write down what will be changed, for the ranks that read back."""
        told = json.dumps([(one.offset, one.new.hex()) for one in patches]).encode()
        data = mark(self._target.token, self._sink.path) + GROWTH_MARK.encode() + told
        descriptor = os.open(self._target.temporary or "", os.O_WRONLY)
        try:
            put_at(descriptor, data, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def allocate(self, name: str, numbers: Sequence[int] | Int64s, nbytes: Sequence[int] | Int64s, masks: Any = 0) -> Int64s:
        """See `Catalog`."""
        which = np.asarray(numbers, dtype=np.int64)
        sizes = np.broadcast_to(np.asarray(nbytes, dtype=np.int64), which.shape)
        kinds = np.broadcast_to(np.asarray(masks, dtype=np.int64), which.shape)
        noted = self._noted[name]
        noted.check(name, which, sizes)
        steps = _aligned(sizes, self._sink.alignment)
        offsets: Int64s = self._end + np.cumsum(steps) - steps
        self._end += int(steps.sum())
        noted.place(which, offsets, sizes, kinds)
        return offsets

    def finish(self, *, allow_missing: bool = False) -> None:
        """See `Catalog`."""
        if self._is_finished:
            raise ValueError("the catalog is finished")
        for name, noted in self._noted.items():
            noted.check_complete(name)
        view = Overlay(self._descriptor)
        end = _aligned(self._end, 8)
        with named(self._sink.path):
            for name, one in self._sink.arrays.items():
                self._changes[name].tree = tree = self._grown(view, name, one, end)
                tree.write(lambda data, offset: put_at(self._descriptor, data, offset))
                end = _aligned(tree.end, 8)
            end = self._plan(view, end)
            os.ftruncate(self._descriptor, max(end, os.fstat(self._descriptor).st_size))
            os.fsync(self._descriptor)
            self._note(self._of(*_KINDS))
            sync_folder(self._target.folder)
        self._check()
        self._end, self._is_finished = end, True

    def _grown(self, view: Overlay, name: str, one: GrowthEncoder, place: int) -> Grown:
        """The new index of an array."""
        noted, spots = self._noted[name], self._changes[name].spots
        index = np.stack(np.unravel_index(np.arange(len(noted.sizes)), one.spec.grid), axis=-1)
        index[:, one.axis] += one.base // spots.tree.chunks[one.axis]
        masks = np.zeros(len(index), np.int64)
        masks[list(noted.masks)] = list(noted.masks.values())
        new = spots.tree.entries(index, noted.offsets, noted.sizes, masks)
        try:
            return spots.tree.grown(view.piece, spots.root, one.axis, one.base, new, place)
        except UnknownError as error:
            raise unfit(f"'{name}' in '{self._sink.path}'", error) from error

    def _plan(self, view: Overlay, end: int) -> int:
        """The writes that change the file, in order. Two of them may meet in a block that has a checksum. Blocks that must move
        are written; returns where they end.
        """
        for name, found in self._changes.items():
            end = self._make_whole(view, found, end, f"'{name}' in '{self._sink.path}'")

        def change(what: str, spot: Spot, value: int) -> None:
            patch = spot.changed(view.piece, value)
            view.add(patch)
            self._patches[what].append(patch)

        change("end", self._superblock.end_spot, end)
        order = self._sink.order
        for name in order:
            found = self._changes[name]
            if found.tree is not None:
                change("index", found.spots.index, found.tree.root)
                self._patches["links"] += found.tree.links
        for name in order:
            one = self._sink.arrays[name]
            change("shape", self._changes[name].spots.dims[one.axis], one.new_shape[one.axis])
        for name, length in self._sink.dimensions.items():
            change("shape", self._changes[name].spots.dims[0], length)
        return end

    def _make_whole(self, view: Overlay, one: _Change, end: int, where: str) -> int:
        """Have the blocks of a header that change in one page each. Returns the end."""
        try:
            for which in (0, 1):
                while not (spot := one.spots.of(one.axis)[which]).is_in_one_page:
                    block = spot.block
                    while block is not None:
                        nbytes = block[1] + 4 - block[0]
                        place = end if end // PAGE == (end + nbytes) // PAGE else _aligned(end, PAGE)
                        move = Move.of(view.piece, one.facts.address, block, place)
                        block = move.first
                    put_at(self._descriptor, move.data, place)
                    view.add(move.patch)
                    self._patches["move"].append(move.patch)
                    end = _aligned(place + len(move.data), 8)
                    one.spots = one.facts.spots(view.piece)
        except UnknownError as error:
            raise unfit(where, error) from error
        return end

    def _of(self, *kinds: str) -> list[Patch]:
        return [one for kind in kinds for one in self._patches[kind]]

    def _check(self) -> None:
        """Have the HDF5 library read the file as it will be, and compare with what was planned. The values of what is new are
        read back by other ranks.
        """
        old = {name: (0, 0) for name in self._sink.arrays}
        with self._opened() as file:
            for name, one in self._sink.arrays.items():
                old[name] = self._told(file[name], name, one, is_new=False)
        with self._opened(self._of(*_KINDS)) as file:
            for name, change in self._changes.items():
                dataset = file[name]
                is_array = name in self._sink.arrays
                shape = self._sink.arrays[name].new_shape if is_array else (self._sink.dimensions[name],)
                if dataset.shape != shape or sorted(dataset.attrs) != change.attrs:
                    raise self._misread(name, f"the shape {dataset.shape} and the attributes {sorted(dataset.attrs)}")
                if is_array and self._told(dataset, name, self._sink.arrays[name], is_new=True) != old[name]:
                    raise self._misread(name, "other old chunks")

    def _told(self, dataset: h5py.Dataset, name: str, one: GrowthEncoder, *, is_new: bool) -> tuple[int, int]:
        """Compare the new chunks that HDF5 finds with those that were placed; returns a count and a sum over the others."""
        noted, spots = self._noted[name], self._changes[name].spots
        count = total = n_found = 0
        chunk = np.array(spots.tree.chunks, dtype=np.int64)

        def take(rows: Int64s) -> None:
            nonlocal count, total, n_found
            is_here = rows[:, one.axis] >= one.base
            rest = rows[~is_here]
            count, total = count + len(rest), (total + _sum(rest)) % 2**64
            if not is_new:
                return
            rows = rows[is_here]
            index = rows[:, : len(chunk)] // chunk
            index[:, one.axis] -= one.base // chunk[one.axis]
            outside = np.flatnonzero(np.any(index >= one.spec.grid, axis=1))
            if len(outside):
                raise self._misread(name, f"a chunk outside of it, at {tuple(rows[outside[0], : len(chunk)].tolist())}")
            which = np.ravel_multi_index(tuple(index.T), one.spec.grid) if len(rows) else np.zeros(0, np.int64)
            expected = np.stack([noted.offsets[which], noted.sizes[which].astype(np.int64), noted.masks_of(which)], axis=-1)
            wrong = np.flatnonzero(np.any(rows[:, len(chunk) :] != expected, axis=1))
            if len(wrong):
                at = unravel(int(which[wrong[0]]), one.spec.grid)
                raise self._misread(name, f"chunk {at} of what comes at {rows[wrong[0], -3]}, not at {expected[wrong[0], 0]}")
            n_found += len(rows)

        tell_chunks(dataset.id, len(chunk), take)
        if is_new and n_found != len(noted.sizes):
            raise self._misread(name, f"{n_found} new chunks, not {len(noted.sizes)}")
        return count, total

    def _misread(self, name: str, what: str) -> SourceError:
        return SourceError(
            f"the HDF5 library would find {what} in '{name}' of '{self._sink.path}', as append would have written it. "
            "Nothing was appended. This is a defect in shardload; please report it with the file",
            path=self._sink.path,
            dataset=name,
        )

    def commit(self) -> None:
        """See `Catalog`."""
        if not self._is_finished:
            raise ValueError("finish the catalog first")
        with named(self._sink.path):
            self._held.exclude()
            self._compare()
            done: list[Patch] = []
            self._is_begun = True
            try:
                for kind in _KINDS:
                    for one in self._of(kind):
                        done.append(one)
                        put_at(self._descriptor, one.new, one.offset)
                    if self._patches[kind]:
                        os.fsync(self._descriptor)
            except BaseException as error:
                try:
                    for one in reversed(done[1:]):  # the end may stay: the file is that long
                        put_at(self._descriptor, one.old, one.offset)
                    os.fsync(self._descriptor)
                except OSError as found:
                    raise not_undone(error, self._sink.path, found) from error
                raise
            with contextlib.suppress(OSError):
                for one in self._of("links"):
                    put_at(self._descriptor, one.new, one.offset)
        self.abandon()

    def _compare(self) -> None:
        """ConfigError if somebody has changed the file meanwhile, or put another one in its place."""
        is_same = self._is_as_before() and state_of(self._path) == tuple(file_state(self._descriptor))
        if not is_same or os.fstat(self._descriptor).st_size < self._end:
            raise self._sink.changed()

    def _is_as_before(self) -> bool:
        read = Overlay(self._descriptor).piece
        return all(read(start, len(old)) == old for start, old in self._before.items())

    def abandon(self) -> None:
        """See `Catalog`. What is behind the old end goes, unless somebody else has changed the file: it may be theirs."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                is_longer = self._size is not None and os.fstat(self._descriptor).st_size > self._size
                if is_longer and not self._is_begun and self._is_as_before():
                    os.ftruncate(self._descriptor, self._size or 0)
            with contextlib.suppress(OSError):
                os.close(self._descriptor)  # gives the file's lock back
            self._descriptor = -1
        self._target.abandon()
        self._lock.release()


def _aligned(nbytes: Any, alignment: int) -> Any:
    return -(-nbytes // alignment) * alignment


def _sum(rows: Int64s) -> int:
    """A sum over rows that does not depend on their order: of each, a number that depends on all of it."""
    mixed = np.zeros(len(rows), np.uint64)
    for column in rows.T.astype(np.uint64):
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return int(mixed.sum(dtype=np.uint64))
