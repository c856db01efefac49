"""Where does scratch memory begin? See docs/design/decode.md: elsewhere the kernel copies into it far more slowly."""

from __future__ import annotations

import numpy as np
import pytest

from shardload.system.scratch import ThreadScratch, empty_bytes


@pytest.mark.parametrize("nbytes", [4096, 4097, 200_000, 1 << 20, (3 << 20) + 5])
def test_memory_to_read_into_begins_at_a_boundary(nbytes: int) -> None:
    """Wrong if it began where NumPy's large arrays do, 16 bytes after the beginning of a page."""
    made = [empty_bytes(nbytes), ThreadScratch().bytes("chunk", nbytes)]
    made += [ThreadScratch().array("x", (nbytes // 8,), np.dtype("f8"))]
    for one in made:
        assert one.ctypes.data % 64 == 0
    assert [len(one) for one in made[:2]] == [nbytes] * 2


def test_small_memory() -> None:
    assert [len(empty_bytes(n)) for n in (0, 1, 4095)] == [0, 1, 4095]
