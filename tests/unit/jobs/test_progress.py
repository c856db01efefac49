"""Is progress shown where somebody sees it: on rank 0, in a terminal or a notebook, and nowhere else?"""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardload.jobs import progress
from shardload.jobs.progress import progress_of

LARGE = 1 << 30


class Notebook:
    """The little of IPython that a kernel has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
        self.shown: list[Any] = []
        shell, display = ModuleType("IPython"), ModuleType("IPython.display")
        shell.__dict__["get_ipython"] = lambda: SimpleNamespace(kernel=kernel)
        display.__dict__["display"] = self.display
        monkeypatch.setitem(sys.modules, "IPython", shell)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, bar: Any, display_id: bool) -> Any:
        assert display_id is True
        self.shown.append(bar)
        return SimpleNamespace(update=self.shown.append)


def load(wanted: Any, total: int = LARGE, rank: int = 0) -> None:
    with progress_of(wanted, "'/<b>\x1b[1m' in 'a.h5'", total, rank) as advance:
        advance(total // 4)
        advance(total - total // 4)


def test_a_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Wrong if there were none because standard error is no terminal there, or if it needed ipywidgets."""
    notebook = Notebook(monkeypatch, kernel=object())
    monkeypatch.setattr(progress, "_REDRAWN_SECONDS", 0.0)
    load(None)
    done = [bar.done for bar in notebook.shown]
    assert done[:3] == [0, LARGE // 4, LARGE] and done[-1] == LARGE
    html = notebook.shown[1]._repr_html_()
    assert html.startswith(f'<progress value="{LARGE // 4}" max="{LARGE}"></progress>')
    assert r"rank 0: &#x27;/&lt;b&gt;\x1b[1m&#x27; in &#x27;a.h5&#x27;: 256.0 MiB of 1.0 GiB" in html
    assert repr(notebook.shown[1]).startswith(r"rank 0: '/<b>\x1b[1m' in 'a.h5': 256.0 MiB of 1.0 GiB")
    assert capfd.readouterr() == ("", "")


def test_a_bar_is_not_drawn_for_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a load of a million parts sent a million messages to the browser."""
    notebook = Notebook(monkeypatch, kernel=object())
    monkeypatch.setattr(progress, "_REDRAWN_SECONDS", 1e9)
    with progress_of(True, "a", 1000, 0) as advance:
        for _ in range(1000):
            advance(1)
    assert [bar.done for bar in notebook.shown] == [0, 1000, 1000]


@pytest.mark.parametrize(
    ("wanted", "total", "rank", "kernel", "n"),
    [
        (None, LARGE, 0, object(), 4),
        (None, LARGE, 1, object(), 0),
        (None, 1 << 20, 0, object(), 0),
        (True, 1 << 20, 0, object(), 4),
        (True, 1 << 20, 1, object(), 0),
        (False, LARGE, 0, object(), 0),
        (None, LARGE, 0, None, 0),  # IPython in a terminal that was redirected
        (True, 0, 0, object(), 4),
    ],
)
def test_where_a_bar_is_shown(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, total: int, rank: int, kernel: object, n: int
) -> None:
    notebook = Notebook(monkeypatch, kernel)
    monkeypatch.setattr(progress, "_REDRAWN_SECONDS", 0.0)
    with open(os.devnull, "w") as nowhere:
        monkeypatch.setattr(sys, "stderr", nowhere)
        load(wanted, total, rank)
    assert len(notebook.shown) == n


def test_a_load_that_fails_leaves_the_bar_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch, kernel=object())
    with pytest.raises(RuntimeError, match=r"^disk$"), progress_of(True, "a", 100, 0) as advance:
        advance(30)
        raise RuntimeError("disk")
    assert notebook.shown[-1].done == 30


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_bar_on_standard_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], columns: int) -> None:
    """Wrong if the name of a file took the room of the bar, as a long path did, or were a command for the terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with progress_of(True, f"'/<b>[red]\x1b[1m' in '/scratch/{'long/' * 30}run.h5'", 100 << 30, 0) as advance:
        advance(100 << 30)
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert out == "" and len(line) <= columns
    assert line.startswith("rank 0") and "run.h5' " in line and "100.0/100.0 GiB" in line
    assert ("━━━━━━━━" in line) is (columns >= 60)


def test_a_function_is_told_on_every_rank() -> None:
    seen: list[tuple[int, int]] = []
    load(lambda *told: seen.append(told), 100, rank=3)
    assert seen == [(25, 100), (100, 100)]
