"""Run what a shell would run, in a copy of a process that has imported JAX, h5py and Zarr already (`tests.jobs.preloaded`).

The copy's files, variables and folder are what a new process would have, and it ends as Python does. Programs whose subject is
how an interpreter starts (its locale, what libraries read or import as they are loaded) are started as ever.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.jobs.preloaded import WHOLE_END, prefix

__all__ = ["run_copy"]

SECONDS = 120.0
ANEW = "default:of nothing"  # a filter of warnings; what has options for these imports the project itself


def run_copy(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    is_end_whole: bool = False,
    is_imported_anew: bool = False,
    **options: Any,
) -> Any:
    """``subprocess.run([sys.executable, *arguments], text=True, **options)``.

    Parameters
    ----------
    arguments : sequence of str or path
        The interpreter's: ``["-m", "shardload", ...]``.
    env : mapping, optional
        All variables (default: this process's).
    is_end_whole : bool
        Let Python take itself apart at the end. For what is seen only then: what is left in streams that nobody closes.
    is_imported_anew : bool
        Import the project in the copy. For what its modules may do, or read, as they are imported.
    **options
        `subprocess.run`'s.
    """
    variables = {**(os.environ if env is None else env), **({WHOLE_END: "1"} if is_end_whole else {})}
    words = [*(["-W", ANEW] if is_imported_anew else []), *map(str, arguments)]
    return subprocess.run([*prefix(variables), *words], env=variables, text=True, timeout=SECONDS, **options)
