"""How many ranks read, and which, on a machine whose file system is known?

Without a known file system all ranks read: a core that decodes is all that a reader needs. With one, more readers are more
opens, operations and messages, and fewer are fewer streams and cores. So a few numbers are tried: a few readers on each node
(1, 2, 4, ..., all), one on every fourth node, every sixteenth, and so on. The fastest by the model is taken; of those that are
about as fast, the one with the fewest readers. Readers are spread evenly over the ranks, and so over the nodes.

Many small arrays are shared out among the readers as they are (`share_out`): a reader then opens and cuts up fewer of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardload.planning.cost import Cost
from shardload.planning.schedule import Schedule
from shardload.units import counted

__all__ = ["numbers_of_readers", "pick_readers", "readers_text", "share_out"]

_ABOUT = 1.02  # more readers are taken only if they are this much faster
_STEP = 4  # between numbers of nodes
_UNEVEN = 1.1  # the reader with the most bytes may have so many times the mean


def numbers_of_readers(n_ranks: int, per_node: int, most: int) -> list[int]:
    """The numbers to try, ascending. `most` is how many could have a block to read.

    >>> numbers_of_readers(64, 4, 1000), numbers_of_readers(64, 4, 10), numbers_of_readers(6, 4, 6)
    ([1, 4, 16, 32, 64], [1, 4, 10], [1, 2, 4, 6])
    """
    n_nodes, most = -(-n_ranks // per_node), max(1, min(n_ranks, most))
    found, n = {most}, n_nodes
    while n > 1:
        found.add(n)
        n //= _STEP
    found.add(1)
    k = 2
    while k < per_node:
        found.add(k * n_nodes)
        k *= 2
    return sorted(n for n in found if n <= most)


def pick_readers(
    numbers: Sequence[int], make: Callable[[int], Schedule], cost: Callable[[Schedule], Cost]
) -> tuple[Schedule, Cost]:
    """The schedule with the number of readers that is fastest by the model, and its cost."""
    tried = [(made := make(n), cost(made)) for n in numbers]
    limit = _ABOUT * min(found.seconds for _, found in tried)
    return next(one for one in tried if one[1].seconds <= limit)


def readers_text(n_readers: int, n_ranks: int, per_node: int) -> str:
    """Who reads, for people.

    >>> readers_text(16, 64, 4), readers_text(4, 64, 4), readers_text(5, 64, 4)
    ('16 readers, 1 on each node', '4 readers, on every 4th node', '5 readers, on different nodes')
    >>> readers_text(6, 9, 4)
    '6 readers, about 2 on each node'
    """
    n_nodes = -(-n_ranks // per_node)
    count = counted(n_readers, "reader")
    if n_readers >= n_nodes:
        few, more = n_readers // n_nodes, -(-n_readers // n_nodes)
        about = (
            "about " if few > 1 and n_ranks % per_node else ""
        )  # a last node with fewer ranks has no more readers than these
        return f"{count}, {about}{few if few == more else f'{few} or {more}'} on each node"
    if n_readers == 1:
        return count
    step = n_nodes // n_readers
    return f"{count}, on {'different nodes' if n_nodes % n_readers else 'every ' + _nth(step) + ' node'}"


def share_out(sizes: Sequence[int], n_readers: int) -> list[int | None]:
    """The reader of each of some arrays, by their bytes; None for an array that all read together.

    Each reader gets neighbours. All are None if that would leave one with much more than the others.

    >>> share_out([5] * 8, 4), share_out([5] * 9, 4)
    ([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 2, 2, 3, 3, None])
    >>> share_out([1, 1, 1, 100], 2), share_out([30, 10, 20, 20], 2)
    ([None, None, None, None], [0, 0, 1, 1])
    """
    n = len(sizes) if len(set(sizes)) > 1 else len(sizes) // n_readers * n_readers
    total, before, loads = sum(sizes[:n]), 0, [0] * n_readers
    found: list[int | None] = []
    for nbytes in sizes[:n]:
        reader = (2 * before + nbytes) * n_readers // max(1, 2 * total)  # by the middle of the array
        before += nbytes
        loads[min(reader, n_readers - 1)] += nbytes
        found.append(min(reader, n_readers - 1))
    if max(loads) * n_readers > _UNEVEN * total or not total:
        return [None] * len(sizes)
    return found + [None] * (len(sizes) - n)


def _nth(n: int) -> str:
    return "2nd" if n == 2 else "3rd" if n == 3 else f"{n}th"
