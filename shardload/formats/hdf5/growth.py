"""How does an HDF5 or netCDF4 file grow along an axis, so that every reader finds the old arrays or the new ones?

Nothing that the old metadata lead to is changed before the new metadata are whole:

1. `read_file` says how arrays are stored, and refuses what could not grow safely: on one rank, which tells the others.
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
import io
import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats.base import native_dtype, read_at
from shardload.formats.growing import Growing, GrowingSink
from shardload.formats.hdf5.chunk_tree import ChunkTree, Grown
from shardload.formats.hdf5.making import properties_of
from shardload.formats.hdf5.metadata import NO_VARIABLE
from shardload.formats.hdf5.on_disk import (
    DATASPACE,
    LAYOUT,
    PAGE,
    UNDEFINED,
    Message,
    Move,
    Patch,
    Read,
    Spot,
    Superblock,
    UnknownError,
    check_moves,
    read_header,
    read_superblock,
)
from shardload.formats.hdf5.pipeline import Pipeline, create_type
from shardload.formats.hdf5.raw_file import file_number
from shardload.formats.hdf5.sink import Hdf5Encoder, Hdf5Writer, Noted, limit_cache, tell_chunks
from shardload.formats.leftovers import GROWTH_MARK
from shardload.formats.locks import AppendLock, FileLock
from shardload.formats.sink import ArraySpec, Catalog, Compression, Decode, Placed, Ticket, Writer
from shardload.formats.target import MARK_NBYTES, Target, mark, named, put_at, sync_folder
from shardload.planning.grid import unravel

__all__ = ["GrowthSink", "Overlay", "read_file"]

Json = dict[str, Any]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
_KINDS = ("end", "move", "index", "shape")  # of writes that change the file, in order
_INDEXES = {
    1: "a single chunk",
    2: "an implicit index",
    3: "a fixed array",
    4: "an extensible array",
    5: "a B-tree of version 2",
}


# --- what there is


def read_file(path: str, names: Iterable[str]) -> Json:
    """How the arrays of a file are stored: ``"arrays"`` by name, and ``"state"``, its size and time.

    Of each array: shape, names of the axes, and for each axis what else has it (``"scopes"``). Of those in `names` all that
    `GrowthSink` needs.

    Raises
    ------
    ConfigError
        If one of `names` cannot grow.
    SourceError
        If this is no HDF5 file, or it cannot be read.
    """
    path = os.path.realpath(path)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise SourceError(f"'{path}' cannot be read: {error.strerror or error}", path=path) from error
    try:
        view = Overlay(descriptor)
        try:
            superblock = read_superblock(view.piece)
        except UnknownError as error:
            if not h5py.is_hdf5(path):
                raise ConfigError(
                    f"'{path}' is a file, but neither HDF5 nor netCDF4; append writes to these, and to Zarr stores in folders. "
                    "A netCDF-3 file becomes netCDF4 by `nccopy -k nc4 OLD NEW`"
                ) from error
            raise _unfit(f"'{path}'", error) from error
        state = _state(descriptor)
        try:
            with h5py.File(view, "r") as file:
                arrays = _arrays(file)
                for name in names:
                    if name in arrays:
                        arrays[name] |= _details(path, file[name], superblock, view.piece)
        except (OSError, RuntimeError, KeyError) as error:
            raise SourceError(f"'{path}' cannot be read by HDF5: {error}", path=path) from error
    finally:
        os.close(descriptor)
    return {"arrays": arrays, "state": state}


def _state(descriptor: int) -> list[int]:
    found = os.fstat(descriptor)
    return [found.st_size, found.st_mtime_ns]


def _superblock(path: str, read: Read) -> Superblock:
    try:
        found = read_superblock(read)
    except UnknownError as error:
        raise _unfit(f"'{path}'", error) from error
    return found


def _unfit(where: str, what: object) -> ConfigError:
    return ConfigError(
        f"{where} cannot grow safely: it has {what}. Make a file that can: `shardload copy OLD NEW`; or "
        "append with h5py, where a kill may cost the file"
    )


def _arrays(file: h5py.File) -> dict[str, Json]:
    """The datasets of a file: shape, names of axes, scopes, and whether it is a dimension of netCDF without values."""
    datasets: dict[str, h5py.Dataset] = {}
    numbers: dict[int, str] = {}  # netCDF's, of dimensions

    def visit(name: Any, thing: Any) -> None:
        if isinstance(thing, h5py.Dataset) and thing.shape is not None:
            datasets[f"/{name}"] = thing
            number = thing.attrs.get("_Netcdf4Dimid") if h5py.h5ds.is_scale(thing.id) else None
            if number is not None:
                numbers[int(np.asarray(number).reshape(-1)[0])] = f"/{name}"

    file.visititems(visit)
    found: dict[str, Json] = {}
    for name, dataset in datasets.items():
        scopes = _scopes(name, dataset, numbers)
        is_scale = h5py.h5ds.is_scale(dataset.id)
        told = h5py.h5ds.get_scale_name(dataset.id).decode(errors="replace") if is_scale else ""
        found[name] = {
            "shape": dataset.shape,
            "dims": [None if one is None else one.rpartition("/")[2].rpartition(":")[2] for one in scopes],
            "scopes": scopes,
            "is_dimension": told.startswith(NO_VARIABLE),
        }
    return found


def _scopes(name: str, dataset: h5py.Dataset, numbers: Mapping[int, str]) -> list[str | None]:
    """For each axis a text that arrays with the same axis have in common: the scale of the axis, or the group and the label."""
    if h5py.h5ds.is_scale(dataset.id):
        if len(dataset.shape) == 1:
            return [name]
        ids = np.asarray(dataset.attrs.get("_Netcdf4Coordinates", ())).reshape(-1).tolist()
        return [numbers.get(number) for number in ids] if len(ids) == len(dataset.shape) else [None] * len(dataset.shape)
    found: list[str | None] = []
    for axis in range(len(dataset.shape)):
        one = dataset.dims[axis]
        scale = one[0].name if len(one) else None
        label = str(one.label)
        found.append(str(scale) if scale else f"{name.rpartition('/')[0]}/:{label}" if label else None)
    return found


def _details(path: str, dataset: h5py.Dataset, superblock: Superblock, read: Read) -> Json:
    """How one array is stored. ConfigError if nothing can be appended to it."""
    where = f"'{dataset.name}' in '{path}'"
    if dataset.chunks is None:
        raise ConfigError(
            f"{where} has no chunks, so that it cannot grow. Make it with maxshape=(None, ...) in h5py, with an unlimited "
            "dimension in netCDF4 or unlimited_dims= in xarray"
        )
    if dataset.dtype.kind not in "biufc" or not create_type(dataset.name, dataset.dtype).equal(dataset.id.get_type()):
        raise ConfigError(f"{where} holds {dataset.dtype} in a form that append does not write; append with h5py")
    try:
        facts = Facts.of(dataset, superblock)
        facts.spots(read)
        if file_number(dataset.id) != file_number(dataset.file.id):
            raise UnknownError("a link to another file")
    except UnknownError as error:
        raise _unfit(where, error) from error
    found = properties_of(dataset)
    dtype = native_dtype(dataset.dtype)
    fill = np.zeros((), dtype) if found.fill_value is None else np.asarray(found.fill_value, dtype)
    known = {
        "maxshape": dataset.maxshape,
        "dtype": dataset.dtype.str,
        "chunks": dataset.chunks,
        "compression": found.compression,
        "checksum": found.checksum,
        "fill": fill.tobytes().hex(),
        "format": "netCDF4" if "_NCProperties" in dataset.file.attrs else "HDF5",
        "why_not": [facts.why_not(read, axis) for axis in range(dataset.ndim)],
    }
    _check_filters(where, dataset, known)
    return known


def _spec(known: Json, shape: tuple[int, ...]) -> ArraySpec:
    dtype = np.dtype(known["dtype"])
    fill = np.frombuffer(bytes.fromhex(known["fill"]), native_dtype(dtype))[0]
    return ArraySpec(
        shape,
        dtype,
        tuple(known["chunks"]),
        compression=Compression.of(known["compression"]),
        checksum=known["checksum"],
        fill_value=fill,
    )


def _check_filters(where: str, dataset: h5py.Dataset, known: Json) -> None:
    """ConfigError unless chunks that are made here go through the same filters as those of the file."""
    filters = _filters(dataset.id.get_create_plist())
    why = ""
    try:
        mine = Pipeline(dataset.name, _spec(known, tuple(dataset.chunks)))
        with h5py.File("trial", "w", driver="core", backing_store=False) as trial:
            space = h5py.h5s.create_simple(tuple(dataset.chunks))
            made = _filters(h5py.h5d.create(trial.id, b"x", mine.kind, space, mine.creation).get_create_plist())
    except (ConfigError, OSError, RuntimeError, ValueError, TypeError) as error:
        made, why = [], f" ({error})"
    if made != filters:
        told = ", then ".join(f"{number} with {values}" for number, values in filters)
        raise ConfigError(
            f"the chunks of {where} go through the HDF5 filters {told or 'none'}, which append does not write{why}. "
            "Append with h5py, or make a file with other filters: `shardload copy OLD NEW --compression gzip`"
        )


def _filters(creation: Any) -> list[tuple[int, tuple[int, ...]]]:
    found = [creation.get_filter(k) for k in range(creation.get_nfilters())]
    return [(number, tuple(values)) for number, _, values, _ in found]


# --- where its bytes are


@dataclass(frozen=True)
class Spots:
    """Where a dataset's header says what changes."""

    index: Spot
    root: int
    dims: tuple[Spot, ...]
    tree: ChunkTree
    header: tuple[Message, ...]

    def of(self, axis: int) -> tuple[Spot, Spot]:
        """What changes if it grows along an axis."""
        return self.index, self.dims[axis]


@dataclass(frozen=True)
class Facts:
    """What HDF5 says of a dataset, and the address of its header."""

    address: int
    shape: tuple[int, ...]
    maxshape: tuple[int | None, ...]
    chunks: tuple[int, ...]
    itemsize: int
    n_children: int

    @classmethod
    def of(cls, dataset: h5py.Dataset, superblock: Superblock) -> Facts:
        """Of an open dataset."""
        address = h5py.h5o.get_info(dataset.id).addr
        itemsize = dataset.id.get_type().get_size()
        return cls(address, dataset.shape, dataset.maxshape, tuple(dataset.chunks or ()), itemsize, superblock.n_children)

    def spots(self, read: Read) -> Spots:
        """UnknownError if the header says something else than HDF5, or something that append does not change."""
        messages = read_header(read, self.address)
        spaces, layouts = ([one for one in messages if one.kind == kind] for kind in (DATASPACE, LAYOUT))
        if len(spaces) != 1 or len(layouts) != 1 or spaces[0].is_shared or layouts[0].is_shared:
            raise UnknownError("a shape that is stored elsewhere than in its header")
        space, layout = spaces[0].data, layouts[0].data
        if layout[0] != 3:
            kind = _INDEXES.get(layout[5 + layout[3] * layout[4]], "another one") if layout[0] > 3 else "an old one"
            raise UnknownError(f"another index of chunks than a B-tree of version 1: {kind} (layout of version {layout[0]})")
        n = len(self.shape)
        at = {1: 8, 2: 4}.get(space[0], 0)
        numbers = np.frombuffer(space[at : at + 16 * n], "<u8").tolist() if at else []
        most = [UNDEFINED if one is None else one for one in self.maxshape]
        sizes = np.frombuffer(layout[11 : 11 + 4 * (n + 1)], "<u4").tolist()
        if numbers != [*self.shape, *most] or layout[1:3] != bytes([2, n + 1]) or sizes != [*self.chunks, self.itemsize]:
            raise UnknownError("a header that says something else than HDF5 does")
        dims = tuple(spaces[0].spot(at + 8 * axis) for axis in range(n))
        tree = ChunkTree(self.chunks, self.itemsize, self.n_children)
        return Spots(layouts[0].spot(3), int.from_bytes(layout[3:11], "little"), dims, tree, tuple(messages))

    def why_not(self, read: Read, axis: int) -> str | None:
        """Why it cannot grow safely along an axis; None if it can."""
        try:
            for spot in self.spots(read).of(axis):
                check_moves(read, self.address, spot)
        except UnknownError as error:
            return str(error)
        return None


class Overlay(io.RawIOBase):
    """A file as it will be, for the HDF5 library: its bytes, with some writes on top. For one thread at a time.

    Parameters
    ----------
    descriptor : int
        The open file. It stays the caller's.
    patches : sequence of Patch
        The writes, in order.
    """

    def __init__(self, descriptor: int, patches: Sequence[Patch] = ()) -> None:
        super().__init__()
        self._descriptor, self._at = descriptor, 0
        self._pages: dict[int, list[Patch]] = {}
        for one in patches:
            self.add(one)

    def add(self, patch: Patch) -> None:
        """One more write, within a page."""
        self._pages.setdefault(patch.offset // PAGE, []).append(patch)

    def piece(self, offset: int, nbytes: int) -> bytes:
        """Some bytes; fewer at the end of the file."""
        room = np.zeros(nbytes, np.uint8)
        n = read_at(self._descriptor, room, offset)
        data = bytearray(room[:n].tobytes())
        for page in range(offset // PAGE, -(-(offset + nbytes) // PAGE)):
            for one in self._pages.get(page, ()):
                a, b = max(offset, one.offset), min(offset + n, one.offset + len(one.new))
                if a < b:
                    data[a - offset : b - offset] = one.new[a - one.offset : b - one.offset]
        return bytes(data)

    def readinto(self, out: Any) -> int:
        """Read on from where `seek` went; zeros behind the end."""
        room = memoryview(out).cast("B")
        data = self.piece(self._at, len(room))
        room[: len(data)] = data
        room[len(data) :] = bytes(len(room) - len(data))
        self._at += len(room)
        return len(room)

    def read(self, size: int = -1) -> bytes:
        """The next bytes, as files give them."""
        data = self.piece(self._at, max(0, self._nbytes - self._at) if size < 0 else size)
        self._at += len(data)
        return data

    @property
    def _nbytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        return self._at

    def tell(self) -> int:
        """The offset."""
        return self._at

    def flush(self) -> None:
        """Nothing is written."""

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True


# --- what comes


class GrowthEncoder(Hdf5Encoder, Growing):
    """See `Encoder` and `Growing`."""

    def __init__(self, path: str, name: str, known: Json, axis: int, n_new: int) -> None:
        if known["why_not"][axis] is not None:
            raise _unfit(f"'{name}' in '{path}'", known["why_not"][axis])
        shape = self.begin(tuple(known["shape"]), axis, known["chunks"][axis], n_new)
        super().__init__(path, name, _spec(known, shape), known["format"])

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

    def create(self) -> Catalog:
        """See `Sink`."""
        return GrowthCatalog(self)

    def resume(self, temporary: str, token: str, placed: Iterable[Placed]) -> Catalog:
        """See `Sink`. An append is not resumed."""
        raise ConfigError(f"an append to '{self.path}' cannot be resumed: begin again")

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
    """See `Writer`: chunks go into the file itself, behind its end."""

    def __init__(self, sink: GrowthSink, ticket: Ticket) -> None:
        super().__init__(sink, ticket)  # looks for the token, in the temporary beside the file
        self._close()
        with named(sink.path):
            self._descriptor = os.open(sink.file, os.O_RDWR)
        self._close = weakref.finalize(self, os.close, self._descriptor)


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
        self._target = Target(self._path, "w")
        self._lock = AppendLock(self._path)
        self._patches: dict[str, list[Patch]] = {kind: [] for kind in (*_KINDS, "links")}
        try:
            with named(sink.path):
                self._descriptor = os.open(self._path, os.O_RDWR)
            self._held = FileLock(self._descriptor, self._path)
            self._find()
            self._held.share()  # others may read meanwhile, and ranks of this job do
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
        if _state(self._descriptor) != self._sink.state:
            raise self._changed()
        read = Overlay(self._descriptor).piece
        superblock = self._superblock = _superblock(self._sink.path, read)
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
                    raise _unfit(f"'{name}' in '{self._sink.path}'", error) from error
                if dataset.shape != shapes.get(name, dataset.shape):
                    raise self._changed()
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

    def _changed(self) -> ConfigError:
        return ConfigError(
            f"'{self._sink.path}' was changed by somebody else during this append. Nothing was appended; run it again"
        )

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
            raise _unfit(f"'{name}' in '{self._sink.path}'", error) from error

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
            raise _unfit(where, error) from error
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
            except BaseException:
                with contextlib.suppress(OSError):
                    for one in reversed(done[1:]):  # the end may stay: the file is that long
                        put_at(self._descriptor, one.old, one.offset)
                    os.fsync(self._descriptor)
                raise
            with contextlib.suppress(OSError):
                for one in self._of("links"):
                    put_at(self._descriptor, one.new, one.offset)
        self.abandon()

    def _compare(self) -> None:
        """ConfigError if somebody has changed the file meanwhile."""
        read = Overlay(self._descriptor).piece
        is_same = all(read(start, len(old)) == old for start, old in self._before.items())
        if not is_same or os.fstat(self._descriptor).st_size < self._end:
            raise self._changed()

    def abandon(self) -> None:
        """See `Catalog`."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                if not self._is_begun and self._size is not None and os.fstat(self._descriptor).st_size > self._size:
                    os.ftruncate(self._descriptor, self._size)
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
