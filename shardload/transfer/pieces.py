"""How do values get into the pieces of this rank, and when is a shard complete?

What this rank has read itself is copied there by the thread that read it (`LocalPieces`); what others send is received there.

Both fill the sections of a shard: views of the shard's buffer, each a `Piece` of its own in the coordinates of the file's
array. Without a halo a shard is one section. What is not in the file is filled in here: values before the exchange
(`ShardPieces.fill`), and rows that are repeated when all sections of the shard have arrived (`ShardPieces.completed`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardload.errors import PeerError, ShardloadError
from shardload.planning.region import Array, Region
from shardload.planning.schedule import Part
from shardload.planning.shards import Shards
from shardload.transfer.buffers import Piece, view_of
from shardload.transfer.checksum import checksum
from shardload.transfer.counters import Counters


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

    def in_place(self, parts: Iterable[Part], region: Region) -> Array | None:
        """The view of `region` in a piece, if no other rank or shard needs it and it has no gaps; else None."""
        part, *more_parts = itertools.islice(parts, 2)
        if more_parts or not self.is_own(part) or not part.region.contains(region):
            return None
        view = self.view(part, region)
        return view if view.flags.c_contiguous else None

    def is_own(self, part: Part) -> bool:
        """True if a part stays on this rank."""
        return part.rank == self._rank

    def view(self, part: Part, region: Region) -> Array:
        """The memory of `region` in the piece of an own part."""
        return self._pieces[part.target].view(region)

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
                f"the part {region} that stays on rank {self._rank} is not what was read, or what the device holds: a checksum "
                "after the copy differs from the one before it. The call is void; if it happens again, suspect the memory of "
                "this node",
                rank=self._rank,
            )


class ShardPieces:
    """The shards of one rank.

    Parameters
    ----------
    shards : Shards
        Which rank holds which shard, and what is in it.
    shape : tuple of int
        Shape of the array in the file.
    memory : sequence of ndarray
        For this rank's shards, ascending.
    rank : int
        This rank.

    Attributes
    ----------
    shards : dict of int to Piece
        This rank's shards, by number, in the coordinates of the jax.Array.
    sections : dict of int to Piece
        What the exchange fills, by section.
    """

    def __init__(self, shards: Shards, shape: tuple[int, ...], memory: Sequence[Array], rank: int) -> None:
        self._held_shards = {shard.number: shard for shard in shards.held_by(rank, shape)}
        self.shards: dict[int, Piece] = {}
        self.sections: dict[int, Piece] = {}
        self._shard_of: dict[int, int] = {}  # by the id of a section
        self._n_left: dict[int, int] = {}  # sections with elements of the file that have not arrived
        whole = Region.whole(shape)
        for shard, data in zip(self._held_shards.values(), memory, strict=True):
            piece = self.shards[shard.number] = Piece(shard.region, data)
            self._n_left[shard.number] = sum(region.intersect(whole) is not None for _, region, _ in shard.sections)
            for number, region, place in shard.sections:
                section = self.sections[number] = Piece(region, piece.view(place))
                self._shard_of[id(section)] = shard.number

    def fill(self, value_of: Callable[[Any], Any]) -> None:
        """Fill what is not in the file with values. `value_of` takes `Content.fill`.

        Raises
        ------
        ShardloadError
            If an element is neither in the file nor filled. Verification looks at the same regions, so it could not find that.
        """
        for shard in self._held_shards.values():
            piece = self.shards[shard.number]
            n_left = piece.region.size
            for content in shard.contents:
                n_left -= content.place.size
                if content.source is None:
                    view_of(piece.data, content.place, piece.region)[...] = value_of(content.fill)
            if n_left:
                raise ShardloadError(f"{n_left} elements of the shard {piece.region} were not filled: a defect in shardload")

    def completed(self, section: Piece) -> Piece | None:
        """Return the shard of a section that has arrived, if it was the last one of that shard; else None.

        The last rows of the array are then repeated beyond its ends.
        """
        shard = self._shard_of[id(section)]
        self._n_left[shard] -= 1
        if self._n_left[shard]:
            return None
        sections = [self.sections[number] for number, _, _ in self._held_shards[shard].sections]
        for content in self._held_shards[shard].contents:
            if content.is_repeated and content.source is not None:
                section = next(section for section in sections if section.region.contains(content.source))
                self.shards[shard].view(content.place)[...] = section.view(content.source)
        return self.shards[shard]
