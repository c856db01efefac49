"""Do all ranks raise the same error, and does it keep what it knows on its way to them?"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardload.comm import collectives, mpi, watchdog
from shardload.comm import group as groups
from shardload.comm.group import Group, Invocation, group_of
from shardload.comm.heartbeat import Departures
from shardload.comm.mpi import mpi_problem, world
from shardload.comm.shared_errors import as_shardload, from_json, to_json
from shardload.errors import (
    ConfigError,
    LeftOutWarning,
    MissingChunksWarning,
    PackedWarning,
    PeerError,
    ShardloadError,
    SourceError,
    StallError,
    is_unread,
)
from shardload.system import garbage, scratch
from tests.unit import ranks
from tests.unit.files import raising
from tests.unit.ranks import Store, in_threads, on_ranks

MPI: Any = pytest.importorskip("mpi4py.MPI") if not mpi_problem() else None


def asked(kind: str = "load", **values: str) -> Invocation:
    return Invocation(kind, f"{kind} of it", values)


# --- one rank


def test_a_group_of_one_needs_no_mpi() -> None:
    alone = Group(None)
    assert (alone.rank, alone.size, alone.comm) == (0, 1, None)
    assert alone.gather_int(7).tolist() == [7]
    assert alone.sum_ints([1, -2, 1 << 40]) == [1, -2, 1 << 40]
    assert alone.send_text("é", 0) == "é" and alone.send_text(None, 0) == ""
    assert alone.gather_text("é") == ["é"] and alone.gather_text("") == [""]
    assert alone.processes(3) == (3,) and alone.processes(4) == (4,)
    assert alone.agree(None) == [] and alone.agree(None, [3, 4]) == [3, 4]
    assert alone.tell(lambda: "text", 0) == "text"
    alone.agree_same(asked(path="a"))
    assert alone.begin(asked(path="a"), lambda: "text") == "text"
    assert alone.all_same(asked(), True) and not alone.all_same(asked(), False)


@pytest.mark.parametrize("kind", [ShardloadError, ConfigError, SourceError, PeerError, ZeroDivisionError])
def test_alone_an_error_is_raised_as_it_is(kind: type[Exception]) -> None:
    """Any other than ours is the cause of a PeerError."""
    error, is_ours = kind("what went wrong"), issubclass(kind, ShardloadError)
    for call in (
        lambda: Group(None).agree(error),
        lambda: Group(None).agree_same(asked(), error),
        lambda: Group(None).tell(raising(error), 0),
        lambda: Group(None).begin(asked(), raising(error)),
    ):
        text = r"^what went wrong$" if is_ours else r"^ZeroDivisionError: what went wrong$"
        with pytest.raises(kind if is_ours else PeerError, match=text) as caught:
            call()
        assert (caught.value if is_ours else caught.value.__cause__) is error
        assert error.__cause__ is not error, "a chain of causes that never ends"
        assert not isinstance(caught.value, ShardloadError) or caught.value.rank is None


# --- errors on their way


def test_whatever_is_in_an_error_it_can_be_sent() -> None:
    """A rank that cannot say what is wrong would leave the others waiting."""
    error = SourceError("x", path=Path("/a"), chunk=(np.int64(3), np.int32(4)), rank=np.int64(1))  # type: ignore[arg-type]
    found = from_json(to_json(error), 1, 1, 2)
    assert isinstance(found, SourceError) and found.chunk == (3, 4) and found.path == "/a" and found.rank == 1


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_an_error_that_cannot_say_what_is_wrong(kind: type[Exception]) -> None:
    """Wrong if the rank that it comes up on left the others waiting, with an error of its own."""

    class Mute(kind):  # type: ignore[misc, valid-type]
        def __str__(self) -> str:
            return str(self.args[1])

    def work(group: Group) -> str:
        with pytest.raises(PeerError) as told:
            group.tell(raising(Mute("too few")), 0)
        with pytest.raises(PeerError) as agreed:
            group.agree(Mute("too few") if group.rank else None)
        return f"{told.value}; {agreed.value}"

    text = "Mute: it has no text, because making it fails (IndexError)"
    assert on_ranks(3, work) == [f"on rank 0 of 3: {text}; on rank 1 of 3 (and on 1 more): {text}"] * 3


@pytest.mark.parametrize("n", [1, 3])
def test_errors_that_caused_each_other_have_an_end(n: int) -> None:
    """Libraries write ``raise error from error``. Wrong if a rank that asks what caused it never came to an end."""

    errors: list[Exception] = [KeyError(k) for k in range(n)]
    for k, error in enumerate(errors):
        error.__cause__ = errors[k - 1]
    assert str(as_shardload(errors[0], 1)) == "KeyError: 0"
    assert not is_unread(errors[0])
    errors[-1].__cause__ = OSError(24, "Too many open files")
    assert "ulimit -n" in str(as_shardload(errors[-1], 1))


# --- several ranks, as threads


@pytest.fixture(params=["mpi", "jax"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the ranks of `on_ranks` agree."""
    monkeypatch.setattr(ranks, "way", request.param)


def check_all_same(errors: list[Any], kind: type[ShardloadError], text: str, rank: int | None) -> None:
    for error in errors:
        assert type(error) is kind, error
        assert (str(error), error.rank) == (text, rank)


def test_all_well() -> None:
    assert on_ranks(3, lambda g: g.agree(None, [g.rank, 1])) == [[3, 3]] * 3
    assert on_ranks(3, lambda g: g.gather_int(10 * g.rank).tolist()) == [[0, 10, 20]] * 3
    for root in range(3):
        assert on_ranks(3, lambda g, r=root: g.send_text(f"from {g.rank} é", r)) == [f"from {root} é"] * 3  # type: ignore[misc]
        assert on_ranks(3, lambda g, r=root: g.send_text("" if g.rank == r else None, r)) == [""] * 3  # type: ignore[misc]
        assert on_ranks(3, lambda g, r=root: g.tell(lambda: f"made by {g.rank}", r)) == [f"made by {root}"] * 3  # type: ignore[misc]
    assert on_ranks(3, lambda g: g.agree_same(asked(path="a", é="b"))) == [None] * 3
    assert on_ranks(3, lambda g: g.processes(2 - g.rank)) == [(2, 1, 0)] * 3


def test_a_rank_that_can_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the others waited for it, for a quarter of an hour, while it raised an error of its own."""
    submit = raising(RuntimeError("can't start new thread"))

    def work(group: Group) -> list[int]:
        if group.rank == 1 and ranks.way == "jax":
            monkeypatch.setattr(group._collectives._pool, "submit", submit)  # type: ignore[attr-defined]
        return group.gather_int(10 * group.rank).tolist()  # type: ignore[no-any-return]

    assert on_ranks(3, work) == [[0, 10, 20]] * 3


def test_texts_of_all_ranks_come_whole_and_in_order() -> None:
    """Wrong if a text were cut at the length of another's, or at that of its characters instead of its bytes."""
    texts = ["é", "", "x" * 10_000, "日本 and more"]
    assert on_ranks(4, lambda g: g.gather_text(texts[g.rank])) == [texts] * 4
    assert on_ranks(3, lambda g: g.gather_text("")) == [["", "", ""]] * 3


def test_one_rank_fails() -> None:
    def work(group: Group) -> Any:
        error = SourceError("bad", path="p", dataset="d", chunk=(1, 2)) if group.rank == 2 else None
        return group.agree(error, [1])

    found = on_ranks(4, work)
    check_all_same(found, SourceError, "on rank 2 of 4: bad", 2)
    assert all((e.path, e.dataset, e.chunk) == ("p", "d", (1, 2)) for e in found)
    assert isinstance(found[2].__cause__, SourceError) and found[0].__cause__ is None


def test_of_several_failures_the_lowest_rank_speaks() -> None:
    def work(group: Group) -> Any:
        errors = {1: KeyError("k"), 2: SourceError("s")}
        return group.agree(errors.get(group.rank))

    check_all_same(on_ranks(4, work), PeerError, "on rank 1 of 4 (and on 1 more): KeyError: 'k'", 1)
    check_all_same(on_ranks(3, lambda g: g.agree(ConfigError("all"))), ConfigError, "all", None)


def test_what_the_root_alone_finds() -> None:
    def work(error: Exception) -> Callable[[Group], str]:
        return lambda group: group.tell(raising(error), 1)

    # The file is wrong where the root looked; the arguments are wrong everywhere.
    check_all_same(on_ranks(3, work(SourceError("gone"))), SourceError, "on rank 1 of 3: gone", 1)
    check_all_same(on_ranks(3, work(ConfigError("typo"))), ConfigError, "typo", None)
    check_all_same(on_ranks(3, work(OSError(5, "I/O"))), PeerError, "on rank 1 of 3: OSError: [Errno 5] I/O", 1)


# --- different calls, and calls at the same time


def one_call(group: Group, what: Invocation, find: Callable[[], str] = lambda: "found") -> str:
    """What every call does first."""
    with group.call() as refusal:
        found = group.begin(what, find)
        if not group.all_same(what, found is not None and refusal is None):
            group.agree_same(what, refusal)
        return found or ""


@pytest.mark.parametrize("other", [0, 1, 2])
def test_different_calls_meet_before_anything_else(other: int) -> None:
    """Wrong if a call with more arguments sent more integers than the others: MPI would mix or truncate them."""

    def work(group: Group) -> list[Any]:
        mine = asked("verify", path="a", x="b", seed="0") if group.rank == other else asked("load", path="a")
        said = []
        for what in (mine, asked("load", path="a"), mine):
            try:
                said.append(one_call(group, what))
            except PeerError as error:
                said.append(str(error))
        return said

    found = on_ranks(3, work)
    assert found[0] == found[1] == found[2]
    first, second, third = found[0]
    theirs, ours = ("load", "verify") if other == 0 else ("verify", "load")
    assert f"rank {other or 1} called {theirs} of it, rank 0 called {ours} of it" in first == third
    assert second == "found", "the ranks were out of step afterwards"


def test_what_rank_0_finds_for_another_call_is_not_taken() -> None:
    """Wrong if a rank planned with the metadata of the array that another rank asked for."""
    taken: list[str | None] = []

    def work(group: Group) -> None:
        what = asked(path="b" if group.rank == 1 else "a")
        found = group.begin(what, lambda: "metadata of a")
        if group.rank == 1:
            taken.append(found)
        assert not group.all_same(what, found is not None)
        group.agree_same(what)

    check = on_ranks(2, work)
    assert taken == [None] and all("path = b" in str(e) and "rank 0 was called with path = a" in str(e) for e in check)


def test_a_second_thread_is_refused_on_every_rank() -> None:
    """Wrong if the rank whose thread was refused made a message less than the others: they would wait for it."""
    inside, second = threading.Event(), threading.Event()

    def work(group: Group) -> list[Any]:
        said: list[Any] = []

        def call(name: str) -> None:
            try:
                said.append(one_call(group, asked(path=name)))
            except ConfigError as error:
                said.append(str(error))

        if group.rank == 1:  # here the calls come one after the other: nothing is wrong
            call("first")
            call("second")
            return said

        def find() -> str:
            inside.set()
            assert second.wait(20)
            return "found"

        def late() -> None:
            assert inside.wait(20)
            waits(group, second)
            call("second")

        thread = threading.Thread(target=late)
        thread.start()
        said.append(one_call(group, asked(path="first"), find))
        thread.join(20)
        return said

    for said in on_ranks(2, work):
        assert said[0] == "found" and "on rank 0 of 2: another thread of this process" in said[1], said


def waits(group: Group, at: threading.Event) -> None:
    """Set `at` when somebody waits for the group, and not before."""
    lock = group._call_lock

    class Waited:
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            if blocking:
                at.set()
            return lock.acquire(blocking, timeout)

        def locked(self) -> bool:
            return lock.locked()

        def release(self) -> None:
            lock.release()

    group._call_lock = Waited()  # type: ignore[assignment]


def test_a_process_alone_makes_one_call_after_the_other() -> None:
    """Wrong if a notebook's second thread were refused: there is nobody to mistake the calls."""
    alone, at = Group(None), threading.Event()
    waits(alone, at)
    inside, found = threading.Event(), []

    def first() -> str:
        inside.set()
        assert at.wait(20)
        return "first"

    thread = threading.Thread(target=lambda: found.append(one_call(alone, asked(), first)))
    thread.start()
    assert inside.wait(20)
    found.append(one_call(alone, asked(), lambda: "second"))
    thread.join(20)
    assert found == ["first", "second"]


def test_a_call_inside_a_call_of_the_same_thread() -> None:
    """Wrong if it waited for itself."""
    alone = Group(None)
    for other in (alone, Group(None)):  # over another communicator, too: it would have the same locks
        with alone.call(), pytest.raises(ConfigError, match="this thread is in a call"), other.call():
            pass
    with alone.call():
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, ZeroDivisionError, MemoryError])
def test_what_ranks_do_not_raise_together_leaves_a_group_that_is_not_used_again(error: type[BaseException]) -> None:
    """Wrong if after an exception of a signal handler this rank were a message behind the others, unnoticed."""

    def work(group: Group) -> None:
        group.watch._mailbox = None  # that of threads carries nothing
        with pytest.raises(error), group.call():
            raise error
        assert group.is_torn
        with pytest.raises(ConfigError, match="was interrupted: make the plan again"), group.call():
            pass

    assert on_ranks(2, work) == [None, None]


def test_nothing_keeps_a_group_without_mpi_that_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a program that is interrupted often, and goes on, ran out of threads, descriptors and memory."""
    monkeypatch.setattr(groups, "_of_jax", {})
    made = [groups._without_mpi(Store(), 0, 2)]
    client, name, of_first = made[0]._client, made[0].name, weakref.ref(made[0])
    assert groups._without_mpi(client, 0, 2) is made[0]
    made[0].is_torn = True
    made[0] = groups._without_mpi(client, 0, 2)
    gc.collect()
    assert of_first() is None and made[0].name != name and not made[0].is_torn


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_a_process_alone_goes_on_after_an_interruption(error: type[BaseException]) -> None:
    """Wrong if Ctrl-C in a notebook made every later load an error: there is nobody to be out of step with."""
    alone = Group(None)
    with pytest.raises(error), alone.call():
        raise error
    assert one_call(alone, asked()) == "found"


def test_a_call_that_waits_for_a_thread_which_waits_for_it() -> None:
    """Wrong if both waited for ever."""
    alone, said = Group(None), []

    def second() -> None:
        try:
            with alone.call(timeout=0.01):
                pass
        except ConfigError as error:
            said.append(str(error))

    with alone.call():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(20)
    assert "has been in a call over the same communicator for 0.01 s" in said[0]


@pytest.mark.parametrize(
    "size, is_in_a_call, says",
    [(1, True, "while a thread was in a call.*'spawn'"), (2, False, "from rank 0 of 2.*Make them in the rank itself$")],
)
def test_a_fork_that_cannot_call_says_so(monkeypatch: pytest.MonkeyPatch, size: int, is_in_a_call: bool, says: str) -> None:
    """Wrong if it waited for a thread that no fork has (15 minutes by default), sent messages as the rank, or told a rank to
    spawn a process, which MPI ends when it starts there."""
    group = Group(None)
    group.size = size
    parent = os.getpid()
    with group.call() if is_in_a_call else nullcontext():
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)
        with pytest.raises(ConfigError, match=says), group.call(timeout=0.01):
            pass


def test_threads_of_a_fork_made_between_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a call of one thread of the fork were taken for one that was under way at the fork."""
    group = Group(None)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with group.call():
        group._check_fork()


@pytest.mark.each_value
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("error", [ConfigError, SourceError, PeerError, LeftOutWarning, MissingChunksWarning, PackedWarning])
def test_what_ranks_raise_together_leaves_a_group_as_it_is(error: type[Exception], size: int) -> None:
    """Wrong if each such call made another group: its communicator would never be given back."""

    def work(group: Group) -> bool:
        with pytest.raises(error), group.call():
            raise error("")
        return group.is_torn

    assert (on_ranks(size, work) if size > 1 else [work(Group(None))]) == [False] * size


# --- communicators


@pytest.mark.parametrize(("steps", "is_late"), [([10_000.0, 0.5], False), ([0.5] * 58, False), ([0.5] * 62, True)])
def test_a_job_that_was_suspended_blames_nobody(steps: list[float], is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the first call failed because all ranks were stopped for longer than `timeout` while they waited."""
    clock, left = [0.0], iter(steps)

    def come() -> bool:
        step = next(left, None)
        clock[0] += step or 0.0
        return step is None

    request = SimpleNamespace(Test=come)
    comm = SimpleNamespace(size=2, rank=1, Idup=lambda: ("made", request))
    fake = SimpleNamespace(monotonic=lambda: clock[0], perf_counter=float, sleep=lambda _: None)
    for module in (collectives, watchdog):
        monkeypatch.setattr(module, "time", fake)
    if is_late:
        with pytest.raises(StallError, match=r"moved for 30 s .*not all ranks of this communicator"):
            collectives.duplicate(comm, watchdog.look_before_first_call(1, 30.0))
    else:
        assert collectives.duplicate(comm, watchdog.look_before_first_call(1, 30.0)) == "made"


def test_who_waits_for_ever_can_be_interrupted_all_the_same() -> None:
    """Wrong if `timeout=None` took MPI's call that spins until all ranks are there: it looks at no signal."""
    comm = SimpleNamespace(size=2, rank=1, Idup=lambda: ("made", SimpleNamespace(Test=raising(KeyboardInterrupt()))))
    with pytest.raises(KeyboardInterrupt):
        collectives.duplicate(comm, watchdog.look_before_first_call(1, None))


@pytest.mark.skipif(MPI is None, reason="no MPI library")
def test_first_calls_of_two_threads_make_one_group() -> None:
    """Wrong if both duplicated the communicator: the first duplicate would be freed twice."""
    mine, start = MPI.COMM_SELF.Dup(), threading.Barrier(8)

    def call(_: int) -> Group:
        start.wait(20)
        return group_of(mine)

    assert len({id(group) for group in in_threads(8, call)}) == 1
    mine.Free()


@pytest.mark.parametrize("comm", [3, "world", object()])
def test_what_is_no_communicator(comm: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected an mpi4py communicator such as MPI\.COMM_WORLD"):
        group_of(comm)


@pytest.mark.skipif(MPI is None, reason="no MPI library")
def test_a_communicator_is_duplicated_once_and_freed_with_its_own() -> None:
    assert group_of() is group_of(None) is group_of(MPI.COMM_WORLD) and world() == MPI.COMM_WORLD
    group = group_of(MPI.COMM_WORLD)
    assert group.comm != MPI.COMM_WORLD and MPI.Comm.Compare(group.comm, MPI.COMM_WORLD) == MPI.CONGRUENT
    mine = MPI.COMM_SELF.Dup()
    assert group_of(mine) is group_of(mine) is not group
    assert (group_of(mine).rank, group_of(mine).size) == (0, 1)
    copy = mine.Dup()
    assert group_of(copy) is not group_of(mine), "a duplicate has messages of its own"
    private = group_of(mine).comm
    mine.Free()
    assert private == MPI.COMM_NULL
    copy.Free()


def test_a_wait_does_not_fail_because_no_thread_can_ask_who_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be an error of this rank alone, in the middle of a call."""
    departures = Departures(0, object)
    departures.begin("here", int)

    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    assert departures.departed() == {} and departures.departed() == {}


def test_a_call_in_a_signal_handler_can_take_what_the_thread_holds() -> None:
    """Wrong if it waited for ever, because the thread was in one of these few lines at that moment: nothing watches there."""
    for lock in (mpi._keeping, mpi.CommunicatorAttribute().making, groups._making_group, scratch._sharing, garbage._lock):
        with lock:
            assert lock.acquire(blocking=False)
            lock.release()
