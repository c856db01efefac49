"""Which message does a stall give? It says which ranks are late, at what, and what to do. It is the same on every rank.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class RankStates:
    """The ranks of a call in which nothing moves.

    Attributes
    ----------
    absent : sequence of int
        Ranks that were never heard of in this call.
    lost, heard : dict of int to RankState
        The last states of ranks that are not heard of any more, and the states of the others.
    """

    absent: Sequence[int] = ()
    lost: dict[int, RankState] = field(default_factory=dict)
    heard: dict[int, RankState] = field(default_factory=dict)

    def __str__(self) -> str:
        said = []
        if self.absent:
            who = f"{first_ranks(self.absent)} did not come to this call"
            said.append(f"{who}, or {_are(self.absent)} held up before the first wait in it")
        for phase in dict.fromkeys(state.phase for state in self.lost.values()):
            lost = [rank for rank, state in self.lost.items() if state.phase == phase]
            said.append(f"{first_ranks(lost)} {_are(lost)} held up or gone: not heard of any more (last phase: {phase})")
        doing = {rank: state.doing for rank, state in self.heard.items() if state.doing}
        said += [f"rank {rank} is {what}" for rank, what in [*doing.items()][:_MOST_NAMED]]
        if len(doing) > _MOST_NAMED:
            said.append(f"{len(doing) - _MOST_NAMED} more ranks are reading or writing")
        phases = [state.phase for state in self.heard.values() if not state.doing]
        other = "other " if said else ""
        for phase in dict.fromkeys(phases):
            n = phases.count(phase)
            said.append(f"{counted(n, other + 'rank')} wait{'s' * (n == 1)} (phase: {phase})")
        return "; ".join(said)


def text_of(what: str, timeout: float, ranks: object) -> str:
    """The error message of a stalled call: `what` it does, the seconds without progress, and who is late.

    >>> wait, read = RankState(1, 2, "exchange"), RankState(1, 3, "exchange", "reading chunk (0, 1) of '/x' in 'f.h5'")
    >>> print(text_of("'f.h5'", 30, RankStates(heard={0: wait, 1: wait, 2: read})))  # doctest: +ELLIPSIS
    nothing has moved for 30 s (call: 'f.h5'): rank 2 is reading chunk (0, 1) of '/x' in 'f.h5'; 2 other ranks wait (phase:
    exchange). ...
    """
    return f"nothing has moved for {timeout:g} s (call: {what}): {ranks}. {_ADVICE}"


def notice_of(what: str, seconds: float, ranks: object, timeout: float | None) -> str:
    """The warning long before a call fails.

    >>> print(notice_of("'f.h5'", 20, RankStates([1, 2], {}, {0: RankState(1, 1, "metadata")}), 900))  # doctest: +ELLIPSIS
    nothing has moved for 20 s (call: 'f.h5'): ranks 1, 2 did not come to this call, ...; 1 other rank waits (phase:
    metadata). All ranks must make the call. It fails after 900 s (timeout=)
    """
    fails = "It waits for ever (timeout=None)" if timeout is None else f"It fails after {timeout:g} s (timeout=)"
    return f"nothing has moved for {seconds:g} s (call: {what}): {ranks}. All ranks must make the call. {fails}"


def text_of_departed(what: str, ranks: Sequence[int]) -> str:
    """The error message if programs of other ranks have ended.

    >>> print(text_of_departed("'f.h5'", [1, 3]))  # doctest: +ELLIPSIS
    ranks 1, 3 have come to the end of their program, and never make the call in which others wait for them: 'f.h5'. ...
    """
    is_one = len(ranks) == 1
    has, them = ("has come to the end of its program", "it") if is_one else ("have come to the end of their program", "them")
    return (
        f"{first_ranks(ranks)} {has}, and never make{'s' * is_one} the call in which others wait for {them}: {what}. "
        "All ranks must make the same calls: look for an `if` around it, or for what ended that program (sys.exit(), return). "
        f"{_DEAD}"
    )


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
