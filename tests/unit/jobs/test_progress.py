"""Is progress shown where somebody sees it: on rank 0, in a terminal or a notebook, and nowhere else?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardload.jobs import progress
from shardload.jobs.progress import progress_of

LARGE = 1 << 30


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
    shell: Any = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=kernel))  # the little of IPython that a kernel has
    monkeypatch.setitem(sys.modules, "IPython", shell)
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


def test_a_line_each_30_seconds_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Wrong if a job of hours said nothing in its log, or a line came for each part."""
    now = iter([0.0, 10.0, 31.0, 40.0, 62.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(progress, "launcher_has_terminal", lambda: False)
    with progress_of(None, "'/rho'", LARGE, 0) as advance:
        for _ in range(4):
            advance(LARGE // 4)
    assert capfd.readouterr().err.splitlines() == [
        "shardload: rank 0: '/rho': 512.0 MiB of 1.0 GiB, 50 %, after 31 s",
        "shardload: rank 0: '/rho': 1.0 GiB of 1.0 GiB, 100 %, after 62 s",
    ]


@pytest.mark.parametrize("name", ["mpiexec.hydra", "bash"])
@pytest.mark.parametrize("has_terminal", [True, False])
def test_the_terminal_of_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, has_terminal: bool) -> None:
    """Wrong if a bar were shown in a log, or none in the terminal in which mpiexec was typed."""
    launcher, terminal, pipe = tmp_path / name, *os.openpty()[:2]
    launcher.write_text(
        f"#!/bin/sh\n{sys.executable} -c 'from shardload.jobs.progress import launcher_has_terminal as has; print(has())'\n"
    )
    launcher.chmod(0o755)
    made = subprocess.run(
        [str(launcher)], stdout=subprocess.PIPE, stderr=pipe if has_terminal else subprocess.DEVNULL, text=True, timeout=300
    )
    os.close(terminal)
    os.close(pipe)
    assert made.stdout.strip() == str(has_terminal and name != "bash")
