"""Does the command line start fast? `--help`, `--version` and `import shardload` import neither JAX nor MPI nor a format."""

from __future__ import annotations

import subprocess

import pytest

from tests.unit.blocked import run_without

HEAVY = ("jax", "jaxlib", "mpi4py", "h5py", "zarr", "numcodecs", "numpy")
COMMAND = "import sys\nsys.argv = ['shardload', *{arguments!r}]\nfrom shardload.cli.main import main\nmain()"


def blocked(then: str) -> subprocess.CompletedProcess[str]:
    """Run a program that ends where it imports one of `HEAVY`, also if it would catch the error: that costs its time, too."""
    return run_without(HEAVY, then, stop='SystemExit(f"imports {name}")')


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], *([name, "--help"] for name in ("info", "plan", "verify", "copy", "demo", "doctor"))],
)
def test_help_and_version_import_neither_jax_nor_mpi_nor_a_format(arguments: list[str]) -> None:
    done = blocked(COMMAND.format(arguments=arguments))
    assert (done.returncode, done.stderr) == (0, "")
    assert ("Usage:" if "--help" in arguments else "shardload ") in done.stdout


def test_the_package_alone_imports_none_of_them() -> None:
    done = blocked("import shardload\nprint(len(shardload.__all__) > 10, 'load' in dir(shardload))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")


def test_what_needs_them_is_stopped() -> None:
    """Wrong if the tests above could not fail."""
    done = blocked("import shardload\nshardload.load")
    assert done.returncode == 1 and done.stderr.startswith("imports ")
