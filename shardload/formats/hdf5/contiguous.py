"""How is a region of a contiguous HDF5 dataset read without the HDF5 library? By positional reads into the caller's buffer.

1. Merge each axis that the region covers completely with the axis before it. The last axis then has the runs of the region:
   they are contiguous in the file, and in the buffer too.
2. If runs start far from each other, read each run straight into its place.
3. If they start near each other, read many runs at once into a small buffer, with the bytes between them, and copy from there:
   the runs of several planes with one copy.
4. That copy also converts the byte order, if it is not native.

No lock of HDF5 or Python is held while reading or copying.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from shardload.formats.hdf5.opened import OpenDataset
from shardload.formats.hdf5.raw_file import swap_size
from shardload.planning.blocks import NEAR_NBYTES
from shardload.planning.region import Region
from shardload.storage.objects import Ranges, StoredObject
from shardload.storage.remote import expect
from shardload.system.scratch import shared_scratch

_SPAN_NBYTES = 1 << 20  # bytes per read: they stay in a core's cache until they are copied


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
        if not self._swap and region.shape == self._shape:  # most small arrays are read whole
            self._raw.read_into(out.reshape(-1).view(np.uint8), self._offset)
            return
        size = self._swap or min(out.dtype.itemsize, 8)
        kind = np.dtype(f"u{size}")
        per_element = out.dtype.itemsize // size
        axes = merged_axes((*self._shape, per_element), (*region.start, 0), (*region.stop, per_element))
        axes.insert(0, (1, 0, 1))  # so that what is read together always has an axis before it
        target = out.reshape(-1).view(kind).reshape([n for _, _, n in axes])
        strides = [math.prod(length for length, _, _ in axes[k + 1 :]) * size for k in range(len(axes))]
        last = len(axes) - 1
        near = next((k for k in range(1, last) if strides[k] <= NEAR_NBYTES and axes[k][2] > 1), last)
        start = self._offset + sum(first * stride for (_, first, _), stride in zip(axes[: near + 1], strides, strict=False))
        for index in itertools.product(*(range(n) for _, _, n in axes[: near - 1])):
            at = start + sum(i * stride for i, stride in zip(index, strides, strict=False))
            if near < last or self._swap:
                self._read_spans(axes[near + 1 :], at, strides[near - 1], strides[near], target[index])
            else:
                self._read_rows(target[index].view(np.uint8), at, strides[near - 1])

    def expect(self, regions: Iterator[Region], itemsize: int) -> None:
        """Told which regions will be read, in this order: those in one piece of a file in a store are fetched ahead."""
        expect(
            (self._raw, np.array([self._offset + first * itemsize]), np.array([region.size * itemsize]))
            for region in regions
            if region.size and (first := first_of_run(self._shape, region)) is not None
        )

    def _read_rows(self, rows: np.ndarray[Any, Any], at: int, step: int) -> None:
        """Fill each row: row k from `at` + k * `step`."""
        self._raw.read_ranges(Ranges.of_rows(at, step, *rows.shape), rows.reshape(-1))

    def _read_spans(
        self, inner: list[tuple[int, int, int]], at: int, step: int, stride: int, target: np.ndarray[Any, Any]
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
            self._read_rows(span, at + plane * step + first * stride, step)
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


def first_of_run(shape: tuple[int, ...], region: Region) -> int | None:
    """The number of the first element of a region that lies in one piece, in C order; None if it lies in several.

    >>> first_of_run((4, 5, 6), Region((1, 0, 0), (3, 5, 6))), first_of_run((4, 5), Region((1, 0), (3, 2)))
    (30, None)
    """
    number = 0
    axes = merged_axes(shape, region.start, region.stop)
    for length, first, _ in axes:
        number = number * length + first
    return number if all(n == 1 for _, _, n in axes[:-1]) else None
