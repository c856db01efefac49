"""Does a warning name the user's line, however many functions of the package lie in between?"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shardload
from shardload.system.caller import warn_once

INSIDE = str(Path(shardload.__file__).parent / "made_up.py")


def inside(n: int) -> Any:
    """A function that warns, `n` calls deep in files of the package."""
    names: dict[str, Any] = {"warn_once": warn_once}
    source = "def f0(): warn_once('x', UserWarning, 0)\n"
    source += "".join(f"def f{k}(): f{k - 1}()\n" for k in range(1, n))
    exec(compile(source, INSIDE, "exec"), names)
    return names[f"f{n - 1}"]


@pytest.mark.parametrize("n", [1, 2, 7])
def test_the_line_is_that_of_the_first_call_from_outside(n: int) -> None:
    """Wrong if the number of calls were known beforehand, or counted one too few."""
    warn = inside(n)
    with pytest.warns(UserWarning) as said:
        warn()
        frame: Any = inspect.currentframe()
        line = frame.f_lineno - 2
    assert (said[0].filename, said[0].lineno) == (__file__, line)


def test_context_managers_of_the_package_do_not_count() -> None:
    """Wrong if the line were one of Python's own `contextlib`, which calls the package's functions."""
    names: dict[str, Any] = {"warn_once": warn_once, "contextmanager": contextmanager}
    source = "@contextmanager\ndef call():\n    warn_once('x', UserWarning, 0)\n    yield\ndef save():\n    with call(): pass\n"
    exec(compile(source, INSIDE, "exec"), names)
    with pytest.warns(UserWarning) as said:
        names["save"]()
    assert said[0].filename == __file__
