"""Is a shard with a halo complete when all of its sections have arrived, and not before?"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardload.errors import ShardloadError
from shardload.planning.shards import Halo, Shards, plan_shards
from shardload.transfer.pieces import ShardPieces

SHARDS = plan_shards((6, 4), [(0,), ()], np.arange(3))


def pieces(shards: Shards, shape: tuple[int, ...], rank: int) -> ShardPieces:
    return ShardPieces(shards, shape, [np.full(shards.shard_shape, -1) for _ in shards.shards_of(rank)], rank)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_the_last_section_completes_the_shard(order: tuple[int, ...]) -> None:
    """Wrong if a shard went to its device while some of its rows were still to come."""
    made = pieces(SHARDS.with_halo(Halo((1, 2), ("wrap", "wrap"))), (6, 4), 0)
    sections = list(made.sections.values())
    assert len(sections) == 6
    order = (*order, 3, 4, 5)
    assert [made.completed(sections[k]) for k in order[:-1]] == [None] * 5
    assert made.completed(sections[order[-1]]) is made.shards[0]


def test_padding_that_was_left_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if one mistake could hide from the filling and from the verifying, which look at the same regions."""
    right = Shards.contents
    monkeypatch.setattr(Shards, "contents", lambda *what: list(right(*what))[:-1])
    made = pieces(SHARDS, (5, 3), 2)  # five rows over three shards of two
    with pytest.raises(ShardloadError, match=r"1 elements of the shard .* were not filled"):
        made.fill(lambda fill: 7)
