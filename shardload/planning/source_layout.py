"""How does the array that is loaded lie in its file? What planning, reading and verifying know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.planning.blocks import plan_row_chunks
from shardload.planning.grid import Grid
from shardload.planning.selection import Selection

__all__ = ["SourceLayout"]


@dataclass(frozen=True, slots=True)
class SourceLayout:
    """The array that is loaded, as a part of one in a file.

    Parameters
    ----------
    selection : Selection
        Which elements of the file's array make up the one that is loaded.
    chunks : Grid
        The loaded array cut into the file's chunks; where the file has none, into stand-ins: any part can be read by itself.
    chunk_shape : tuple of int or None
        One chunk as it is in the file, with the axes that the selection drops; None where the file has no chunks.
    file_dtype, dtype : dtype
        In the file (in native byte order), and as they are wanted.
    codec : str
        How chunks are encoded: ``"none"``, ``"gzip+shuffle"``.
    """

    selection: Selection
    chunks: Grid
    chunk_shape: tuple[int, ...] | None
    file_dtype: np.dtype[Any]
    dtype: np.dtype[Any]
    codec: str = "none"

    @classmethod
    def cut(
        cls,
        selection: Selection,
        chunk_shape: tuple[int, ...] | None,
        file_dtype: np.dtype[Any],
        dtype: np.dtype[Any],
        codec: str = "none",
    ) -> SourceLayout:
        """With the grid of chunks that a selection of a file's array has.

        >>> from shardload.planning.selection import select_axes
        >>> f4 = np.dtype("f4")
        >>> SourceLayout.cut(select_axes((5, slice(3, 12)), (8, 16)), (4, 4), f4, f4).chunks
        Grid(shape=(9,), cell=(4,), phase=(3,))
        """
        if chunk_shape is None:
            cell, phase = plan_row_chunks(selection.shape, file_dtype.itemsize), (0,) * len(selection.kept)
        else:
            cell = tuple(chunk_shape[k] for k in selection.kept)
            phase = tuple(o % c for o, c in zip(selection.offset, cell, strict=True))
        return cls(selection, Grid(selection.shape, cell, phase), chunk_shape, file_dtype, dtype, codec)

    @property
    def has_chunks(self) -> bool:
        """Whether `chunks` are the file's."""
        return self.chunk_shape is not None

    @property
    def casts(self) -> bool:
        """Whether values are cast on their way."""
        return self.dtype != self.file_dtype

    @property
    def wide_itemsize(self) -> int:
        """Bytes per element of the wider of both types."""
        return max(self.dtype.itemsize, self.file_dtype.itemsize)

    @property
    def chunk_size(self) -> int:
        """Elements of one chunk in the file; 0 where it has none."""
        return 0 if self.chunk_shape is None else math.prod(self.chunk_shape)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one decoded chunk; 0 where there are none."""
        return self.chunk_size * self.file_dtype.itemsize
