"""How is a shard put together on the host?

The exchange fills its sections: views of the shard's buffer, each a `Piece` of its own in the coordinates of the file's array.
Without a halo a shard is one section.
What is not in the file is filled in here: values before the exchange (`ShardPieces.fill`), and rows that are repeated when all
sections of the shard have arrived (`ShardPieces.completed`, `ShardPieces.finish`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from shardload.errors import ShardloadError
from shardload.planning.grid import unravel
from shardload.planning.shards import Shards
from shardload.transfer.buffers import Piece, view_of


class ShardPieces:
    """The shards of one rank.

    Parameters
    ----------
    shards : Shards
        Which rank holds which shard, and what is in it.
    shape : tuple of int
        Shape of the array in the file.
    pieces : mapping of int to Piece
        This rank's shards, by number.
    rank : int
        This rank.

    Attributes
    ----------
    sections : dict of int to Piece
        What the exchange fills, by section.
    """

    def __init__(self, shards: Shards, shape: tuple[int, ...], pieces: Mapping[int, Piece], rank: int) -> None:
        self._shards, self._held, self._pieces = shards, shards.held_by(rank, shape), pieces
        self.sections: dict[int, Piece] = {}
        self._shard_of: dict[int, int] = {}
        for shard in self._held:
            for number, region, place in shard.sections:
                section = self.sections[number] = Piece(region, pieces[shard.number].view(place))
                self._shard_of[id(section)] = shard.number
        self._n_left = Counter(self._shard_of.values())
        self._unfinished = set(pieces)

    def fill(self, value_of: Callable[[Any], Any]) -> None:
        """Fill what is not in the file with values. `value_of` takes `Content.fill`.

        Raises
        ------
        ShardloadError
            If an element is neither in the file nor filled. Verification looks at the same regions, so it could not find that.
        """
        for shard in self._held:
            piece = self._pieces[shard.number]
            n_left = piece.region.size
            for content in shard.contents:
                n_left -= content.place.size
                if content.source is None:
                    view_of(piece.data, content.place, piece.region)[...] = value_of(content.fill)
            if n_left:
                raise ShardloadError(f"{n_left} elements of the shard {piece.region} were not filled: a defect in shardload")

    def completed(self, section: Piece) -> Piece | None:
        """Return the shard of a section that has arrived, if it was the last one of that shard; else None."""
        shard = self._shard_of[id(section)]
        self._n_left[shard] -= 1
        if self._n_left[shard]:
            return None
        self._repeat(shard)
        return self._pieces[shard]

    def finish(self) -> None:
        """Finish all shards, also those of which a section is empty."""
        for shard in sorted(self._unfinished):
            self._repeat(shard)

    def _repeat(self, shard: int) -> None:
        """Repeat the last rows of the array beyond its ends, axis by axis: a corner then has the corner's element."""
        self._unfinished.discard(shard)
        data, halo = self._pieces[shard].data, self._shards.halo
        for axis, (i, n, h) in enumerate(zip(unravel(shard, self._shards.cuts), self._shards.cuts, halo.widths, strict=True)):
            if not halo.repeats(axis):
                continue
            rows = data.swapaxes(0, axis)
            if i == 0:
                rows[:h] = rows[h : h + 1]
            if i == n - 1:
                rows[-h:] = rows[-h - 1 : -h]
