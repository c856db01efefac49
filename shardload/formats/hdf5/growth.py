"""How does an HDF5 or netCDF4 file grow along an axis, so that every reader finds the old arrays or the new ones?

HDF5 itself writes the new metadata, into a ledger on top of the old file. No byte of the old file changes before all of them
are on disk elsewhere:

1. `growable.read_file` says how arrays are stored, and refuses what could not grow safely: on one rank, which tells the others.
2. `Hdf5GrowthCatalog` opens the file on a `Ledger`, and makes each array as short as its whole chunks are, then as long as it
   will be. So the library has no chunk at the old edge any more, and gives all chunks that come a place behind the end of the
   file.
3. All ranks write chunks there, those at the old edge with their old rows. So does the library with new metadata.
4. `finish` has the library end its work. What it changed before the old end goes into a file of changes. The library reads the
   file as it will be, and so do the ranks that read back.
5. `commit` makes the changes (`changes`). If it is killed there, whoever reads the file next makes them.

Nobody else may write meanwhile: `AppendLock` keeps other appends away, the lock that HDF5 itself takes (`FileLock`) others.
docs/design/save.md says what is on disk after a kill.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats.growing import Growing, GrowingSink
from shardload.formats.hdf5.growable import file_state, spec_of, unfit
from shardload.formats.hdf5.ledger import Ledger, LedgerFile, old_file
from shardload.formats.hdf5.on_disk import SUPERBLOCK_NBYTES, UnknownStructureError, end_of, with_end
from shardload.formats.hdf5.sink import Hdf5Encoder, Hdf5Writer, LedgerCatalog, PlacedChunks
from shardload.formats.sink import Catalog, Decode, Ticket, Writer
from shardload.planning.region import Region
from shardload.storage.changes import make_changes, read_changes, write_changes
from shardload.storage.locks import AppendLock, FileLock, take_lock
from shardload.storage.target import Target, mark, named, sync_folder

Json = dict[str, Any]
Int64s = np.ndarray[Any, np.dtype[np.int64]]


class GrowingHdf5Array(Hdf5Encoder, Growing):
    """See `Encoder` and `Growing`."""

    def __init__(self, path: str, name: str, known: Json, axis: int, n_new: int) -> None:
        shape = self.begin(tuple(known["shape"]), axis, known["chunks"][axis], n_new)
        super().__init__(path, name, spec_of(known, shape), known["format"])
        self.is_asked = True


class Hdf5Growth(GrowingSink):
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
        self.arrays: dict[str, GrowingHdf5Array] = {
            name: GrowingHdf5Array(path, name, array, axes[name], n_new[name])
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
        return Hdf5GrowthCatalog(self)

    def writer(self, ticket: Ticket) -> Writer:
        """See `Sink`."""
        writer = Hdf5Writer(self, ticket, self.file)
        if file_state(writer.descriptor) != self.state:  # another file has the name by now, and there the place is not free
            writer.close()
            raise self.changed()
        return writer

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


class Hdf5GrowthCatalog(LedgerCatalog):
    """See `Catalog`. Its temporary is a small file beside the one that grows: what will be changed, for who reads back."""

    def __init__(self, sink: Hdf5Growth) -> None:
        chunks = {
            name: PlacedChunks(sink.path, name, array.spec, name, array.in_file(Region.whole(array.spec.shape)).start)
            for name, array in sink.arrays.items()
        }
        super().__init__(sink.path, Target(sink.file, "w"), chunks)
        self._sink = sink
        self._is_put = self._is_begun = self._is_finished = False
        self._old_nbytes, self._old_end = sink.state[0], 0  # as long as the file is, and as it is for HDF5
        self._lock = AppendLock(sink.file)
        try:
            with named(sink.path):
                self.descriptor = os.open(sink.file, os.O_RDWR)
            self._held = FileLock(self.descriptor, sink.file)
            self._held.share()  # others may read meanwhile, and ranks of this job do
            if file_state(self.descriptor) != sink.state:  # now that nobody changes it
                raise sink.changed()
            self._begin(self.descriptor)
            temporary = self._target.create()
            with named(sink.path):
                write_changes(temporary, mark(self._target.token, sink.path), [])
        except BaseException:
            self.abandon()
            raise
        self.ticket = Ticket(temporary, self._target.token)

    def _begin(self, descriptor: int) -> None:
        """Have the library make the arrays longer."""
        try:
            self._old_end = end_of(os.pread(descriptor, SUPERBLOCK_NBYTES, 0))
        except UnknownStructureError as error:
            raise unfit(f"'{self.path}'", error) from error
        library = self._library = LedgerFile(self.path, Ledger(descriptor, self._old_end), self._sink.alignment)
        try:
            with library.calls():
                self._shorten(library.open("r+"))
                library.close()
                self._give_end_back(library.ledger)
                file = library.open("r+")
                for name in (*self._sink.arrays, *self._sink.dimensions):
                    file[name].resize(self._sink.new_shape(name))
        except (OSError, RuntimeError, KeyError) as error:
            raise self.unread(error) from error

    def _shorten(self, file: h5py.File) -> None:
        """Take the chunks at the old edge out of their index: all that come are new then."""
        for name, array in self._sink.arrays.items():
            if file[name].shape != array.old_shape:
                raise self._sink.changed()
            file[name].resize(array.base, array.axis)

    def _give_end_back(self, ledger: Ledger) -> None:
        """The library took freed chunks at the end off the file. They still have old values: nothing may come there."""
        ledger.seek(0)
        head = with_end(ledger.read(SUPERBLOCK_NBYTES), self._old_end)
        ledger.seek(0)
        ledger.write(head)
        ledger.truncate(self._old_end)

    def allocate(self, name: str, numbers: Sequence[int] | Int64s, nbytes: Sequence[int] | Int64s, masks: Any = 0) -> Int64s:
        """See `Catalog`."""
        if not self._is_put:  # no sooner: who opens the file to write looks if it is as it was
            self.library.ledger.put_from(self._old_end)
            self._is_put = True
        offsets = super().allocate(name, numbers, nbytes, masks)
        if len(offsets) and offsets.min() < self._old_end:
            raise unfit(f"'{name}' in '{self.path}'", f"room for new chunks among old bytes, at {offsets.min()}")
        return offsets

    def finish(self) -> None:
        """See `Catalog`."""
        ledger = self.settle()
        if self.descriptor is None or self._target.temporary is None:
            raise ValueError("the catalog is closed")
        changes = ledger.changes()
        with named(self.path):
            os.ftruncate(self.descriptor, ledger.nbytes)
            os.fsync(self.descriptor)
            write_changes(self._target.temporary, mark(self._target.token, self.path), changes)
            sync_folder(self._target.folder)
        try:
            with old_file(self.descriptor, changes) as file:
                for name in (*self._sink.arrays, *self._sink.dimensions):
                    if file[name].shape != self._sink.new_shape(name):
                        raise OSError(f"'{name}' would have the shape {file[name].shape}")
                for name, placed in self.chunks.items():
                    placed.compare(file[name].id)
        except (OSError, RuntimeError, KeyError) as error:
            raise self.unread(error) from error
        self._is_finished = True

    def commit(self) -> None:
        """See `Catalog`."""
        if not self._is_finished or self.descriptor is None or self._target.temporary is None:
            raise ValueError("finish the catalog first")
        with named(self.path):
            self._held.exclude()
            self._refuse_changed(self.descriptor)
            changes = f"{self._target.temporary.removesuffix('.unfinished')}.changes"
            os.rename(self._target.temporary, changes)
            self._target.temporary = changes
            sync_folder(self._target.folder)
            lock = os.open(changes, os.O_RDWR)
        try:
            take_lock(lock, fcntl.LOCK_EX)
            self._is_begun, self._target.temporary = True, None
            make_changes(self.descriptor, changes)
        except OSError as error:
            raise SourceError(
                f"the append to '{self.path}' failed as its last bytes were written ({error.strerror or error}). All "
                f"values are on disk. What is to be done is in '{changes}': the next load or append does it, or: "
                f"shardload info {self.path}",
                path=self.path,
            ) from error
        finally:
            os.close(lock)
        self.abandon()

    def _refuse_changed(self, descriptor: int) -> None:
        """ConfigError if somebody has changed the file meanwhile, or put another one in its place."""
        here, there = os.fstat(descriptor), os.stat(self._sink.file)
        ledger = self.library.ledger
        if not os.path.samestat(here, there) or here.st_size < ledger.nbytes or not ledger.is_as_before():
            raise self._sink.changed()

    def abandon(self) -> None:
        """See `Catalog`. What is behind the old end goes, unless somebody else has changed the file: it may be theirs."""
        if self._library is not None:
            self._library.give_up()
            if self.descriptor is not None and not self._is_begun:
                with contextlib.suppress(OSError):
                    is_longer = os.fstat(self.descriptor).st_size > self._old_nbytes
                    if is_longer and self._library.ledger.is_as_before():
                        os.ftruncate(self.descriptor, self._old_nbytes)
        with contextlib.suppress(OSError):
            self.close()  # gives the file's lock back
        self._target.abandon()
        self._lock.release()
