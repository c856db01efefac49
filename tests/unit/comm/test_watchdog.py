"""Is a stall found, is the right rank named, and is a slow rank not reported? `waiting` simulates ranks and messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import pytest

from shardload.comm.shared_errors import printed_text as shown_of
from shardload.comm.watchdog import Activity, RankState, Watchdog, beat_seconds, describe_ranks, stall_text
from shardload.errors import PeerError, StallError
from tests.unit.waiting import BEAT, TICK, TIMEOUT, FakeMailbox, Job, Post


def reading(chunk: str, n: int = 0) -> Callable[[], Activity]:
    return lambda: Activity(n, f"reading {chunk}")


# --- when


def test_nothing_is_sent_before_the_first_beat() -> None:
    job = Job()
    job.tick(BEAT * 0.99)
    assert job.post.n_sent == 0
    job.tick(BEAT * 0.01)
    assert job.post.n_sent == 3, "each rank but the monitor says where it is"


def test_while_nothing_is_due_a_look_is_a_look_at_the_clock() -> None:
    looks, post = [], Post(2)
    watch = Watchdog(1, 2, FakeMailbox(post, 1), clock=lambda: looks.append(0) or 0.0)  # type: ignore[func-returns-value]
    watch.begin("", TIMEOUT)
    looks.clear()
    for _ in range(1000):
        watch.look()
    assert len(looks) == 1000 and post.n_sent == 0


def test_there_is_never_a_decision_without_a_timeout() -> None:
    job = Job(timeout=None)
    job.wait(1e4)
    assert not job.raised


@pytest.mark.parametrize("timeout", [0.5, 8.0, 40.0, 900.0])
def test_the_decision_comes_after_the_timeout_and_soon(timeout: float) -> None:
    job = Job(timeout=timeout)
    beat = beat_seconds(timeout, 4)
    started = job.now
    while len(job.raised) < 4:
        job.tick(beat / 4)
        if job.raised:
            assert timeout <= job.now - started <= timeout + 5 * beat
    assert all(watch.is_stalled for watch in job.watches)


# --- who


def test_a_rank_that_was_in_the_call_before_is_not_in_this_one() -> None:
    """Wrong if what it said in a long call, which it made, spoke for it in the next, which it does not make."""
    job = Job()
    for _ in range(40):
        job.watches[3].moved()
        job.tick(BEAT)
    for watch in job.watches:
        watch.close()
    job.begin(3)
    job.wait(2 * TIMEOUT)
    job.check({0, 1, 2}, 3, "rank 3 did not come to this call", "3 other ranks wait")


def test_several_that_are_late_are_all_named() -> None:
    job = Job(7, begins=False)
    job.begin(5, 6)
    job.wait(3 * BEAT)
    job.held.add(4)
    with job.watches[2].attend(reading("chunk (0,)")), job.watches[3].attend(reading("chunk (9,)")):
        job.wait(2 * TIMEOUT)
    text = job.check(
        {0, 1, 2, 3}, 2, "nothing has moved for 40 s (call: 'f.h5')", "ranks 5, 6 did not come", "2 other ranks wait"
    )
    assert "rank 4 is held up or gone: not heard of any more (last phase: begin)" in text
    assert "rank 2 is reading chunk (0,)" in text and "rank 3 is reading chunk (9,)" in text


def test_ranks_that_wait_in_different_places_are_told_apart() -> None:
    job = Job()
    for watch, phase in zip(job.watches, ["agree", "agree", "exchange", "plan"], strict=True):
        watch.enter(phase)
    job.wait(2 * TIMEOUT)
    text = job.check({0, 1, 2, 3}, None)
    assert "2 ranks wait (phase: agree); 1 rank waits (phase: exchange); 1 rank waits (phase: plan)" in text


def test_a_monitor_that_comes_a_little_late_is_not_given_up() -> None:
    """Its own decision takes longer than the timeout, so the others must wait longer for it."""
    job = Job(begins=False)
    job.begin(0)
    job.wait(TIMEOUT + 3 * BEAT)
    job.held.clear()
    job.watches[0].begin("'f.h5'", TIMEOUT)
    job.wait(0.9 * TIMEOUT)
    assert not job.raised


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_monitor_that_says_nothing_is_named_by_all_others(comes_first: bool) -> None:
    job = Job(begins=False)
    job.begin(*() if comes_first else (0,))
    if comes_first:
        job.wait(5 * BEAT)
        job.held.add(0)
    job.wait(3 * TIMEOUT)
    job.check({1, 2, 3}, 0, "nothing was heard of rank 0")


@pytest.mark.parametrize(("late", "text"), [(0, "nothing was heard of rank 0"), (2, "rank 2 did not come")])
def test_a_rank_that_comes_after_the_decision_raises_it(late: int, text: str) -> None:
    job = Job(begins=False)
    job.begin(late)
    job.wait(3 * TIMEOUT)
    job.held.clear()
    job.watches[late].begin("'f.h5'", TIMEOUT)
    job.wait(2 * BEAT)
    job.check({0, 1, 2, 3}, late, text)


# --- who has left


@pytest.mark.parametrize("timeout", [TIMEOUT, None])
@pytest.mark.parametrize("gone", [[1], [0], [0, 3], [1, 2, 3]])
def test_ranks_that_have_left_are_not_waited_for(gone: list[int], timeout: float | None) -> None:
    """Wrong if the others waited out the timeout, or for ever where there is none."""
    job = Job(timeout=timeout, begins=False)
    for watch in job.watches:
        watch.agreed()
    job.begin(*gone)
    job.wait(3 * BEAT)
    assert not job.raised, "nobody has left yet"
    job.departed = dict.fromkeys(gone, 1)
    job.wait(3 * BEAT)
    shown = [rank for rank, error in job.raised.items() if shown_of(error) is None]
    assert shown == [int(gone[0] == 0)], "one rank shows where"
    names = {1: f"rank {gone[0]} has", 2: "ranks 0, 3 have", 3: "ranks 1, 2, 3 have"}[len(gone)]
    job.check(set(range(4)) - set(gone), gone[0], names, "'f.h5'", "sys.exit()", "can make no call together any more")


@pytest.mark.parametrize("behind", [0, 1])
def test_who_left_after_its_part_was_done_holds_up_nobody(behind: int) -> None:
    """Wrong if a rank that is the first to end a program that ends well were said to be missing: others are a step behind."""
    job = Job()
    for rank, watch in enumerate(job.watches):
        if rank != behind:
            watch.agreed()
    job.departed = {2: 1, 3: 1}
    job.held |= {2, 3, 1 - behind}
    job.wait(0.9 * TIMEOUT)
    assert not job.raised
    job.watches[behind].agreed()  # and now it waits for what they never do
    job.wait(6 * BEAT)
    job.check({behind}, 2, "ranks 2, 3 have come to the end of their program")


def test_a_monitor_that_is_busy_elsewhere_is_not_waited_for() -> None:
    """Wrong if only rank 0 could say that somebody has left: it may be in a computation that waits for the same rank."""
    job = Job(timeout=None, begins=False)
    job.begin(0, 3)
    job.departed = {3: 0}
    job.wait(10 * BEAT)
    job.check({1, 2}, 3, "rank 3 has come to the end of its program")


# --- who is waited for


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("timeout", [900.0, None])
@pytest.mark.parametrize(
    ("absent", "parts"), [([1, 2], ("ranks 1, 2 did not come",)), ([0, 2], ("nothing was heard of rank 0",))]
)
def test_who_is_waited_for_is_said_once(
    absent: list[int], parts: tuple[str, ...], timeout: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong if there were minutes of silence, or a line from every rank, or one at each beat."""
    job = Job(timeout=timeout, begins=False)
    job.begin(*absent)
    job.wait(19)
    assert not notices(caplog)
    job.wait(200)
    (text,) = notices(caplog)
    fails = "It waits for ever (timeout=None)" if timeout is None else "It fails after 900 s (timeout=)"
    for part in (*parts, "for 2", "'f.h5'", "All ranks must make the call", fails):
        assert part in text
    for rank in absent:
        job.held.discard(rank)
    for watch in job.watches:
        watch.close()
    job.begin(*absent)
    job.wait(200)
    assert len(notices(caplog)) == 2, "once in each call"


def test_a_load_that_moves_is_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(timeout=900.0)
    for _ in range(20):
        job.wait(15)
        job.watches[2].moved()
    assert not notices(caplog)


# --- what is no stall


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("how", ["moves", "enters", "reads"])
def test_slow_is_not_still(rank: int, how: str) -> None:
    """One rank moves now and then, each time just before the timeout."""
    job = Job()
    n_read = 0
    watch = job.watches[rank]
    with watch.attend(lambda: Activity(n_read, "reading chunk")):
        for k in range(12):
            job.wait(0.99 * TIMEOUT)
            assert not job.raised, k
            n_read += how == "reads"
            if how == "moves":
                watch.moved()
            if how == "enters":
                watch.enter("agree")
    job.wait(2 * TIMEOUT)
    assert len(job.raised) == 4


def test_ranks_that_come_one_after_the_other_are_progress() -> None:
    job = Job(begins=False)
    job.begin(1, 2, 3)
    for rank in (1, 3, 2):
        job.wait(0.99 * TIMEOUT)
        job.held.discard(rank)
        job.watches[rank].begin("'f.h5'", TIMEOUT)
    job.wait(0.99 * TIMEOUT)
    assert not job.raised


def test_a_job_that_was_stopped_for_a_night_goes_on() -> None:
    """Wrong if seconds were counted instead of beats: the machine slept, no rank is late."""
    job = Job()
    job.wait(TIMEOUT / 2)
    job.tick(8 * 3600.0)
    job.wait(TIMEOUT / 4)
    assert not job.raised


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_long_at_something_else_blames_nobody_when_it_is_back(rank: int) -> None:
    job = Job()
    job.wait(3 * BEAT)
    job.held.add(rank)
    job.wait(0.9 * TIMEOUT)
    job.held.clear()
    job.watches[rank].moved()
    job.wait(0.9 * TIMEOUT)
    assert not job.raised


def test_what_is_left_of_an_earlier_call_is_no_progress() -> None:
    """Wrong if the beats of a call that ended well, read in the next one, hid a stall in that for ever."""
    job = Job()
    job.held.add(0)  # it reads none of them
    for _ in range(6):
        job.watches[2].moved()
        job.tick(BEAT)
    job.held.clear()
    job.begin()
    started = job.now
    job.wait(2 * TIMEOUT)
    job.check({0, 1, 2, 3}, None, "4 ranks wait")
    assert job.now - started <= 2 * TIMEOUT + TICK


def test_an_answer_of_an_earlier_call_does_not_speak_for_the_monitor() -> None:
    job = Job()
    job.wait(2 * BEAT)
    stale = [(0, json.dumps({"kind": "alive", "call": 1}))] * 3
    job.begin(0)
    job.wait(3 * TIMEOUT, lambda: [box.extend(stale) for box in job.post.boxes[1:]])
    job.check({1, 2, 3}, 0, "nothing was heard of rank 0")


# --- the end


def test_after_a_stall_every_call_raises_it_at_once_and_sends_nothing() -> None:
    job = Job()
    job.wait(2 * TIMEOUT)
    text = job.check({0, 1, 2, 3}, None)
    n_sent = job.post.n_sent
    for watch in job.watches:
        assert watch.is_stalled
        for call in (watch.look, lambda w=watch: w.begin("another", None)):  # type: ignore[misc]
            with pytest.raises(StallError) as found:
                call()
            assert str(found.value) == text and isinstance(found.value, PeerError)
    assert job.post.n_sent == n_sent
    assert sorted(rank for rank, _ in job.left) == [0, 1, 2, 3], "each once"
    assert all(seconds >= 2 * BEAT for _, seconds in job.left), "the others need a beat or two to learn of it"
    assert job.mailboxes[0].flushed


def test_who_ends_a_long_call_well_learns_what_the_others_say() -> None:
    """Wrong if one rank returned an array while the others gave the call up."""
    job = Job()
    job.wait(2 * BEAT)
    job.held.add(2)
    job.wait(2 * TIMEOUT)
    with pytest.raises(StallError, match="rank 2 is held up or gone"):
        job.watches[2].close()


def test_after_a_call_nothing_is_sent() -> None:
    job = Job()
    job.wait(2 * BEAT)
    for watch in job.watches:
        watch.close()
    n_sent = job.post.n_sent
    job.wait(2 * TIMEOUT)
    assert not job.raised and job.post.n_sent == n_sent


def test_a_process_alone_judges_itself() -> None:
    now = 0.0
    watch = Watchdog(0, 1, clock=lambda: now)
    watch.begin("'f.h5'", TIMEOUT)
    is_named = pytest.raises(StallError, match=r"rank 0 is reading chunk \(3,\) of '/x'")
    with is_named as found, watch.attend(reading("chunk (3,) of '/x'")):
        for _ in range(100):
            now += TICK
            watch.look()
    assert found.value.rank == 0 and "other rank" not in str(found.value)


def test_each_beat_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "shardload")
    job = Job(2)
    with job.watches[1].attend(reading("chunk (3,) of '/x'")):
        job.tick(BEAT)
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG"]
    assert caplog.messages == [
        "rank 0, call 1, 'f.h5': step 0, phase begin",
        "rank 1, call 1, 'f.h5': step 0, phase begin, reading chunk (3,) of '/x'",
    ]


# --- the text


def test_of_many_ranks_a_few_are_named() -> None:
    heard = {rank: RankState(1, 1, "exchange", f"reading chunk ({rank},)") for rank in range(10)}
    heard[0] = RankState(1, 1, "write", "writing [0:4] of '/x'")
    lost = {rank: RankState(1, 1, "open") for rank in range(10, 20)}
    text = stall_text("'f.h5'", 900, describe_ranks(range(20, 4000), lost, heard))
    assert "ranks 20, 21, 22, 23 and 3976 more did not come to this call, or are held up" in text
    assert "ranks 10, 11, 12, 13 and 6 more are held up or gone" in text
    assert "rank 0 is writing [0:4] of '/x'; " in text and "rank 3 is reading chunk (3,)" in text and "rank 4 is" not in text
    assert "6 more ranks are reading or writing" in text
    assert len(text) < 1500


def test_a_long_name_makes_no_long_beat() -> None:
    job = Job(2)
    with job.watches[1].attend(reading("x" * 10_000)):
        job.tick(BEAT)
    assert max(len(text) for box in job.post.boxes for _, text in box) < 1000
