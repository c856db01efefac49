"""Is progress shown where somebody sees it: on rank 0, in a terminal or a notebook, and nowhere else?"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardload.jobs.progress import progress_of

LARGE = 1 << 30


def in_notebook(monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
    """The little of IPython that a kernel has."""
    shell = ModuleType("IPython")
    shell.__dict__["get_ipython"] = lambda: SimpleNamespace(kernel=kernel)
    monkeypatch.setitem(sys.modules, "IPython", shell)


def load(wanted: Any, total: int = LARGE, rank: int = 0) -> None:
    with progress_of(wanted, "'/<b>\x1b[1m' in 'a.h5'", total, rank) as advance:
        advance(total // 4)
        advance(total - total // 4)


@pytest.mark.parametrize(
    ("wanted", "total", "rank", "kernel", "is_shown"),
    [
        (None, LARGE, 0, object(), True),
        (None, LARGE, 1, object(), False),
        (None, 1 << 20, 0, object(), False),
        (True, 1 << 20, 0, object(), True),
        (True, 1 << 20, 1, object(), False),
        (False, LARGE, 0, object(), False),
        (None, LARGE, 0, None, False),  # IPython in a terminal that was redirected
        (True, 0, 0, object(), True),
    ],
)
def test_where_a_bar_is_shown(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    wanted: Any,
    total: int,
    rank: int,
    kernel: object,
    is_shown: bool,
) -> None:
    """Wrong if there were none in a notebook, where standard error is no terminal, or if it needed ipywidgets there."""
    in_notebook(monkeypatch, kernel)
    load(wanted, total, rank)
    out, err = capfd.readouterr()
    assert out == "" and ("rank 0" in err) is is_shown
    assert "ipywidgets" not in err and "\x1b[1m" not in err


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
