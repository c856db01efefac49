"""Is a shard with a halo complete when all of its sections have arrived, and not before?"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardload.errors import ShardloadError
from shardload.planning.shards import Halo, Shards, plan_shards
from shardload.transfer.buffers import Piece
from shardload.transfer.pieces import ShardPieces

SHAPE = (6, 4)


def pieces(halo: Halo, rank: int) -> tuple[ShardPieces, dict[int, Piece]]:
    shards = plan_shards(SHAPE, [(0,), ()], np.arange(3)).with_halo(halo)
    return in_shards(shards, SHAPE, rank)


def in_shards(shards: Shards, shape: tuple[int, ...], rank: int) -> tuple[ShardPieces, dict[int, Piece]]:
    made = ShardPieces(shards, shape, [np.full(shards.shard_shape, -1) for _ in shards.shards_of(rank)], rank)
    return made, made.shards


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_the_last_section_completes_the_shard(order: tuple[int, ...]) -> None:
    """Wrong if a shard went to its device while some of its rows were still to come."""
    made, buffers = pieces(Halo((1, 2), ("wrap", "wrap")), 0)
    sections = list(made.sections.values())
    assert len(sections) == 6
    order = (*order, 3, 4, 5)
    assert [made.completed(sections[k]) for k in order[:-1]] == [None] * 5
    assert made.completed(sections[order[-1]]) is buffers[0]


def padded(rank: int) -> tuple[ShardPieces, dict[int, Piece]]:
    """Five rows over three shards of two."""
    shards = plan_shards(SHAPE, [(0,), ()], np.arange(3))
    return in_shards(shards, (5, 3), rank)


def test_padding_that_was_left_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if one mistake could hide from the filling and from the verifying, which look at the same regions."""
    right = Shards.contents
    monkeypatch.setattr(Shards, "contents", lambda *what: list(right(*what))[:-1])
    made, _ = padded(2)
    with pytest.raises(ShardloadError, match=r"1 elements of the shard .* were not filled"):
        made.fill(lambda fill: 7)
