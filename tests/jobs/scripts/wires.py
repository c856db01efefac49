"""What `wrong.py` breaks on the way: a communicator and a NumPy that are right, except for one thing."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardload.comm.group import group_of
from shardload.transfer.channels import HEAD_SIZE, OFFER

NDIM = 2
AT = 2 * NDIM  # in a row of a note


class Wire:
    """A communicator that is the right one, except for what it does to what it sends.

    `change_data` gets the bytes of a message and who is to have it, and returns what is sent to whom instead. `change_note`
    gets the rows of an offer and who is to have it, and returns who has it instead.
    """

    def __init__(self, real: Any, change_data: Any, change_note: Any) -> None:
        self._real, self._change_data, self._change_note, self._keep = real, change_data, change_note, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def Isend(self, message: Any, dest: int, tag: int) -> Any:
        is_note = tag % 2
        if not is_note and self._change_data:
            data, *how = message
            changed, dest = self._change_data(bytes(data), dest)
            message = [changed, *how]
        if is_note and message[0] == OFFER and self._change_note:
            dest = self._change_note(message[HEAD_SIZE:].reshape(-1, 1 + 3 * NDIM), dest)
        self._keep.append(message)
        return self._real.Isend(message, dest=dest, tag=tag)


class Numpy:
    """NumPy, except that a copy has another first element."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def copyto(self, to: Any, what: Any, **options: Any) -> None:
        np.copyto(to, what, **options)
        to[(0,) * to.ndim] += 1


def flipped(data: bytes) -> bytes:
    """One bit of the middle changed: the last of a mantissa, so that no look at the values would find it."""
    k = len(data) // 2 // 4 * 4
    return data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :]


def flip_shared(row: Any) -> None:
    """The same where a note says that the values lie, after their checksum was taken."""
    group = group_of()
    group.node.segments[group.rank].data[row[AT]] ^= 1
