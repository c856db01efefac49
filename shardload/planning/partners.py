"""Which rank reads back what a rank has written? Another rank, on another node where that is possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def plan_partners(leaders: Sequence[int]) -> list[int]:
    """For each rank, the rank that reads back what it wrote. Each rank reads what one other rank wrote.

    Parameters
    ----------
    leaders : sequence of int
        For each rank a number of its node (`comm.topology.Topology.leaders`).

    Examples
    --------
    Two nodes with two ranks each; three ranks of one node and one of another; one rank alone:

    >>> plan_partners([0, 0, 2, 2]), plan_partners([0, 0, 0, 3]), plan_partners([0])
    ([2, 3, 0, 1], [3, 0, 1, 2], [0])
    """
    n, of_node = len(leaders), Counter(leaders)
    # In this order a step as long as the largest node leads out of every node, or, if one node has more than half of the ranks,
    # out of it as often as that is possible.
    order = sorted(range(n), key=lambda rank: (-of_node[leaders[rank]], leaders[rank], rank))
    most = max(of_node.values())
    step = most if most < n else 1
    found = [0] * n
    for k, rank in enumerate(order):
        found[rank] = order[(k + step) % n]
    return found
