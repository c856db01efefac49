"""On which machines and cores do the ranks of a group run?"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardload.comm.agreement import Agreement, digest_of
from shardload.comm.shared_memory import Node
from shardload.system.memory_limit import limit_nbytes

UNKNOWN_NBYTES = 1 << 62  # of memory, if nothing says how much there is


@dataclass(frozen=True)
class Topology:
    """The machines and cores that the ranks of a group run on.

    Attributes
    ----------
    leaders : tuple of int
        For each rank the lowest rank on its machine: equal for ranks on the same machine.
    n_threads : int
        Cores that a rank has for itself (minimum over the ranks; 1 if ranks share cores).
    n_cores : int
        Cores that the ranks of a machine have together (minimum over the machines).
    memory_nbytes : int
        Bytes of memory that a rank may use at most (minimum over the ranks): its share of its machine's, and of limits.
    """

    leaders: tuple[int, ...]
    n_threads: int
    n_cores: int
    memory_nbytes: int = field(default=UNKNOWN_NBYTES, compare=False)

    @cached_property
    def ranks_per_node(self) -> int:
        """Number of ranks on the machine that has most."""
        return max(Counter(self.leaders).values())

    @cached_property
    def n_nodes(self) -> int:
        """Number of machines."""
        return len(set(self.leaders))


def pretended_node(rank: int) -> int | None:
    """The machine that a rank is to be treated as being on, to measure or test traffic between machines; None: its own.

    From SHARDLOAD_RANKS_PER_NODE: the number of consecutive ranks of one machine, or for each rank the number of its machine.

    >>> os.environ["SHARDLOAD_RANKS_PER_NODE"] = "2"
    >>> [pretended_node(rank) for rank in range(4)]
    [0, 0, 1, 1]
    >>> os.environ["SHARDLOAD_RANKS_PER_NODE"] = "0,1,0,1"
    >>> [pretended_node(rank) for rank in range(4)]
    [0, 1, 0, 1]
    >>> del os.environ["SHARDLOAD_RANKS_PER_NODE"]
    """
    given = os.environ.get("SHARDLOAD_RANKS_PER_NODE", "").split(",")
    if not all(one.isdigit() for one in given):
        return None
    numbers = [int(one) for one in given]
    if len(numbers) == 1:
        return rank // numbers[0] if numbers[0] else None
    return numbers[rank] if rank < len(numbers) else None


def find_topology(ranks: Agreement, node: Node) -> Topology:
    """Find out what the ranks run on. Collective."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    digest = np.array([digest_of(repr(cores)) >> 1], dtype=np.int64)
    everyone = node.collectives.gather(digest)[:, 0]
    n_alike = int((everyone == digest[0]).sum())  # ranks that are bound to different cores do not share them
    leaders = ranks.gather_int(node.ranks[0])
    n_threads = int(ranks.gather_int(max(1, len(cores) // n_alike)).min())
    n_ranks = int((leaders == leaders[ranks.rank]).sum())
    memory = min(limit_nbytes(n_ranks), UNKNOWN_NBYTES)
    n_cores, memory_nbytes = ranks.gather_ints([max(1, len(cores) * n_ranks // n_alike), int(memory)]).min(axis=0).tolist()
    return Topology(tuple(int(v) for v in leaders), n_threads, n_cores, memory_nbytes)
