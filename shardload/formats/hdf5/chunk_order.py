"""Where are the chunks that the HDF5 library lists? Not always where it says.

If exactly one axis of a dataset can grow, the newer rules (``libver="latest"``) index its chunks as an "extensible array". That
numbers them along the growing axis first. But ``H5Dchunk_iter`` and ``H5Dget_chunk_info`` turn these numbers into positions as
if the axes were in order. So if the growing axis is not the first one, they give chunks the positions of others, inside of the
dataset or outside of it (seen in HDF5 1.14.4 and 2.0.0). Reading values is right, and so is ``H5Dread_chunk``.

1. `true_place` says for which datasets that matters, and puts a position right.
2. `_is_in_order` tries out what the library that is here does: a later one may list all chunks where they are.
3. `is_listed` is ``H5Dget_chunk_info_by_coord``, which searches the same list, with the right positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil

from shardload.formats.hdf5.in_memory import file_in_memory
from shardload.formats.hdf5.unwrapped import number_of

__all__ = ["PutRight", "UnknownOrderError", "is_listed", "is_over_edge", "true_place"]

Place = tuple[int, ...]
PutRight = Callable[[Any], tuple[Any, ...]]  # of one position, or of arrays of them, one for each axis
_EXTENSIBLE_ARRAY = 4  # H5D_CHUNK_IDX_EARRAY


class UnknownOrderError(ValueError):
    """The library lists chunks in places that are not understood."""


def is_over_edge(place: Sequence[int], chunk: Sequence[int], shape: Sequence[int]) -> bool:
    """True if a chunk that begins at `place` reaches over the array's edge.

    >>> is_over_edge((4, 0), (4, 3), (8, 6)), is_over_edge((4, 3), (4, 4), (8, 6))
    (False, True)
    """
    return any(at + c > end for at, c, end in zip(place, chunk, shape, strict=True))


def true_place(dataset: h5py.Dataset) -> PutRight | None:
    """How the position of a chunk (its first element) in the library's list becomes the true one; None if it is the true one.

    Raises
    ------
    UnknownOrderError
        If the list cannot be used.
    """
    chunk, most = tuple(dataset.chunks), tuple(dataset.maxshape)
    growing = [axis for axis, n in enumerate(most) if n is None]
    if len(growing) != 1 or growing[0] == 0:
        return None
    counts = [1 if n is None else max(1, -(-n // c)) for n, c in zip(most, chunk, strict=True)]
    if math.prod(counts[: growing[0]]) == 1:
        return None  # there is nothing before the growing axis, so both orders are the same
    kind = _kind_of_index(dataset.id)
    if kind not in (None, _EXTENSIBLE_ARRAY) or _is_in_order():
        return None
    if kind is None:
        raise UnknownOrderError("the HDF5 library does not say how it numbers the chunks, and lists some in wrong places")
    return functools.partial(_put_right, chunk, counts, growing[0])


def is_listed(dataset: h5py.Dataset, place: Place) -> bool:
    """True if the library has a stored chunk at a position. Slow: it goes through the list of all. Raises as `true_place`."""
    put_right = true_place(dataset)
    if put_right is None:
        return dataset.id.get_chunk_info_by_coord(place).byte_offset is not None
    found: list[Any] = []

    def look(one: Any) -> bool | None:
        if put_right(one.chunk_offset) == place:
            found.append(one)
        return True if found else None

    with phil:
        dataset.id.chunk_iter(look)
    return bool(found)


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
    """True if the library lists the chunks of an extensible array where they are; UnknownOrderError if neither there nor where
    `_put_right` expects them.
    """
    shape, chunk, counts = (6, 4, 5), (2, 2, 1), [3, 1, 7]
    places: tuple[Place, ...] = ((4, 0, 0), (0, 2, 0), (2, 2, 4), (4, 2, 3))
    said: list[Place] = []
    with phil, file_in_memory(libver="latest") as file:
        for place in places:
            one = file.create_dataset(str(place), shape, "u1", maxshape=(6, None, 7), chunks=chunk)
            one[tuple(slice(at, at + c) for at, c in zip(place, chunk, strict=True))] = np.uint8(1)
            one.id.chunk_iter(lambda stored: said.append(tuple(stored.chunk_offset)))
    if tuple(said) == places:
        return True
    if tuple(_put_right(chunk, counts, 1, place) for place in said) == places:
        return False
    raise UnknownOrderError(f"the HDF5 library lists chunks at {said} that are at {list(places)}")


def _kind_of_index(identifier: Any) -> int | None:
    """The number of the kind of a dataset's index of chunks; None if the library does not say."""
    return number_of("H5Dget_chunk_index_type", identifier)
