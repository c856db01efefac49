"""Where are the chunks that the HDF5 library lists? Not always where it says.

If exactly one axis of a dataset can grow, the newer rules (``libver="latest"``) index its chunks as an "extensible array". That
numbers them along the growing axis first. But ``H5Dchunk_iter`` turns these numbers into positions as if the axes were in
order. So if the growing axis is not the first one, it gives chunks the positions of others (seen in HDF5 1.14.4 and 2.0.0).
Reading values is right. A later library may list all chunks where they are, so this one is tried out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil

from shardload.formats.hdf5.in_memory import file_in_memory
from shardload.formats.hdf5.unwrapped import number_of

Place = tuple[int, ...]
_EXTENSIBLE_ARRAY = 4  # H5D_CHUNK_IDX_EARRAY


def true_place(dataset: h5py.Dataset) -> Callable[[Any], tuple[Any, ...]] | None:
    """How positions of chunks (their first elements) in the library's list, as an array for each axis, become the true ones;
    None if they are the true ones. ValueError if the list cannot be used.
    """
    chunk, most = tuple(dataset.chunks), tuple(dataset.maxshape)
    growing = [axis for axis, n in enumerate(most) if n is None]
    if len(growing) != 1 or growing[0] == 0:
        return None
    counts = [1 if n is None else max(1, -(-n // c)) for n, c in zip(most, chunk, strict=True)]
    if math.prod(counts[: growing[0]]) == 1:
        return None  # there is nothing before the growing axis, so both orders are the same
    kind = number_of("H5Dget_chunk_index_type", dataset.id)
    if kind not in (None, _EXTENSIBLE_ARRAY) or _is_in_order():
        return None
    return functools.partial(_put_right, chunk, counts, growing[0])


def _put_right(chunk: Place, counts: list[int], growing: int, place: Any) -> tuple[Any, ...]:
    """The true position of a chunk of an extensible array, or of many (arrays of positions along each axis).

    `counts` are the chunks along each axis when all axes are as long as they can be; of the growing axis it does not count.

    >>> _put_right((2, 5), [3, 1], 1, (0, 20)), _put_right((2, 5, 1), [3, 1, 4], 1, (0, 5, 3))
    ((2, 5), (2, 0, 3))
    """
    number: Any = 0
    for at, c, n in zip(place[growing:], chunk[growing:], (1, *counts[growing + 1 :]), strict=True):
        number = number * n + at // c
    true: list[Any] = [0] * len(chunk)
    for axis in reversed([axis for axis in range(len(chunk)) if axis != growing]):
        number, true[axis] = divmod(number, counts[axis])
    true[growing] = number
    return tuple(k * c for k, c in zip(true, chunk, strict=True))


@functools.cache
def _is_in_order() -> bool:
    """True if the library lists the chunks of an extensible array where they are; ValueError if neither there nor where
    `_put_right` expects them.
    """
    shape, chunk, place = (6, 4, 5), (2, 2, 1), (4, 2, 3)
    with phil, file_in_memory(libver="latest") as file:
        dataset = file.create_dataset("x", shape, "u1", maxshape=(6, None, 7), chunks=chunk)
        dataset[tuple(slice(at, at + c) for at, c in zip(place, chunk, strict=True))] = np.uint8(1)
        told: list[Any] = []
        dataset.id.chunk_iter(told.append)
    listed = tuple(told[0].chunk_offset)
    if place not in (listed, _put_right(chunk, [3, 1, 7], 1, listed)):
        raise ValueError(f"the HDF5 library lists a chunk at {listed} that is at {place}")
    return listed == place
