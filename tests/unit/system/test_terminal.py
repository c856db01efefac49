"""Is text broken between words only, does a table fit without losing a cell, and can libraries not print into it?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardload.errors import printable
from shardload.system.terminal import Column, fit_table, own_stdout, width_of, width_of_prints

COLUMNS = (Column("name"), Column("shape"), Column("dtype"), Column("size", is_number=True))
ROWS = [
    ["/fields/a-rather-long-name", "16384 x 16384 x 16384", "float32", "16.0 TiB"],
    ["/x", "12", "float64", "96 B"],
    ["/y", "", "int8", "1 B"],
]


def test_the_forms_of_a_table() -> None:
    assert fit_table(COLUMNS, ROWS[1:2], 80) == ["name  shape  dtype    size", "/x    12     float64  96 B"]
    assert fit_table(COLUMNS, ROWS[:2], 50) == [
        "name                        shape",
        "/fields/a-rather-long-name  16384 x 16384 x 16384",
        "    dtype float32; size 16.0 TiB",
        "/x                          12",
        "    dtype float64; size 96 B",
    ]
    assert fit_table(COLUMNS, ROWS[1:2], 12) == ["name  shape", "/x    12", "    dtype", "    float64;", "    size 96", "    B"]
    assert fit_table(COLUMNS, [], 80) == ["name  shape  dtype  size"]


def test_names_are_no_commands() -> None:
    assert printable("rho \u03c1 \u5bc6 a\u00a0b") == "rho \u03c1 \u5bc6 a\u00a0b"
    assert printable("a\x1b]0;title\x07\n\x9b2J") == r"a\x1b]0;title\x07\n\x9b2J"


def test_80_columns_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wrong if what a script prints into a log depended on a variable that one machine has and another has not."""
    with open(tmp_path / "log", "w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        monkeypatch.delenv("COLUMNS", raising=False)
        assert (width_of(), width_of_prints()) == (80, 80)
        for columns, n in (("132", 132), ("0", 80), ("many", 80), ("1", 20)):
            monkeypatch.setenv("COLUMNS", columns)
            assert (width_of(), width_of_prints()) == (n, 80)
    monkeypatch.setattr(sys, "stdout", None)
    assert width_of_prints() == 80


def test_the_columns_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl
    import struct
    import termios

    monkeypatch.delenv("COLUMNS", raising=False)
    control, end = os.openpty()
    with os.fdopen(control), os.fdopen(end, "w") as terminal:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 57, 0, 0))
        monkeypatch.setattr(sys, "stdout", terminal)
        assert (width_of(), width_of_prints()) == (57, 57)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        assert width_of() == 80, "a terminal that does not know"


def test_a_command_has_its_output_for_itself() -> None:
    """Wrong if a library's line came in between, or at the end, when the C library empties its buffer."""
    script = (
        "import ctypes, os\nfrom shardload.system.terminal import own_stdout\nc = ctypes.CDLL(None)\nprint('before')\n"
        "with own_stdout() as out:\n    c.puts(b'[Gloo] of C'); os.write(1, b'[Gloo] at once'); print('[Gloo] of Python')\n"
        "    print('\\u2500 mine', file=out)\n"
        "print('after')\n"
    )
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": ""}  # set, the C library would hold nothing back
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, env=environ)
    assert done.stdout.decode().splitlines() == ["before", "\u2500 mine", "after"]


def test_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a command whose output nobody wants failed for that."""
    monkeypatch.setattr(sys, "stdout", None)
    with own_stdout() as out:
        print("said", file=out, flush=True)
