"""Did all ranks read the same array, and did it stay as it was?

A file that is replaced while ranks open it, or written while they read, would give an array of which one part is old and
another new, without any error. So each rank that reads looks at the file's size and time of last change (`Source.state`) when
it has opened it and again when it has read, and the ranks compare what they saw in the sums that they agree on in the end
anyway: a few more integers, no further message.

An array that the caller has opened, or has in memory, may be another one on each rank, under the same name and of the same
shape. Then every rank, whether it reads or not, looks at its own (`contents_of`), and they are compared in the same sums.

The comparison: with a number `h` of each of `n` ranks, ``n * sum(h * h) == sum(h) ** 2`` holds exactly when all are equal.
`h` has 20 bits, so that the sums over a million ranks fit into 64, and there are three of them.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Any

import numpy as np

from shardload.arrays.compare import sample_regions
from shardload.errors import SourceError
from shardload.formats.base import Source
from shardload.planning.grid import Grid
from shardload.planning.region import Region
from shardload.planning.selection import Selection
from shardload.transfer.checksum import checksum

__all__ = ["N_SUMS", "State", "check_same", "check_unchanged", "contents_of", "is_open", "to_sums"]

State = tuple[int, ...] | None
_N_COMPARED = 2  # size and time: what follows tells files apart on one machine only
_BITS, _N_NUMBERS = 20, 3
N_SUMS = 1 + 2 * _N_NUMBERS
_N_BOXES = 8
_FIX = "Load it again when nothing writes to it any more; write a new version beside the old one and rename it"


def is_open(handle: Any) -> bool:
    """Whether this is an array that the caller has opened or has in memory, on every rank, and no path.

    >>> is_open("data.h5"), is_open(None), is_open(np.zeros(3))
    (False, False, True)
    """
    if isinstance(handle, (str, os.PathLike)):
        return "memory://" in os.fspath(handle)  # fsspec's: each process has its own
    return handle is not None and not isinstance(handle, Source)


def contents_of(source: Source, handle: Any, selection: Selection, chunks: Grid | None) -> tuple[int, int]:
    """What tells an open array from another one: that of its file where it has one, else of its values.

    Of a NumPy array all that is selected goes in, at the speed of memory; of a memory map, or of an array in a store that no
    file belongs to, a few regions.

    Parameters
    ----------
    source : Source
        Of the array.
    handle : object
        What the caller passed.
    selection : Selection
        Which elements are loaded.
    chunks : Grid or None
        The selected array cut into the file's chunks, so that each region takes one chunk to be decoded.
    """
    state = source.state()
    if state is not None:
        return state[0], state[1]
    whole = Region.whole(selection.shape)
    if isinstance(handle, np.ndarray) and not _is_mapped(handle):
        selected = np.asarray(handle)[selection.to_file(whole).slices()]
        return selected.nbytes, checksum(np.atleast_1d(selected))
    sum_ = 0
    for region in sample_regions(whole, chunks, source.dtype.itemsize, 0, _N_BOXES):
        place = selection.to_file(region)
        values = np.empty(place.shape, dtype=source.dtype)
        source.read_into(place, values)
        sum_ = checksum(values, sum_)
    return whole.size * source.dtype.itemsize, sum_


def _is_mapped(array: Any) -> bool:
    """Whether its values are in a file, so that to look at all of them takes as long as to load them."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False


def to_sums(state: State) -> list[int]:
    """What to add up over the ranks; a rank that read nothing, or something without a state, adds nothing.

    >>> to_sums(None)
    [0, 0, 0, 0, 0, 0, 0]
    """
    if state is None:
        return [0] * N_SUMS
    digest = int.from_bytes(blake2b(repr(state[:_N_COMPARED]).encode(), digest_size=8).digest(), "little")
    numbers = [digest >> k * _BITS & ((1 << _BITS) - 1) for k in range(_N_NUMBERS)]
    return [1, *numbers, *(number * number for number in numbers)]


def check_same(name: str, sums: list[int], path: str, dataset: str, is_open: bool = False) -> None:
    """SourceError where not all ranks read the same, from the sums over all ranks. The same answer on every rank."""
    n, firsts, seconds = sums[0], sums[1 : 1 + _N_NUMBERS], sums[1 + _N_NUMBERS :]
    if all(n * second == first * first for first, second in zip(firsts, seconds, strict=True)):
        return
    if is_open:
        text = (
            f"{name}: the {n} ranks that passed this array did not pass the same one: its values, or its file, differ from "
            "rank to rank. Nothing was loaded, because it could have been a mixture. Pass the same array on every rank; "
            "shardload.scatter takes one that only one rank has, jax.make_array_from_process_local_data one piece of each"
        )
    else:
        text = (
            f"{name}: the {n} ranks that read it did not see the same file (its size, or the time of its last change). It was "
            "replaced or written while they opened it, or a machine still sees an older version, or each machine has a copy of "
            "its own: then copy it with its time (cp -p, sbcast -p, rsync -t). Nothing was loaded, because it could have been "
            f"a mixture. {_FIX}"
        )
    raise SourceError(text, path=path, dataset=dataset)


def check_unchanged(name: str, before: State, after: State, path: str, dataset: str) -> None:
    """SourceError where the file is not what it was before it was read."""
    if before is not None and after != before:
        was = "is gone" if after is None else f"had {before[0]} bytes and has {after[0]}" if after[0] != before[0] else ""
        raise SourceError(
            f"{name} changed while it was read{f' (it {was})' if was else ''}. Nothing was loaded, because it could have been "
            f"a mixture of old and new. {_FIX}",
            path=path,
            dataset=dataset,
        )
