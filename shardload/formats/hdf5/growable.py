"""How are the arrays of an HDF5 file stored, and can they grow safely? This is found out before anything is written.

1. `read_file` reads the file with the HDF5 library, for all ranks: shapes, names of axes, filters.
2. `Facts.spots` finds the few bytes of a dataset's header that would change, and compares them with what the library says.
3. What append could not change so that a kill leaves a whole file is refused, with what to do instead.

`Overlay` is the file as it will be: what the library reads of it is what a reader would.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats.base import dtype_text, is_added, native_dtype, read_at, refusal
from shardload.formats.containment import open_file
from shardload.formats.growing import HOW_TO_GROW, meaning_of
from shardload.formats.hdf5.attributes import axis_texts_of, is_scale, plain, scales_of
from shardload.formats.hdf5.chunk_tree import ChunkTree
from shardload.formats.hdf5.in_memory import file_in_memory
from shardload.formats.hdf5.making import properties_of
from shardload.formats.hdf5.metadata import stands_for_axis
from shardload.formats.hdf5.names import places_in
from shardload.formats.hdf5.on_disk import (
    DATASPACE,
    LAYOUT,
    PAGE,
    UNDEFINED,
    Message,
    Patch,
    Read,
    Spot,
    Superblock,
    UnknownError,
    check_moves,
    read_header,
    read_superblock,
)
from shardload.formats.hdf5.opened import kind_of
from shardload.formats.hdf5.pipeline import Pipeline, create_type
from shardload.formats.hdf5.raw_file import file_number, type_of_values
from shardload.formats.sink import ArraySpec, Compression

__all__ = ["Facts", "Overlay", "Spots", "file_state", "read_file", "spec_of", "superblock_of", "unfit"]

Json = dict[str, Any]
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
        descriptor = open_file(path)
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
            raise unfit(f"'{path}'", error) from error
        state = file_state(descriptor)
        try:
            with h5py.File(view, "r") as file:
                names = list(names)
                arrays = _arrays(path, file, names)
                names = [name for name in names if name in arrays]
                for name in names:
                    arrays[name] |= _details(path, file[name], superblock, view.piece)
                filters = {name: _filters(file[name].id.get_create_plist()) for name in names}
        except (OSError, RuntimeError, KeyError) as error:
            raise SourceError(f"'{path}' cannot be read by HDF5: {error}", path=path) from error
    finally:
        os.close(descriptor)
    # Now that the file is closed: a filter that an open dataset has cannot be replaced by the one that we write with.
    for name in names:
        _check_filters(f"'{name}' in '{path}'", name, arrays[name], filters[name])
    return {"arrays": arrays, "state": state}


def file_state(descriptor: int) -> list[int]:
    """Size and time of an open file."""
    found = os.fstat(descriptor)
    return [found.st_size, found.st_mtime_ns]


def superblock_of(path: str, read: Read) -> Superblock:
    """The superblock. ConfigError if the file is of a kind that cannot grow."""
    try:
        found = read_superblock(read)
    except UnknownError as error:
        raise unfit(f"'{path}'", error) from error
    return found


def unfit(where: str, what: object) -> ConfigError:
    """The error about something that cannot grow."""
    return ConfigError(
        f"{where} cannot grow safely: it has {what}. Make a file that can: `shardload copy OLD NEW`; or "
        "append with h5py, where a kill may cost the file"
    )


def _arrays(path: str, file: h5py.File, names: Iterable[str]) -> dict[str, Json]:
    """The datasets of a file: shape, names of axes, scopes, and whether it is a dimension of netCDF without values. One with
    several names (hard links) has that by which it was asked for, if any.
    """
    called = _called(path, file, names)
    datasets: dict[str, h5py.Dataset] = {}
    numbers: dict[int, str] = {}  # netCDF's, of dimensions

    def visit(name: Any, thing: Any) -> None:
        if isinstance(thing, h5py.Dataset) and thing.shape is not None:
            name = called.setdefault(_address(thing), f"/{name}")
            datasets[name] = thing
            number = plain(thing, "_Netcdf4Dimid") if is_scale(thing) else None
            if isinstance(number, int):
                numbers[number] = name

    file.visititems(visit)
    found: dict[str, Json] = {}
    places = places_in(file)
    for name, dataset in datasets.items():
        scopes = _scopes(name, dataset, numbers, called, places)
        found[name] = {
            "shape": dataset.shape,
            "dims": [None if one is None else one.rpartition("/")[2].rpartition(":")[2] for one in scopes],
            "scopes": scopes,
            "is_dimension": stands_for_axis(dataset),
        }
    for name, one in found.items():  # a scale without values may have another name than the axis, which then has a label
        for axis, scope in enumerate(one["scopes"]):
            if scope in found and scope != name and found[scope]["is_dimension"]:
                one["dims"][axis] = axis_texts_of(datasets[name])[0][axis] or one["dims"][axis]
    return found


def _address(dataset: h5py.Dataset) -> int:
    """The offset of its header: the same for all of its names."""
    return int(h5py.h5o.get_info(dataset.id).addr)


def _called(path: str, file: h5py.File, names: Iterable[str]) -> dict[int, str]:
    """The address of each array that is asked for, and by which name. ConfigError if two names are one array."""
    found: dict[int, str] = {}
    for name in names:
        thing: Any = file
        for part in name.strip("/").split("/"):
            # Hard links alone: others may lead out of the file.
            is_here = isinstance(thing, h5py.Group) and isinstance(thing.get(part, getlink=True), h5py.HardLink)
            thing = thing[part] if is_here else None
        if isinstance(thing, h5py.Dataset) and found.setdefault(_address(thing), name) != name:
            raise ConfigError(f"'{found[_address(thing)]}' and '{name}' in '{path}' are one array with two names. Pass it once")
    return found


def _scopes(
    name: str, dataset: h5py.Dataset, numbers: Mapping[int, str], called: Mapping[int, str], places: Mapping[int, list[str]]
) -> list[str | None]:
    """For each axis a text that arrays with the same axis have in common: the scale of the axis, or the group and the label."""
    if is_scale(dataset):
        if len(dataset.shape) == 1:
            return [name]
        ids = plain(dataset, "_Netcdf4Coordinates")
        is_known = isinstance(ids, list) and len(ids) == len(dataset.shape)
        return [numbers.get(number) for number in ids] if is_known else [None] * len(dataset.shape)
    found: list[str | None] = []
    for scales, label in zip(scales_of(dataset, lambda: places)[0], axis_texts_of(dataset)[0], strict=True):
        own = called.get(_address(scales[0][1])) if scales else None
        found.append(own or (f"{name.rpartition('/')[0]}/:{label}" if label else None))
    return found


def _details(path: str, dataset: h5py.Dataset, superblock: Superblock, read: Read) -> Json:
    """How one array is stored. ConfigError if nothing can be appended to it."""
    where = f"'{dataset.name}' in '{path}'"
    if dataset.is_virtual:
        raise ConfigError(
            f"{where} is virtual: its values are in other files, so that it cannot grow. Append to the last part, and join the "
            "parts anew (`shardload join`); or make one file of them: `shardload copy OLD NEW --unlimited AXIS`"
        )
    if dataset.chunks is None:
        raise ConfigError(f"{where} has no chunks, so that it cannot grow. {HOW_TO_GROW}")
    dtype = type_of_values(kind_of(dataset))
    if refusal(dtype) is not None or not _is_written(dataset, dtype):
        raise ConfigError(f"{where} holds {dtype} in a form that append does not write; append with h5py")
    try:
        facts = Facts.of(dataset, superblock)
        facts.spots(read)
        if file_number(dataset.id) != file_number(dataset.file.id):
            raise UnknownError("a link to another file")
    except UnknownError as error:
        raise unfit(where, error) from error
    found = properties_of(dataset)
    fill = np.asarray(found.fill_value or 0, native_dtype(dtype))
    known = {
        "maxshape": dataset.maxshape,
        "dtype": dtype_text(dtype),
        "chunks": dataset.chunks,
        "compression": found.compression,
        "checksum": found.checksum,
        "fill": fill.tobytes().hex(),
        "format": "netCDF4" if "_NCProperties" in dataset.file.attrs else "HDF5",
        "why_not": [facts.why_not(read, axis) for axis in range(dataset.ndim)],
        **meaning_of(
            native_dtype(dtype), {key: value for key, value in found.attrs.items() if not isinstance(value, h5py.Empty)}
        ),
    }
    return known


def _is_written(dataset: h5py.Dataset, dtype: np.dtype[Any]) -> bool:
    """True if what is written here has the type of this dataset."""
    kind, mine = (
        dataset.id.get_type().copy(),
        create_type(dataset.name, np.dtype(dtype_text(dtype)) if is_added(dtype) else dtype),
    )
    if isinstance(kind, h5py.h5t.TypeIntegerID) and kind.get_size() == 1:  # its byte order says nothing, and NumPy has none
        kind.set_order(mine.get_order())
    return bool(mine.equal(kind))


def spec_of(known: Json, shape: tuple[int, ...]) -> ArraySpec:
    """How chunks of an array are stored, of this shape."""
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


def _check_filters(where: str, name: str, known: Json, filters: list[tuple[int, tuple[int, ...]]]) -> None:
    """ConfigError unless chunks that are made here go through the filters of those in the file."""
    chunks, why = tuple(known["chunks"]), ""
    try:
        if isinstance(known["compression"], str):
            raise ConfigError(f"'{name}' {known['compression']}")
        mine = Pipeline(name, spec_of(known, chunks))
        with file_in_memory() as trial:
            space = h5py.h5s.create_simple(chunks)
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
