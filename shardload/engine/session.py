"""What stays open while values move between the ranks of a call, and how does a round of them go?

    session = Session(group, digest, shared_nbytes=..., checksums=...)      # on all ranks
    with session:
        session.run(rounds, source, target)         # in each round: make memory, stage, agree, exchange, take

A load is a session of one round; a save and a copy have as many as their memory cap asks for; a stream, which has no end, moves
one round after the other, and a rank with nothing to do stages blocks of the next one. This is the one place where rounds make
collective calls, but for `TargetEndpoint.take`. So a rank never waits for another while it stages or makes memory,
and what fails there is kept (`Session.errors`) until the ranks agree.

A session uses the group that it is given and nothing else that other calls share. One that goes on in the background while the
program makes other calls needs a group over a communicator of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any, Protocol, Self
from zlib import crc32

import numpy as np

from shardload.comm.group import Group
from shardload.comm.shared_memory import Segment
from shardload.planning.region import aligned
from shardload.planning.staging import Staging
from shardload.system.interruption import FirstError
from shardload.system.undo import Undo
from shardload.transfer.buffers import Resources, Slots
from shardload.transfer.channels import Channels
from shardload.transfer.counters import Counters
from shardload.transfer.exchange import Outgoing, exchange, open_channels
from shardload.transfer.moves import ArrayMove


@dataclass(frozen=True)
class Round:
    """What moves between two agreements.

    Attributes
    ----------
    moves : sequence of ArrayMove
        The arrays.
    staging : Staging
        The buffers and threads for them.
    is_shared : bool
        Whether parts may go to other ranks: then all ranks have this round with the same arrays. If not, each rank has its own.
    values : callable
        What else the target takes, when all has arrived: for a file its chunks.
    """

    moves: Sequence[ArrayMove]
    staging: Staging
    is_shared: bool
    values: Callable[[], Iterable[Any]] = tuple


_NOTHING = Round((), Staging(n_threads=1, n_slots=0, n_pack=0, slot_nbytes=0), is_shared=False)


class SourceEndpoint(Protocol):
    """Where values come from: a file, the devices of this process, or an array in memory."""

    def stage(self, moves: Sequence[ArrayMove], resources: Resources, opened: ExitStack) -> None:
        """Give each move its producer, which stages what this rank sends. `opened` ends what is begun, when all has moved."""


class TargetEndpoint(Protocol):
    """Where values go: the devices of this process, or a file."""

    def make_room(self, moves: Sequence[ArrayMove]) -> None:
        """Give each move its targets: memory for what this rank receives and keeps."""

    def take(self, round_: Round) -> None:
        """Take the values of a round. May be collective, and then all ranks agree on what failed until now."""


@dataclass
class _BegunRound:
    """A round that this rank has begun: its memory is made, and blocks are being staged. `opened` ends the staging."""

    round: Round
    outgoing: Outgoing
    opened: ExitStack = field(default_factory=ExitStack)
    errors: FirstError = field(default_factory=FirstError)

    def drop(self) -> None:
        """End it after an error, which names the cause better than one that comes up here."""
        with suppress(Exception):
            self.opened.__exit__(*sys.exc_info())


class Session:
    """The rounds of one call, on one rank. To make one is collective; a context manager, which ends its threads.

    Parameters
    ----------
    group : Group
        The ranks.
    digest : str
        What all ranks have agreed on, as text. A part of another session is never taken for one of this.
    shared_nbytes : int, optional
        Bytes of memory for staged blocks that this rank shares with those of its node; None, on all ranks, if none shares any.
    checksums : bool
        Whether each part is checksummed on both sides.

    Attributes
    ----------
    group : Group
        The ranks.
    on_progress : callable or None
        Called with the number of bytes of each part that has arrived.
    errors : FirstError
        What went wrong on this rank, until the ranks agree.
    counters : Counters
        What this rank received in all rounds.
    """

    def __init__(
        self,
        group: Group,
        digest: str,
        *,
        shared_nbytes: int | None,
        checksums: bool,
    ) -> None:
        self.group, self._digest, self._checksums = group, digest, checksums
        self.on_progress: Callable[[int], None] | None = None
        self._shared_nbytes = shared_nbytes or 0
        self._segments: Mapping[int, Segment] = {} if shared_nbytes is None else group.node.shared_memory(shared_nbytes)
        self._current: tuple[Staging, Resources] | None = None
        self._next: _BegunRound | None = None
        self._n_rounds = 0
        self.errors, self.counters = FirstError(), Counters()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.release(kind)
        self.errors.take()

    def release(self, kind: type[BaseException] | None = None) -> None:
        """End the threads, and let go of the buffers, and of a round that is begun."""
        begun, self._next = self._next, None
        if begun is not None:
            begun.opened.__exit__(kind, None, None)
        if self._current is not None:
            self._current[1].__exit__(kind)
        self._current = None

    def agree(self, counts: Sequence[int] = (0, 0, 0)) -> list[int]:
        """Raise what went wrong on any rank until now; else return the sums of three counts over the ranks. Collective.

        All agreements have as many counts, so that a rank that fails early, or leaves, answers whichever the others are at.
        """
        return self.group.agree(self.errors.take(), [*counts])

    def run(self, rounds: Iterable[Round], source: SourceEndpoint, target: TargetEndpoint) -> None:
        """Do all rounds. Collective if any is shared, or the target's `take` is."""
        for round_ in rounds:
            self.move(round_, source, target)
            target.take(round_)
        self.release()

    def run_own(self, rounds: Iterable[Round], n_rounds: int, source: SourceEndpoint, target: TargetEndpoint) -> None:
        """Do rounds of which each rank has its own number, `n_rounds`: all do as many as the rank with most. Collective."""
        n_most = -int(self.group.least_ints(np.array([-n_rounds]))[0])
        self.run(chain(rounds, repeat(_NOTHING, n_most - n_rounds)), source, target)

    def move(
        self,
        round_: Round,
        source: SourceEndpoint,
        target: TargetEndpoint,
        coming: Callable[[], Round | None] = lambda: None,
    ) -> None:
        """Move the values of a round into the memory of the target. What goes wrong is kept. Collective if it is shared.

        While this rank has nothing to do it begins with the round that `coming` gives. None: none may begin yet. If that round
        is not the next to be moved, `release` comes before.
        """
        self._n_rounds += 1
        tags = self.group.next_tags() if round_.is_shared else (0, 0)
        begun, self._next = self._next, None
        if begun is None:
            begun = self._begin(round_, source, target)
        elif begun.round is not round_:
            raise ValueError("another round is begun: a defect in shardload")

        with Undo(begun.drop):
            if (error := begun.errors.take()) is not None:
                self.errors.keep(error)
            channels: Channels | None = None
            with self.errors:
                channels = self._open_channels(begun, tags) if round_.moves and not self.errors else None
            if round_.is_shared:
                self.agree()  # a rank that cannot read or receive says so before anything is sent
            # A thread of the target may have failed since: the others expect what this rank sends all the same.
            if channels is not None:
                begin_next = partial(self._begin_next, round_, source, target, coming)
                failed, counters = exchange(self.group, channels, self._resources(round_), begun.outgoing, begin_next)
                self.counters.add(counters)
                del channels  # an error that is kept keeps the variables of its calls: see `system.garbage.let_go`
                if failed is not None:
                    self.errors.keep(failed)
                del failed
        with self.errors:  # other ranks still wait for this rank
            begun.opened.close()

    def _begin(self, round_: Round, source: SourceEndpoint, target: TargetEndpoint) -> _BegunRound:
        """Make memory for a round, and what stages its blocks. Not collective; what fails is kept."""
        begun, moves = _BegunRound(round_, Outgoing((), self.group.rank)), round_.moves
        with Undo(begun.drop), begun.errors:
            target.make_room(moves)
            if moves:
                source.stage(moves, self._resources(round_), begun.opened)
                begun.outgoing = Outgoing(moves, self.group.rank)
        return begun

    def _begin_next(
        self, round_: Round, source: SourceEndpoint, target: TargetEndpoint, coming: Callable[[], Round | None]
    ) -> bool:
        """While `round_` moves, begin with the round that is coming, or start one more of its blocks. False: nothing to do.

        It is a method, since the frame of a nested function, which an error keeps, keeps all that this refers to: see `let_go`.
        """
        begun = self._next
        if begun is None:
            following = coming()
            if following is None or (following.staging, following.is_shared) != (round_.staging, round_.is_shared):
                return False
            self._next = self._begin(following, source, target)
            return True
        with begun.errors:
            return not begun.errors and begun.outgoing.start_one()
        return False

    def _open_channels(self, begun: _BegunRound, tags: tuple[int, int]) -> Channels:
        round_ = begun.round
        seed = crc32(f"{self._digest} {self._n_rounds} {tags}".encode())
        for move in round_.moves:
            move.seed = seed
        channels = open_channels(
            self.group,
            round_.moves,
            self._resources(round_),
            tags=tags,
            checksums=self._checksums,
            on_progress=self.on_progress,
        )
        begun.opened.callback(channels.close)
        return channels

    def _resources(self, round_: Round) -> Resources:
        """Buffers and threads of a round: those of the round before, if it had the same staging."""
        staging, segments = round_.staging, self._segments if round_.is_shared else {}
        if self._current is not None:
            if self._current[0] == staging and self._current[1].segments == segments:
                return self._current[1]
            self.release()
        segment, slots_nbytes = segments.get(self.group.rank), staging.n_slots * aligned(staging.slot_nbytes)
        shared = segment.data if segment is not None and self._shared_nbytes else None
        resources = Resources(
            Slots(staging.n_slots, staging.slot_nbytes, shared),
            None if segment is None else segment.bell,
            staging.n_threads,
            staging.batch_nbytes,
            pack_slots=Slots(staging.n_pack, staging.slot_nbytes, None if shared is None else shared[slots_nbytes:]),
            segments=segments,
        )
        self._current = staging, resources
        return resources


def shared_nbytes(staging: Staging) -> int:
    """Bytes of shared memory for the buffers of a rank that sends something."""
    return staging.n_blocks * aligned(staging.slot_nbytes)
