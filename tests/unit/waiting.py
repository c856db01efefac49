"""Ranks that wait for each other: their watches, with a clock and messages that the test turns by hand.

At each tick the clock goes on by a quarter of a beat, and every rank that is not held up looks. What one sends another can
take from the next turn on.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from shardload.comm.heartbeat import NoteMailbox
from shardload.comm.watchdog import Watchdog, beat_seconds
from shardload.errors import StallError

TIMEOUT = 40.0
BEAT = beat_seconds(TIMEOUT, 4)
TICK = BEAT / 4


class Post:
    """What is under way between all ranks."""

    def __init__(self, size: int) -> None:
        self.boxes: list[deque[tuple[int, str]]] = [deque() for _ in range(size)]
        self.n_sent = 0


class FakeMailbox(NoteMailbox):
    def __init__(self, post: Post, rank: int) -> None:
        self.post, self.rank, self.flushed = post, rank, False

    def send(self, rank: int, message: dict[str, Any]) -> None:
        assert rank != self.rank
        self.post.n_sent += 1
        self.post.boxes[rank].append((self.rank, json.dumps(message)))  # as text: nothing else could be sent

    def receive(self) -> Iterator[tuple[int, dict[str, Any]]]:
        box = self.post.boxes[self.rank]
        for _ in range(len(box)):
            rank, text = box.popleft()
            yield rank, json.loads(text)

    def flush(self) -> None:
        self.flushed = True


class Job:
    """Some ranks in one call."""

    def __init__(self, size: int = 4, timeout: float | None = TIMEOUT, begins: bool = True) -> None:
        self.now, self.size, self.timeout = 1000.0, size, timeout
        self.post = Post(size)
        self.mailboxes = [FakeMailbox(self.post, rank) for rank in range(size)]
        self.left: list[tuple[int, float]] = []
        self.departed: dict[int, int] = {}
        self.watches = [
            Watchdog(
                rank,
                size,
                self.mailboxes[rank],
                clock=lambda: self.now,
                on_stall=lambda s, r=rank: self.left.append((r, s)),  # type: ignore[misc]
                departed=lambda: self.departed,
            )
            for rank in range(size)
        ]
        self.raised: dict[int, StallError] = {}
        self.held: set[int] = set()
        if begins:
            self.begin()

    def begin(self, *absent: int) -> None:
        for rank, watch in enumerate(self.watches):
            if rank not in absent:
                watch.begin("'f.h5'", self.timeout)
        self.held |= set(absent)

    def tick(self, seconds: float = TICK) -> None:
        self.now += seconds
        for rank, watch in enumerate(self.watches):
            if rank in self.held or rank in self.raised:
                continue
            try:
                watch.look()
            except StallError as error:
                self.raised[rank] = error

    def wait(self, seconds: float, each: Callable[[], object] = lambda: None) -> None:
        end = self.now + seconds
        while self.now < end:
            each()
            self.tick()

    def check(self, ranks: set[int], late: int | None, *parts: str) -> str:
        """All of these have raised the same, and nobody else; how it reads."""
        assert set(self.raised) == ranks
        (text,) = {str(error) for error in self.raised.values()}
        assert {(type(error), error.rank) for error in self.raised.values()} == {(StallError, late)}
        for part in parts:
            assert part in text
        return text
