"""How do the values that this rank has read get into its own pieces?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardload.errors import PeerError
from shardload.planning.parts import Part
from shardload.planning.region import Region
from shardload.transfer.buffers import Piece, view_of
from shardload.transfer.checksum import checksum
from shardload.transfer.counters import Counters

Array = np.ndarray[Any, Any]


class LocalPieces:
    """The pieces of one rank.

    Parameters
    ----------
    rank : int
        This rank.
    pieces : mapping of int to Piece
        Its pieces, by shard.
    checksums : bool
        Whether each copied part is compared with its source by checksum.
    """

    def __init__(self, rank: int, pieces: Mapping[int, Piece], checksums: bool = False) -> None:
        self._rank, self._pieces, self.has_checksums = rank, pieces, checksums

    def sends(self, parts: Iterable[Part]) -> bool:
        """True if another rank needs one of these parts."""
        return not all(map(self.is_own, parts))

    def in_place(self, parts: Sequence[Part], region: Region) -> Array | None:
        """The view of `region` in a piece, if no other rank or shard needs it and it has no gaps; else None."""
        if len(parts) != 1 or parts[0].rank != self._rank or not parts[0].region.contains(region):
            return None
        view = self._pieces[parts[0].shard].view(region)
        return view if view.flags.c_contiguous else None

    def is_own(self, part: Part) -> bool:
        """True if a part stays on this rank."""
        return part.rank == self._rank

    def view(self, part: Part, region: Region) -> Array:
        """The memory of `region` in the piece of an own part."""
        return self._pieces[part.shard].view(region)

    def deliver(self, parts: Iterable[Part], region: Region, values: Array, counters: Counters) -> None:
        """Copy this rank's parts of `region`, whose values these are, into its pieces. PeerError as for `copy`."""
        started = time.perf_counter()
        for part in filter(self.is_own, parts):
            self.copy(part.region, view_of(values, part.region, region), self.view(part, part.region), counters)
        counters.copy_seconds += time.perf_counter() - started

    def copy(self, region: Region, values: Array, piece: Array, counters: Counters) -> None:
        """Copy the values of a region into a view of a piece. The caller counts the time.

        Raises
        ------
        PeerError
            If a checksum after the copy differs from the one before it.
        """
        np.copyto(piece, values, casting="no")
        counters.nbytes_copied += piece.nbytes
        counters.n_checksums += self.has_checksums
        if self.has_checksums and checksum(values) != checksum(piece):
            raise PeerError(
                f"the part {region} that stays on rank {self._rank} is not what was read: a checksum after the copy "
                "differs from the one before it. The load is void; if it happens again, suspect the memory of this node",
                rank=self._rank,
            )
