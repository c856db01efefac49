"""How do many processes write an HDF5 or netCDF4 file, without parallel HDF5? One makes the metadata, all write chunks.

1. One rank creates the file on a `Ledger`: the HDF5 library writes its metadata there.
2. For each chunk the library is asked to write that many bytes, and the ledger notes where. Contiguous arrays get their places
   when they are made.
3. Any rank writes chunks at these offsets into the temporary file (`LedgerSink.writer`).
4. `Hdf5Sink.finish` writes the metadata, the superblock last. Then it opens the file with the HDF5 library itself, and
   compares the place of every chunk with what was noted.

For a million chunks one rank keeps less than 64 MiB: places as arrays, and of the metadata what HDF5 itself keeps.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Self

import h5py
import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats.contract.array import native_dtype
from shardload.formats.hdf5.chunks import FEW, list_chunks
from shardload.formats.hdf5.dimensions import check_netcdf, netcdf_names, write_attrs, write_axis_names
from shardload.formats.hdf5.file import open_explained
from shardload.formats.hdf5.filters import Hdf5Encoder
from shardload.formats.hdf5.ledger import Ledger, limit_cache
from shardload.formats.hdf5.opened import file_in_memory
from shardload.formats.sink import ArraySpec, PlacedChunks, Sink, Ticket, Writer, with_dims
from shardload.planning.region import unravel
from shardload.storage.changes import GrowingFile
from shardload.storage.local import Fence, LocalFolder
from shardload.storage.objects import Ints, ObjectFolder
from shardload.storage.target import Change, NewFile, Target, WritableFile, as_write_error, check_mark
from shardload.system.steps import step_done, steps_of
from shardload.system.undo import Undo

_AT_ONCE = 4096  # chunks
_RENEWED_AFTER = 1 << 16  # chunks


class LedgerSink(Sink):
    """A file that the HDF5 library writes to a ledger: see `Sink`.

    Attributes
    ----------
    alignment : int
        Chunks begin at multiples of this. 4096 if ranks on several nodes write: clients of Lustre and NFS that write to the
        same page can lose each other's bytes.
    chunks : dict of str to Hdf5PlacedChunks
        Once it is created: where the chunks of each array are.
    """

    alignment: int
    chunks: dict[str, Hdf5PlacedChunks]

    def begin(self, file: NewFile | GrowingFile, chunks: dict[str, Hdf5PlacedChunks], old_nbytes: int = 0) -> None:
        """Begin to write to a file, which ends at `old_nbytes` for HDF5, if it grows."""
        self.chunks, self._file = chunks, file
        self.ledger = Ledger(file, old_nbytes)
        self._library: h5py.File | None = None
        self._n_placed = 0

    def file_of(self, ticket: Ticket) -> str:
        """Where its chunks go, without links."""
        return os.path.realpath(ticket.temporary)

    def open(self, ticket: Ticket) -> WritableFile:
        """That file, to be written."""
        return WritableFile(self.file_of(ticket))

    def writer(self, ticket: Ticket) -> Writer:
        """See `Sink`."""
        check_mark(ticket.temporary, ticket.temporary, self.path)
        file = self.open(ticket)
        return Writer(self, file, lambda name, number, offset, data: file.write_at(data, offset))

    def stored(self, ticket: Ticket) -> ObjectFolder:
        """See `Sink`."""
        return LocalFolder(os.path.dirname(self.file_of(ticket)), Fence())

    def key_of(self, ticket: Ticket, name: str, number: int) -> str:
        """See `Sink`."""
        return os.path.basename(self.file_of(ticket))

    # --- on the rank that creates it

    @property
    def library(self) -> h5py.File:
        """The file as the library has it open. ValueError if it is closed: then its places are settled."""
        if self._library is None:
            raise ValueError(f"'{self.path}' is finished")
        return self._library

    def open_library(self, mode: str, track_order: bool | None = None) -> h5py.File:
        """Have the library begin a new file (``"w"``), or go on with one (``"r+"``)."""
        self._library = h5py.File(
            self.ledger,
            mode,
            libver="earliest",
            track_order=track_order,
            alignment_threshold=1,
            alignment_interval=self.alignment,
            meta_block_size=max(self.alignment, 2048),
        )
        limit_cache(self._library)
        return self._library

    def close_library(self) -> None:
        """Have the library write the rest of the metadata. May be called again."""
        file, self._library = self._library, None
        if file is not None:
            file.close()

    @contextmanager
    def calls(self) -> Iterator[None]:
        """For calls of HDF5: raises the error of the ledger, if it could not write or read meanwhile."""
        try:
            yield
        finally:
            if self.ledger.failed is not None:
                with as_write_error(self.path):
                    raise self.ledger.failed

    def place(self, name: str, starts: Ints, sizes: Ints, masks: Ints) -> list[int]:
        """Have the library give some chunks of an array a place: by the first element of each, its bytes, and the filters that
        were left out. Now and then the file is closed and opened again: HDF5 remembers each gap between aligned chunks, in 250
        bytes.
        """
        step_done()
        dataset = self.library[name].id
        offsets = [
            self.ledger.place(dataset, tuple(start), size, mask)
            for start, size, mask in zip(starts.tolist(), sizes.tolist(), masks.tolist(), strict=True)
        ]
        self._n_placed += len(offsets)
        if self._n_placed >= _RENEWED_AFTER and self.alignment > 1:
            self._n_placed = 0
            self.close_library()
            self.open_library("r+")
        return offsets

    def allocate(self, name: str, numbers: Sequence[int] | Ints, nbytes: Sequence[int] | Ints, masks: Any = 0) -> Ints:
        """See `Sink`."""
        _ = self.library  # ValueError if it is finished
        placed = self.chunks[name]
        with self.calls():
            numbers, sizes = placed.checked(numbers, nbytes)
            masks = np.broadcast_to(np.asarray(masks, dtype=np.int64), numbers.shape)
            order = np.argsort(numbers, kind="stable")  # the index of chunks is smaller, and faster, if they come in order
            offsets = np.empty(len(numbers), dtype=np.int64)
            for first in range(0, len(numbers), _AT_ONCE):
                batch = order[first : first + _AT_ONCE]
                with self.explained():
                    offsets[batch] = self.place(placed.stored_name, placed.starts(numbers[batch]), sizes[batch], masks[batch])
        placed.note(numbers, offsets, sizes, masks)
        return offsets

    def finish(self) -> None:
        """See `Sink`. ValueError if a chunk has no place."""
        _ = self.library  # ValueError if that was done before
        for chunks in self.chunks.values():
            chunks.check_complete()
        with self.calls():
            self.close_library()
        changes = self.ledger.changes()
        with as_write_error(self.path):
            self._file.finish(self.ledger.nbytes, changes)
        with self.explained(), self.finished(changes) as file:
            for placed in self.chunks.values():
                placed.compare(file[placed.stored_name].id)

    @abc.abstractmethod
    def finished(self, changes: list[Change]) -> AbstractContextManager[h5py.File]:
        """The file as it will be, as HDF5 reads it. `changes` were given to `NewFile.finish` or `GrowingFile.finish`."""

    @contextmanager
    def explained(self) -> Iterator[None]:
        """SourceError about a file that HDF5 cannot read, as one whose index of chunks was damaged before."""
        try:
            yield
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            if isinstance(error, SourceError) and error.path == self.path:
                raise
            text = f"the new file of '{self.path}' cannot be read by HDF5: {error}. What had this name before is as it was"
            raise SourceError(text, path=self.path) from error

    def commit(self) -> None:
        """See `Sink`."""
        self._file.publish()
        self.abandon()

    def abandon(self, *, keeps: bool = False) -> None:
        """See `Sink`."""
        self.ledger.is_given_up = True
        with suppress(OSError, RuntimeError):  # of HDF5, if metadata could not be read back
            self.close_library()
        self._file.discard()


class Hdf5Sink(LedgerSink):
    """A new HDF5 file.

    Parameters
    ----------
    path : str
        The name that it will have.
    specs : mapping of str to ArraySpec
        Its arrays, by their full names.
    mode : str
        See `Sink`.
    is_netcdf : bool
        Whether it is a netCDF4 file: each axis gets a dimension, and only netCDF's types are allowed.
    alignment : int
        See `LedgerSink`.
    group_attrs : mapping
        Attributes of the file (``"/"``) and of its groups, by their full names.

    Attributes
    ----------
    stored_names : mapping of str to str
        The name of each array in HDF5: see `netcdf_names`.
    """

    def __init__(
        self,
        path: str,
        specs: Mapping[str, ArraySpec],
        *,
        mode: str = "w-",
        is_netcdf: bool = False,
        alignment: int = 1,
        group_attrs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._group_attrs = group_attrs or {}
        Target(path, mode)  # checks the mode
        self.path, self.mode, self.is_netcdf, self.alignment = path, mode, is_netcdf, alignment
        checked = {}
        for name, spec in specs.items():
            if spec.shards is not None:
                raise ConfigError(f"'{name}' has shards, which HDF5 does not have. Leave shards= out, or use the suffix .zarr")
            checked[name] = spec.checked(name)
            if is_netcdf:
                check_netcdf(name, checked[name])
        checked = with_dims(checked) if is_netcdf else checked
        self.stored_names = netcdf_names(checked) if is_netcdf else {name: name for name in checked}
        flavour = "netCDF4" if is_netcdf else "HDF5"
        self._texts = {name: spec for name, spec in checked.items() if spec.texts is not None}
        self.arrays: dict[str, Hdf5Encoder] = {
            name: Hdf5Encoder(path, name, spec, flavour) for name, spec in checked.items() if spec.texts is None
        }
        # All that the metadata can be wrong in is tried in memory, on every rank: before the first byte is on disk.
        with file_in_memory(track_order=is_netcdf or None) as file:
            self.describe(file, is_trial=True)

    def create(self) -> Self:
        """See `Sink`."""
        chunks = {
            name: Hdf5PlacedChunks(self.path, name, array.spec, self.stored_names[name]) for name, array in self.arrays.items()
        }
        early = [chunks[name] for name, array in self.arrays.items() if not array.is_placed_by_root]
        file = NewFile(self.path, self.mode)
        self.begin(file, chunks)
        with Undo(self.abandon):
            with self.calls():
                self.describe(self.open_library("w", track_order=self.is_netcdf or None))
                for placed in steps_of(early):
                    dataset = self.library[placed.stored_name].id
                    placed.offsets[:], placed.sizes[:] = dataset.get_offset() or 0, dataset.get_storage_size()
            _reserve(file, early)
        self.ticket = Ticket(file.temporary, {placed.name: int(placed.offsets[0]) for placed in early})
        return self

    @contextmanager
    def finished(self, changes: list[Change]) -> Iterator[h5py.File]:
        """See `LedgerSink`."""
        with open_explained(self.ticket.temporary) as file:
            limit_cache(file)
            yield file

    def describe(self, file: h5py.File, *, is_trial: bool = False) -> None:
        """Create all that is not values: groups, datasets, attributes, names of axes."""
        specs = {name: array.spec for name, array in self.arrays.items()} | self._texts
        if self.is_netcdf:
            versions = f"version=2,shardload=1,hdf5={h5py.version.hdf5_version},h5py={h5py.__version__}"
            file.attrs["_NCProperties"] = np.bytes_(versions)
        for name, array in self.arrays.items():
            with _making(name):
                self._make(*self._place(file, name), name, array, is_trial)
            attrs = dict(array.spec.attrs)
            if self.is_netcdf and array.spec.fill_value is not None:
                attrs["_FillValue"] = np.asarray(array.spec.fill_value, dtype=native_dtype(array.spec.dtype))
            write_attrs(file[self.stored_names[name]], name, attrs, is_netcdf=self.is_netcdf)
        for name, spec in self._texts.items():
            with _making(name):
                dataset = self._write_text(*self._place(file, name), spec)
            write_attrs(dataset, name, spec.attrs, is_netcdf=self.is_netcdf)
        for name, group_attrs in self._group_attrs.items():
            write_attrs(self._group(file, name), name, group_attrs, is_netcdf=self.is_netcdf)
        write_axis_names(file, {self.stored_names[name]: spec for name, spec in specs.items()}, is_netcdf=self.is_netcdf)

    def _group(self, file: h5py.File, name: str) -> h5py.Group:
        """A group, made with those above it if they are not there. The netCDF library writes only to a file of which every
        group keeps the order of its members.
        """
        group = file
        for part in filter(None, name.split("/")):
            is_new = part not in group
            group = group.create_group(part, track_order=self.is_netcdf or None) if is_new else group.require_group(part)
        return group

    def _place(self, file: h5py.File, name: str) -> tuple[h5py.Group, str]:
        """The group of an array, and its name there."""
        group, _, last = self.stored_names[name].strip("/").rpartition("/")
        return self._group(file, group), last

    def _write_text(self, group: h5py.Group, last: str, spec: ArraySpec) -> h5py.Dataset:
        """An array of text, with its values."""
        values = np.asarray(spec.texts)
        kind = values.dtype if h5py.check_string_dtype(values.dtype) else h5py.string_dtype()
        largest = tuple(None if k in spec.unlimited else n for k, n in enumerate(spec.shape)) if spec.unlimited else None
        return group.create_dataset(last, data=values, dtype=kind, maxshape=largest)

    def _make(self, group: h5py.Group, last: str, name: str, array: Hdf5Encoder, is_trial: bool) -> None:
        spec, creation = array.spec, array.creation
        largest = tuple(h5py.h5s.UNLIMITED if k in spec.unlimited else n for k, n in enumerate(spec.shape))
        space = h5py.h5s.create_simple(spec.shape, largest) if spec.shape else h5py.h5s.create(h5py.h5s.SCALAR)
        if is_trial:  # without places for values
            creation = creation.copy()
            creation.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR if spec.chunks else h5py.h5d.ALLOC_TIME_LATE)
        h5py.h5d.create(group.id, last.encode(), array.kind, space, creation)


@contextmanager
def _making(name: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"'{name}' cannot be made in an HDF5 file: {error}") from error


def _reserve(file: WritableFile, arrays: Sequence[Hdf5PlacedChunks]) -> None:
    """Have the file system reserve the space of arrays that have their places."""
    arrays = [placed for placed in arrays if placed.sizes.any()]
    if arrays:
        start = min(int(placed.offsets[placed.sizes > 0].min()) for placed in arrays)
        stop = max(int((placed.offsets + placed.sizes).max()) for placed in arrays)
        file.reserve(start, stop)


class Hdf5PlacedChunks(PlacedChunks):
    """Where the chunks of one array are, for HDF5 too. A contiguous array counts as one chunk.

    Parameters
    ----------
    path, name : str
        Its file and name, for messages.
    spec : ArraySpec
        The array.
    stored_name : str
        Its name in HDF5.
    origin : sequence of int, optional
        Of an array that grows: where its new part begins.
    """

    def __init__(self, path: str, name: str, spec: ArraySpec, stored_name: str, origin: Sequence[int] = ()) -> None:
        super().__init__(name, spec.grid if spec.chunks is not None else ())
        self.path, self.stored_name = path, stored_name
        self._chunks, self._origin = np.array(spec.chunks or (), np.int64), np.array(origin or (0,) * len(self.grid), np.int64)
        self._masks = np.zeros(len(self.sizes), np.uint32)

    def starts(self, numbers: Ints) -> Ints:
        """The first element of chunks in the file: a row for each."""
        return np.stack(np.unravel_index(numbers, self.grid), axis=-1) * self._chunks + self._origin

    def note(self, numbers: Ints, offsets: Ints, sizes: Ints, masks: Ints) -> None:
        """Note the places of chunks."""
        self.offsets[numbers], self.sizes[numbers], self._masks[numbers] = offsets, sizes, masks

    def compare(self, dataset: h5py.h5d.DatasetID) -> None:
        """SourceError unless HDF5 finds the chunks where they are, and no others."""
        step_done()
        n_found, wrong = 0, list[tuple[int, int]]()  # number and offset

        def compare(starts: Ints, offsets: Ints, sizes: Ints, masks: Ints) -> None:
            nonlocal n_found
            starts = starts - self._origin
            is_new = np.all(starts >= 0, axis=1)
            numbers = np.ravel_multi_index(tuple((starts[is_new] // self._chunks).T), self.grid)
            offsets, sizes, masks = offsets[is_new], sizes[is_new], masks[is_new]
            n_found += len(numbers)
            is_wrong = (offsets != self.offsets[numbers]) | (sizes != self.sizes[numbers]) | (masks != self._masks[numbers])
            wrong.extend(zip(numbers[is_wrong][:1].tolist(), offsets[is_wrong][:1].tolist(), strict=True))

        if self.grid:  # Of a file that grows step by step, each step would list all before it.
            few = self.starts(np.arange(len(self.sizes))) if self._origin.any() and len(self.sizes) <= FEW else None
            list_chunks(h5py.Dataset(dataset), compare, few)
        elif self.sizes[0] and dataset.get_offset() != self.offsets[0]:
            wrong.append((0, dataset.get_offset()))
        if wrong:
            number, offset = min(wrong)
            index, place = unravel(number, self.grid), f"'{self.name}' in '{self.path}'"
            text = f"chunk {index} of {place} is at byte {offset} for HDF5, but was written at byte {self.offsets[number]}"
            raise SourceError(text, path=self.path, dataset=self.name, chunk=index)
        if self.grid and n_found != len(self.sizes):
            text = f"'{self.name}' in '{self.path}' has {n_found} chunks for HDF5, but {len(self.sizes)} were written"
            raise SourceError(text, path=self.path, dataset=self.name)
