"""Does a rank that has nothing to do in one round begin with the next one, without harm to either?"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardload.comm.group import Group
from shardload.comm.watchdog import Watchdog
from shardload.engine.session import Round, Session
from shardload.planning.region import Region
from shardload.planning.schedule import Block, Part
from shardload.planning.staging import Staging
from shardload.transfer.buffers import Resources
from shardload.transfer.exchange import Outgoing, _Exchange
from shardload.transfer.moves import ArrayMove
from tests.unit.fakes import TABLE, FakeSource, piece_of, reader_of, rows, tune, whole

SECONDS = 10.0
ALL = rows(0, 8)


@pytest.fixture(autouse=True)
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, inline_nbytes=-1)


class InOrder:
    """The flow of an array that stays on its rank, in blocks of two rows."""

    def outgoing(self, rank: int) -> Iterator[Block]:
        return (whole(rows(k, k + 2)) for k in range(0, 8, 2))

    def incoming(self, rank: int) -> Mapping[int, list[Part]]:
        return {}

    def target(self, number: int) -> Region:
        return ALL

    def targets(self, rank: int) -> list[int]:
        return [0]


@contextmanager
def naming(number: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(f"round {number}: {error}") from error


@dataclass
class Ends:
    """Both ends of the rounds: round k reads source k."""

    sources: Sequence[FakeSource]
    rooms: list[int] = field(default_factory=list)

    def round(self, number: int, **staging: int) -> Round:
        sizes = {"n_threads": 2, "n_slots": 2, "n_pack": 1, "slot_nbytes": TABLE.nbytes} | staging
        move = ArrayMove(number, InOrder(), TABLE.dtype, naming_errors=lambda: naming(number))
        return Round([move], Staging(**sizes), is_shared=False)

    def make_room(self, moves: Sequence[ArrayMove]) -> None:
        for move in moves:
            self.rooms.append(move.array)
            move.targets = {0: piece_of(ALL)}

    def stage(self, moves: Sequence[ArrayMove], resources: Resources, opened: ExitStack) -> None:
        for move in moves:
            move.producer = opened.enter_context(reader_of(self.sources[move.array], dict(move.targets), resources=resources))

    def take(self, round_: Round) -> None: ...


@dataclass
class TwoRounds:
    """A session in which the first round lasts until a block of the second one is being read."""

    fails_in_second: bool = False

    def __post_init__(self) -> None:
        begun, first_nearly_ends = threading.Event(), threading.Event()

        def hold_up(region: Region) -> None:
            if region == rows(6, 8):  # the last block
                first_nearly_ends.set()
                assert begun.wait(SECONDS), "nothing of the second round was read while the first one lasted"

        def begin(region: Region) -> Exception | None:
            begun.set()
            return OSError("damaged") if self.fails_in_second else None

        self.ends = Ends([FakeSource(TABLE, None, hold_up), FakeSource(TABLE + 100, None, begin), FakeSource(TABLE + 200)])
        self.first, self.second = self.ends.round(0), self.ends.round(1)
        self.session = Session(Group(None), "digest", shared_nbytes=None, checksums=False)
        with self.session.errors:
            self.session.move(self.first, self.ends, self.ends, lambda: self.second if first_nearly_ends.is_set() else None)

    def values(self, round_: Round) -> Any:
        return round_.moves[0].targets[0].data


def test_blocks_of_the_next_round_are_read_while_this_one_lasts() -> None:
    """Wrong if a block were read twice, memory made twice, or the rounds exchanged their values."""
    job = TwoRounds()
    with job.session as session:
        assert not session.errors
        np.testing.assert_array_equal(job.values(job.first), TABLE)
        session.move(job.second, job.ends, job.ends)
        assert not session.errors
    np.testing.assert_array_equal(job.values(job.second), TABLE + 100)
    assert job.ends.rooms == [0, 1]
    reads = sorted(job.ends.sources[1].reads, key=lambda region: region.start)  # two threads read
    assert reads == [rows(k, k + 2) for k in range(0, 8, 2)]


def test_an_error_of_a_block_that_is_read_early_belongs_to_its_own_round() -> None:
    """Wrong if the round before failed, whose values are all there: its batches would be lost."""
    job = TwoRounds(fails_in_second=True)
    with job.session as session:
        assert not session.errors
        np.testing.assert_array_equal(job.values(job.first), TABLE)
        session.move(job.second, job.ends, job.ends)
        assert "round 1: " in str(session.errors.take()) and job.ends.rooms == [0, 1]


def test_a_round_that_was_begun_can_be_dropped() -> None:
    """Another round comes after `release` alone: its blocks would wait for the buffers of the one that was begun."""
    job = TwoRounds()
    third = job.ends.round(2)
    with job.session as session:
        session.release()
        session.move(third, job.ends, job.ends)
        assert not session.errors
    np.testing.assert_array_equal(job.values(third), TABLE + 200)

    job = TwoRounds()
    with job.session as session, pytest.raises(ValueError, match="another round is begun"):
        session.move(job.ends.round(2), job.ends, job.ends)


def test_a_round_with_other_buffers_is_not_begun() -> None:
    """Wrong if it were: the buffers that are in use would be let go."""
    ends = Ends([FakeSource(TABLE), FakeSource(TABLE + 100)])
    other, offered = ends.round(1, n_slots=3), []
    with Session(Group(None), "digest", shared_nbytes=None, checksums=False) as session:
        session.move(ends.round(0), ends, ends, lambda: offered.append(other) or other)
        assert offered and ends.rooms == [0]
        session.move(other, ends, ends)
        assert not session.errors


def test_a_rank_that_was_woken_soon_looks_again() -> None:
    """The bell can ring before the message is there. Wrong if the rank then slept as long as after many looks in vain."""
    slept: list[int] = []
    is_rung = [False, False, True, False]

    class NoChannels:
        is_empty, moves, arrivals = True, (), None

        def wait(self, bell: object, n_idle: int, longest_seconds: float) -> bool:
            slept.append(n_idle)
            return is_rung[len(slept) - 1]

        @property
        def is_done(self) -> bool:
            return len(slept) == len(is_rung)

        def check(self, is_whole: bool) -> None: ...
        def send_receipts(self, went_well: bool) -> None: ...
        def send_queued(self) -> bool:
            return False

        receive = send_queued

    watch = Watchdog(0, 1)
    watch.begin("test", SECONDS)
    group, resources, channels = SimpleNamespace(rank=0, watch=watch), SimpleNamespace(bell=None), NoChannels()
    moving = _Exchange(group, channels, resources, Outgoing([], 0))  # type: ignore[arg-type]
    moving.run(lambda: False)
    assert slept == [1, 2, 3, 1]
