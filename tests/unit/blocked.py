"""Run a program in which some libraries cannot be imported, to see that it does not need them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

__all__ = ["run_without"]

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise {stop}

sys.meta_path.insert(0, Blocker())
{program}
"""


def run_without(names: Collection[str], program: str, *arguments: str, stop: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own. To import one of `names` raises `stop`, an expression with `name`."""
    code = BLOCKER.format(names=tuple(names), stop=stop, program=program)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        check=False,
    )
