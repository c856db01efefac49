"""Do the files exist that the pages name? Every link, and every `path.py` in backticks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
