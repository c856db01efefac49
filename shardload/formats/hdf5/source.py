"""How are values read from HDF5, and so from netCDF4? With the HDF5 library, straight into the caller's buffer.

1. `open_path` opens the file read-only and looks the name up, through soft and external links.
2. `describe` turns the dataset's metadata into an `ArrayInfo`, without reading values. It also decides what cannot be loaded,
   and why, so that the reading code need not.
3. `Hdf5Source.read_into` is one ``H5Dread`` per region: HDF5 decodes each chunk that meets the region once, converts the byte
   order, and writes into the caller's buffer. Contiguous values are read without HDF5, by `contiguous`.
4. `Hdf5Source.chunk_reader` gives single chunks to callers with several threads, by `chunks`, if that is surely correct.

The values of missing chunks (never written) are the fill value, as HDF5 defines it.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import h5py
import numpy as np

from shardload.errors import ConfigError, SourceError, printable
from shardload.formats.access import STRICT, Access
from shardload.formats.contract.array import MOST_NAMED, ArrayInfo, Properties, group_info, some
from shardload.formats.contract.by_chunks import a_few_chunks, index_in_parts, read_by_chunks
from shardload.formats.contract.chunk_reader import ChunkReader
from shardload.formats.contract.dtypes import check_request, native_dtype
from shardload.formats.contract.format import ChangedError, Format, OpenFile, Source, UndecodedError
from shardload.formats.hdf5.chunks import ChunkPlaces, fill_value, leaves_gaps, open_chunks
from shardload.formats.hdf5.contiguous import Hdf5Contiguous, open_contiguous
from shardload.formats.hdf5.filters import NAMES
from shardload.formats.hdf5.links import (
    LostError,
    Others,
    Places,
    follow,
    follow_hard,
    look_through,
    open_other,
    place_of,
    versions_of,
)
from shardload.formats.hdf5.making import attribute_names, groups_of, properties_of
from shardload.formats.hdf5.metadata import (
    NON_COORDINATE,
    describe,
    filters_of,
    group_attrs_of,
    labels_of,
    stands_for_axis,
)
from shardload.formats.hdf5.names import decoded, encoded, names_below
from shardload.formats.hdf5.opened import (
    OpenDataset,
    OpenFacts,
    OpenParts,
    creation_of,
    element_of,
    kept,
    kind_of,
    nbytes_stored_of,
    raw_of,
)
from shardload.formats.hdf5.raw_file import (
    BFLOAT16,
    close_all,
    has_signature,
    open_to_read,
    plain_descriptor,
    type_in_file,
    type_of_values,
)
from shardload.formats.hdf5.tiles import Tiles, code_of, find_boxes, tell_parts
from shardload.formats.labels import Labels
from shardload.planning.region import Region
from shardload.storage.containment import Fence, NotAFileError, OutsideError, open_file
from shardload.storage.local import LocalFile, state_of

__all__ = ["FORMAT", "Hdf5Format", "Hdf5Source", "describe", "open_explained"]

_MOST_NAMES = 1 << 17  # names to read for the message about a name that does not exist
_DRIVERS = {b"NCSAfami": "family driver", b"NCSAmult": "split or multi driver"}  # the names of drivers in a file's first block
_JOINED = {
    "family driver": "`h5repart -family_to_sec2 part%d.h5 whole.h5`",
    "split or multi driver": "`h5repack` on the name before `-m.h5`",
}
_HEAD_NBYTES = 4096

_TRUSTING = {32001, 32004, 32015}  # HDF5's decoders of these believe what a chunk declares of its length
_MOST_AT_ONCE = 256  # chunks per call: HDF5 holds 6 KiB for each, and with more chunks takes longer for each
_COMPLEX = {"complex64": "NATIVE_FLOAT_COMPLEX", "complex128": "NATIVE_DOUBLE_COMPLEX"}


class Hdf5Source(Source):
    """One open HDF5 dataset.

    Parameters
    ----------
    dataset : h5py.Dataset
        Open, and not refused by `info.refused`.
    info : ArrayInfo
        Its description, from `describe`.
    others : Others
        The other files that hold its values.
    files : sequence of h5py.File
        The files to close with this source.
    is_own : bool
        True if `close` closes the dataset; False if it is the caller's.
    facts : OpenFacts, optional
        Closed with this source.
    give_back : callable, optional
        Called when this source was closed.
    is_linked : bool
        True if a link led to the dataset from another file, whose names it does not know.
    opened_in : tuple of int, optional
        The state of its file before anything was read of it; by default that of now.
    """

    def __init__(
        self,
        dataset: h5py.Dataset,
        info: ArrayInfo,
        others: Others,
        files: Sequence[h5py.File] = (),
        is_own: bool = False,
        facts: OpenFacts | None = None,
        give_back: Callable[[], None] | None = None,
        is_linked: bool = False,
        opened_in: tuple[int, ...] | None = None,
    ) -> None:
        self._is_linked = is_linked
        self._facts, self._give_back = facts, give_back
        self._dataset, self._info, self._others, self._files, self._is_own = dataset, info, others, files, is_own
        self._opened_in = self._state_of_file() if opened_in is None else opened_in
        self._expected: Region | None = None
        number, self._inner = element_of(dataset)
        self._dtype = self._number = np.dtype("V1") if info.refused else native_dtype(type_of_values(number))
        # h5py makes the type in memory from NumPy's: for complex numbers a pair (r, i). HDF5 cannot convert the complex type of
        # HDF5 2.0 in the other byte order to that pair.
        is_native_complex = number.get_class() == getattr(h5py.h5t, "COMPLEX", None)
        name = _COMPLEX.get(self._dtype.name) if is_native_complex else None
        self._memory_type = getattr(h5py.h5t, name) if name else None
        if number.get_class() == h5py.h5t.BITFIELD and not info.refused:  # HDF5 does not convert it to a number
            self._memory_type = getattr(h5py.h5t, f"NATIVE_B{8 * self._number.itemsize}")
        if self._number == BFLOAT16:
            self._memory_type = type_in_file(BFLOAT16)
        self._swaps = not info.refused and _has_unused_bits(number) and not number.dtype.isnative
        if self._swaps:
            self._memory_type = h5py.h5t.py_create(number.dtype)
        if self._inner and not info.refused:  # below, an element is so many bytes
            self._memory_type = h5py.h5t.array_create(self._memory_type or h5py.h5t.py_create(self._number), self._inner)
            self._dtype = np.dtype((np.void, self._memory_type.get_size()))
            n = len(dataset.shape)
            self._info = replace(info, shape=info.shape[:n], chunks=info.chunks and info.chunks[:n])
        self._told = info
        # What HDF5 does not write into the buffer: zero, as h5py has it there, if the creator chose never to fill. And of a
        # virtual dataset what no mapping covers, if others overlap: HDF5 fills nothing if they are as many elements in all.
        self._gaps: Any = None
        if not info.refused:
            self._gaps = np.zeros((), self._dtype) if leaves_gaps(dataset) else dataset.fillvalue if others.is_virtual else None

    @property
    def info(self) -> ArrayInfo:
        """Shape, dtype, chunks and the other metadata."""
        return self._told

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values, in native byte order."""
        return self._number

    def expect(self, region: Region) -> None:
        """Only the places of chunks that meet `region` will be listed."""
        self._expected = region
        tiles = self.__dict__.get("_tiles")
        if tiles is not None:
            tiles.expect(region)

    def nbytes_stored(self) -> int | None:
        """Bytes that its values take in the file. HDF5 goes through the index of all chunks for that."""
        return None if self._others.is_virtual else nbytes_stored_of(self._dataset)

    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> None:
        """Read `region` into `out`: straight from the file, or with ``H5Dread``."""
        check_request(self._told, self._number, region, out)
        if region.size == 0:
            return
        if self._inner:
            elements, inside = self._cut(region)
            numbers = np.empty((*elements.shape, *self._inner), self._number)
            with self._others.watched():
                self._read_into(elements, numbers.reshape(-1).view(self._dtype).reshape(elements.shape))
            out[...] = numbers[inside]
            return
        if self._dataset.id.valid and self._tiles is not None:
            self._tiles.read_into(region, out)
            return
        with self._others.watched():
            self._read_into(region, out)

    def _cut(self, region: Region) -> tuple[Region, tuple[Any, ...]]:
        """The elements in which a region is, which may be small arrays; and what is in it of these."""
        n = region.ndim - len(self._inner)
        return Region(region.start[:n], region.stop[:n]), (..., *Region(region.start[n:], region.stop[n:]).slices())

    def _read_into(self, region: Region, out: np.ndarray[Any, Any]) -> None:
        is_open = self._dataset.id.valid
        if is_open and self._contiguous is not None:
            self._contiguous.read_into(region, out)
            return
        if is_open and self._decoded_here is not None:
            read_by_chunks(self._decoded_here, self._info.chunks or (), region, out)
            return
        if is_open and self._places is not None:
            self._places.check(region)
        if self._gaps is not None:
            out[...] = self._gaps  # it may hold another block's values
        try:
            self._read_by_library(region, out)
            if self._swaps:
                out.reshape(-1).view(self._number).byteswap(inplace=True)
        finally:  # if the file was cut, that error names the cause better
            self._check_whole()

    def _check_whole(self) -> None:
        """OSError if the file was cut since it was opened: HDF5 gives zeros for the end."""
        if not self._dataset.id.valid:
            return
        now, before = self._state_of_file(), self._dataset.file.id.get_filesize()
        if now is not None and now[0] < before:
            raise OSError(f"the file was cut to {now[0]} bytes from {before} since it was opened")
        self._others.check_whole()

    def _read_by_library(self, region: Region, out: np.ndarray[Any, Any]) -> None:
        identifier = self._dataset.id
        if region.ndim == 0:
            identifier.read(h5py.h5s.ALL, h5py.h5s.ALL, out, self._memory_type)
            return
        in_file, in_memory = identifier.get_space(), h5py.h5s.create_simple(region.shape)
        for part in self._parts(region):
            in_file.select_hyperslab(part.start, part.shape)
            if part != region:
                at = tuple(a - b for a, b in zip(part.start, region.start, strict=True))
                in_memory.select_hyperslab(at, part.shape)
            identifier.read(in_memory, in_file, out, self._memory_type)

    def _parts(self, region: Region) -> Iterator[Region]:
        """Cut a non-empty region into regions to read in one call of HDF5."""
        chunk = self._info.chunks
        return iter((region,)) if chunk is None else a_few_chunks(region, chunk, _MOST_AT_ONCE)

    def missing(self, region: Region) -> list[tuple[int, ...]]:
        """The missing chunks that meet `region`; ``[()]`` for a dataset without chunks and without stored values."""
        if region.size == 0 or not self._dataset.id.valid:
            return []
        if self._tiles is not None:
            return self._tiles.missing(region)
        elements = self._cut(region)[0]
        if self._places is not None:
            return [(*index, *((0,) * len(self._inner))) for index in self._places.missing(elements)]
        creation = creation_of(self._dataset)
        is_contiguous = creation.get_layout() == h5py.h5d.CONTIGUOUS and not creation.get_external_count()
        return [()] if is_contiguous and self._dataset.id.get_offset() is None else []

    @kept
    def _places(self) -> ChunkPlaces | None:
        """Where the chunks are; None for a dataset without chunks."""
        if creation_of(self._dataset).get_layout() != h5py.h5d.CHUNKED:
            return None
        expected = None if self._expected is None else self._cut(self._expected)[0]
        return ChunkPlaces(self._dataset, self._raw, expected)

    @kept
    def _decoded_here(self) -> ChunkReader | None:
        """A reader of chunks, if HDF5's own filters would trust what a chunk declares; else None."""
        names = [NAMES[number] for number, *_ in filters_of(self._dataset) if number in _TRUSTING]
        if self._info.refused or self._places is None or not names:
            return None
        found = open_chunks(self._dataset, self._dtype, self._places)
        if found is None and not all(map(self._others.access.may_use, names)):
            raise UndecodedError(
                f"its chunks are encoded by {' and '.join(names)} in a way that only HDF5 decodes, which would crash if one is "
                f"damaged. If you trust who wrote the file, pass allow_filters='{names[0]}'"
            )
        return found

    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """The values as h5py's indexing gives them."""
        with self._others.watched():
            try:
                elements, inside = self._cut(region)
                return np.asarray(self._plain(elements)[inside])
            finally:  # as for `read_into`
                self._check_whole()

    def _plain(self, region: Region) -> np.ndarray[Any, Any]:
        if self._places is not None and region.size:
            self._places.check(region)
        if self._decoded_here is not None and region.size:  # an error here, in place of a crash in HDF5
            for part in self._parts(region):
                read_by_chunks(self._decoded_here, self._info.chunks or (), part, np.empty(part.shape, self._dtype))
        if self._dtype == BFLOAT16:  # h5py makes float32 of it
            out = np.full(region.shape, self._gaps or 0, self._dtype)
            if region.size:
                self._read_by_library(region, out)
            return out
        if self._others.is_virtual and region.size:
            out = np.full(region.shape, self._gaps, self._dataset.dtype)
            for part in self._parts(region):
                self._dataset.read_direct(out, part.slices(), part.slices(region.start))
            return out
        return index_in_parts(self._dataset, region, self._parts)

    def labels(self) -> Labels:
        """The dimension scales and all attributes."""
        with self._others.watched():
            return labels_of(self._dataset, has_coords=not self._is_linked)

    def group_attrs(self) -> Mapping[str, Any]:
        """Those of the group in this file; if a link leads to the array in another file, none."""
        with self._others.watched():
            return {} if self._is_linked else group_attrs_of(self._dataset)

    def properties(self) -> Properties:
        """Filters with their options, and attributes with their types."""
        with self._others.watched():
            return properties_of(self._dataset, self._others.filters if self._others.is_virtual else None)

    def chunk_reader(self) -> ChunkReader | None:
        """A reader that decodes single chunks without HDF5; None if only HDF5 can decode them."""
        if self._info.refused is not None or self._info.chunks is None:
            return None
        if self._others.is_virtual:
            return None if self._tiles is None else self._tiles.chunk_reader()
        if self._raw is None or self._places is None:
            return None
        return open_chunks(self._dataset, self._dtype, self._places)

    @kept
    def _tiles(self) -> Tiles | None:
        """The parts of a virtual dataset; None for any other one, and if HDF5 has to read it."""
        if not self._others.is_virtual or self._others.is_unlimited or self._info.refused is not None:
            return None
        if self._info.parts is None:
            return None
        shapes = map(tuple, self._info.parts["shapes"])
        boxes = find_boxes(self._dataset, self._others.names, lambda _: next(shapes, None))
        if boxes is None or len(boxes) != len(self._info.parts["versions"]):  # HDF5 must not read parts that nobody looked at
            raise ChangedError(f"{self._info} has other parts than when it was looked at. Load it again, or make a new plan")
        open_part = OtherFiles(self._dataset, self._others.fence, self._others.access)
        tiles = Tiles(boxes, self._info, fill_value(self._dataset, self._dtype), open_part)
        if self._expected is not None:
            tiles.expect(self._expected)
        return tiles

    @kept
    def _raw(self) -> LocalFile | None:
        """The bytes of the file; None if only HDF5 may read them."""
        return raw_of(self._dataset)

    @kept
    def _contiguous(self) -> Hdf5Contiguous | None:
        """A reader of contiguous values without HDF5; None if only HDF5 can read them."""
        if self._info.chunks is not None or self._raw is None:
            return None
        return open_contiguous(self._dataset, self._dtype, self._raw)

    def state(self) -> tuple[int, ...] | None:
        """The state of the open file that holds the dataset, if it is a plain file and open for reading only; else None.

        If other files hold values, their sizes and times are in it. Those of `Tiles` have been compared when they were opened,
        and are again.
        """
        found = self._state_of_file()
        if found is None:
            return None
        tiles = self.__dict__.get("_tiles")
        if self._info.parts is not None:
            return *found, 0 if tiles is None else tiles.n_changed()
        return _together(found, self._others.state())

    def opened_in(self) -> tuple[int, ...] | None:
        """`state` before anything was read of these files."""
        found = self._opened_in
        if found is None:
            return None
        return (*found, 0) if self._info.parts is not None else _together(found, self._others.opened_in())

    def _state_of_file(self) -> tuple[int, ...] | None:
        try:
            if isinstance(self._dataset, OpenDataset):
                descriptor = self._dataset.facts.state_descriptor()
                return None if descriptor is None else state_of(descriptor)
            return _state_of(self._dataset.file)
        except (RuntimeError, ValueError):  # it was closed
            return None

    def close(self) -> None:
        """Close the dataset and the files, if this object opened them."""
        tiles = self.__dict__.get("_tiles")
        if tiles is not None:
            tiles.close()
        raw = self.__dict__.get("_raw")
        if raw is not None and not isinstance(self._dataset, OpenDataset):
            raw.close()
        if self._facts is not None:
            self._facts.close()
        if self._is_own:
            if self._dataset.id.valid:
                self._dataset.id.close()
            close_all(self._files)
        if self._give_back is not None:
            self._give_back()
            self._give_back = None


class Hdf5Format(Format):
    """HDF5 files, with any layout, and any filter that the installed HDF5 library can decode."""

    name = "HDF5"

    def claims_path(self, path: str) -> bool:
        """True if the file has the HDF5 signature."""
        try:
            file = open_file(path)
        except (NotAFileError, FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
            return False
        try:
            return has_signature(file)
        finally:
            os.close(file)

    def claims_object(self, obj: object) -> bool:
        """True if `obj` is an `h5py.Dataset`, group or file."""
        return isinstance(obj, h5py.Dataset | h5py.Group)

    def list_arrays(self, path: str, access: Access = STRICT) -> list[ArrayInfo]:
        """Every dataset in the file; links to other files are not followed."""
        with open_explained(path) as file:
            return list(_describe_all(file, path, Fence.around_file(path, access.allow_external), in_full=True, access=access))

    def sketch_arrays(self, path: str, access: Access = STRICT, most: int | None = None, like: str = "") -> list[ArrayInfo]:
        """Like `list_arrays`, without what a load does not need; or at most `most` + 1 datasets, each under one name."""
        fence = Fence.around_file(path, access.allow_external)
        with open_explained(path) as file:
            named = {info.dataset: info for info in _describe_group(file, path, like, fence, access)}
            found = _describe_all(file, path, fence, most=most, like=like, access=access, known=named)
            return list(itertools.islice(itertools.chain(named.values(), found), None if most is None else most + 1))

    def list_linked(self, path: str, group: str, access: Access = STRICT, in_full: bool = True) -> list[ArrayInfo]:
        """The datasets below a group to which links lead, as h5py follows them."""
        fence, opened = Fence.around_file(path, access.allow_external), list[h5py.File]()
        with open_explained(path) as file:
            try:
                found, opened = _follow(file, path, group, fence)
                is_group = isinstance(found, h5py.h5g.GroupID)
                return list(_describe_below(h5py.Group(found), path, group, fence, access, in_full)) if is_group else []
            except KeyError:  # no such name
                return []
            finally:
                close_all(opened)

    def open_path(self, path: str, dataset: str, access: Access = STRICT) -> Source:
        """Open a dataset by its name, or by the name of a link to it; KeyError if there is none."""
        return _open_alone(path, dataset, access)

    def open_planned(self, path: str, info: ArrayInfo, access: Access = STRICT) -> Source:
        """The same for a dataset that was described before: if it is virtual, its parts are not looked at again."""
        return _open_alone(path, info.dataset, access, info)

    def open_file(self, path: str, access: Access = STRICT) -> OpenFile:
        """Open the file once for several datasets."""
        return _Hdf5File(open_explained(path), path, access)

    def open_object(self, obj: Any, access: Access = STRICT) -> Source:
        """Make a source of an open `h5py.Dataset`."""
        if not obj:
            raise SourceError(
                f"the {type(obj).__module__.partition('.')[0]}.{type(obj).__name__} handed in is closed, so nothing "
                "can be read from it. Keep its file open during the load, or pass the path of the file."
            )
        path, opened_in = str(obj.file.filename), _state_of(obj.file)
        fence = Fence.around_file(place_of(obj.file), access.allow_external)
        if isinstance(obj, h5py.Group):
            found = itertools.islice(_describe_all(obj, path, fence, most=MOST_NAMED), MOST_NAMED + 1)
            names = some([repr(info.dataset) for info in found]) or "none"
            raise ConfigError(
                f"'{obj.name}' in '{path}' is a group, not an array. Pass group['name'] with a name of an array in it: {names}."
            )
        others = look_through(obj, fence, access)
        info = _describe(obj, path, str(obj.name or "<unnamed>"), others, access=access)
        return Hdf5Source(obj, info, others, opened_in=opened_in)


FORMAT = Hdf5Format()


class _Hdf5File(OpenFile):
    """A file that is opened once; its datasets share it."""

    def __init__(self, file: h5py.File, path: str, access: Access) -> None:
        self._file, self._path, self._access, self._facts = file, path, access, OpenFacts(file)
        self._fence = Fence.around_file(path, access.allow_external)

    def open(self, dataset: str) -> Source:
        return _open_dataset(self._facts, self._path, dataset, self._access, is_own=False, fence=self._fence)

    def open_planned(self, info: ArrayInfo) -> Source:
        return _open_dataset(self._facts, self._path, info.dataset, self._access, False, self._fence, info)

    def groups(self) -> dict[str, dict[str, Any]]:
        """The attributes of all groups."""
        return self._groups[0]

    def unread(self) -> list[str]:
        """What could not be read of them."""
        return self._groups[1]

    def links(self) -> dict[str, str]:
        """All but the first hard link to an object. Nothing is opened to find out what they lead to."""
        others: dict[Any, int] = {}
        first: dict[int, str] = {int(h5py.h5o.get_info(self._file.id).addr): ""}
        found: dict[str, str] = {}

        def keep(name: Any, link: Any) -> None:
            if link.type != h5py.h5l.TYPE_HARD:
                others[name] = int(link.type)
            elif link.u in first:
                found[f"/{decoded(name)}"] = f"'/{first[link.u]}'"
            else:
                first[int(link.u)] = decoded(name)

        try:
            self._file.id.links.visit(keep, info=True)
            for name, kind in others.items():
                value: Any = self._file.id.links.get_val(name) if kind in (h5py.h5l.TYPE_SOFT, h5py.h5l.TYPE_EXTERNAL) else b"?"
                is_external = kind == h5py.h5l.TYPE_EXTERNAL
                to = f"'{decoded(value[1])}' in '{os.fsdecode(value[0])}'" if is_external else f"'{decoded(value)}'"
                found[f"/{decoded(name)}"] = to
        except (KeyError, OSError, RuntimeError, ValueError):  # who lists the arrays is told what cannot be read
            return {}
        return found

    @kept
    def _groups(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        return groups_of(self._file)  # goes through the whole file

    def state(self) -> tuple[int, ...] | None:
        """As `Hdf5Source.state`."""
        descriptor = self._facts.state_descriptor()
        return None if descriptor is None else state_of(descriptor)

    def close(self) -> None:
        self._facts.close()
        close_all([self._file])


def _has_unused_bits(kind: Any) -> bool:
    """True for integers of fewer bits than their bytes have.

    If HDF5 is to give them in the other byte order, it swaps the bytes and takes the unused bits, mostly zeros, for bits of the
    number: -3 of 12 bits becomes 4093. So it gives them in their own byte order.
    """
    return bool(kind.get_class() == h5py.h5t.INTEGER and kind.get_precision() < 8 * kind.get_size())


def _together(state: tuple[int, ...], others: tuple[int, int] | None) -> tuple[int, ...]:
    return state if others is None else (state[0] + others[0], state[1] ^ others[1], *state[2:])


def _state_of(file: h5py.File) -> tuple[int, ...] | None:
    descriptor = plain_descriptor(file)
    return None if descriptor is None else state_of(descriptor)


def _open_alone(path: str, name: str, access: Access, planned: ArrayInfo | None = None) -> Hdf5Source:
    """Open a dataset and its file, which is closed with it."""
    file = open_explained(path)
    try:
        return _open_dataset(OpenFacts(file), path, name, access, is_own=True, planned=planned)
    except BaseException:
        close_all([file])
        raise


def _open_dataset(
    facts: OpenFacts,
    path: str,
    name: str,
    access: Access,
    is_own: bool,
    fence: Fence | None = None,
    planned: ArrayInfo | None = None,
) -> Hdf5Source:
    """Open a dataset of an open file. With `is_own`, the file is closed with the source. `fence` is that around the file.

    `planned` is what is known of it already: of a virtual dataset, what it says of the parts is not looked at again.
    """
    fence, opened = fence or Fence.around_file(path, access.allow_external), list[h5py.File]()
    try:
        found, opened = _look_up(facts, path, name, fence)
        others = look_through(found, fence, access, planned is not None and planned.parts is not None)
        info = _describe(found, path, name, others, access=access, planned=planned)
        files = [facts.file, *opened] if is_own else opened
        facts_to_close = facts if is_own else None
        opened_in = (opened or [facts.file])[-1].opened_in
        return Hdf5Source(found, info, others, files, True, facts_to_close, is_linked=bool(opened), opened_in=opened_in)
    except BaseException:
        close_all(opened)
        raise


class OtherFiles:
    """Opens datasets of which a virtual one consists.

    Parameters
    ----------
    dataset : h5py.Dataset
        The virtual one.
    fence, access : Fence, Access
        Those of this file: the others are inside, too.
    """

    def __init__(self, dataset: h5py.Dataset, fence: Fence, access: Access) -> None:
        self._places, self._fence, self._access = Places("HDF5_VDS_PREFIX", dataset.file), fence, access
        self._path, self._place = os.path.join(os.getcwd(), str(dataset.file.filename)), self._places.own
        # A dataset of the caller's file may be the only one that is loaded, and nobody would close what is kept for others.
        self._parts = dataset.facts.parts if isinstance(dataset, OpenDataset) else OpenParts(most=0)

    def __call__(self, name: str, dataset: str) -> tuple[Source, dict[str, tuple[int, ...]]]:
        """Open the dataset of this name in the file that is named so. Returns also the files that its values depend on, and
        their versions, which had been seen when it was looked at.
        """
        path, _ = self._places.find(name)
        what = f"values of another file, '{printable(name)}'"
        try:
            facts = self._parts.take(path, state_of(path) or (0, 0), self._fence, lambda: open_other(path, what, self._fence))
        except OutsideError as error:  # of the folder in which the file was opened
            if self._place == self._path:
                raise
            raise ChangedError(
                f"'{printable(self._path)}' was moved or replaced since it was opened: it is '{printable(self._place)}' now, "
                "and its parts are looked for there. Load it again"
            ) from error
        try:
            return _open_part(facts, path, dataset, self._access, self._fence, lambda: self._parts.give_back(facts))
        except BaseException as error:
            self._parts.give_back(facts)
            if isinstance(error, KeyError):
                raise OSError(f"'{printable(path)}' has no '{printable(dataset)}' any more") from None
            raise


def _open_part(
    facts: OpenFacts, path: str, name: str, access: Access, fence: Fence, give_back: Callable[[], None]
) -> tuple[Hdf5Source, dict[str, tuple[int, ...]]]:
    """As `_open_dataset`, of the very name: a virtual dataset knows no names of netCDF. `give_back` is for the source's end."""
    linked = list[h5py.File]()
    try:
        found, linked = _look_up(facts, path, name, fence, has_own_names=False)
        files = versions_of([facts.file, *linked])
        others = look_through(found, fence, access)
        info = _describe(found, path, name, others, access=access)
        if info.refused is not None:
            raise OSError(f"{info} holds {info.refused}")
        opened_in = (linked or [facts.file])[-1].opened_in
        source = Hdf5Source(found, info, others, linked, is_own=True, give_back=give_back, opened_in=opened_in)
        return source, {**files, **others.versions}
    except BaseException:
        close_all(linked)
        raise


def open_explained(path: str) -> h5py.File:
    """Open a file read-only. If the library refuses, SourceError says what to do."""
    try:
        return open_to_read(path)
    except OSError as error:
        said = str(error)
    if "unable to lock file" in said:
        why = (
            "another program has it open for writing, or its file system has no locks. If nobody writes to it, set "
            "HDF5_USE_FILE_LOCKING=FALSE in the environment of all ranks."
        )
    elif (driver := _driver_of(path)) is not None:
        why = f"it is one of the files of HDF5's {driver}, which are one file together. Make one of them: {_JOINED[driver]}."
    elif "truncated file" in said:
        why = "it is shorter than its own header says: a copy or a writer was interrupted. Copy or write it again."
    elif "already open" in said:
        why = "it is open for writing, or its writer died. Close the writer; if it died, run `h5clear -s` on the file."
    else:
        why = "its metadata is damaged or of a newer version of HDF5. Try `h5dump -H` on it."
    raise SourceError(f"'{path}' is an HDF5 file that cannot be opened: {why} HDF5 says: {said}", path=path)


def _driver_of(path: str) -> str | None:
    """The driver that wrote a file which HDF5 cannot open, if it spread the file over several; else None."""
    try:
        head = open_file(path)
    except OSError:
        return None
    with os.fdopen(head, "rb") as file:
        start = file.read(_HEAD_NBYTES)
    return next((driver for mark, driver in _DRIVERS.items() if mark in start), None)


def _look_up(
    facts: OpenFacts, path: str, name: str, fence: Fence, has_own_names: bool = True
) -> tuple[h5py.Dataset, list[h5py.File]]:
    """The dataset of that name, and the files opened on the way. KeyError if there is no such dataset; SourceError if a link
    has no target, or leads outside. With `has_own_names`, netCDF's names count before those of HDF5.
    """
    found = follow_hard(facts, name)
    if found is not None:
        return _variable_of(found, name) if has_own_names else found, []
    found, opened = _follow(facts.file, path, name, fence)
    if not isinstance(found, h5py.h5d.DatasetID):
        close_all(opened)
        raise KeyError(name)
    return h5py.Dataset(found), opened


def _follow(file: h5py.File, path: str, name: str, fence: Fence) -> tuple[Any, list[h5py.File]]:
    """What `follow` finds; SourceError if a link has no target, or leads outside."""
    try:
        return follow(file, name, fence)
    except OutsideError as error:
        raise SourceError(f"'{name}' in '{path}' cannot be loaded: {error}.", path=path, dataset=name) from None
    except LostError as error:
        text = str(error) if str(error).startswith(f"'{name}' in '{path}'") else f"'{name}' in '{path}' leads nowhere: {error}"
        text += ". Restore the target, or name another array."
        raise SourceError(text, path=path, dataset=name) from error


def _variable_of(dataset: OpenDataset, name: str) -> OpenDataset:
    """The variable of that name in netCDF, if the dataset of that name is only a dimension; else the dataset itself.

    A variable that has the name of a dimension, but is no coordinate of it, cannot have that name in HDF5. The netCDF library
    puts a prefix in front of it, and takes it away when it reads.
    """
    if not stands_for_axis(dataset):
        return dataset
    above, _, last = name.rpartition("/")
    found = follow_hard(dataset.facts, f"{above}/{NON_COORDINATE}{last}")
    return dataset if found is None else found


def _describe(
    dataset: h5py.Dataset,
    path: str,
    name: str,
    others: Others,
    in_full: bool = False,
    access: Access = STRICT,
    planned: ArrayInfo | None = None,
) -> ArrayInfo:
    """Describe a dataset. Its shape is not asked for if the library would open refused files to find it."""
    if not (others.refused and others.is_unlimited):
        try:
            with others.watched():
                found = describe(dataset, path, name, others, in_full, access)
            return _with_parts(found, dataset, others, planned) if others.is_virtual and found.refused is None else found
        except OutsideError as error:
            others.refused = str(error)
    return ArrayInfo(path, name, "HDF5", (), "unknown", refused=others.refused)


def _with_parts(info: ArrayInfo, dataset: h5py.Dataset, others: Others, planned: ArrayInfo | None) -> ArrayInfo:
    """What must be known of the parts of a virtual dataset, by those who look at them or by those who have."""
    if others.is_unlimited:
        return info
    if planned is not None and planned.parts is not None:
        return replace(info, chunks=planned.chunks, codec=planned.codec, parts=planned.parts)
    seen = others.behind
    boxes = find_boxes(dataset, others.names, lambda names: seen[names].shape if names in seen else None)
    if boxes is None:
        return info
    fill = fill_value(dataset, native_dtype(type_of_values(kind_of(dataset)))).tobytes()
    return replace(info, parts=tell_parts(boxes, others.behind, info.shape, info.chunks, code_of(kind_of(dataset)), fill))


def _describe_all(
    group: h5py.Group,
    path: str,
    fence: Fence,
    in_full: bool = False,
    most: int | None = None,
    like: str = "",
    access: Access = STRICT,
    known: Collection[str] = (),
) -> Iterator[ArrayInfo]:
    """Describe every dataset below `group`, but those that are `known`. A dataset that cannot be opened is listed as refused.

    With `most`, only a limited number of names is read (16 microseconds each; a dataset takes 300), one of each array. If there
    are more than `most`, those most similar to `like` come first.
    """
    names, lost = names_below(group, None if most is None else max(most, _MOST_NAMES))
    base = (group.name or "").rstrip("/")
    if most is not None and len(names) > most and like:
        names = _likest_first(names, like.removeprefix(base).strip("/"))
    netcdf = _netcdf_names(group, names)
    dimensions = set(netcdf.values())  # whose names variables have
    for name in names:
        full = f"{base}/{netcdf.get(name, name)}"
        if name in dimensions or full in known:
            continue
        try:
            found = group[encoded(name)]
            if isinstance(found, h5py.Dataset):
                yield _describe(found, path, full, look_through(found, fence, access), in_full, access)
        except (AssertionError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:  # h5py asserts, too
            yield ArrayInfo(path, full, "HDF5", (), "unknown", refused=f"metadata that HDF5 cannot read ({error})")
    for name, why in lost.items():
        yield ArrayInfo(path, f"{base}/{name}", "HDF5", (), "unknown", refused=f"a group that HDF5 cannot read ({why})")


def _describe_group(file: h5py.File, path: str, name: str, fence: Fence, access: Access) -> list[ArrayInfo]:
    """Some of the arrays below a group, to which links may lead, or what it is without arrays; nothing if there is no group."""
    opened: list[h5py.File] = []
    try:
        found, opened = follow(file, name, fence)
        if not name or not isinstance(found, h5py.h5g.GroupID):
            return []
        group = h5py.Group(found)
        infos = list(itertools.islice(_describe_below(group, path, name, fence, access, most=MOST_NAMED), MOST_NAMED + 1))
        how = f"h5py.File({path!r})[{name!r}].attrs"
        return infos or [group_info(path, name, "HDF5", attribute_names(group), how)]
    except (KeyError, OSError, RuntimeError, ValueError):  # the search for the array has said what is wrong
        return []
    finally:
        close_all(opened)


def _describe_below(
    group: h5py.Group, path: str, name: str, fence: Fence, access: Access, in_full: bool = False, most: int | None = None
) -> Iterator[ArrayInfo]:
    """What `_describe_all` says of a group, with the name that the caller has for it, to which links may have led."""
    below, own = name.rstrip("/"), len((group.name or "").rstrip("/"))
    for info in _describe_all(group, path, fence, in_full, most, access=access):
        yield replace(info, dataset=f"{below}{info.dataset[own:]}")


def _netcdf_names(group: h5py.Group, names: list[str]) -> dict[str, str]:
    """The names in netCDF of variables that have another one in HDF5: see `_variable_of`."""
    found = {}
    for text in (text for text in names if NON_COORDINATE in text):
        above, _, last = text.rpartition("/")
        plain = f"{above}/{last.removeprefix(NON_COORDINATE)}".lstrip("/")
        if last.startswith(NON_COORDINATE) and _is_dimension_at(group, plain):
            found[text] = plain
    return found


def _is_dimension_at(group: h5py.Group, name: str) -> bool:
    try:
        found = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
        return isinstance(found, h5py.Dataset) and stands_for_axis(found)
    except (KeyError, OSError, RuntimeError, ValueError):  # `_describe_all` says what is wrong
        return False


def _likest_first(names: list[str], like: str) -> list[str]:
    """Names below the group `like` first, then names similar to it, then the others."""
    below = itertools.islice((name for name in names if name.startswith(like + "/")), MOST_NAMED)
    near = [*below, *difflib.get_close_matches(like, names, n=MOST_NAMED)]
    return list(dict.fromkeys([*near, *names]))
