"""Do the files exist that the pages name (every link, and every `path.py` in backticks), and is their output real?"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from examples import many_arrays, shuffling
from shardload.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("shardload", "tests", "benchmarks", "examples", "slurm", "docs")
MADE_BY_THE_READER = {"example.py", "first.py"}


@pytest.fixture(scope="module")
def modules() -> list[str]:
    """All Python files, each with a slash before it."""
    return [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path, modules: list[str]) -> None:
    """Wrong if a file were moved or renamed and a page still sent its reader to the old place."""
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []
    named = set(re.findall(r"`([\w/.-]+\.py)(?:::\w+)?`", text)) - MADE_BY_THE_READER
    assert [name for name in sorted(named) if not any(module.endswith(f"/{name}") for module in modules)] == []


def test_the_index_names_every_page() -> None:
    """Wrong if a page were added that no reader would find."""
    links = set(re.findall(r"\]\(([^)\s]+)\)", (ROOT / "docs" / "README.md").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert pages - links == set()


def test_the_plan_of_many_arrays_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the page, for the file of the example. Estimated seconds depend on the machine."""
    page = (ROOT / "docs" / "many-arrays.md").read_text()
    shown = re.search(r"    shardload (plan snap[^\n]*)\n\n<!-- plan[^\n]*-->\n```text\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    monkeypatch.chdir(tmp_path)
    many_arrays.write_example("snap.h5")
    made = CliRunner().invoke(app, [word.strip('"') for word in shown[1].split()], env={"COLUMNS": "80"})
    assert made.exit_code == 0, made.stderr
    printed, promised = (re.sub(r"about \S+ s", "about ... s", text) for text in (made.stdout, shown[2]))
    assert printed == promised


def block(marker: str) -> str:
    """The fenced block of docs/streams.md after an HTML comment that starts with `marker`."""
    found = re.search(rf"<!-- {marker}[^\n]*-->\n```\w*\n(.*?)```", (ROOT / "docs" / "streams.md").read_text(), re.DOTALL)
    assert found is not None, marker
    return found[1]


def test_the_stream_of_the_page_is_real(tmp_path: Path) -> None:
    """Its plan is what the page says, and its state goes on."""
    names: dict[str, Any] = {}
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(block("stream"), names)
        exec(block("checkpoint"), names)
    assert printed.getvalue() == block("plan of the stream")
    assert (names["x"].shape, names["y"].shape) == ((8, 2, 32, 64), (8, 32, 64))
    assert names["batches"].index.tolist() == names["ds"].order(0)[80:88].tolist()


def test_the_table_of_shuffling_is_real(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["shuffling"])
    shuffling.main()
    assert capsys.readouterr().out == block("shuffling")
