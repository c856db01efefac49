"""How does an HDF5 or netCDF4 file grow along an axis, so that every reader finds the old arrays or the new ones?

HDF5 itself writes the new metadata, into a ledger on top of the old file. No byte of the old file changes before all of them
are on disk elsewhere:

1. `growable.read_file` says how arrays are stored, and refuses what could not grow safely: on one rank, which tells the others.
2. `Hdf5GrowthCatalog` opens the file on a `Ledger`, and makes each array as short as its whole chunks are (those of the rows
   that stay, if rows are replaced), then as long as it will be. So the library has no chunk at the old edge any more, and gives
   all chunks that come a place behind the end of the file.
3. All ranks write chunks there, those at the old edge with their old rows. So does the library with new metadata.
4. `finish` has the library end its work. What it changed before the old end goes into a file of changes. The library reads the
   file as it will be, and so do the ranks that read back.
5. `commit` makes the changes (`changes`). If it is killed there, whoever reads the file next makes them.

Nobody else may write meanwhile: `AppendLock` keeps other appends away, the lock that HDF5 itself takes others.
docs/design/save.md says what is on disk after a kill.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from shardload.formats.hdf5.growable import spec_of, unfit
from shardload.formats.hdf5.ledger import Ledger, old_file
from shardload.formats.hdf5.on_disk import SUPERBLOCK_NBYTES, UnknownStructureError, end_of, with_end
from shardload.formats.hdf5.sink import Hdf5Encoder, Hdf5PlacedChunks, LedgerCatalog, OneFileSink
from shardload.formats.sink import Catalog, Decode, Growing, Ticket
from shardload.planning.region import Region
from shardload.storage.changes import GrowingFile, read_changes, state_of_file
from shardload.storage.containment import open_file
from shardload.storage.local import LocalFile
from shardload.storage.locks import changed_meanwhile
from shardload.storage.target import Change, WritableFile

Json = dict[str, Any]
Int64s = np.ndarray[Any, np.dtype[np.int64]]


class GrowingHdf5Array(Hdf5Encoder, Growing):
    """See `Encoder` and `Growing`."""

    def __init__(self, path: str, name: str, known: Json, axis: int, n_new: int) -> None:
        shape = self.begin(known, axis, known["chunks"][axis], n_new)
        super().__init__(path, name, spec_of(known, shape), known["format"])
        self.is_placed_by_root = True


class Hdf5Growth(OneFileSink):
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

    def new_shape(self, name: str) -> tuple[int, ...]:
        """The shape that an array, or a dimension without values, will have."""
        return self.arrays[name].new_shape if name in self.arrays else (self.dimensions[name],)

    def create(self) -> Catalog:
        """See `Sink`."""
        return Hdf5GrowthCatalog(self)

    def file_of(self, ticket: Ticket) -> str:
        """See `OneFileSink`."""
        return os.path.realpath(self.path)

    def open(self, ticket: Ticket) -> WritableFile:
        """See `OneFileSink`."""
        file = super().open(ticket)
        if state_of_file(file) != self.state:  # another file has the name by now, and there the place is not free
            raise changed_meanwhile(self.path)
        return file

    @contextlib.contextmanager
    def decoding(self, ticket: Ticket, name: str) -> Iterator[Decode]:
        """See `Sink`: the HDF5 library reads the file as it will be."""
        changes = read_changes(ticket.temporary)
        with contextlib.closing(LocalFile(open_file(self.file_of(ticket)))) as stored, old_file(stored, changes) as file:
            dataset, array = file[name], self.arrays[name]
            yield lambda region: np.asarray(dataset[array.in_file(region).slices()])


class Hdf5GrowthCatalog(LedgerCatalog):
    """See `Catalog`. Its ticket leads to a small file beside the one that grows: what will be changed, for who reads back."""

    def __init__(self, sink: Hdf5Growth) -> None:
        chunks = {
            name: Hdf5PlacedChunks(sink.path, name, array.spec, name, array.in_file(Region.whole(array.spec.shape)).start)
            for name, array in sink.arrays.items()
        }
        self._sink, self._is_put = sink, False
        file = GrowingFile(os.path.realpath(sink.path), sink.path, sink.state)
        self.ticket = Ticket(file.temporary)
        try:
            self._old_end = end_of(file.read_at_most(0, SUPERBLOCK_NBYTES))
        except BaseException as error:
            file.discard()
            raise (unfit(f"'{sink.path}'", error) if isinstance(error, UnknownStructureError) else error) from error
        super().__init__(sink.path, file, chunks, sink.alignment, self._old_end)
        file.is_as_before = self.library.ledger.is_as_before
        try:
            self._make_longer()
        except BaseException:
            self.abandon()
            raise

    def _make_longer(self) -> None:
        library = self.library
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
            if file[name].shape != array.stored_shape:
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

    @contextlib.contextmanager
    def finished(self, changes: list[Change]) -> Iterator[h5py.File]:
        """See `LedgerCatalog`."""
        with old_file(self._file, changes) as file:
            for name in (*self._sink.arrays, *self._sink.dimensions):
                if file[name].shape != self._sink.new_shape(name):
                    raise OSError(f"'{name}' would have the shape {file[name].shape}")
            yield file
