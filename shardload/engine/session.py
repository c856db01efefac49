"""What stays open while values move between the ranks of a call? Their messages, shared memory, staging buffers and threads.

    session = Session(group, digest, ...)      # on all ranks
    for each round:
        session.begin_round()                  # on all ranks, also on one that has failed
        session.move(moves)                    # on all ranks of the round, when all are ready

A load is a session of one round. A save and a copy have as many rounds as their memory cap asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from zlib import crc32

from shardload.comm.group import Group
from shardload.comm.shared_memory import Bell, Segment
from shardload.planning.blocks import aligned
from shardload.planning.staging import Staging
from shardload.transfer.buffers import Slots
from shardload.transfer.exchange import Buffers, Moved, exchange
from shardload.transfer.moves import ArrayMove
from shardload.transfer.resources import Resources

__all__ = ["Session"]

_NO_TAGS = (0, 0, 0)  # of a round without messages
