"""Which formats are there, and which of them claims a file? The first one that says so has it.

A format is imported when its turn comes, so a rank that reads HDF5 never imports zarr.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

from shardload.formats.contract.format import Format

# The modules of the formats, in the order of asking. Each has a `FORMAT`. Zarr is last: it takes any URL as a store.
_MODULES = ("shardload.formats.hdf5.file", "shardload.formats.zarr.source")


def formats() -> Iterator[Format]:
    """The formats, in the order of asking. Each is imported when it is asked for."""
    for module in _MODULES:
        yield importlib.import_module(module).FORMAT


def claiming(is_claimed: Callable[[Format], bool]) -> Format | None:
    """The first format for which `is_claimed` is true. None if there is none."""
    return next(filter(is_claimed, formats()), None)
