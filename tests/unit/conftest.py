"""What must be imported before the tests are, and processes that start at once."""

import functools
import subprocess
from types import SimpleNamespace

import hdf5plugin  # noqa: F401  # before netCDF4, whose HDF5 would register filters of its own in the place of these
import pytest
import typer.testing

# Else each call of a command in a test makes all commands anew, which takes longer than most of the calls.
typer.testing._get_command = functools.cache(typer.testing._get_command)


@functools.cache
def _start_one() -> None:
    """A helper process, so that the process is there of which all others are copies."""
    from shardload.formats.access import Access, Limits
    from shardload.formats.untrusted import UntrustedFile

    with UntrustedFile("none.h5", Access(untrusted=Limits())) as file:
        file.state()


@pytest.fixture
def quick_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helper processes of untrusted files are copies of one that has imported h5py and Zarr, which takes each a quarter of a
    second and more. Not for tests of how they start, of what they are as processes, or of their memory."""
    from shardload.formats import untrusted as helper
    from tests.unit.copies import copy_of_a_helper

    process = SimpleNamespace(Popen=copy_of_a_helper, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(helper, "subprocess", process)
    _start_one()
