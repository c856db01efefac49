"""Does each room import what it promises, and is it where the linter, the picture and the page say?

The import linter reads the code; here each room is imported in a process in which the other libraries cannot be.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import shardload
from tests.unit.blocked import run_without

ROOT = Path(__file__).parents[2]
LIBRARIES = ("deflate", "google_crc32c", "h5py", "jax", "ml_dtypes", "mpi4py", "numcodecs", "numpy", "rich", "typer", "zarr")

# What importing a room may import: all of its modules, or the one that is named.
ROOMS = {
    "shardload": (),
    "shardload.errors": (),
    "shardload.units": (),
    "shardload.system": ("numpy",),
    "shardload.planning": ("numpy",),
    "shardload.values": ("numpy",),
    "shardload.formats.contract": ("numpy",),
    "shardload.formats.lookup": ("numpy",),
    "shardload.options": (),
    "shardload.transfer": ("numpy", "deflate"),
    "shardload.comm": ("numpy", "jax", "ml_dtypes"),  # JAX is what `launch` starts; MPI waits until somebody needs it
    "shardload.jobs": ("numpy", "deflate", "google_crc32c", "jax", "ml_dtypes"),  # no format, no MPI
    "shardload.cli.main": ("typer", "rich"),
}

IMPORT_ALL = """
import importlib, pkgutil
room = sys.argv[1]
found = importlib.import_module(room)
if room != "shardload":
    for module in pkgutil.walk_packages(getattr(found, "__path__", ()), room + "."):
        importlib.import_module(module.name)
"""


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_promises(room: str) -> None:
    done = run_without({*LIBRARIES} - {*ROOMS[room]}, IMPORT_ALL, room, stop='SystemExit(f"{name} is imported")')
    assert (done.returncode, done.stderr) == (0, "")


def test_a_library_that_is_imported_is_noticed() -> None:
    assert run_without(LIBRARIES, IMPORT_ALL, "shardload.planning", stop='SystemExit(f"{name}")').stderr == "numpy\n"


@pytest.mark.parametrize("name", shardload.__all__)
def test_public_names_are_looked_up_when_they_are_used(name: str) -> None:
    """Wrong if a module of the package were called like a public name, and took its place once it is imported."""
    code = f"import shardload; assert {name!r} in dir(shardload) and {name!r} not in vars(shardload); shardload.{name}"
    assert not (ROOT / "shardload" / f"{name}.py").exists() and not (ROOT / "shardload" / name).exists()
    assert getattr(shardload, name).__name__ == name
    if name.endswith("Error"):  # the others import JAX, which takes a second each
        subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60, cwd=ROOT)


def test_an_editor_offers_public_names_only() -> None:
    assert [name for name in dir(shardload) if not name.startswith("__")] == sorted(shardload.__all__)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'shardload' has no attribute 'lode'"):
        shardload.lode  # type: ignore[attr-defined]  # noqa: B018


def layers() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = (c for c in contracts if c["type"] == "layers" and c["containers"] == ["shardload"])
    return [room.strip() for layer in contract["layers"] for room in layer.split("|")]


def test_the_linter_s_layers_are_the_folders_and_modules_at_the_top() -> None:
    """Wrong if a file lay at the top that is no room, or if a room had no place in the order."""
    package = ROOT / "shardload"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    assert len(layers()) == len(folders) + len(modules) and set(layers()) == folders | modules
    assert len(modules) < 6  # and __init__


def test_each_room_lists_its_modules() -> None:
    """Wrong if a module were added, or renamed, and the list in the `__init__` of its folder did not follow."""
    for init in (ROOT / "shardload").glob("*/**/__init__.py"):
        listed = set(re.findall(r"\w+", ast.get_docstring(ast.parse(init.read_text())) or ""))
        modules = {path.stem for path in init.parent.glob("*.py")} - {"__init__"}
        folders = {path.parent.name for path in init.parent.glob("*/__init__.py")}
        assert modules | folders <= listed, f"{init.parent.name}: {sorted((modules | folders) - listed)}"


def test_the_tests_have_the_rooms_of_the_package() -> None:
    folders = {path.parent.name for path in (ROOT / "tests" / "unit").glob("*/*.py")}  # one that is gone may have __pycache__
    assert folders <= set(layers())


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
