"""The picture and the table of docs/design/data-flow.md show the rooms that the linter checks and that shardload/ has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def layers() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [room.strip() for layer in contract["layers"] for room in layer.split("|")]


def test_the_linter_s_layers_are_the_folders_and_modules_at_the_top() -> None:
    """Wrong if a file lay at the top that is no room, or if a room had no place in the order."""
    package = ROOT / "shardload"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    assert len(layers()) == len(folders) + len(modules) and set(layers()) == folders | modules


def test_the_picture_shows_the_rooms_in_their_order() -> None:
    """Wrong if a room were added and the picture not drawn again: python docs/figures/rooms.py."""
    drawn = re.findall(r'<g id="room-(\w+)">', (ROOT / "docs" / "figures" / "rooms.svg").read_text())
    assert drawn == layers()


def test_the_table_has_the_rooms_in_their_order_and_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "design" / "data-flow.md").read_text()
    rows = re.findall(r"^\| `(\w+?)(?:/|\.py)` \|.*\|([^|]*)\|$", page, re.MULTILINE)
    assert [room for room, _ in rows] == layers()
    for room, first in rows:
        for name in re.findall(r"`([\w/]+\.py)`", first):
            assert (ROOT / "shardload" / room / name).is_file(), f"{room}: {name}"
