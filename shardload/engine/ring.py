"""Where are the values of a round until they are encoded? In buffers that are used in turn."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardload.planning.blocks import aligned
from shardload.planning.region import Region
from shardload.planning.rounds import KEPT_ROUNDS
from shardload.transfer.buffers import Piece, aligned_empty

__all__ = ["Ring"]


class Ring:
    """Memory for the values of rounds: what one round has stays until the third round after it begins.

    Parameters
    ----------
    nbytes : int
        Bytes of the largest round, each piece rounded up (`aligned`).
    """

    def __init__(self, nbytes: int) -> None:
        self._buffers = [aligned_empty((nbytes,), np.dtype(np.uint8)) for _ in range(KEPT_ROUNDS)]
        self._turn = self._offset = 0

    def begin_round(self) -> None:
        """Use the buffer that was used longest ago."""
        self._turn, self._offset = (self._turn + 1) % KEPT_ROUNDS, 0

    def piece(self, region: Region, dtype: np.dtype[Any]) -> Piece:
        """Memory for the values of a region. ValueError if the round has no more."""
        nbytes = region.size * dtype.itemsize
        buffer = self._buffers[self._turn]
        data = buffer[self._offset : self._offset + nbytes]
        if data.nbytes < nbytes:
            raise ValueError(f"{region} does not fit into a round of {buffer.nbytes} bytes: a defect in shardload")
        self._offset += aligned(nbytes)
        return Piece(region, data.view(dtype).reshape(region.shape))
