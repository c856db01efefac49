"""How does an HDF5 or netCDF4 file grow along an axis, so that every reader finds the old arrays or the new ones?

HDF5 itself writes the new metadata, into a ledger on top of the old file. No byte of the old file changes before all of them
are on disk elsewhere:

1. `growable.read_file` says how arrays are stored, and refuses what could not grow safely: on one rank, which tells the others.
2. `GrowthCatalog` opens the file on a `Ledger`, and makes each array as short as its whole chunks are, then as long as it will
   be. So the library has no chunk at the old edge any more, and gives all chunks that come a place behind the end of the file.
3. All ranks write chunks there, those at the old edge with their old rows.
4. `finish` has the library end its work. What it wrote behind the old end goes into the file; what it changed before that goes
   into a file of changes. The library reads the file as it will be, and so do the ranks that read back.
5. `commit` makes the changes (`changes`). If it is killed there, whoever reads the file next makes them.

Nobody else may write meanwhile: `AppendLock` keeps other appends away, the lock that HDF5 itself takes (`FileLock`) others.
docs/design/save.md says what is on disk after a kill.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats.changes import HEAD_NBYTES, Change, make_changes, read_changes, write_changes
from shardload.formats.contract.ranges import state_of
from shardload.formats.growing import Growing, GrowingSink
from shardload.formats.hdf5.growable import file_state, spec_of, unfit
from shardload.formats.hdf5.ledger import MOST_NBYTES, Ledger
from shardload.formats.hdf5.ledger_file import UNLIMITED, FileStore, LedgerFile, old_file
from shardload.formats.hdf5.on_disk import SUPERBLOCK_NBYTES, UnknownError, end_of, with_end
from shardload.formats.hdf5.sink import Hdf5Encoder, Hdf5Writer, Noted, check_overlap, tell_chunks
from shardload.formats.locks import AppendLock, FileLock, take_lock
from shardload.formats.sink import Catalog, Decode, Ticket, Writer
from shardload.formats.target import Target, mark, named, put_at, sync_folder
from shardload.planning.grid import unravel

__all__ = ["GrowthCatalog", "GrowthEncoder", "GrowthSink"]

Json = dict[str, Any]
Int64s = np.ndarray[Any, np.dtype[np.int64]]


class GrowthEncoder(Hdf5Encoder, Growing):
    """See `Encoder` and `Growing`."""

    def __init__(self, path: str, name: str, known: Json, axis: int, n_new: int) -> None:
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
            name: GrowthEncoder(path, name, array, axes[name], n_new[name])
            for name, array in known["arrays"].items()
            if name in axes
        }
        self.dimensions = dict(dimensions or {})

    @property
    def file(self) -> str:
        """The path without links."""
        return os.path.realpath(self.path)

    def new_shape(self, name: str) -> tuple[int, ...]:
        """The shape that an array, or a dimension without values, will have."""
        return self.arrays[name].new_shape if name in self.arrays else (self.dimensions[name],)

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
        changes = read_changes(ticket.temporary)
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            with old_file(descriptor, changes) as file:
                dataset, array = file[name], self.arrays[name]
                yield lambda region: np.asarray(dataset[array.in_file(region).slices()])
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


class _OldFile(FileStore):
    """The file that grows, for the ledger. It knows what it has read of the old bytes."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.nbytes = os.fstat(descriptor).st_size
        self.end = self.nbytes  # for HDF5: set when it is known
        self._checksums: dict[tuple[int, int], int] = {}

    def get(self, nbytes: int, offset: int) -> bytes:
        """See `Store`."""
        data = super().get(nbytes, offset)
        if offset + nbytes <= self.end:
            self._checksums[nbytes, offset] = zlib.crc32(data)
        return data

    def is_as_before(self) -> bool:
        """True if all that was read of the old bytes is still the same."""
        try:
            return all(zlib.crc32(super(_OldFile, self).get(*place)) == told for place, told in self._checksums.items())
        except OSError:
            return False


class GrowthCatalog(Catalog):
    """See `Catalog`. Its temporary is a small file beside the one that grows: what will be changed, for who reads back."""

    def __init__(self, sink: GrowthSink) -> None:
        self._sink, self._path = sink, sink.file
        self._old: _OldFile | None = None
        self._library: LedgerFile | None = None
        self._is_begun = self._is_finished = False
        self._target = Target(self._path, "w")
        self._noted = {
            name: Noted(array.spec, [array.base * (k == array.axis) for k in range(len(array.spec.shape))])
            for name, array in sink.arrays.items()
        }
        self._attrs: dict[str, list[str]] = {}
        self._old_chunks: dict[str, tuple[int, int]] = {}  # how many there are, and the sum of their places
        self._lock = AppendLock(self._path)
        try:
            with named(sink.path):
                descriptor = os.open(self._path, os.O_RDWR)
            self._old = _OldFile(descriptor)
            self._held = FileLock(descriptor, self._path)
            self._held.share()  # others may read meanwhile, and ranks of this job do
            self._begin(self._old)
            temporary = self._target.create()
            with named(sink.path):
                self._note([])
        except BaseException:
            self.abandon()
            raise
        self.ticket = Ticket(temporary, self._target.token)

    def _begin(self, old: _OldFile) -> None:
        """Look at the file again, now that nobody changes it, and have the library make the arrays longer."""
        if file_state(old.descriptor) != self._sink.state:
            raise self._sink.changed()
        try:
            old.end = end_of(old.get(min(SUPERBLOCK_NBYTES, old.nbytes), 0))
        except UnknownError as error:
            raise unfit(f"'{self._sink.path}'", error) from error
        try:
            with old_file(old.descriptor) as file:
                for name in self._noted:
                    self._old_chunks[name] = self._check_chunks(name, file[name], is_new=False)
        except (OSError, RuntimeError, KeyError) as error:
            raise self._unread(error) from error
        self._ledger = Ledger(old, UNLIMITED, old.end)
        self._library = LedgerFile(self._sink.path, self._ledger, self._sink.alignment)
        try:
            with self._library.calls():
                self._shorten(self._library.open("r+"))
                self._library.close()
                self._give_end_back(old.end)
                file = self._library.open("r+")
                for name in (*self._sink.arrays, *self._sink.dimensions):
                    file[name].resize(self._sink.new_shape(name))
        except (OSError, RuntimeError, KeyError) as error:
            raise self._unread(error) from error
        self._ledger.most_nbytes = MOST_NBYTES

    def _shorten(self, file: h5py.File) -> None:
        """Take the chunks at the old edge out of their index: all that come are new then."""
        for name, array in self._sink.arrays.items():
            dataset = file[name]
            if dataset.shape != array.old_shape:
                raise self._sink.changed()
            dataset.resize(array.base, array.axis)
        for name in (*self._sink.arrays, *self._sink.dimensions):
            self._attrs[name] = sorted(file[name].attrs)

    def _give_end_back(self, end: int) -> None:
        """The library took freed chunks at the end off the file. They still have old values: nothing may come there."""
        self._ledger.seek(0)
        head = with_end(self._ledger.read(SUPERBLOCK_NBYTES), end)
        self._ledger.seek(0)
        self._ledger.write(head)
        self._ledger.truncate(end)

    def _note(self, changes: Sequence[Change]) -> None:
        """Write down what will be changed, for the ranks that read back, and for `commit`."""
        write_changes(self._target.temporary or "", mark(self._target.token, self._sink.path), changes)

    def allocate(self, name: str, numbers: Sequence[int] | Int64s, nbytes: Sequence[int] | Int64s, masks: Any = 0) -> Int64s:
        """See `Catalog`."""
        if self._library is None or self._old is None or not self._library.is_open:
            raise ValueError("the catalog is finished")
        offsets = self._noted[name].allocated(self._library, name, numbers, nbytes, masks)
        if len(offsets) and offsets.min() < self._old.end:
            raise unfit(f"'{name}' in '{self._sink.path}'", f"room for new chunks among old bytes, at {offsets.min()}")
        return offsets

    def finish(self, *, allow_missing: bool = False) -> None:
        """See `Catalog`."""
        if self._library is None or self._old is None or not self._library.is_open:
            raise ValueError("the catalog is finished")
        for name, noted in self._noted.items():
            noted.check_complete(name)
        with self._library.calls():
            self._library.close()
        check_overlap(self._sink.path, self._ledger, self._noted.values())
        with named(self._sink.path):
            changes = self._put_metadata(self._old)
            self._note(changes)
            sync_folder(self._target.folder)
        self._check(self._old.descriptor, changes)
        self._is_finished = True

    def _put_metadata(self, old: _OldFile) -> list[Change]:
        """Put what lies behind the old end into the file. Returns the other changes, the first bytes first."""
        self._ledger.seek(0)
        changes = [(0, self._ledger.read(HEAD_NBYTES))]
        for offset, data in self._ledger.metadata():
            for start, stop in ((HEAD_NBYTES, old.end), (old.end, self._ledger.nbytes)):
                first, last = max(offset, start), min(offset + len(data), stop)
                if first >= last:
                    continue
                part = data[first - offset : last - offset]
                if start == old.end:
                    put_at(old.descriptor, part, first)
                else:
                    changes.append((first, part))
        os.ftruncate(old.descriptor, self._ledger.nbytes)
        os.fsync(old.descriptor)
        return changes

    def _check(self, descriptor: int, changes: Sequence[Change]) -> None:
        """Have the HDF5 library read the file as it will be, and compare with what was planned. The values of what is new are
        read back by other ranks.
        """
        try:
            with old_file(descriptor, changes) as file:
                for name, attrs in self._attrs.items():
                    dataset = file[name]
                    if dataset.shape != self._sink.new_shape(name) or sorted(dataset.attrs) != attrs:
                        raise self._misread(name, f"the shape {dataset.shape} and the attributes {sorted(dataset.attrs)}")
                    if name in self._noted and self._check_chunks(name, dataset, is_new=True) != self._old_chunks[name]:
                        raise self._misread(name, "other old chunks")
        except (OSError, RuntimeError, KeyError) as error:
            raise self._unread(error) from error

    def _check_chunks(self, name: str, dataset: h5py.Dataset, *, is_new: bool) -> tuple[int, int]:
        """Compare the new chunks that HDF5 finds with those that were placed; returns a count and a sum over the others."""
        array, noted = self._sink.arrays[name], self._noted[name]
        chunk, axis = np.array(array.spec.chunks, dtype=np.int64), array.axis
        n_old = total = n_new = 0

        def take(rows: Int64s) -> None:
            nonlocal n_old, total, n_new
            is_here = rows[:, axis] >= array.base
            n_old, total = n_old + int(np.count_nonzero(~is_here)), total + int(rows[~is_here, -3].sum())
            if not is_new:
                return
            rows = rows[is_here]
            n_new += len(rows)
            index = rows[:, : len(chunk)] // chunk
            index[:, axis] -= array.base // chunk[axis]
            which = np.ravel_multi_index(tuple(index.T), array.spec.grid) if len(rows) else np.zeros(0, np.int64)
            expected = np.stack([noted.offsets[which], noted.sizes[which].astype(np.int64), noted.masks_of(which)], axis=-1)
            wrong = np.flatnonzero(np.any(rows[:, len(chunk) :] != expected, axis=1))
            if len(wrong):
                at = unravel(int(which[wrong[0]]), array.spec.grid)
                raise self._misread(name, f"chunk {at} of what comes at {rows[wrong[0], -3]}, not at {expected[wrong[0], 0]}")

        tell_chunks(dataset.id, len(chunk), take)
        if is_new and n_new != len(noted.sizes):
            raise self._misread(name, f"{n_new} new chunks, not {len(noted.sizes)}")
        return n_old, total

    def _misread(self, name: str, what: str) -> SourceError:
        return SourceError(
            f"the HDF5 library would find {what} in '{name}' of '{self._sink.path}', as append would have written it. "
            "Nothing was appended. This is a defect in shardload; please report it with the file",
            path=self._sink.path,
            dataset=name,
        )

    def _unread(self, error: Exception) -> SourceError:
        path = self._sink.path
        return SourceError(f"'{path}' cannot be read by HDF5: {error}. Nothing was appended", path=path)

    def commit(self) -> None:
        """See `Catalog`."""
        if not self._is_finished or self._old is None or self._target.temporary is None:
            raise ValueError("finish the catalog first")
        with named(self._sink.path):
            self._held.exclude()
            self._compare(self._old)
            changes = f"{self._target.temporary.removesuffix('.unfinished')}.changes"
            os.rename(self._target.temporary, changes)
            self._target.temporary = changes
            sync_folder(self._target.folder)
            lock = os.open(changes, os.O_RDWR)
        try:
            take_lock(lock, fcntl.LOCK_EX)
            self._is_begun, self._target.temporary = True, None
            make_changes(self._old.descriptor, changes)
        except OSError as error:
            raise SourceError(
                f"the append to '{self._sink.path}' failed as its last bytes were written ({error.strerror or error}). All "
                f"values are on disk. What is to be done is in '{changes}': the next load or append does it, or: "
                f"shardload info {self._sink.path}",
                path=self._sink.path,
            ) from error
        finally:
            os.close(lock)
        self.abandon()

    def _compare(self, old: _OldFile) -> None:
        """ConfigError if somebody has changed the file meanwhile, or put another one in its place."""
        is_same = state_of(self._path) == tuple(file_state(old.descriptor))
        if not is_same or not old.is_as_before() or os.fstat(old.descriptor).st_size < self._ledger.nbytes:
            raise self._sink.changed()

    def abandon(self) -> None:
        """See `Catalog`. What is behind the old end goes, unless somebody else has changed the file: it may be theirs."""
        if self._library is not None:
            self._ledger.most_nbytes = UNLIMITED  # what HDF5 still writes goes nowhere
            with contextlib.suppress(OSError, RuntimeError):
                self._library.close()
        old, self._old = self._old, None
        if old is not None:
            with contextlib.suppress(OSError):
                is_longer = os.fstat(old.descriptor).st_size > old.nbytes
                if is_longer and not self._is_begun and old.is_as_before():
                    os.ftruncate(old.descriptor, old.nbytes)
            with contextlib.suppress(OSError):
                os.close(old.descriptor)  # gives the file's lock back
        self._target.abandon()
        self._lock.release()
