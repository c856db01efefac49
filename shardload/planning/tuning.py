"""Which sizes decide how a load is done, and why these?

None of them changes what is loaded, only how fast. A job takes them once, when it is asked for, and hands them down, so that
all of it goes by the same ones. Every rank of a job must have the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Tuning", "default_tuning", "tuned"]


@dataclass(frozen=True)
class Tuning:
    """The sizes; the defaults were measured.

    Attributes
    ----------
    inline_nbytes : int
        Blocks up to this size are read by the thread that also calls MPI: handing one to another thread takes longer.
    min_chunk_nbytes : int
        Smaller chunks are read by the format's own library, a block at a time. One by one from Python they cost more than the
        library's lock does.
    worth_sharing_nbytes : int
        Smaller blocks go to ranks of the same machine as messages: MPI has them there in microseconds.
    small_nbytes : int
        The values of an array up to this size come to all ranks with its metadata: that takes less than to open a file.
    small_chunk_nbytes : int
        Unless it lies in a larger chunk or shard than this: a chunk is decoded whole, and `staging` is not asked before.
    block_nbytes, block_between_nodes_nbytes : int
        Cap on a block where all ranks are on one machine, and where they are not. Large enough that a read is efficient, small
        enough that reading and sending overlap. Inside a machine parts need no messages of their own, and smaller blocks stay
        in the cores' caches; between machines there should be few messages.
    """

    inline_nbytes: int = 1 << 14
    min_chunk_nbytes: int = 1 << 15
    worth_sharing_nbytes: int = 1 << 16
    small_nbytes: int = 1 << 14
    small_chunk_nbytes: int = 1 << 20
    block_nbytes: int = 4 << 20
    block_between_nodes_nbytes: int = 16 << 20


_default = Tuning()


def default_tuning() -> Tuning:
    """What a job goes by that is asked for now."""
    return _default


@contextmanager
def tuned(**changes: Any) -> Iterator[Tuning]:
    """Jobs that are asked for meanwhile, by any thread, go by other sizes: for tests and measurements.

    >>> with tuned(inline_nbytes=0):
    ...     default_tuning().inline_nbytes
    0
    >>> default_tuning() == Tuning()
    True
    """
    global _default
    before = _default
    _default = replace(before, **changes)
    try:
        yield _default
    finally:
        _default = before
