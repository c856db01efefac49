"""Does the command line start fast? `--help`, `--version` and `import shardload` import neither JAX nor MPI nor a format."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Not "is it in sys.modules at the end?": an import that is caught, or undone, costs its time too.
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise SystemExit(f"imports {{name}}")

sys.meta_path.insert(0, Blocked())
{then}
"""
HEAVY = ("jax", "jaxlib", "mpi4py", "h5py", "zarr", "numcodecs", "numpy")
COMMAND = "import sys\nsys.argv = ['shardload', *{arguments!r}]\nfrom shardload.cli.main import main\nmain()"


def blocked(then: str) -> subprocess.CompletedProcess[str]:
    """Run a program in which none of `HEAVY` can be imported."""
    program = BLOCKED.format(names=HEAVY, then=then)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in ("info", "plan", "verify", "demo", "doctor"))]
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
