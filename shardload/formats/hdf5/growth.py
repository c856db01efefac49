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
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from shardload.formats.growing import Growing, GrowingSink
from shardload.formats.hdf5.growable import spec_of, unfit
from shardload.formats.hdf5.ledger import Ledger, LedgerFile, old_file
from shardload.formats.hdf5.on_disk import SUPERBLOCK_NBYTES, UnknownStructureError, end_of, with_end
from shardload.formats.hdf5.sink import Hdf5Encoder, LedgerCatalog, PlacedChunks, writer_of
from shardload.formats.sink import Catalog, Decode, Ticket, Writer
from shardload.planning.region import Region
from shardload.storage.changes import GrowingFile, read_changes, state_of_file
from shardload.storage.containment import Fence, open_file
from shardload.storage.local import LocalFile, LocalFolder
from shardload.storage.locks import changed_meanwhile
from shardload.storage.new_file import WritableFile
from shardload.storage.objects import ObjectFolder
from shardload.storage.target import check_mark, named

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

    def create(self) -> Catalog:
        """See `Sink`."""
        return Hdf5GrowthCatalog(self)

    def writer(self, ticket: Ticket) -> Writer:
        """See `Sink`."""
        check_mark(ticket.temporary, ticket.temporary, self.path)
        file = WritableFile(self.file)
        if state_of_file(file) != self.state:  # another file has the name by now, and there the place is not free
            raise changed_meanwhile(self.path)
        return writer_of(self, file)

    def stored(self, ticket: Ticket) -> ObjectFolder:
        """See `Sink`."""
        return LocalFolder(os.path.dirname(self.file), Fence())

    def key_of(self, ticket: Ticket, name: str, number: int) -> str:
        """See `Sink`."""
        return os.path.basename(self.file)

    @contextlib.contextmanager
    def decoding(self, ticket: Ticket, name: str) -> Iterator[Decode]:
        """See `Sink`: the HDF5 library reads the file as it will be."""
        changes = read_changes(ticket.temporary)
        with contextlib.closing(LocalFile(open_file(self.file))) as stored, old_file(stored, changes) as file:
            dataset, array = file[name], self.arrays[name]
            yield lambda region: np.asarray(dataset[array.in_file(region).slices()])


class Hdf5GrowthCatalog(LedgerCatalog):
    """See `Catalog`. Its ticket leads to a small file beside the one that grows: what will be changed, for who reads back."""

    file: GrowingFile | None

    def __init__(self, sink: Hdf5Growth) -> None:
        chunks = {
            name: PlacedChunks(sink.path, name, array.spec, name, array.in_file(Region.whole(array.spec.shape)).start)
            for name, array in sink.arrays.items()
        }
        super().__init__(sink.path, chunks)
        self._sink, self._is_put, self._old_end = sink, False, 0  # its end for HDF5
        self.file = GrowingFile(sink.file, sink.path, sink.state)
        try:
            self._begin(self.file)
        except BaseException:
            self.abandon()
            raise
        self.ticket = Ticket(self.file.changes)

    def _begin(self, growing: GrowingFile) -> None:
        """Have the library make the arrays longer."""
        try:
            self._old_end = end_of(growing.read_at_most(0, SUPERBLOCK_NBYTES))
        except UnknownStructureError as error:
            raise unfit(f"'{self.path}'", error) from error
        library = self._library = LedgerFile(self.path, Ledger(growing, self._old_end), self._sink.alignment)
        growing.is_as_before = library.ledger.is_as_before
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
                raise changed_meanwhile(self.path)
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
        changes = ledger.changes()
        with named(self.path):
            ledger.file.finish(ledger.nbytes, changes)
        try:
            with old_file(ledger.file, changes) as file:
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
        if not self._is_finished or self.file is None:
            raise ValueError("finish the catalog first")
        self.file.publish()
        self.abandon()

    def abandon(self) -> None:
        """See `Catalog`."""
        if self._library is not None:
            self._library.give_up()
        if self.file is not None:
            self.file.discard()
