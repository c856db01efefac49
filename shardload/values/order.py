"""Does a coordinate go on in one direction? Searches by its values, and whoever joins files or adds rows, rely on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def direction_of(blocks: Sequence[Array]) -> bool | None:
    """True if the values of each block rise, False if they fall, None if they have no direction in common.

    Blocks of one value each go from the first to the second.

    >>> direction_of([np.array([1, 2]), np.array([3])]), direction_of([np.array([3]), np.array([2])])
    (True, False)
    """
    blocks = [block for block in blocks if len(block)]
    if any(block.dtype.kind not in "iuf" for block in blocks) or not blocks:
        return None
    if all(len(block) == 1 for block in blocks):
        return len(blocks) < 2 or bool(blocks[1][0] > blocks[0][0])
    for rises in (True, False):
        if all(first_break(block, rises) is None for block in blocks):
            return rises
    return None


def first_break(values: Array, rises: bool) -> int | None:
    """The position of the first value that does not lie beyond the one before it; None if all do.

    >>> first_break(np.array([0.28, 0.30, 0.28]), True)
    2
    """
    goes_on = values[1:] > values[:-1] if rises else values[1:] < values[:-1]
    return None if goes_on.all() else int(np.argmin(goes_on)) + 1
