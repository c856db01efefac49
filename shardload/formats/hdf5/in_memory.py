"""How is an HDF5 file made that is nowhere on disk? With a name that no other has: two of one name are one file for HDF5."""

from __future__ import annotations

import itertools
from typing import Any

import h5py

_numbers = itertools.count()


def file_in_memory(**how: Any) -> h5py.File:
    """A new file in memory. `how` goes to `h5py.File`."""
    return h5py.File(f"shardload {next(_numbers)}", "w", driver="core", backing_store=False, **how)
