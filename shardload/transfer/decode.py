"""How do stored numbers become the values that were asked for? Decoded by their attributes, and then cast.

A block is decoded in pieces that stay in the core's cache, so that no temporary is as large as a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shardload.planning.region import Region
from shardload.transfer.cast import cast_into
from shardload.values.decoding import Decoding

_DECODE_SIZE = 1 << 14  # elements

Array = np.ndarray[Any, Any]
# Takes the stored numbers, the array to write the values to, and the numbers' name for messages.
Convert = Callable[[Array, Array, str], None]


def conversion(decoding: Decoding | None) -> Convert:
    """The function that turns stored numbers into the loaded array's values: a cast, after decoding if there is a rule."""
    return cast_into if decoding is None else partial(decode_into, decoding)


def decode_into(decoding: Decoding, stored: Array, out: Array, name: str) -> None:
    """Decode stored numbers into `out`, which has their shape; cast them if it has another dtype than the decoded values.

    Raises
    ------
    ConfigError
        If a decoded value does not fit into `out`'s dtype.
    """
    for region in Region.whole(stored.shape).split(_DECODE_SIZE):
        index: Any = (*region.slices(), ...)
        if out.dtype == decoding.dtype:
            decoding.into(stored[index], out[index])
        else:
            cast_into(decoding.values(stored[index]), out[index], f"{name} once decoded")
