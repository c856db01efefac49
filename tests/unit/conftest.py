"""What must be imported before the tests are."""

import functools

import hdf5plugin  # noqa: F401  # before netCDF4, whose HDF5 would register filters of its own in the place of these
import typer.testing

# Else each call of a command in a test makes all commands anew, which takes longer than most of the calls.
typer.testing._get_command = functools.cache(typer.testing._get_command)
