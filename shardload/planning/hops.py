"""Over which ranks do parts travel from one node to another?

Pure, like `schedule`: every rank computes the same, each for itself, at the cost of its own partners.

There are three ways. With `MESSAGES` each part goes straight to its rank. Otherwise a sender joins parts in *bundles*, and a
bundle goes to one rank of another node, a *relay*, which passes the parts on:

- `NODES`: to a relay on the node of the parts' receivers.
- `TWO_HOPS`: the nodes form a grid of about sqrt(n) rows and columns. The first hop goes along the row of the sender, to a
  relay on the node in the column of the receivers. It joins what several senders of the row send down this column, and the
  second hop goes down the column to a relay on the node of the receivers. So a rank sends to at most about 2 sqrt(n) others.

`NODES` is the same with a single row. The last hop, inside the node, goes through shared memory.

If the last row is shorter, its senders cannot pass over a node that is not there. They take one of another row, each its own,
so that this work is spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from shardload.planning.grid import IntArray

__all__ = [
    "AUTO_WAY", "BUNDLE_NBYTES", "GROUP_NBYTES", "HEAD_NBYTES", "MESSAGES", "NODES", "N_HOPS", "ROW_NBYTES",
    "SMALL_BUNDLE_NBYTES", "TWO_HOPS", "WAYS", "EvenNodes", "Hops", "ListedNodes", "NodeMap", "grid_of", "least_bundle_nbytes",
    "n_partners", "node_map",
]  # fmt: skip

N_HOPS = 3  # along a row, down a column, and inside a node whose ranks do not share memory
HEAD_NBYTES, GROUP_NBYTES, ROW_NBYTES = 16, 8, 32  # of a bundle, of a group of parts in it, of a part
BUNDLE_NBYTES = 1 << 18  # of a bundle: large enough that what a message costs does not count
SMALL_BUNDLE_NBYTES = 1 << 14  # of one that leaves, if there are many at a time
MESSAGES, NODES, TWO_HOPS = "messages", "nodes", "two hops"
WAYS = (MESSAGES, NODES, TWO_HOPS)
AUTO_WAY = "auto"


def least_bundle_nbytes(part_nbytes: int) -> int:
    """Fewest bytes of a bundle that has room for a part.

    >>> least_bundle_nbytes(101)
    160
    """
    return HEAD_NBYTES + GROUP_NBYTES + ROW_NBYTES + -(-part_nbytes // 4) * 4


def grid_of(n_nodes: int, way: str) -> tuple[int, int]:
    """Rows and columns of the grid of nodes.

    >>> grid_of(7, "nodes"), grid_of(7, "two hops"), grid_of(6, "two hops"), grid_of(2, "two hops")
    ((1, 7), (3, 3), (3, 2), (2, 1))
    """
    side = math.isqrt(n_nodes)
    n_columns = n_nodes if way == NODES else side + (n_nodes > side * side + side)  # to the nearest
    return -(-n_nodes // n_columns), n_columns


def n_partners(n_nodes: int, per_node: int, way: str) -> tuple[int, int, int]:
    """To how many ranks a rank sends bundles at most: along its row, down its column, and inside its node.

    >>> n_partners(16384, 4, "two hops"), n_partners(16384, 4, "nodes")
    ((128, 127, 3), (16383, 0, 3))
    """
    n_rows, n_columns = grid_of(n_nodes, way)
    return n_columns - (n_rows == 1), n_rows - 1, per_node - 1


class NodeMap(Protocol):
    """Which rank runs on which node. Nodes are numbered from 0, members of a node too, in the order of their ranks."""

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        ...

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        ...

    def node(self, rank: int) -> int:
        """The node of a rank."""
        ...

    def nodes(self, ranks: IntArray) -> IntArray:
        """`node` of many ranks."""
        ...

    def member(self, rank: int) -> int:
        """A rank's number among those of its node."""
        ...

    def n_members(self, node: int) -> int:
        """Number of ranks of a node."""
        ...

    def rank(self, node: int, member: int) -> int:
        """The rank of a member of a node."""
        ...


@dataclass(frozen=True)
class EvenNodes:
    """Rank ``r`` runs on node ``r // per_node``; the last node may have fewer ranks. A formula, not an array."""

    n_ranks: int
    per_node: int

    @property
    def n_nodes(self) -> int:
        """See `NodeMap`."""
        return -(-self.n_ranks // self.per_node)

    def node(self, rank: int) -> int:
        """See `NodeMap`."""
        return rank // self.per_node

    def nodes(self, ranks: IntArray) -> IntArray:
        """See `NodeMap`."""
        return ranks // self.per_node

    def member(self, rank: int) -> int:
        """See `NodeMap`."""
        return rank % self.per_node

    def n_members(self, node: int) -> int:
        """See `NodeMap`."""
        return min(self.per_node, self.n_ranks - node * self.per_node)

    def rank(self, node: int, member: int) -> int:
        """See `NodeMap`."""
        return node * self.per_node + member


class ListedNodes:
    """Ranks in any order over the nodes, as arrays.

    Parameters
    ----------
    leaders : sequence of int
        For each rank the lowest rank of its node.
    """

    def __init__(self, leaders: Sequence[int]) -> None:
        lowest, self._node = np.unique(np.asarray(leaders, dtype=np.int64), return_inverse=True)
        self.n_ranks, self.n_nodes = len(self._node), len(lowest)
        self._order = np.argsort(self._node, kind="stable")
        self._first = np.searchsorted(self._node[self._order], np.arange(self.n_nodes + 1))
        self._member = np.empty(self.n_ranks, dtype=np.int64)
        self._member[self._order] = np.arange(self.n_ranks) - self._first[self._node[self._order]]

    def node(self, rank: int) -> int:
        """See `NodeMap`."""
        return int(self._node[rank])

    def nodes(self, ranks: IntArray) -> IntArray:
        """See `NodeMap`."""
        found: IntArray = self._node[ranks]
        return found

    def member(self, rank: int) -> int:
        """See `NodeMap`."""
        return int(self._member[rank])

    def n_members(self, node: int) -> int:
        """See `NodeMap`."""
        return int(self._first[node + 1] - self._first[node])

    def rank(self, node: int, member: int) -> int:
        """See `NodeMap`."""
        return int(self._order[self._first[node] + member])


def node_map(leaders: Sequence[int]) -> NodeMap:
    """The map for ranks whose node's lowest rank is given: a formula where there is one.

    >>> node_map([0, 0, 2, 2, 4]), type(node_map([0, 1, 0, 1])).__name__
    (EvenNodes(n_ranks=5, per_node=2), 'ListedNodes')
    """
    found = np.asarray(leaders, dtype=np.int64)
    per_node = max(1, int(np.count_nonzero(found == found[0])) if len(found) else 1)
    number = np.arange(len(found))
    if (found == number // per_node * per_node).all():
        return EvenNodes(len(found), per_node)
    return ListedNodes(leaders)


@dataclass(frozen=True, eq=False)
class Hops:
    """The relays of a job.

    Parameters
    ----------
    ranks : NodeMap
        Which rank runs on which node.
    n_columns : int
        Columns of the grid of nodes: as many as nodes for one hop.

    Examples
    --------
    Seven nodes of two ranks. From rank 2, on node 1, to rank 13, on the only node of the last row:

    >>> hops = Hops.of(EvenNodes(14, 2), TWO_HOPS)
    >>> hops.n_columns, hops.n_rows, hops.first_relay(2, hops.column(6)), hops.relay(hops.first_relay(2, hops.column(6)), 6)
    (3, 3, 1, 13)
    >>> Hops.of(EvenNodes(14, 2), NODES).first_relay(2, 6)
    13
    """

    ranks: NodeMap
    n_columns: int

    @classmethod
    def of(cls, ranks: NodeMap, way: str) -> Hops:
        """The relays of one of `WAYS` that has relays."""
        return cls(ranks, grid_of(ranks.n_nodes, way)[1])

    @property
    def n_rows(self) -> int:
        """Rows of the grid of nodes. The last one may be shorter."""
        return -(-self.ranks.n_nodes // self.n_columns)

    @property
    def is_one_hop(self) -> bool:
        """True if there is a single row."""
        return self.n_columns >= self.ranks.n_nodes

    @cached_property
    def _n_last(self) -> int:
        """Nodes of the last row."""
        return self.ranks.n_nodes - (self.n_rows - 1) * self.n_columns

    def column(self, node: int) -> int:
        """The column of a node."""
        return node % self.n_columns

    def corner(self, node: int, column: int) -> int:
        """The node to which the first hop from `node` goes, for receivers in a column."""
        row = node // self.n_columns
        if row == self.n_rows - 1 and column >= self._n_last:
            row = node % self.n_columns % row
        return row * self.n_columns + column

    def relay(self, rank: int, node: int) -> int:
        """The rank of a node that relays what `rank` sends to this node. Senders are spread over the members of the node."""
        ranks = self.ranks
        return ranks.rank(node, (ranks.member(rank) + ranks.node(rank)) % ranks.n_members(node))

    # --- the first hop

    def first_relay(self, rank: int, column: int) -> int:
        """To whom a sender sends what is for a column: also for its own to the relay that joins it with the others'."""
        return self.relay(rank, self.corner(self.ranks.node(rank), column))

    def first_relays(self, rank: int) -> list[int]:
        """The relays of a sender's first hops, for each column one."""
        return [self.first_relay(rank, column) for column in range(self.n_columns)]

    def first_senders(self, rank: int) -> Iterator[int]:
        """The ranks whose first hop may go to `rank`: the inverse of `first_relays`."""
        for node in self._nodes_before(self.ranks.node(rank)):
            yield from self._relayed_by(rank, node)

    def _nodes_before(self, node: int) -> Iterator[int]:
        """The nodes whose first hop, for one column, goes to `node`."""
        columns, last = self.n_columns, self.n_rows - 1
        row, column = divmod(node, columns)
        yield from range(row * columns, min((row + 1) * columns, self.ranks.n_nodes))
        if row < last and column >= self._n_last:
            yield from range(last * columns + row, self.ranks.n_nodes, last)

    def _relayed_by(self, rank: int, node: int) -> range | Iterator[int]:
        """The ranks of a node for which `rank` is the relay of its own node."""
        ranks = self.ranks
        n = ranks.n_members(ranks.node(rank))
        return (ranks.rank(node, k) for k in range((ranks.member(rank) - node) % n, ranks.n_members(node), n))

    # --- the second hop

    def second_relays(self, rank: int) -> list[int]:
        """The relays to which `rank` passes on what comes to it in a first hop: on each other node of its column one."""
        own = self.ranks.node(rank)
        nodes = range(self.column(own), self.ranks.n_nodes, self.n_columns)
        return [self.relay(rank, node) for node in nodes if node != own]

    def second_senders(self, rank: int) -> list[int]:
        """The ranks that pass on to `rank`: the inverse of `second_relays`."""
        own = self.ranks.node(rank)
        nodes = range(self.column(own), self.ranks.n_nodes, self.n_columns)
        return [sender for node in nodes if node != own for sender in self._relayed_by(rank, node)]
