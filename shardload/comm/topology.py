"""What do the ranks of a group run on?"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

__all__ = ["Machine", "Node", "pretended_ranks_per_node"]


@dataclass(frozen=True)
class Node:
    """The ranks of a group that share this rank's machine: their communicator (None without MPI) and ranks, ascending."""

    comm: Any
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """What the ranks of a group run on.

    Attributes
    ----------
    leaders : tuple of int
        For each rank the lowest rank on its machine: equal for ranks on the same one.
    n_threads : int
        Cores that a rank has for itself (the least of all ranks; 1 where ranks share cores).
    n_cores : int
        Cores that the ranks of a machine have together (the least of all machines).
    """

    leaders: tuple[int, ...]
    n_threads: int
    n_cores: int

    @property
    def ranks_per_node(self) -> int:
        """Ranks on the fullest machine."""
        return max(Counter(self.leaders).values())


def pretended_ranks_per_node() -> int:
    """SHARDLOAD_RANKS_PER_NODE: every so many ranks count as a machine, to measure or test what happens between."""
    text = os.environ.get("SHARDLOAD_RANKS_PER_NODE", "")
    return int(text) if text.isdigit() else 0
