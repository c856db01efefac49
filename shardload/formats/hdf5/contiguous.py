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

from shardload.formats.hdf5.opened import OpenDataset, swap_size
from shardload.planning.blocks import NEAR_NBYTES
from shardload.planning.region import Region
from shardload.storage.objects import Ints, Ranges, StoredObject
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
        axes, strides, near = self._axes_of(region, out.dtype)
        target = out.reshape(-1).view(f"u{strides[-1]}").reshape([n for _, _, n in axes])
        for index, at in self._starts(axes, strides, near):
            if near < len(axes) - 1 or self._swap:
                self._read_spans(axes[near + 1 :], at, strides[near - 1], strides[near], target[index])
            else:
                self._read_rows(target[index].view(np.uint8), at, strides[near - 1])

    def extents(self, region: Region, dtype: np.dtype[Any]) -> Iterator[tuple[Ints, Ints]]:
        """The bytes of the file that `read_into` reads of a region: offsets and sizes."""
        axes, strides, near = self._axes_of(region, dtype)
        for _, at in self._starts(axes, strides, near):
            n = axes[near - 1][2]
            yield at + np.arange(n) * strides[near - 1], np.full(n, axes[near][2] * strides[near])

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
