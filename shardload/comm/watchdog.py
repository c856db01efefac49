"""Do the ranks still make progress? If not, which rank is late, and at what?

Every rank calls `Watchdog.look` in each iteration of each wait, which costs a look at the clock. In intervals, called beats:

1. A rank that waits sends rank 0, the monitor, its state: a count that grows with its progress, its phase, and what it is
   reading (a thread may hang in that read while the rank itself still answers).
2. The monitor answers each beat and stores the state. If no rank's count has grown for `timeout` seconds, counted in its own
   beats, it decides which ranks are late, and sends the decision to all ranks.
3. A rank whose beats are not answered for that long and a few beats more decides that the monitor is late, and tells all ranks.
4. A rank that reached the end of its program without making the call will never make it. As soon as this is known, the call
   fails.
5. A rank that makes or receives a decision raises it, now and at each later call, because the ranks are out of step for good.
6. A rank that leaves a call by an error which only it has says so to all. They raise that, and can go on with another group.

Long before a decision, if there is no progress for a while, one warning names the ranks that the others wait for: by rank 0,
or by rank 1 if rank 0 is one of them. (A rank that has left a stream early warns itself: nobody else may know of it.)

Time is counted in beats, not seconds, so that a process that was itself stopped for a while blames no other. Nothing is sent
before the first beat is due. A `NoteMailbox` carries the messages. A process alone has none. The message of a stall says which
ranks are late, at what, and what to do; it is the same on every rank.

It starts no thread, does not sleep, and knows no MPI.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from shardload.comm.heartbeat import NoteMailbox
from shardload.comm.shared_errors import message_of, share
from shardload.errors import StallError
from shardload.units import counted, first_ranks

NOTICE_SECONDS = 20.0  # without progress, until the warning
_MOST_NAMED = 4
_DEAD = "The call has failed, and these processes can make no call together any more: end the job"
_ADVICE = (
    "Look whether the late process still runs, and where (py-spy dump --pid ...), and whether its file system answers; all "
    f"ranks must make the call. {_DEAD}. If it was only slow, pass a longer timeout= (in seconds; None waits for ever)"
)


@dataclass(frozen=True)
class RankState:
    """The state of a rank.

    Attributes
    ----------
    call, count : int
        Number of the call, and a count of the progress in it.
    phase : str
        Phase of the call.
    doing : str
        What its threads have in hand, such as "reading chunk (1, 2) of '/x' in 'f.h5'"; empty: nothing.
    """

    call: int
    count: int
    phase: str = ""
    doing: str = ""


def describe_ranks(absent: Sequence[int], lost: Mapping[int, RankState], heard: Mapping[int, RankState]) -> str:
    """Describe what each rank does in a call in which nothing moves.

    `absent`: ranks that sent nothing in this call. `lost`: the last states of ranks that send nothing any more. `heard`: the
    states of the others.

    >>> describe_ranks([1, 2], {}, {0: RankState(1, 1, "metadata")})
    'ranks 1, 2 did not come to this call, or are held up before the first wait in it; 1 other rank waits (phase: metadata)'
    """
    parts = []
    if absent:
        parts.append(f"{first_ranks(absent)} did not come to this call, or {_are(absent)} held up before the first wait in it")
    for phase in dict.fromkeys(state.phase for state in lost.values()):
        ranks = [rank for rank, state in lost.items() if state.phase == phase]
        parts.append(f"{first_ranks(ranks)} {_are(ranks)} held up or gone: not heard of any more (last phase: {phase})")
    doing = {rank: state.doing for rank, state in heard.items() if state.doing}
    parts += [f"rank {rank} is {activity}" for rank, activity in [*doing.items()][:_MOST_NAMED]]
    if len(doing) > _MOST_NAMED:
        parts.append(f"{len(doing) - _MOST_NAMED} more ranks are reading or writing")
    phases = [state.phase for state in heard.values() if not state.doing]
    other = "other " if parts else ""
    for phase in dict.fromkeys(phases):
        n = phases.count(phase)
        parts.append(f"{counted(n, other + 'rank')} wait{'s' * (n == 1)} (phase: {phase})")
    return "; ".join(parts)


def stall_text(title: str, timeout: float, ranks: str) -> str:
    """The error message of a stalled call: which call it is, the seconds without progress, and who is late.

    >>> wait, read = RankState(1, 2, "exchange"), RankState(1, 3, "exchange", "reading chunk (0, 1) of '/x' in 'f.h5'")
    >>> print(stall_text("'f.h5'", 30, describe_ranks([], {}, {0: wait, 1: wait, 2: read})))  # doctest: +ELLIPSIS
    nothing has moved for 30 s (call: 'f.h5'): rank 2 is reading chunk (0, 1) of '/x' in 'f.h5'; 2 other ranks wait (phase:
    exchange). ...
    """
    return f"nothing has moved for {timeout:g} s (call: {title}): {ranks}. {_ADVICE}"


def notice_text(title: str, seconds: float, ranks: str, timeout: float | None) -> str:
    """The warning long before a call fails.

    >>> print(notice_text("'f.h5'", 20, "2 ranks wait", 900))
    nothing has moved for 20 s (call: 'f.h5'): 2 ranks wait. All ranks must make the call. It fails after 900 s (timeout=)
    """
    fails = "It waits for ever (timeout=None)" if timeout is None else f"It fails after {timeout:g} s (timeout=)"
    return f"nothing has moved for {seconds:g} s (call: {title}): {ranks}. All ranks must make the call. {fails}"


def departed_text(title: str, ranks: Sequence[int]) -> str:
    """The error message if programs of other ranks have ended.

    >>> print(departed_text("'f.h5'", [1, 3]))  # doctest: +ELLIPSIS
    ranks 1, 3 have come to the end of their program, and never make the call in which others wait for them: 'f.h5'. ...
    """
    is_one = len(ranks) == 1
    ended, them = ("has come to the end of its program", "it") if is_one else ("have come to the end of their program", "them")
    return (
        f"{first_ranks(ranks)} {ended}, and never make{'s' * is_one} the call in which others wait for {them}: {title}. All "
        "ranks must make the same calls: look for an `if` around it, or for what ended that program (sys.exit(), return). "
        f"{_DEAD}"
    )


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


_log = logging.getLogger("shardload")
_BEATS, _LONGEST_BEAT_SECONDS = 8, 5.0  # beats in a timeout; longest beat (of up to 5000 ranks)
_RANKS_A_SECOND = 1000  # ranks whose beats the monitor can handle beside its own work
_SILENT_BEATS = 3  # beats without a message: one may have to wait for the monitor's next beat
_LATE_BEATS = 6  # more than the monitor needs, so that its own decision comes first
_LEARN_BEATS = 3  # until every waiting rank has looked
_LONGEST_NAME = 500  # characters, so that a beat stays a short message
_BEAT, _ALIVE, _STALLED, _LEFT = "beat", "alive", "stalled", "left"
_NOTICE_BEATS = 2  # progress is sent at the next beat, and read at the monitor's next beat
_NO_MONITOR = "nothing was heard of rank 0, which watches over the others"
_FIRST, _SOME = "the first one", "not all ranks of this communicator have made their first call"
_LONGEST_STEP_SECONDS = 1.0  # between two looks at the clock; if it was more, this process was stopped, and nobody is late


def beat_seconds(timeout: float | None, size: int) -> float:
    """The interval of beats, in seconds.

    >>> beat_seconds(900, 4), beat_seconds(8, 4), beat_seconds(900, 20_000), beat_seconds(None, 4)
    (5.0, 1.0, 20.0, 5.0)
    """
    longest = max(_LONGEST_BEAT_SECONDS, size / _RANKS_A_SECOND)
    return longest if timeout is None else min(timeout / _BEATS, longest)


class Activity(NamedTuple):
    """What the threads of a rank do.

    Attributes
    ----------
    n_done : int
        Grows with what they have done, in any unit.
    doing : str
        What they have in hand, such as "reading chunk (1, 2) of '/x' in 'f.h5'"; empty: nothing.
    """

    n_done: int = 0
    doing: str = ""


class Watchdog:
    """Watches the progress of all ranks, on one of them.

    Parameters
    ----------
    rank, size : int
        This rank, and the number of ranks.
    mailbox : NoteMailbox, optional
        Carries messages; None for a process alone.
    clock : callable
        Returns seconds, from any origin.
    on_stall : callable, optional
        Called once, before the first `StallError` is raised, with the seconds that all ranks need to learn of it.
    departed : callable, optional
        Returns, for each rank known to have reached the end of its program, how many collectives it had finished. Must not
        wait.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        mailbox: NoteMailbox | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_stall: Callable[[float], None] | None = None,
        departed: Callable[[], Mapping[int, int]] | None = None,
    ) -> None:
        self._rank, self._size, self._mailbox, self._clock = rank, size, mailbox, clock
        self._on_stall, self._departed = on_stall, departed
        self.n_agreed = 0
        self.is_left = False  # a rank has left a call that others wait in
        self._stall: tuple[str, int | None] | None = None
        self._call, self._count, self._n_done_before = 0, 0, 0
        self._title, self._phase = "initialize()", "begin"  # until a call says what it is
        self._timeout: float | None = None
        self._activity: Callable[[], Activity] = Activity
        self._warns = False  # where nothing is heard of the monitor
        self._states: dict[int, RankState] = {}  # on the monitor: the latest state of each rank
        self._last_heard: dict[int, int] = {}  # ... and the beat at which it came
        self._start_beats()

    def _start_beats(self) -> None:
        self._interval = beat_seconds(self._timeout, self._size)
        self._due = self._clock() + self._interval
        self._n_beats = self._n_still = self._n_unanswered = self._n_gone = 0
        self._has_warned = False

    @property
    def nap_seconds(self) -> float:
        """Longest sleep between two looks, in seconds; with a longer one, beats would be late."""
        return self._interval / 4

    @property
    def is_stalled(self) -> bool:
        """True if a stall was detected."""
        return self._stall is not None

    def agreed(self) -> None:
        """Count a collective over all ranks that this rank has finished."""
        self.n_agreed += 1

    def begin(self, title: str, timeout: float | None, warns: bool = False) -> None:
        """Begin a call: its `title` ("load ..."), and the seconds without progress after which it fails (None: never).
        `warns`: this rank may be the only one in it. If it hears nothing of rank 0, it says so, whichever rank it is.

        Raises
        ------
        StallError
            If an earlier call ended in a stall.
        """
        self._raise_stall()
        self._call += 1
        self._warns = warns or self._rank == 1
        self._count, self._phase, self._title, self._timeout = 0, "begin", title, timeout
        self._activity, self._n_done_before = Activity, 0
        self._last_heard.clear()
        self._start_beats()

    def enter(self, phase: str) -> None:
        """Set the phase. This counts as progress."""
        self._phase = phase
        self._count += 1

    def moved(self) -> None:
        """Count progress."""
        self._count += 1

    def step_done(self) -> None:
        """Count progress of this thread while it works alone (`system.steps`), and look."""
        self._count += 1
        self.look()

    @contextmanager
    def attend(self, activity: Callable[[], Activity]) -> Iterator[None]:
        """Ask at each beat what the threads of this rank do."""
        self._activity, self._n_done_before = activity, 0
        try:
            yield
        finally:
            self._activity = Activity

    def look(self) -> None:
        """Call this in each iteration of a wait. StallError if a stall was detected."""
        if self._stall is not None:
            self._raise_stall()
        if self._clock() >= self._due:
            self._beat()

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks that this one has left a call by an error of which they know nothing: they would wait for it."""
        text = f"rank {self._rank} has left this call by an error of its own: {type(error).__name__}: {message_of(error)}"
        with suppress(Exception):  # of MPI, which `error` may be about
            self._tell_all({"kind": _LEFT, "text": f"{text} (call: {self._title})", "rank": self._rank})

    def close(self) -> None:
        """End a call. If the call took long, this rank learns here whether the others have given it up."""
        if self._n_beats and self._timeout is not None:
            self._hear(answers=False)
        self._due = math.inf

    def _beat(self) -> None:
        self._due = self._clock() + self._interval
        self._n_beats += 1
        n_done, doing = self._activity()
        if n_done != self._n_done_before:
            self._n_done_before = n_done
            self._count += 1
        report = RankState(self._call, self._count, self._phase, doing[:_LONGEST_NAME])
        doing = f", {report.doing}" if report.doing else ""
        text = f"call {report.call}, {self._title}: step {report.count}, phase {report.phase}{doing}"
        _log.debug("rank %d, %s", self._rank, text)
        patience = math.inf if self._timeout is None else math.ceil(self._timeout / self._interval)
        self._n_still += 1
        self._hear()
        self._judge_departed()
        if self._mailbox is None or self._rank == 0:
            self._store(self._rank, report)
            absent, lost, heard = self._sorted_ranks()
            if self._timeout is not None and self._n_still >= patience + _NOTICE_BEATS:
                late = sorted([*absent, *lost, *(rank for rank, state in heard.items() if state.doing)])
                text = stall_text(self._title, self._timeout, describe_ranks(absent, lost, heard))
                self._give_up(text, late[0] if late else None)
            if self._n_still * self._interval >= NOTICE_SECONDS:
                self._warn(self._n_still, describe_ranks(absent, lost, heard))
            return
        if self._timeout is not None and self._n_unanswered >= patience + _LATE_BEATS:
            self._give_up(stall_text(self._title, self._timeout, _NO_MONITOR), 0)
        if self._warns and self._n_unanswered * self._interval >= NOTICE_SECONDS:
            self._warn(self._n_unanswered, _NO_MONITOR)
        self._n_unanswered += 1
        self._mailbox.send(0, {"kind": _BEAT, "state": astuple(report)})

    def _judge_departed(self) -> None:
        """Give up if a rank has departed before it took part in the collective that this rank waits for."""
        departed = {} if self._departed is None else self._departed()
        # A rank that has finished more collectives than this rank has done its part in the current one.
        gone = sorted(rank for rank, n_agreed in departed.items() if rank != self._rank and n_agreed <= self.n_agreed)
        self._n_gone = self._n_gone + 1 if gone else 0
        if gone and (self._rank == 0 or 0 in gone or self._n_gone > _LEARN_BEATS):  # if there is a monitor, it decides first
            self._give_up(departed_text(self._title, gone), gone[0])

    def _warn(self, n_beats: int, ranks: str) -> None:
        """Warn once in a call which ranks are late."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s", notice_text(self._title, n_beats * self._interval, ranks, self._timeout))

    def _hear(self, answers: bool = True) -> None:
        mailbox = self._mailbox
        for rank, message in () if mailbox is None else mailbox.receive():
            if message["kind"] == _STALLED:
                self._set_stall(message["text"], message["rank"])
            elif message["kind"] == _LEFT and self._stall is None:
                self.is_left, self._stall = True, (message["text"], message["rank"])
            elif message["kind"] == _BEAT and self._rank == 0 and mailbox is not None:
                state = RankState(*message["state"])
                self._store(rank, state)
                if answers:
                    mailbox.send(rank, {"kind": _ALIVE, "call": state.call})
            elif message["kind"] == _ALIVE and message["call"] == self._call:
                self._n_unanswered = 0
        self._raise_stall()

    def _store(self, rank: int, state: RankState) -> None:
        """Store the state that a rank reports."""
        self._last_heard[rank] = self._n_beats
        previous = self._states.get(rank)
        if previous is None or (state.call, state.count) > (previous.call, previous.count):
            self._n_still = 0
        if previous is None or (state.call, state.count) >= (previous.call, previous.count):
            self._states[rank] = state

    def _sorted_ranks(self) -> tuple[list[int], dict[int, RankState], dict[int, RankState]]:
        """The ranks that are absent, and the states of those that are lost, and of those that answer: see `describe_ranks`."""
        ranks = range(self._size)
        oldest = self._n_beats - _SILENT_BEATS
        heard = {r: self._states[r] for r in ranks if r in self._states and self._last_heard.get(r, oldest - 1) >= oldest}
        lost = {r: state for r, state in self._states.items() if r not in heard and state.call >= self._call}
        return [r for r in ranks if r not in heard and r not in lost], lost, heard

    def _give_up(self, text: str, late: int | None) -> None:
        """Send the decision to all ranks, and raise it."""
        self._tell_all({"kind": _STALLED, "text": text, "rank": late})
        self._set_stall(text, late)
        self._raise_stall()

    def _tell_all(self, message: dict[str, Any]) -> None:
        if self._mailbox is not None:
            for rank in range(self._size):
                if rank != self._rank:
                    self._mailbox.send(rank, message)
            self._mailbox.flush()

    def _set_stall(self, text: str, late: int | None) -> None:
        if self._stall is None:
            self._stall = (text, late)
            if self._on_stall is not None:
                self._on_stall(_LEARN_BEATS * self._interval)

    def _raise_stall(self) -> None:
        if self._stall is not None:
            text, late = self._stall
            error = StallError(text, rank=late)
            share(error, self._rank, self._size, shows=self._rank == (1 if late == 0 else 0))
            raise error


def look_before_first_call(rank: int, timeout: float | None) -> Callable[[], None]:
    """A `look` for ranks that cannot tell each other yet who is late. It raises StallError after `timeout` seconds."""
    waited, last_look = 0.0, time.monotonic()
    has_warned = rank > 0  # only rank 0 warns; it cannot know which ranks wait

    def look() -> None:
        nonlocal waited, last_look, has_warned
        now = time.monotonic()
        waited, last_look = waited + min(now - last_look, _LONGEST_STEP_SECONDS), now
        if timeout is not None and waited > timeout:
            raise StallError(stall_text(_FIRST, timeout, _SOME))
        if waited > NOTICE_SECONDS and not has_warned:
            has_warned = True
            _log.warning("%s", notice_text(_FIRST, NOTICE_SECONDS, _SOME, timeout))

    return look
