"""Does a local file give each range its own bytes, in few reads, and say so if it is too short?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardload.storage.local import LocalFile
from shardload.storage.objects import Ranges

CONTENT = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8).tobytes()


def local_file(folder: Path) -> LocalFile:
    path = folder / "bytes"
    path.write_bytes(CONTENT)
    return LocalFile(os.open(path, os.O_RDONLY), str(path))


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def test_a_file_that_is_too_short_or_closed(tmp_path: Path) -> None:
    file, memory = local_file(tmp_path), np.empty(20, np.uint8)
    assert file.nbytes == 20_000 and file.version is not None
    with pytest.raises(OSError, match="the file ends at byte 20000, but values are stored up to byte 20010"):
        file.read_into(memory, 19_990)
    with pytest.raises(OSError, match="ends at byte 20000"):
        file.read_ranges(Ranges(ints(0, 19_999), ints(5, 5)), memory)
    file.close()
    file.close()
    with pytest.raises(OSError, match="closed"):
        file.read_into(memory, 0)
