"""How is an HDF5 or netCDF4 file written by many processes, without parallel HDF5? One makes the metadata, all put chunks.

1. One rank creates the file on a `Ledger`: the HDF5 library writes its metadata there.
2. For each filtered chunk the library is asked to write that many bytes, and the ledger notes where. Arrays in one piece and
   chunks without filters get their places when they are made, because their sizes are known.
3. Any rank writes chunks at these offsets into the temporary file (`Hdf5Writer`).
4. `_Hdf5Catalog.finish` writes the metadata, the superblock last. Then it opens the file with the HDF5 library itself, and
   compares the place of every chunk with what was noted.

What one rank keeps for a million chunks fits into 64 MiB: places as arrays, and of the metadata only the newest pages.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.dtypes import native_dtype
from shardload.formats.contract.ranges import read_at
from shardload.formats.hdf5.dimensions import check_netcdf, name_axes, netcdf_names, with_dims_beside_coordinates, write_attrs
from shardload.formats.hdf5.in_memory import file_in_memory
from shardload.formats.hdf5.ledger import MOST_NBYTES, Ledger
from shardload.formats.hdf5.ledger_file import FileStore, LedgerFile, limit_cache
from shardload.formats.hdf5.pipeline import Pipeline
from shardload.formats.hdf5.source import open_explained
from shardload.formats.sink import (
    ArraySpec,
    Catalog,
    Encoder,
    Places,
    Sink,
    Stored,
    Ticket,
    Writer,
    with_dims,
)
from shardload.formats.target import MARK_NBYTES, Target, mark, named, put_at, reserve, sync_folder
from shardload.planning.blocks import runs
from shardload.planning.grid import unravel
from shardload.planning.region import Region

__all__ = ["Hdf5Encoder", "Hdf5Sink", "Hdf5Writer", "Noted", "check_overlap", "tell_chunks"]

Int64s = np.ndarray[Any, np.dtype[np.int64]]
_AT_ONCE = 4096  # chunks


class Hdf5Encoder(Encoder):
    """See `Encoder`."""

    def __init__(self, path: str, name: str, spec: ArraySpec, flavour: str) -> None:
        self.name, self.spec = name, spec
        self.pipeline = Pipeline(name, spec)
        self._info = ArrayInfo(
            path=path,
            dataset=name,
            format=flavour,
            shape=spec.shape,
            dtype=native_dtype(spec.dtype).name,
            chunks=spec.chunks,
            codec=self.pipeline.codec,
        )

    @property
    def is_asked(self) -> bool:
        """See `Encoder`."""
        return self.pipeline.is_asked

    def _encode(self, values: np.ndarray[Any, Any]) -> Stored:
        return self.pipeline.encode(values)


class Hdf5Sink(Sink):
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
        Whether it shall be a netCDF4 file: each axis gets a dimension, and only netCDF's types are allowed.
    alignment : int
        Chunks begin at multiples of this. 4096 if ranks on several nodes write: clients of Lustre and NFS that write to the
        same page can lose each other's bytes.
    attrs : mapping
        Attributes of the file.
    group_attrs : mapping
        Attributes of its groups, by their full names.

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
        attrs: Mapping[str, Any] | None = None,
        group_attrs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._group_attrs = group_attrs or {}
        Target(path, mode)  # checks the mode
        self.path, self.mode, self._is_netcdf, self._alignment, self._attrs = (
            path,
            mode,
            is_netcdf,
            alignment,
            dict(attrs or {}),
        )
        checked = {}
        for name, spec in specs.items():
            if spec.shards is not None:
                raise ConfigError(f"'{name}' has shards, which HDF5 does not have. Leave shards= out, or use the suffix .zarr")
            checked[name] = spec.checked(name)
            if is_netcdf:
                check_netcdf(name, checked[name])
        checked = with_dims(checked) if is_netcdf else with_dims_beside_coordinates(checked)
        self.stored_names = netcdf_names(checked) if is_netcdf else {name: name for name in checked}
        flavour = "netCDF4" if is_netcdf else "HDF5"
        self._texts = {name: spec for name, spec in checked.items() if spec.texts is not None}
        self.arrays: dict[str, Hdf5Encoder] = {
            name: Hdf5Encoder(path, name, spec, flavour) for name, spec in checked.items() if spec.texts is None
        }
        # All that the metadata can be wrong in is tried in memory, on every rank: before the first byte is on disk.
        with file_in_memory(track_order=is_netcdf or None) as file:
            self.describe(file, is_trial=True)

    def create(self) -> Catalog:
        """See `Sink`."""
        return _Hdf5Catalog(self)

    def writer(self, ticket: Ticket) -> Writer:
        """See `Sink`."""
        return Hdf5Writer(self, ticket)

    def file_of(self, ticket: Ticket, name: str, number: int) -> str:
        """See `Sink`."""
        return ticket.temporary

    def describe(self, file: h5py.File, *, is_trial: bool = False) -> None:
        """Create all that is not values: groups, datasets, attributes, names of axes."""
        every = {name: one.spec for name, one in self.arrays.items()} | self._texts
        specs = {self.stored_names[name]: spec for name, spec in every.items()}
        if self._is_netcdf:
            file.attrs["_NCProperties"] = np.bytes_(
                f"version=2,shardload=1,hdf5={h5py.version.hdf5_version},h5py={h5py.__version__}"
            )
        write_attrs(file, "/", self._attrs, is_netcdf=self._is_netcdf)
        for name, one in self.arrays.items():
            self._make(file, name, one, is_trial)
            attrs = dict(one.spec.attrs)
            if self._is_netcdf and one.spec.fill_value is not None:
                attrs["_FillValue"] = np.asarray(one.spec.fill_value, dtype=native_dtype(one.spec.dtype))
            write_attrs(file[self.stored_names[name]], name, attrs, is_netcdf=self._is_netcdf)
        for name, spec in self._texts.items():
            write_attrs(self._write_text(file, name, spec), name, spec.attrs, is_netcdf=self._is_netcdf)
        for name, found in self._group_attrs.items():
            if name.strip("/"):
                write_attrs(self._group(file, name.strip("/")), name, found, is_netcdf=self._is_netcdf)
        name_axes(file, specs, is_netcdf=self._is_netcdf)

    def _group(self, file: h5py.File, name: str) -> h5py.Group:
        """A group, made with those above it if they are not there. The netCDF library writes only to a file of which every
        group keeps the order of its members.
        """
        found = file
        for part in filter(None, name.split("/")):
            is_new = part not in found
            found = found.create_group(part, track_order=self._is_netcdf or None) if is_new else found.require_group(part)
        return found

    def _write_text(self, file: h5py.File, name: str, spec: ArraySpec) -> h5py.Dataset:
        """An array of text, with its values."""
        group, _, last = self.stored_names[name].strip("/").rpartition("/")
        values = np.asarray(spec.texts)
        kind = values.dtype if h5py.check_string_dtype(values.dtype) else h5py.string_dtype()
        most = tuple(None if k in spec.unlimited else n for k, n in enumerate(spec.shape)) if spec.unlimited else None
        try:
            return self._group(file, group).create_dataset(last, data=values, dtype=kind, maxshape=most)
        except (TypeError, ValueError, OSError, RuntimeError) as error:
            raise ConfigError(f"'{name}' cannot be made in an HDF5 file: {error}") from error

    def _make(self, file: h5py.File, name: str, one: Hdf5Encoder, is_trial: bool) -> None:
        group, _, last = self.stored_names[name].strip("/").rpartition("/")
        try:
            parent = self._group(file, group)
            most = tuple(h5py.h5s.UNLIMITED if k in one.spec.unlimited else n for k, n in enumerate(one.spec.shape))
            space = h5py.h5s.create_simple(one.spec.shape, most) if one.spec.shape else h5py.h5s.create(h5py.h5s.SCALAR)
            creation = one.pipeline.creation
            if is_trial:  # without places for values
                creation = creation.copy()
                creation.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR if one.spec.chunks else h5py.h5d.ALLOC_TIME_LATE)
            h5py.h5d.create(parent.id, last.encode(), one.pipeline.kind, space, creation)
        except (TypeError, ValueError, OSError, RuntimeError) as error:
            raise ConfigError(f"'{name}' cannot be made in an HDF5 file: {error}") from error


class _Hdf5Catalog(Catalog):
    """See `Catalog`."""

    def __init__(self, sink: Hdf5Sink) -> None:
        self._sink, self._target = sink, Target(sink.path, sink.mode)
        self._library: LedgerFile | None = None
        self._store: FileStore | None = None
        temporary = self._target.create()
        try:
            with named(sink.path):
                self._store = FileStore(os.open(temporary, os.O_RDWR))
                self._store.put(mark(self._target.token, sink.path), 0)
            self._ledger = Ledger(self._store, MOST_NBYTES)
            self._library = LedgerFile(sink.path, self._ledger, sink._alignment)
            with self._library.calls():
                sink.describe(self._library.open("w", track_order=sink._is_netcdf or None))
                self._chunks = {name: Noted(one.spec) for name, one in sink.arrays.items()}
                places = {name: self._early(name) for name, one in sink.arrays.items() if not one.is_asked}
            self._reserve()
        except BaseException:
            self.abandon()
            raise
        self.ticket = Ticket(temporary, self._target.token, places)

    def _early(self, name: str) -> Places:
        """The places of an array whose stored sizes are known."""
        noted, dataset = self._chunks[name], self._dataset(name)
        if self._sink.arrays[name].spec.chunks is None:
            noted.offsets[:] = dataset.get_offset() or 0
            noted.sizes[:] = dataset.get_storage_size()
            return Places.of(noted.offsets)

        def note(which: Int64s, offsets: Int64s, sizes: Int64s, _: Int64s) -> None:
            noted.offsets[which], noted.sizes[which] = offsets, sizes

        _tell_numbers(dataset, self._sink.arrays[name].spec, note)
        return Places.of(noted.offsets)

    def _reserve(self) -> None:
        """Have the file system reserve the space of arrays that have their places."""
        early = [noted for noted in self._chunks.values() if noted.sizes.any()]
        if early and self._store is not None:
            start = min(int(noted.offsets[noted.sizes > 0].min()) for noted in early)
            stop = max(int((noted.offsets + noted.sizes).max()) for noted in early)
            reserve(self._store.descriptor, start, stop)

    def _dataset(self, name: str) -> h5py.h5d.DatasetID:
        if self._library is None:
            raise ValueError("the catalog has no file")
        return self._library.file[self._sink.stored_names[name]].id

    def allocate(self, name: str, numbers: Sequence[int] | Int64s, nbytes: Sequence[int] | Int64s, masks: Any = 0) -> Int64s:
        one, noted = self._sink.arrays[name], self._chunks[name]
        if self._library is None or not self._library.is_open:
            raise ValueError("the catalog is finished")
        if not one.is_asked:
            raise ValueError(f"the chunks of '{name}' have places already")
        return noted.allocated(self._library, self._sink.stored_names[name], numbers, nbytes, masks)

    def finish(self, *, allow_missing: bool = False) -> None:
        if self._library is None or not self._library.is_open:
            raise ValueError("the catalog is finished")
        if not allow_missing:
            for name, noted in self._chunks.items():
                noted.check_complete(name)
        with self._library.calls():
            self._library.close()
        check_overlap(self._sink.path, self._ledger, self._chunks.values())
        with named(self._sink.path), _opened(self.ticket.temporary, os.O_RDWR) as descriptor:
            _check_mark(descriptor, self.ticket, self._sink.path)
            self._ledger.write_to(
                lambda data, offset: put_at(descriptor, data, offset),
                lambda nbytes: os.ftruncate(descriptor, nbytes),
                lambda: self._sync(descriptor),
            )
        with named(self._sink.path):
            sync_folder(self._target.folder)
            self._close_store()
        self._check()

    def _sync(self, descriptor: int) -> None:
        """Through both descriptors: an error of what was put early is told to the one that put it."""
        if self._store is not None:
            os.fsync(self._store.descriptor)
        os.fsync(descriptor)

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            os.close(store.descriptor)

    def _check(self) -> None:
        """Compare what the HDF5 library finds in the written file with what was noted."""
        try:
            with open_explained(self.ticket.temporary) as file:
                limit_cache(file)
                for name, noted in self._chunks.items():
                    spec, dataset = self._sink.arrays[name].spec, file[self._sink.stored_names[name]].id
                    if spec.chunks is not None:
                        self._check_chunks(name, spec, dataset, noted)
                    elif noted.sizes[0] and dataset.get_offset() != noted.offsets[0]:
                        raise self._misplaced(name, (), dataset.get_offset(), int(noted.offsets[0]))
        except SourceError as error:
            if error.path == self._sink.path:
                raise
            raise self._unread(error) from error
        except (OSError, RuntimeError, KeyError) as error:
            raise self._unread(error) from error

    def _unread(self, error: Exception) -> SourceError:
        path = self._sink.path
        return SourceError(
            f"the new file of '{path}' cannot be read by HDF5: {error}. What had this name before is as it was", path=path
        )

    def _check_chunks(self, name: str, spec: ArraySpec, dataset: h5py.h5d.DatasetID, noted: Noted) -> None:
        n_noted, n_found = int(np.count_nonzero(noted.sizes)), 0
        misplaced: list[tuple[int, int]] = []  # number and offset

        def compare(which: Int64s, offsets: Int64s, sizes: Int64s, masks: Int64s) -> None:
            nonlocal n_found
            n_found += len(which)
            is_wrong = (offsets != noted.offsets[which]) | (sizes != noted.sizes[which])
            if noted.masks or np.any(masks):
                is_wrong |= masks != noted.masks_of(which)
            misplaced.extend(zip(which[is_wrong][:1].tolist(), offsets[is_wrong][:1].tolist(), strict=True))

        _tell_numbers(dataset, spec, compare)
        if misplaced:
            number, found = min(misplaced)
            raise self._misplaced(name, unravel(number, spec.grid), found, int(noted.offsets[number]))
        if n_found != n_noted:
            raise SourceError(
                f"'{name}' in '{self._sink.path}' has {n_found} chunks for HDF5, but {n_noted} were written",
                path=self._sink.path,
                dataset=name,
            )

    def _misplaced(self, name: str, index: tuple[int, ...], found: Any, expected: int) -> SourceError:
        return SourceError(
            f"chunk {index} of '{name}' in '{self._sink.path}' is at byte {found} for HDF5, but was written at byte {expected}",
            path=self._sink.path,
            dataset=name,
            chunk=index,
        )

    def commit(self) -> None:
        if self._library is None or self._library.is_open:
            raise ValueError("finish the catalog first")
        self._target.commit()

    def abandon(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # of HDF5, if metadata could not be read back
            if self._library is not None:
                self._library.close()
        with contextlib.suppress(OSError):
            self._close_store()
        self._target.abandon()

    @property
    def kept_nbytes(self) -> int:
        """Bytes of memory that the metadata takes."""
        return self._ledger.kept_nbytes


class Noted:
    """Where the chunks of one array are; a size of 0 if nowhere yet.

    Parameters
    ----------
    spec : ArraySpec
        The array.
    origin : sequence of int, optional
        Where its first element is in the array of the file.
    """

    def __init__(self, spec: ArraySpec, origin: Sequence[int] = ()) -> None:
        self._grid = spec.grid if spec.chunks is not None else ()
        self._chunks, self._origin = np.array(spec.chunks or (), np.int64), np.array(origin or (0,) * len(self._grid), np.int64)
        n = math.prod(self._grid)
        # A chunk has less than 4 GiB.
        self.offsets: Int64s = np.zeros(n, np.int64)
        self.sizes: np.ndarray[Any, Any] = np.zeros(n, np.int64 if spec.chunks is None else np.uint32)
        self.is_whole = spec.chunks is None
        self.masks: dict[int, int] = {}

    def stored(self) -> tuple[Int64s, np.ndarray[Any, Any]]:
        """Offsets and sizes of the chunks that have a place."""
        has_place = self.sizes > 0
        return (self.offsets, self.sizes) if np.all(has_place) else (self.offsets[has_place], self.sizes[has_place])

    def allocated(
        self,
        library: LedgerFile,
        name: str,
        numbers: Sequence[int] | Int64s,
        nbytes: Sequence[int] | Int64s,
        masks: Any,
    ) -> Int64s:
        """Have the library give places to chunks: see `Catalog.allocate`."""
        which = np.asarray(numbers, dtype=np.int64)
        sizes = np.broadcast_to(np.asarray(nbytes, dtype=np.int64), which.shape)
        kinds = np.broadcast_to(np.asarray(masks, dtype=np.int64), which.shape)
        self.check(name, which, sizes)
        order = np.argsort(which, kind="stable")  # the index of chunks is smaller, and faster, if they come in order
        offsets = np.empty(len(which), dtype=np.int64)
        with library.calls():
            for at in range(0, len(which), _AT_ONCE):
                some = order[at : at + _AT_ONCE]
                starts = np.stack(np.unravel_index(which[some], self._grid), axis=-1) * self._chunks + self._origin
                offsets[some] = library.place(name, starts, sizes[some], kinds[some])
        self.place(which, offsets, sizes, kinds)
        return offsets

    def place(self, which: Int64s, offsets: Int64s, sizes: Int64s, masks: Int64s) -> None:
        """Note the places of chunks."""
        self.offsets[which], self.sizes[which] = offsets, sizes
        if np.any(masks):
            self.masks.update(zip(which[masks != 0].tolist(), masks[masks != 0].tolist(), strict=True))

    def masks_of(self, which: Int64s) -> Int64s:
        """The filters that are left out of chunks."""
        return np.array([self.masks.get(k, 0) for k in which.tolist()], dtype=np.int64)

    def check(self, name: str, which: Int64s, sizes: Int64s) -> None:
        """ValueError unless these chunks can get a place of that size."""
        if not len(which):
            return
        if which.min() < 0 or which.max() >= len(self.sizes):
            raise ValueError(f"'{name}' has chunks 0 to {len(self.sizes) - 1}; asked for {which.min()} to {which.max()}")
        if sizes.min() < 1 or sizes.max() >= 2**32:
            raise ValueError(f"a chunk of '{name}' has {sizes.min()} to {sizes.max()} bytes; expected 1 to 4 GiB")
        twice = which[self.sizes[which] > 0]
        if len(twice) or len(np.unique(which)) < len(which):
            order = np.sort(which)
            number = int(twice[0]) if len(twice) else int(order[:-1][order[:-1] == order[1:]][0])
            raise ValueError(f"chunk {unravel(number, self._grid)} of '{name}' has a place already")

    def check_complete(self, name: str) -> None:
        """ValueError if a chunk has no place."""
        absent = np.flatnonzero(self.sizes == 0)
        if len(absent) and not self.is_whole:
            first = unravel(int(absent[0]), self._grid)
            raise ValueError(f"{len(absent)} of {len(self.sizes)} chunks of '{name}' have no place; the first is {first}")


def check_overlap(path: str, ledger: Ledger, arrays: Iterable[Noted]) -> None:
    """RuntimeError if the library gave the same bytes twice, to chunks or metadata."""
    stored = [noted.stored() for noted in arrays]
    offsets, sizes = stored[0] if len(stored) == 1 else [np.concatenate(some) for some in zip(*stored, strict=True)]
    clash = ledger.overlap(offsets, sizes)
    if clash is not None:
        raise RuntimeError(f"HDF5 gave the same bytes of '{path}' twice, at {clash[0]} and {clash[1]}")


def tell_chunks(dataset: h5py.h5d.DatasetID, ndim: int, take: Callable[[Int64s], None]) -> None:
    """Give what HDF5 says of all stored chunks, some at a time: of each a row with its first element's position, its offset,
    size and mask.
    """
    found: list[Any] = []

    def hand_on() -> None:
        at = np.array([one.chunk_offset for one in found], dtype=np.int64).reshape(-1, ndim)
        rest = np.array([(one.byte_offset, one.size, one.filter_mask) for one in found], dtype=np.int64).reshape(-1, 3)
        found.clear()
        take(np.concatenate([at, rest], axis=1))

    def note(one: Any) -> None:
        found.append(one)
        if len(found) == _AT_ONCE:
            hand_on()

    dataset.chunk_iter(note)
    hand_on()


def _tell_numbers(dataset: h5py.h5d.DatasetID, spec: ArraySpec, take: Callable[[Int64s, Int64s, Int64s, Int64s], None]) -> None:
    """The same with the numbers of chunks in place of positions."""
    shape = np.array(spec.chunks, dtype=np.int64)

    def hand_on(rows: Int64s) -> None:
        which = np.ravel_multi_index(tuple((rows[:, : len(shape)] // shape).T), spec.grid)
        take(which, *rows[:, len(shape) :].T)

    tell_chunks(dataset, len(shape), hand_on)


class _opened:
    """An open descriptor of a file, closed at the end of a ``with`` statement. Errors of closing are raised."""

    def __init__(self, path: str, flags: int) -> None:
        self._descriptor = os.open(path, flags)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _check_mark(descriptor: int, ticket: Ticket, path: str) -> None:
    """ConfigError unless the temporary is the one that the catalog made."""
    room = np.zeros(MARK_NBYTES, dtype=np.uint8)
    found = room[: read_at(descriptor, room, 0)].tobytes()
    if found != mark(ticket.token, path):
        raise ConfigError(
            f"'{ticket.temporary}' is not the file that another rank made there: it begins with {found[:40]!r}. Is another "
            "file system mounted there on some node? Save to one that all nodes share"
        )


class Hdf5Writer(Writer):
    """See `Writer`."""

    def __init__(self, sink: Sink, ticket: Ticket) -> None:
        self._sink, self._ticket = sink, ticket
        try:
            self._descriptor = os.open(ticket.temporary, os.O_RDWR)
        except FileNotFoundError:
            raise ConfigError(
                f"'{ticket.temporary}', which another rank made, is not to be seen here. Is another file system mounted there "
                "on some node? Save to one that all nodes share"
            ) from None
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._lock = threading.Lock()
        with named(sink.path):
            try:
                _check_mark(self._descriptor, ticket, sink.path)
            except BaseException:
                self._close()
                raise

    def place(self, name: str, number: int) -> int:
        """See `Writer`."""
        return self._ticket.places[name][number]

    def put(self, name: str, number: int, offset: int, stored: Stored) -> None:
        """See `Writer`."""
        with named(self._sink.path, name, self._index(name, number)):
            put_at(self._alive(), stored.data, offset)

    def put_region(self, name: str, region: Region, stored: Stored) -> None:
        """See `Writer`."""
        spec = self._sink.arrays[name].spec
        if spec.chunks is not None:
            raise ValueError(f"'{name}' has chunks: put them one by one")
        if stored.nbytes != region.size * spec.dtype.itemsize or not Region.whole(spec.shape).contains(region):
            raise ValueError(f"{stored.nbytes} bytes for region {region} of '{name}', which has shape {spec.shape}")
        data, done = memoryview(stored.data).cast("B"), 0
        base, size = self._ticket.places[name][0], spec.dtype.itemsize
        with named(self._sink.path, name):
            for start, length in runs(spec.shape, region):
                put_at(self._alive(), data[done : done + length * size], base + start * size)
                done += length * size

    def _index(self, name: str, number: int) -> Callable[[], tuple[int, ...]]:
        return lambda: unravel(number, self._sink.arrays[name].spec.grid)

    def _alive(self) -> int:
        if not self._close.alive:
            raise ValueError(f"the writer of '{self._sink.path}' is closed")
        return self._descriptor

    def sync(self) -> None:
        """See `Writer`."""
        with named(self._sink.path):
            os.fsync(self._alive())

    def close(self) -> None:
        """See `Writer`."""
        with named(self._sink.path):
            self._close()
