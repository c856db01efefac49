"""What does it cost to send parts to other nodes, as messages or over relays, and which way should be taken?

Pure, like `cost`, which asks. The counts are for equal shares: so many parts, of so many senders, for so many receivers. For
each way of `hops.WAYS`, `way_costs` counts messages and partners, and estimates the seconds of the busiest rank:

- As messages, each part costs both of its ends a message.
- Over relays, a part costs its sender a row in a bundle, each relay that it passes a row too, and its receiver a copy; a bundle
  costs about as much as a few messages, at either end. Bytes and rows go over the network once, or nearly twice.

`choose_way` takes messages, the simplest way, unless another is clearly faster: parts that are few, or large, go straight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardload.planning.hops import BUNDLE_NBYTES, MESSAGES, NODES, ROW_NBYTES, SMALL_BUNDLE_NBYTES, TWO_HOPS, grid_of
from shardload.planning.rates import WIRE_RATE
from shardload.units import format_nbytes, number_text

__all__ = ["Sending", "WayCost", "choose_way", "way_costs"]

_PART_SECONDS = 3e-5  # of a message with a part, at each end, mostly Python
# Over relays, of each part (docs/design/exchange.md), and of a bundle at each end.
_ROW_SECONDS, _PASS_SECONDS, _TAKE_SECONDS, _BUNDLE_SECONDS = 2e-6, 1e-5, 2e-5, 1e-4
_ROOM_NBYTES = 31 << 20  # for bundles that are being filled, with the usual staging cap
# Relays are taken only if they are so much faster, and save so many seconds: the model is not more accurate than that.
_MARGIN, _LEAST_SAVED_SECONDS = 0.7, 0.01


@dataclass(frozen=True, slots=True)
class Sending:
    """What is sent between nodes.

    Attributes
    ----------
    parts : float
        Number of parts.
    nbytes : float
        Their bytes.
    n_senders, n_receivers : int
        Ranks that send, and that receive.
    blocks_of_sender : int
        Blocks of a sender, one after the other.
    n_ranks, per_node : int
        All ranks, and those of a node.
    latency : float
        Seconds of a message of the network.
    """

    parts: float
    nbytes: float
    n_senders: int
    n_receivers: int
    blocks_of_sender: int
    n_ranks: int
    per_node: int
    latency: float = 0.0

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return -(-self.n_ranks // self.per_node)


@dataclass(frozen=True, slots=True)
class WayCost:
    """What one way costs.

    Attributes
    ----------
    way : str
        One of `hops.WAYS`.
    seconds : float
        Of the busiest rank's core.
    messages : float
        Messages with values between nodes, and bundles, in the whole job.
    partners : int
        Ranks that the busiest sender or relay sends to.
    message_nbytes : float
        Mean bytes of the messages of senders.
    between_nbytes : float
        Bytes that go from one node to another, counted each time.
    """

    way: str
    seconds: float
    messages: float
    partners: int
    message_nbytes: float
    between_nbytes: float


def way_costs(sending: Sending, ways: Sequence[str]) -> list[WayCost]:
    """The cost of each of some ways."""
    count = {MESSAGES: _as_messages, NODES: _by_node, TWO_HOPS: _by_two_hops}
    return [count[way](sending) for way in ways]


def choose_way(costs: Sequence[WayCost]) -> tuple[WayCost, str]:
    """The way to take, and why. The first is the simplest."""
    simplest = costs[0]
    best = min(costs, key=lambda cost: cost.seconds)
    if best.seconds < _MARGIN * simplest.seconds and simplest.seconds - best.seconds > _LEAST_SAVED_SECONDS:
        return best, (
            f"{_count(best)} in place of {simplest.messages:,.0f} messages of {format_nbytes(int(simplest.message_nbytes))}, "
            f"{simplest.partners:,} partners, {number_text(simplest.seconds, 2)} s"
        )
    if simplest.way != MESSAGES:
        return simplest, _count(simplest)
    return simplest, f"{_count(simplest)}; relays would not be clearly faster" if len(costs) > 1 else _count(simplest)


def _count(cost: WayCost) -> str:
    return (
        f"{cost.messages:,.0f} messages of {format_nbytes(int(cost.message_nbytes))}, each rank with up to {cost.partners:,} "
        f"partners, {number_text(cost.seconds, 2)} s"
    )


def _as_messages(s: Sending) -> WayCost:
    end = max(1, min(s.n_senders, s.n_receivers))
    seconds = (s.nbytes / WIRE_RATE + s.parts * max(_PART_SECONDS, s.latency)) / end
    partners = min(max(0, s.n_ranks - s.per_node), math.ceil(s.parts / max(1, s.n_senders)))
    return WayCost(MESSAGES, seconds, s.parts, partners, s.nbytes / max(1, s.parts), s.nbytes)


def _bundles(n_partners: float, nbytes: float, n_times: int) -> float:
    """Bundles that a rank sends to so many partners: full ones, at least one for each partner.

    If there is no room for a bundle for each partner at a time, each block needs its own.
    """
    if n_partners * SMALL_BUNDLE_NBYTES > _ROOM_NBYTES:
        return max(n_partners * n_times, nbytes / BUNDLE_NBYTES)
    room = min(BUNDLE_NBYTES, max(SMALL_BUNDLE_NBYTES, _ROOM_NBYTES / max(1, n_partners)))
    return max(n_partners, nbytes / room)


def _by_node(s: Sending) -> WayCost:
    senders, receivers, relays = max(1, s.n_senders), max(1, s.n_receivers), max(1, s.n_ranks)
    nbytes, message = s.nbytes + ROW_NBYTES * s.parts, max(_BUNDLE_SECONDS, s.latency)
    partners = min(max(0, s.n_nodes - 1), math.ceil(s.parts / senders))
    bundles = _bundles(partners, nbytes / senders, s.blocks_of_sender)
    sender = s.parts / senders * _ROW_SECONDS + bundles * message + nbytes / senders / WIRE_RATE
    relay = s.parts / relays * _PASS_SECONDS + senders * bundles / relays * message + nbytes / relays / WIRE_RATE
    receiver = s.parts / receivers * _TAKE_SECONDS
    total = senders * bundles
    return WayCost(NODES, sender + relay + receiver, total, partners, nbytes / max(1, total), nbytes)


def _by_two_hops(s: Sending) -> WayCost:
    rows, columns = grid_of(s.n_nodes, TWO_HOPS)
    senders, receivers, ranks = max(1, s.n_senders), max(1, s.n_receivers), max(1, s.n_ranks)
    nbytes, message = s.nbytes + ROW_NBYTES * s.parts, max(_BUNDLE_SECONDS, s.latency)
    corners = min(ranks, senders * columns)
    first = _bundles(columns, nbytes / senders, s.blocks_of_sender)
    per_corner = -(-s.blocks_of_sender * senders * columns // corners)
    second = _bundles(rows - 1, nbytes / corners * (rows - 1) / rows, per_corner)
    sender = s.parts / senders * _ROW_SECONDS + first * message + nbytes / senders / WIRE_RATE
    corner = (
        s.parts / corners * _PASS_SECONDS + (senders * first / corners + second) * message + 2 * nbytes / corners / WIRE_RATE
    )
    relay = s.parts / ranks * _PASS_SECONDS + corners * second / ranks * message + nbytes / ranks / WIRE_RATE
    receiver = s.parts / receivers * _TAKE_SECONDS
    total = senders * first + corners * second + (ranks - corners) * (rows - 1)  # a rank that passes nothing on says so
    crossing = nbytes * ((columns - 1) / columns + (rows - 1) / rows)
    partners = max(columns, rows - 1)
    return WayCost(TWO_HOPS, sender + corner + relay + receiver, total, partners, nbytes / max(1, senders * first), crossing)
