"""Do few buffers serve many blocks and parts, each with its own values, and does a checksum see what it should?"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from shardload.planning.region import Region
from shardload.planning.schedule import Block, Part
from shardload.transfer.buffers import Packer, Piece, Slots, StagedBlock, sendable
from shardload.transfer.checksum import checksum
from tests.unit.fakes import TABLE, rows

F4 = np.dtype("f4")
Array = np.ndarray[Any, Any]


def block_of(region: Region) -> StagedBlock:
    """A block of TABLE that lies in memory with gaps."""
    held = np.full((region.shape[0], region.shape[1] + 2), -1, F4)
    held[:, 1:-1] = TABLE[region.slices()]
    return StagedBlock(Block(region, (Part(region, 0, 1),)), [Piece(region, held[:, 1:-1])])


ALL = rows(0, 8)


def test_parts_share_a_slot_until_all_have_left() -> None:
    slots, block = Slots(1, 200), block_of(ALL)
    packer: Any = Packer(slots)
    packed = [packer.pack(block, rows(k, k + 1)) for k in range(3)]  # 64 bytes each, for alignment
    assert packer.pack(block, rows(4, 6)) is None, "there is no room"
    for k, found in enumerate(packed):
        np.testing.assert_array_equal(found[0], TABLE[k : k + 1])
        assert found[0].ctypes.data % 64 == 0
        assert not slots.has_room()
    for found in packed:
        assert not slots.has_room()
        found[1]()
    assert slots.has_room() and slots.peak_nbytes == 200
    again = packer.pack(block, rows(4, 8))
    np.testing.assert_array_equal(again[0], TABLE[4:8])


def test_replicas_share_one_copy() -> None:
    slots, block = Slots(2, 64), block_of(ALL)
    packer: Any = Packer(slots)
    packed = [packer.pack(block, rows(0, 4)) for _ in range(3)]
    assert all(found[0] is packed[0][0] for found in packed)
    assert slots.peak_nbytes == 64
    for found in packed[:2]:
        found[1]()
    other = packer.pack(block, rows(4, 8))
    assert not np.shares_memory(other[0], packed[2][0]), "one replica has not left"
    packed[2][1]()
    new = packer.pack(block, rows(0, 4))
    np.testing.assert_array_equal(new[0], TABLE[:4])


def test_a_part_larger_than_a_slot_is_a_defect_of_the_plan() -> None:
    with pytest.raises(ValueError, match="a part of 128 bytes for slots of 127"):
        Packer(Slots(3, 127)).pack(block_of(ALL), rows(0, 8))


# --- slots and blocks


def test_the_slot_used_last_is_used_next_and_no_other_is_made() -> None:
    """Wrong if a reader that never needs two slots at a time touched the memory of more."""
    slots: Any = Slots(3, 64)
    first = slots.take()
    for _ in range(10):
        slots.give(first)
        assert slots.take() is first
    assert slots.peak_nbytes == 64


def test_the_values_of_a_part_are_in_one_tile() -> None:
    tiles = [Region((0, 0), (8, 3)), Region((0, 3), (8, 4))]
    block = StagedBlock(Block(rows(0, 8), ()), [Piece(tile, TABLE[tile.slices()]) for tile in tiles])
    inside = Region((2, 1), (5, 3))
    np.testing.assert_array_equal(block.view(inside), TABLE[2:5, 1:3])
    assert np.shares_memory(block.view(inside), TABLE)
    with pytest.raises(ValueError, match="is not in the block"):
        block.view(rows(2, 4))


# --- what both sides compute


def test_a_checksum_of_more_than_it_copies_at_a_time() -> None:
    data = np.arange(3 << 18, dtype="<f8").reshape(-1, 512)[:, ::2]
    assert checksum(data) == zlib.crc32(data.tobytes())


@pytest.mark.parametrize(
    ("view", "is_sendable"),
    [
        (TABLE, True),
        (TABLE[:, 1:3], True),
        (TABLE[::2], True),
        (TABLE[::-1], False),
        (TABLE[:1][::-1], True),
        (np.broadcast_to(TABLE[:1], (3, 4)), False),
        (TABLE.astype(">f4"), False),
        (TABLE.T, True),
    ],
)
def test_what_can_be_sent_as_it_is(view: Array, is_sendable: bool) -> None:
    assert sendable(view) == is_sendable
