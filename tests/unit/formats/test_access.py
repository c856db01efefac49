"""Does what the caller allows reach every format, and does it keep a file in its folder?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardload.storage.local import Fence, NotAFileError, OutsideError


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
