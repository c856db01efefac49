"""Does the command line start fast? `--help`, `--version` and `import shardload` import neither JAX nor MPI nor a format."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.unit.blocked import run_without

HEAVY = ("jax", "jaxlib", "mpi4py", "h5py", "zarr", "numcodecs", "numpy")
ASKED = [["--help"], ["--version"], *([name, "--help"] for name in ("info", "plan", "verify", "copy", "doctor"))]
COMMANDS = f"""
import contextlib, io, json, os, sys
from shardload.cli.main import main

for arguments in {ASKED}:
    reading, writing = os.pipe()
    if os.fork() == 0:  # each finds imported what `main` itself has imported
        sys.argv, status = ["shardload", *arguments], 0
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as ended:
                status = ended.code or 0
        with open(writing, "w") as pipe:
            json.dump([status, out.getvalue(), err.getvalue()], pipe)
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        print(pipe.read())
    os.wait()
"""


def blocked(then: str) -> subprocess.CompletedProcess[str]:
    """Run a program that ends where it imports one of `HEAVY`, also if it would catch the error: that costs its time, too."""
    return run_without(HEAVY, then, stop='SystemExit(f"imports {name}")')


@pytest.fixture(scope="module")
def answers() -> list[tuple[Any, str, str]]:
    """Status, output and errors of each of the commands that are `ASKED`."""
    done = blocked(COMMANDS)
    assert (done.returncode, done.stderr) == (0, "")
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("arguments", ASKED)
def test_help_and_version_import_neither_jax_nor_mpi_nor_a_format(
    arguments: list[str], answers: list[tuple[Any, str, str]]
) -> None:
    status, out, err = answers[ASKED.index(arguments)]
    assert (status, err) == (0, "")
    assert ("Usage:" if "--help" in arguments else "shardload ") in out


def test_the_package_alone_imports_none_of_them() -> None:
    done = blocked("import shardload\nprint(len(shardload.__all__) > 10, 'load' in dir(shardload))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")


def test_what_needs_them_is_stopped() -> None:
    """Wrong if the tests above could not fail."""
    done = blocked("import shardload\nshardload.load")
    assert done.returncode == 1 and done.stderr.startswith("imports ")


def test_who_loads_does_not_wait_for_what_only_saves_need() -> None:
    """On a thousand nodes each module is a file that all ranks open at once."""
    program = """
import gc, sys, shardload
searches = []
gc.callbacks.append(lambda phase, of: searches.append(phase) if of["generation"] == 2 else None)
assert callable(shardload.load) and callable(shardload.verify)
gc.callbacks.clear()
print(len(searches), gc.isenabled())  # such a search goes through all that JAX has made
gc.disable()
rooms = ("shardload.jobs.saving", "shardload.jobs.copying")
print(sorted(name for name in sys.modules if name.startswith(rooms)))
assert callable(shardload.save) and shardload.SaveReport.__module__ in sys.modules
print(gc.isenabled())  # as the user wanted it
"""
    done = run_without((), program.strip(), stop="SystemExit")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 True\n[]\nFalse\n", "")
