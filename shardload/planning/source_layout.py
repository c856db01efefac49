"""How does the loaded array lie in its file? Planning, reading and verification use this description."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.planning.blocks import plan_row_chunks
from shardload.planning.grid import Grid
from shardload.planning.selection import Selection


@dataclass(frozen=True, slots=True)
class SourceLayout:
    """The loaded array, as a selection of an array in a file.

    Parameters
    ----------
    selection : Selection
        The elements of the file's array that make up the loaded array.
    chunks : Grid
        The loaded array cut into the file's chunks. If the file has none, into stand-ins: any part can be read by itself.
    chunk_shape : tuple of int or None
        Shape of a chunk in the file, including the axes that the selection drops; None if the file has no chunks.
    file_dtype, dtype : dtype
        Type in the file (in native byte order), and type of the loaded array.
    codec : str
        Encoding of the chunks: ``"none"``, ``"gzip+shuffle"``.
    is_decoded : bool
        True if stored numbers become values by more than a cast.
    """

    selection: Selection
    chunks: Grid
    chunk_shape: tuple[int, ...] | None
    file_dtype: np.dtype[Any]
    dtype: np.dtype[Any]
    codec: str = "none"
    is_decoded: bool = False

    @classmethod
    def cut(
        cls,
        selection: Selection,
        chunk_shape: tuple[int, ...] | None,
        file_dtype: np.dtype[Any],
        dtype: np.dtype[Any],
        codec: str = "none",
        is_decoded: bool = False,
    ) -> SourceLayout:
        """Make the layout, with the grid of chunks that a selection of a file's array has.

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
        chunks = Grid(selection.shape, cell, phase)
        return cls(selection, chunks, chunk_shape, file_dtype, dtype, codec, is_decoded)

    @staticmethod
    def pattern(selection: Selection, chunk_shape: tuple[int, ...] | None) -> tuple[Any, ...]:
        """What is equal for selections that are cut by the chunks in the same way, wherever they are: planning takes long.

        >>> from shardload.planning.selection import select_axes
        >>> [SourceLayout.pattern(select_axes(index, (8, 16)), (4, 4)) for index in (0, 5, (7, slice(4, 16)))]
        [((16,), (1,), (0,)), ((16,), (1,), (0,)), ((12,), (1,), (0,))]
        """
        kept = selection.kept
        phase = () if chunk_shape is None else tuple(o % chunk_shape[k] for k, o in zip(kept, selection.offset, strict=True))
        return selection.shape, kept, phase

    @property
    def has_chunks(self) -> bool:
        """True if the file has chunks, so that `chunks` are not stand-ins."""
        return self.chunk_shape is not None

    @property
    def casts(self) -> bool:
        """True if values are decoded or cast while they are loaded."""
        return self.is_decoded or self.dtype != self.file_dtype

    @property
    def wide_itemsize(self) -> int:
        """Bytes per element of the wider of the two types."""
        return max(self.dtype.itemsize, self.file_dtype.itemsize)

    @property
    def chunk_size(self) -> int:
        """Number of elements of one chunk in the file; 0 without chunks."""
        return 0 if self.chunk_shape is None else math.prod(self.chunk_shape)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one decoded chunk; 0 without chunks."""
        return self.chunk_size * self.file_dtype.itemsize
