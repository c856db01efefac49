"""Does a local file say so if it is too short, and is none opened outside of the folder that a file or a store may read?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardload.storage.local import Fence, LocalFile, NotAFileError, OutsideError
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


# --- where files may be


def contents(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def test_a_file_that_another_names_is_opened_inside_of_its_folder_alone(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    (home / "parts").mkdir(parents=True)
    other.mkdir()
    named_by, inside, outside = str(home / "index"), home / "parts" / "1", other / "secret"
    for path in (named_by, inside, outside):
        Path(path).write_bytes(str(path).encode())
    fence = Fence.around_file(named_by)
    assert contents(fence.open(str(inside), named_by)) == str(inside).encode()
    (home / "link").symlink_to(outside)
    for path in (str(outside), str(home / "link"), str(home / "parts" / ".." / ".." / "other" / "secret")):
        with pytest.raises(
            OutsideError, match=rf"'{named_by}' leads to '{outside}', outside the folder of that file; pass allow_e"
        ):
            fence.open(path, named_by)
        assert contents(Fence().open(path, named_by)) == str(outside).encode()
    # A store that is a folder may lead into itself alone.
    fence = Fence.around_store(str(home / "parts"))
    assert contents(fence.open(str(inside), str(home / "parts"))) == str(inside).encode()
    with pytest.raises(OutsideError, match="outside the folder"):
        fence.open(named_by, str(home / "parts"))


def test_a_link_that_is_put_there_meanwhile_does_not_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if it were looked only before the file is opened."""
    (tmp_path / "home").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "home" / "part").write_text("part")
    plain = os.open

    def swap(path: str, *how: int) -> int:
        if not os.path.islink(path):
            os.unlink(path)
            os.symlink(tmp_path / "secret", path)
        return plain(path, *how)

    monkeypatch.setattr(os, "open", swap)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OutsideError, match="outside the folder"):
        Fence.around_file(str(tmp_path / "home" / "index")).open(str(tmp_path / "home" / "part"), "index")
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotAFileError, match="a pipe, expected a file"):
        Fence.around_file(str(tmp_path / "index")).open(str(tmp_path / "pipe"), "index")
