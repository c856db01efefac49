"""How do the values that this rank has read get into its own pieces?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardload.errors import PeerError
from shardload.planning.parts import Part
from shardload.planning.region import Region
from shardload.transfer.buffers import Piece
from shardload.transfer.checksum import checksum
from shardload.transfer.counters import Counters

Array = np.ndarray[Any, Any]


class Copy(NamedTuple):
    """Values of a region that were read, and their place in a piece of this rank."""

    region: Region
    values: Array
    piece: Array


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
        self._rank, self._pieces, self._checksums = rank, pieces, checksums

    def sends(self, parts: Iterable[Part]) -> bool:
        """True if another rank needs one of these parts."""
        return any(part.rank != self._rank for part in parts)

    def in_place(self, parts: Sequence[Part], region: Region) -> Array | None:
        """The view of `region` in a piece, if no other rank or shard needs it and it has no gaps; else None."""
        if len(parts) != 1 or parts[0].rank != self._rank or not parts[0].region.contains(region):
            return None
        view = self._pieces[parts[0].shard].view(region)
        return view if view.flags.c_contiguous else None

    @property
    def has_checksums(self) -> bool:
        """True if each copied part is compared with its source."""
        return self._checksums

    def is_own(self, part: Part) -> bool:
        """True if a part stays on this rank."""
        return part.rank == self._rank

    def view(self, part: Part, region: Region) -> Array:
        """The memory of `region` in the piece of an own part."""
        return self._pieces[part.shard].view(region)

    def deliver(self, parts: Iterable[Part], region: Region, values: Array, counters: Counters) -> None:
        """Copy `values` (of `region`) into this rank's pieces, as far as `parts` say.

        Raises
        ------
        PeerError
            If a checksum after the copy differs from the one before it.
        """
        started = time.perf_counter()
        self.copy(self.copies(parts, region, values), counters)
        counters.copy_seconds += time.perf_counter() - started

    def copies(self, parts: Iterable[Part], region: Region, values: Array) -> list[Copy]:
        """What `deliver` would copy."""
        found = []
        for part in parts:
            common = part.region.intersect(region) if part.rank == self._rank else None
            if common is not None:
                found.append(Copy(common, Piece(region, values).view(common), self._pieces[part.shard].view(common)))
        return found

    def copy(self, copies: Iterable[Copy], counters: Counters) -> None:
        """Copy into this rank's pieces. PeerError as for `deliver`. The caller counts the time."""
        for region, values, piece in copies:
            np.copyto(piece, values, casting="no")
            counters.nbytes_copied += piece.nbytes
            counters.n_checksums += self._checksums
            if self._checksums and checksum(values) != checksum(piece):
                raise PeerError(
                    f"the part {region} that stays on rank {self._rank} is not what was read: a checksum after the copy "
                    "differs from the one before it. The load is void; if it happens again, suspect the memory of this node",
                    rank=self._rank,
                )
