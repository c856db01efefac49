"""How are values read from HDF5, and so from netCDF4? Without the HDF5 library and its lock, where that is possible.

1. `Hdf5Source.chunk_reader` reads and decodes chunks without HDF5, in several threads if the caller has them, if that is surely
   correct (`chunks`).
2. Else `Hdf5Source.read_into` has the HDF5 library read: it decodes each chunk that meets the region once, converts the byte
   order, and writes into the caller's buffer. The values of missing chunks (never written) are the fill value, as HDF5 defines
   it.
3. `Hdf5Contiguous` reads contiguous values without HDF5, by positional reads into the caller's buffer. No lock of HDF5 or
   Python is held while reading or copying. Each axis that the region covers completely is merged with the axis before it. The
   last axis then has the runs of the region: they are contiguous in the file, and in the buffer too. If runs start far from
   each other, each is read straight into its place. If they start near each other, many runs are read at once into a small
   buffer, with the bytes between them, and copied from there, the runs of several planes with one copy. That copy also converts
   the byte order, if it is not native.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import h5py
import numpy as np

from shardload.formats.contract.array import ArrayInfo, Labels, Properties, check_request
from shardload.formats.contract.chunk_reader import ChunkReader, a_few_chunks, index_in_parts, read_by_chunks
from shardload.formats.contract.format import ChangedError, Source, UndecodedError
from shardload.formats.hdf5.chunks import ChunkPlaces, fill_value, leaves_gaps, open_chunks
from shardload.formats.hdf5.filters import filter_of
from shardload.formats.hdf5.links import OtherFiles
from shardload.formats.hdf5.metadata import group_attrs_of, labels_of, properties_of
from shardload.formats.hdf5.opened import BFLOAT16, OpenDataset, cached, swap_size, type_in_file
from shardload.formats.hdf5.tiles import PartOpener, Tiles, find_boxes
from shardload.planning.region import NEAR_NBYTES, Region
from shardload.storage.objects import Ints, Ranges, StoredObject
from shardload.system.scratch import shared_scratch

_SPAN_NBYTES = 1 << 20  # bytes per read: they stay in a core's cache until they are copied
_MOST_AT_ONCE = 256  # chunks per call: HDF5 holds 6 KiB for each, and with more chunks takes longer for each
_COMPLEX = {"complex64": "NATIVE_FLOAT_COMPLEX", "complex128": "NATIVE_DOUBLE_COMPLEX"}


def open_contiguous(dataset: OpenDataset, dtype: np.dtype[Any]) -> Hdf5Contiguous | None:
    """A reader of `dataset` as values of `dtype` (a native type); None if HDF5 has to read it."""
    if dataset.creation.get_layout() != h5py.h5d.CONTIGUOUS or dataset.creation.get_external_count() > 0:
        return None
    swap, extent = swap_size(dataset.kind, dtype), dataset.extent
    if dataset.raw is None or swap is None or extent is None or extent[1] != math.prod(dataset.shape) * dtype.itemsize:
        return None
    return Hdf5Contiguous(dataset.raw, extent[0], dataset.shape, swap)


class Hdf5Contiguous:
    """One open contiguous dataset. Made by `open_contiguous`. For one thread at a time.

    Parameters
    ----------
    raw : StoredObject
        The file that holds it.
    offset : int
        Position of its first byte in the file.
    shape : tuple of int
        Elements along each axis.
    swap : int
        Bytes to reverse, from `swap_size`.
    """

    def __init__(self, raw: StoredObject, offset: int, shape: tuple[int, ...], swap: int) -> None:
        self._raw, self._offset, self._shape, self._swap = raw, offset, shape, swap
        self._scratch = shared_scratch()

    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> None:
        """Read a non-empty region into `out`, a C-contiguous buffer of its shape.

        Raises
        ------
        OSError
            If the file is too short or cannot be read.
        """
        axes, strides, near = self._axes_of(region, out.dtype)
        target = out.reshape(-1).view(f"u{strides[-1]}").reshape([n for _, _, n in axes])
        for index, offset in self._starts(axes, strides, near):
            if near < len(axes) - 1 or self._swap:
                self._read_spans(axes[near + 1 :], offset, strides[near - 1], strides[near], target[index])
            else:
                self._read_rows(target[index].view(np.uint8), offset, strides[near - 1])

    def extents(self, region: Region, dtype: np.dtype[Any]) -> Iterator[tuple[Ints, Ints]]:
        """The bytes of the file that `read_into` reads of a region: offsets and sizes."""
        axes, strides, near = self._axes_of(region, dtype)
        for _, offset in self._starts(axes, strides, near):
            n = axes[near - 1][2]
            yield offset + np.arange(n) * strides[near - 1], np.full(n, axes[near][2] * strides[near])

    def _axes_of(self, region: Region, dtype: np.dtype[Any]) -> tuple[list[tuple[int, int, int]], list[int], int]:
        """The merged axes of a region, with one for the parts of an element; the bytes from one to the next along each; and
        along which runs are near each other (the last: none).
        """
        size = self._swap or min(dtype.itemsize, 8)
        per_element = dtype.itemsize // size
        axes = merged_axes((*self._shape, per_element), (*region.start, 0), (*region.stop, per_element))
        axes.insert(0, (1, 0, 1))  # so that what is read together always has an axis before it
        strides = [math.prod(length for length, _, _ in axes[k + 1 :]) * size for k in range(len(axes))]
        last = len(axes) - 1
        return axes, strides, next((k for k in range(1, last) if strides[k] <= NEAR_NBYTES and axes[k][2] > 1), last)

    def _starts(self, axes: list[tuple[int, int, int]], strides: list[int], near: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """What is read together, by its index along the first axes, and where in the file it begins."""
        start = self._offset + sum(first * stride for (_, first, _), stride in zip(axes[: near + 1], strides, strict=False))
        for index in itertools.product(*(range(n) for _, _, n in axes[: near - 1])):
            yield index, start + sum(i * stride for i, stride in zip(index, strides, strict=False))

    def _read_rows(self, rows: np.ndarray[Any, Any], offset: int, step: int) -> None:
        """Fill each row: row k from `offset` + k * `step`."""
        self._raw.read_ranges(Ranges.of_rows(offset, step, *rows.shape), rows.reshape(-1))

    def _read_spans(
        self, inner: list[tuple[int, int, int]], offset: int, step: int, stride: int, target: np.ndarray[Any, Any]
    ) -> None:
        """Read planes that start `step` bytes apart, of rows that start `stride` bytes apart.

        `inner` says which part of each row, along each axis, goes to `target`. Several small planes are copied at once: NumPy
        takes longer to begin a copy than to copy some rows.
        """
        n_planes, n_rows = target.shape[:2]
        most_rows = min(n_rows, max(1, _SPAN_NBYTES // stride))
        most_planes = max(1, _SPAN_NBYTES // (n_rows * stride))
        memory = self._scratch.bytes("span", min(n_planes, most_planes) * most_rows * stride)
        kind = target.dtype.newbyteorder("S" if self._swap else "=")
        lengths = tuple(length for length, _, _ in inner)
        wanted = (slice(None), slice(None), *(slice(start, start + n) for _, start, n in inner))
        for plane, first in itertools.product(range(0, n_planes, most_planes), range(0, n_rows, most_rows)):
            part = target[plane : plane + most_planes, first : first + most_rows]
            n, rows = part.shape[:2]
            span = memory[: n * rows * stride].reshape(n, rows * stride)
            self._read_rows(span, offset + plane * step + first * stride, step)
            np.copyto(part, span.view(kind).reshape(n, rows, *lengths)[wanted])


def merged_axes(shape: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """The same region over as few axes as possible, each as (length, start, number).

    An axis that the region covers completely is merged with the axis before it.

    Examples
    --------
    >>> merged_axes((4, 5, 6), (1, 0, 0), (3, 5, 6))
    [(120, 30, 60)]
    >>> merged_axes((4, 5, 6), (0, 0, 2), (4, 5, 3))
    [(20, 0, 20), (6, 2, 1)]
    """
    axes: list[tuple[int, int, int]] = []
    for length, first, end in zip(reversed(shape), reversed(start), reversed(stop), strict=True):
        n = end - first
        if axes and axes[0][2] == axes[0][0]:
            inner = axes[0][0]
            axes[0] = (length * inner, first * inner, n * inner)
        else:
            axes.insert(0, (length, first, n))
    return axes


def _memory_type_of(kind: Any, dtype: np.dtype[Any]) -> tuple[Any, bool]:
    """HDF5's type in memory for numbers that have the type `kind` in the file, None for h5py's own type of `dtype`; and whether
    their bytes must be swapped after that.
    """
    # h5py makes the type in memory from NumPy's: for complex numbers a pair (r, i). HDF5 cannot convert the complex type of
    # HDF5 2.0 in the other byte order to that pair.
    if kind.get_class() == getattr(h5py.h5t, "COMPLEX", None) and dtype.name in _COMPLEX:
        return getattr(h5py.h5t, _COMPLEX[dtype.name]), False
    if kind.get_class() == h5py.h5t.BITFIELD:  # HDF5 does not convert it to a number
        return getattr(h5py.h5t, f"NATIVE_B{8 * dtype.itemsize}"), False
    if dtype == BFLOAT16:
        return type_in_file(BFLOAT16), False
    # Integers of fewer bits than their bytes have: if HDF5 is to give them in the other byte order, it swaps the bytes and
    # takes the unused bits, mostly zeros, for bits of the number: -3 of 12 bits becomes 4093. So integers come in their own
    # order: also where all bits are used, because parts of a virtual dataset may have fewer.
    if kind.get_class() == h5py.h5t.INTEGER and not kind.dtype.isnative:
        return h5py.h5t.py_create(kind.dtype), True
    return None, False


class Hdf5Source(Source):
    """One open HDF5 dataset.

    Parameters
    ----------
    dataset : OpenDataset
        Not refused by `info.refused`.
    info : ArrayInfo
        Its description, from `describe`.
    others : OtherFiles
        The other files that hold its values.
    open_part : PartOpener, optional
        Opens the parts of a virtual dataset. None for any other dataset.
    close : callable, optional
        Called by `close`.
    is_linked : bool
        True if a link led to the dataset from another file: names in its own file mean nothing to the caller.
    """

    def __init__(
        self,
        dataset: OpenDataset,
        info: ArrayInfo,
        others: OtherFiles,
        open_part: PartOpener | None = None,
        close: Callable[[], None] = lambda: None,
        is_linked: bool = False,
    ) -> None:
        self.dataset, self.info, self.others, self._is_linked = dataset, info, others, is_linked
        self._open_part, self._close = open_part, close
        self._expected: Region | None = None
        state = dataset.facts.opened_in
        self.opened_in = state if state is None or info.parts is None else (*state, 0)
        if info.refused:  # nothing is read
            self.dtype = np.dtype("V1")
            return
        self.dtype = np.dtype(info.dtype)
        self._memory_type, self._swaps = _memory_type_of(dataset.kind, self.dtype)
        # The value of what HDF5 does not write into the buffer; None if it writes all. It is zero, as h5py has it there, if the
        # creator chose never to fill.
        self._gap_value = fill_value(dataset, self.dtype) if leaves_gaps(dataset) else None

    def expect(self, region: Region) -> None:
        """Only the places of chunks that meet `region` will be listed."""
        self._expected = region

    def expect_in_order(self, regions: Iterator[Region]) -> None:
        """See `Source`: values of parts at URLs are fetched ahead."""
        if self.dataset.facts.in_store and self._tiles is not None:
            self._tiles.expect_in_order(regions)

    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> list[tuple[int, ...]]:
        """Read `region` into `out`: straight from the file, or with ``H5Dread``."""
        check_request(self.info, self.dtype, region, out)
        if region.size == 0:
            return []
        if self.dataset.id.valid:
            if self._tiles is not None:
                return self._tiles.read_into(region, out)
            if self._contiguous is not None:
                self._contiguous.read_into(region, out)
                return []
            if self._reader is not None:
                return read_by_chunks(self._reader, self.info.chunks or (), region, out)
            self._check_stored(region)
        if self._gap_value is not None:
            # It may hold another block's values.
            out[...] = self._gap_value.byteswap() if self._swaps else self._gap_value
        try:
            self._read_by_library(region, out)
            if self._swaps:
                out.reshape(-1).view(self.dtype).byteswap(inplace=True)
        finally:  # if the file was cut, that error names the cause better
            self._check_whole()
        if self.places is not None:
            return self.places.missing(region)
        creation = self.dataset.creation
        is_contiguous = creation.get_layout() == h5py.h5d.CONTIGUOUS and not creation.get_external_count()
        return [()] if is_contiguous and self.dataset.extent is None else []

    def _check_whole(self) -> None:
        """OSError if the file was cut since it was opened: HDF5 gives zeros for the end."""
        if not self.dataset.id.valid:
            return
        now, before = self.dataset.facts.state(), self.dataset.file.id.get_filesize()
        if now is not None and now[0] < before:
            raise OSError(f"the file was cut to {now[0]} bytes from {before} since it was opened")

    def _read_by_library(self, region: Region, out: np.ndarray[Any, Any]) -> None:
        if region.ndim == 0:
            self.dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, out, self._memory_type)
            return
        in_file, in_memory = self.dataset.id.get_space(), h5py.h5s.create_simple(region.shape)
        for part in self._parts(region):
            in_file.select_hyperslab(part.start, part.shape)
            if part != region:
                start = tuple(a - b for a, b in zip(part.start, region.start, strict=True))
                in_memory.select_hyperslab(start, part.shape)
            with self._with_values(part) as identifier:
                identifier.read(in_memory, in_file, out, self._memory_type)

    def _with_values(self, part: Region) -> contextlib.AbstractContextManager[Any]:
        """The dataset from which HDF5 reads a part."""
        return contextlib.nullcontext(self.dataset.id)

    def _parts(self, region: Region) -> Iterator[Region]:
        """Cut a non-empty region into regions to read in one call of HDF5."""
        return iter((region,)) if self.info.chunks is None else a_few_chunks(region, self.info.chunks, _MOST_AT_ONCE)

    @cached
    def places(self) -> ChunkPlaces | None:
        """Where the chunks are; None for a dataset without chunks."""
        if self.dataset.creation.get_layout() != h5py.h5d.CHUNKED:
            return None
        return ChunkPlaces(self.dataset, self._expected)

    @cached
    def _reader(self) -> ChunkReader | None:
        """A reader of chunks without HDF5, which takes twice as long; None if only HDF5 can read or decode them."""
        if self.info.refused is not None or self.places is None:
            return None
        return open_chunks(self.dataset, self.dtype, self.places)

    def _check_stored(self, region: Region) -> None:
        """Raise ValueError if HDF5 must not decode the chunks that meet a non-empty region: it might crash."""
        if self.places is None:
            return
        self.places.check(region)
        codecs = [filter_of(number) for number, *_ in self.dataset.stored_filters]
        names = [codec.word for codec in codecs if codec.is_believed]
        if not names:
            return
        if self._reader is not None:  # only `plain` has HDF5 decode what this can decode
            for part in self._parts(region):
                read_by_chunks(self._reader, self.info.chunks or (), part, np.empty(part.shape, self.dtype))
        elif not all(map(self.others.access.may_use, names)):
            raise UndecodedError(
                f"its chunks are encoded by {' and '.join(names)}, and only HDF5 can read them (of a file that is open for "
                "writing or by another driver, or has a user block) or decode them, which would crash if one is damaged. "
                f"If you trust who wrote the file, pass allow_filters='{names[0]}'"
            )

    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """The values as h5py's indexing gives them; of a virtual dataset, as it gives those of the parts."""
        if self._tiles is not None:
            return self._tiles.plain(region)
        try:
            if region.size:
                self._check_stored(region)
            if self.dtype == BFLOAT16:  # h5py makes float32 of it
                out = np.full(region.shape, self._gap_value or 0, self.dtype)
                if region.size:
                    self._read_by_library(region, out)
                return out
            return index_in_parts(self.dataset, region, self._parts)
        finally:  # as for `read_into`
            self._check_whole()

    def labels(self) -> Labels:
        """The dimension scales and all attributes."""
        return labels_of(self.dataset, has_coords=not self._is_linked)

    def group_attrs(self) -> Mapping[str, Any]:
        """Those of the group of the dataset; none if a link led to it from another file."""
        return {} if self._is_linked else group_attrs_of(self.dataset)

    def properties(self) -> Properties:
        """Filters with their options, and attributes with their types."""
        return properties_of(self.dataset, self.others.filters if self.others.is_virtual else None)

    def chunk_reader(self) -> ChunkReader | None:
        """A reader that decodes single chunks without HDF5; None if only HDF5 can decode them."""
        return self._reader if self._tiles is None else self._tiles.chunk_reader()

    @cached
    def _tiles(self) -> Tiles | None:
        """The parts of a virtual dataset; None for any other one."""
        if self._open_part is None or self.info.refused is not None or self.info.parts is None:
            return None
        names, shapes = self.others.names, self.info.parts["shapes"]
        boxes = find_boxes(self.dataset, names, shapes) if len(names) == len(shapes) else None
        if boxes is None:
            raise ChangedError(f"{self.info} has other parts than when it was looked at. Load it again, or make a new plan")
        versions = dict(zip(names, self.info.parts["versions"], strict=True))
        fill = fill_value(self.dataset, self.dtype)
        return Tiles(boxes, versions, self.info, fill, self._open_part, self._expected)

    @cached
    def _contiguous(self) -> Hdf5Contiguous | None:
        """A reader of contiguous values without HDF5; None if only HDF5 can read them."""
        return open_contiguous(self.dataset, self.dtype)

    def state(self) -> tuple[int, ...] | None:
        """The state of the open file that holds the dataset, if it is a plain file and open for reading only; else None.

        Other files that hold values were compared when they were opened; here they are compared again.
        """
        state, tiles = self.dataset.facts.state(), self.__dict__.get("_tiles")
        if state is None or self.info.parts is None:
            return state
        return *state, 0 if tiles is None else tiles.n_changed()

    def close(self) -> None:
        """Close the dataset and the files, if this object opened them."""
        tiles = self.__dict__.get("_tiles")
        if tiles is not None:
            tiles.close()
        self._close()
