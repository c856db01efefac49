"""Which message does a stall give? It says which ranks are late, at what, and what to do. It is the same on every rank.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardload.units import first_ranks

__all__ = [
    "NOTICE_SECONDS",
    "RankState",
    "notice_apart",
    "notice_before_first",
    "notice_of",
    "notice_without_monitor",
    "text_before_first",
    "text_of",
    "text_of_departed",
    "text_without_monitor",
]

NOTICE_SECONDS = 20.0  # without progress, until the warning
_MOST_NAMED = 4
_WAITING = {"exchange": "for parts", "agree": "for all to be done"}
_DEAD = "The call has failed, and these processes can make no call together any more: end the job"
_END = f"{_DEAD}. If it was only slow, pass a longer timeout= (in seconds; None waits for ever)"
_ALL = "All ranks must make the same calls: look for an `if` around it, or for what ended that program (sys.exit(), return)"


@dataclass(frozen=True)
class RankState:
    """The state of a rank.

    Attributes
    ----------
    call, count : int
        Number of the call, and a count of the progress in it.
    phase : str
        Phase of the call.
    reading : str
        What the rank is reading from the file; empty: nothing.
    """

    call: int
    count: int
    phase: str = ""
    reading: str = ""

    @property
    def place(self) -> str:
        """The phase; "read" if the rank is reading."""
        return "read" if self.reading else self.phase


def text_of(
    what: str, timeout: float, absent: Sequence[int], lost: Mapping[int, RankState], heard: Mapping[int, RankState]
) -> str:
    """The error message of a stalled call.

    Parameters
    ----------
    what : str
        What the call does.
    timeout : float
        Seconds without progress.
    absent : sequence of int
        Ranks that were never heard of in this call.
    lost : mapping of int to RankState
        Ranks that are not heard of any more, with their last states.
    heard : mapping of int to RankState
        The other ranks, with their states.

    Examples
    --------
    >>> wait, read = RankState(1, 2, "exchange"), RankState(1, 3, "exchange", "chunk (0, 1) of '/x' in 'f.h5'")
    >>> print(text_of("'f.h5'", 30, [], {}, {0: wait, 1: wait, 2: read}))  # doctest: +ELLIPSIS
    nothing has moved for 30 s (call: 'f.h5'): rank 2 is reading chunk (0, 1) of '/x' in 'f.h5' (phase: read); 2 other ranks
    wait for parts (phase: exchange). ...
    """
    advice = _advice(bool(absent or lost), any(state.reading for state in heard.values()))
    return f"nothing has moved for {timeout:g} s (call: {what}): {_who(absent, lost, heard)}. {advice}"


def _who(absent: Sequence[int], lost: Mapping[int, RankState], heard: Mapping[int, RankState]) -> str:
    said = []
    if absent:
        said.append(f"{first_ranks(absent)} did not come to this call, or {_is(absent)} held up before the first wait in it")
    for phase in dict.fromkeys(state.phase for state in lost.values()):
        those = [rank for rank, state in lost.items() if state.phase == phase]
        said.append(f"{first_ranks(those)} {_is(those)} held up or gone: not heard of any more (last phase: {phase})")
    reading = {rank: state for rank, state in heard.items() if state.reading}
    for rank, state in [*reading.items()][:_MOST_NAMED]:
        said.append(f"rank {rank} is reading {state.reading} (phase: {state.place})")
    if len(reading) > _MOST_NAMED:
        said.append(f"{len(reading) - _MOST_NAMED} more ranks are reading")
    other = "other " if said else ""
    for phase in dict.fromkeys(state.phase for state in heard.values() if not state.reading):
        n = sum(state.phase == phase and not state.reading for state in heard.values())
        ranks = f"{n} {other}ranks wait" if n > 1 else f"{n} {other}rank waits"
        said.append(f"{ranks}{_WAITING.get(phase, '') and ' ' + _WAITING[phase]} (phase: {phase})")
    return "; ".join(said)


def notice_of(
    what: str,
    seconds: float,
    absent: Sequence[int],
    lost: Mapping[int, RankState],
    heard: Mapping[int, RankState],
    timeout: float | None,
) -> str:
    """The warning long before a call fails.

    >>> print(notice_of("'f.h5'", 20, [1, 2], {}, {0: RankState(1, 1, "metadata")}, 900))  # doctest: +ELLIPSIS
    nothing has moved for 20 s (call: 'f.h5'): ranks 1, 2 did not come to this call, ...; 1 other rank waits (phase:
    metadata). All ranks must make the call. It fails after 900 s (timeout=)
    """
    then = _until(timeout, bool(absent or lost))
    return f"nothing has moved for {seconds:g} s (call: {what}): {_who(absent, lost, heard)}. {then}"


def notice_without_monitor(what: str, seconds: float, timeout: float | None) -> str:
    """The warning if rank 0 does not come."""
    return f"nothing was heard of rank 0 for {seconds:g} s (call: {what}): it did not come to this call. {_until(timeout)}"


def notice_before_first(timeout: float | None) -> str:
    """The warning if some ranks have not made their first call: it is not known which."""
    return f"not all ranks of this communicator have made their first call within {NOTICE_SECONDS:g} s. {_until(timeout)}"


def notice_apart(what: str, seconds: float) -> str:
    """The warning of processes that cannot send each other their states."""
    return f"this process has waited for others for {seconds:g} s (call: {what}). All processes must make the call"


def _until(timeout: float | None, has_silent: bool = True) -> str:
    fails = "It waits for ever (timeout=None)" if timeout is None else f"It fails after {timeout:g} s (timeout=)"
    return f"All ranks must make the call. {fails}" if has_silent else fails


def text_of_departed(what: str, ranks: Sequence[int]) -> str:
    """The error message if programs of other ranks have ended.

    >>> print(text_of_departed("'f.h5'", [1, 3]))  # doctest: +ELLIPSIS
    ranks 1, 3 have come to the end of their program, and never make the call in which others wait for them: 'f.h5'. ...
    """
    one = len(ranks) == 1
    has, them = ("has come to the end of its program", "it") if one else ("have come to the end of their program", "them")
    never = f"never make{'s' * one} the call in which others wait for {them}: {what}"
    return f"{first_ranks(ranks)} {has}, and {never}. {_ALL}. {_DEAD}"


def text_without_monitor(what: str, timeout: float) -> str:
    """The error message of ranks that do not hear from rank 0, the monitor."""
    return (
        f"nothing was heard of rank 0, which watches over the others, for {timeout:g} s (call: {what}): it did not come to "
        f"this call, is held up in it, or is gone. {_advice(True, False)}"
    )


def text_before_first(timeout: float) -> str:
    """The error message if some ranks never made their first call: it is not known which."""
    return (
        f"not all ranks of this communicator have made their first call within {timeout:g} s: some did not come to it, are "
        f"held up, or are gone. {_advice(True, False)}"
    )


def _advice(has_silent: bool, has_reading: bool) -> str:
    advice = []
    if has_silent:
        advice.append("Look whether that process still runs, and where (py-spy dump --pid ...); all ranks must make the call.")
    if has_reading:
        advice.append("Look whether the file can be read there, and whether its file system answers.")
    return " ".join([*advice, _END])


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
