"""From which sizes on is one way of moving values better than another? Measured numbers, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TUNING", "Tuning"]


@dataclass(frozen=True)
class Tuning:
    """Sizes at which the way changes. The values do not change what is loaded.

    Attributes
    ----------
    inline_nbytes : int
        Blocks up to this size are read at once by the thread that asks: waking another one takes longer.
    min_chunk_nbytes : int
        Chunks from this size on are decoded one by one in threads. Smaller ones cost more Python each than the lock of the
        format's library does.
    """

    inline_nbytes: int = 1 << 14
    min_chunk_nbytes: int = 1 << 15


# What loads use. Tests put another one here, to have small files take the way of large ones.
TUNING = Tuning()
