"""Do a few staging buffers serve many blocks, and are a block's values found in them?"""

from __future__ import annotations

import numpy as np
import pytest

from shardload.planning.region import Region
from shardload.planning.schedule import Block
from shardload.transfer.buffers import Piece, Slots, StagedBlock
from tests.unit.fakes import TABLE, rows

# --- slots


def test_the_slot_used_last_is_used_next_and_no_other_is_made() -> None:
    """Wrong if a reader that never needs two slots at a time touched the memory of more."""
    slots = Slots(3, 64)
    first = slots.take()
    for _ in range(10):
        assert first is not None
        slots.give(first)
        assert slots.take() is first
    assert slots.peak_nbytes == 64


# --- blocks


def test_the_values_of_a_part_are_in_one_tile() -> None:
    tiles = [Region((0, 0), (8, 3)), Region((0, 3), (8, 4))]
    block = StagedBlock(Block(rows(0, 8), ()), [Piece(tile, TABLE[tile.slices()]) for tile in tiles])
    inside = Region((2, 1), (5, 3))
    np.testing.assert_array_equal(block.view(inside), TABLE[2:5, 1:3])
    assert np.shares_memory(block.view(inside), TABLE)
    with pytest.raises(ValueError, match="is not in the block"):
        block.view(rows(2, 4))
