"""Does a pool run each call once, and can a process end while a thread hangs?"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from shardload.system.thread_pool import Pool, call_together
from tests.unit.files import raising

SECONDS = 20  # no test waits that long unless it fails


def test_what_ends_a_thread_elsewhere_is_a_result_here() -> None:
    """Wrong if the future were never done: whoever waits for it would wait for ever."""
    pool = Pool(1, "t")
    assert isinstance(pool.submit(raising(SystemExit(3))).exception(SECONDS), SystemExit)
    assert pool.submit(len, "ab").result(SECONDS) == 2
    pool.close()


def test_threads_are_started_only_when_none_is_free() -> None:
    pool, names = Pool(5, "t"), set()
    release = threading.Semaphore(0)
    for _ in range(10):
        pool.submit(lambda: names.add(threading.current_thread().name)).result(SECONDS)
        assert pool._waiting.acquire(timeout=SECONDS)  # it is free again
        pool._waiting.release()
    assert names == {"t_0"}
    held = [pool.submit(release.acquire) for _ in range(3)]
    assert len(pool._threads) == 3
    release.release(3)
    assert all(future.result(SECONDS) for future in held)
    pool.close()


@pytest.mark.parametrize("n_started", [0, 1])
def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, n_started: int) -> None:
    """Wrong if a call waited for a thread that never came, or if the threads that there are were not enough."""
    start, started = threading.Thread.start, list[str]()

    def limited(self: threading.Thread) -> None:
        if len(started) == n_started:
            raise RuntimeError("can't start new thread")
        started.append(self.name)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    pool, done = Pool(3, "t"), list[int]()
    for k in range(6 if n_started else 1):
        if n_started:
            pool.submit(done.append, k).result(SECONDS)
        else:
            with pytest.raises(RuntimeError, match="start new thread"):
                pool.submit(done.append, k)
    if not n_started:  # the limit is gone
        n_started = 1
        pool.submit(done.append, 7).result(SECONDS)
        assert done == [7], "what was refused is not done later"
    else:
        assert done == [*range(6)]
    pool.close()


def test_close_waits_for_what_runs_and_cancels_what_has_not_begun() -> None:
    pool, begun, release, seen = Pool(1, "t"), threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        assert release.wait(SECONDS)
        seen.append("first")

    running, waiting = pool.submit(work), pool.submit(seen.append, "second")
    assert begun.wait(SECONDS)
    assert not pool.close(wait=False), "it is left behind"
    with pytest.raises(CancelledError):
        waiting.result(SECONDS)
    closer = threading.Thread(target=pool.close)  # once more: what tells the thread to end must not be thrown away
    closer.start()
    assert closer.is_alive() and not running.done(), "it still runs, and so close waits"
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(work)
    release.set()
    closer.join(SECONDS)
    assert not closer.is_alive() and seen == ["first"] and running.done()
    assert not any(thread.is_alive() for thread in pool._threads)


def test_a_pool_that_nobody_holds_ends_its_threads() -> None:
    pool = Pool(2, "t")
    pool.submit(int).result(SECONDS)
    (thread,) = pool._threads
    del pool
    gc.collect()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_task_that_is_done_is_forgotten() -> None:
    """Wrong if the memory of a load lived on in an idle thread."""

    class Big:
        pass

    pool, big, gone = Pool(1, "t"), Big(), threading.Event()
    weakref.finalize(big, gone.set)
    pool.submit(id, big).result(SECONDS)
    del big
    assert gone.wait(SECONDS)
    pool.close()


def test_the_process_ends_while_a_thread_is_held_up() -> None:
    """Wrong if the interpreter waited for it, as it does for the threads of concurrent.futures."""
    program = """
import threading
from shardload.system.thread_pool import Pool
begun = threading.Event()
def work():
    begun.set()
    threading.Event().wait()
pool = Pool(1, "t")
pool.submit(work)
begun.wait()
pool.close(wait=False)
raise SystemExit(5)
"""
    found = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (5, "", "")


@pytest.mark.parametrize("starts", [True, False])
def test_interrupted_while_a_thread_starts(monkeypatch: pytest.MonkeyPatch, starts: bool) -> None:
    """Wrong if Ctrl-C at this moment became an error of `join`, or a thread were left running."""
    start, begun = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        begun.append(thread)
        if starts:
            start(threading.Timer(0.05, start, (thread,)))
        raise KeyboardInterrupt

    pool = Pool(1, "t")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(len, "ab")
    pool.close()
    assert not begun[0].is_alive() and (begun[0].ident is not None) == starts


def test_calls_together_end_before_their_error_is_raised() -> None:
    """Wrong if results came as they are done; or if the error were raised while another call still uses what is closed then."""
    begun, ended = threading.Barrier(3), list[int]()

    def call(k: int) -> int:
        begun.wait(20)
        ended.append(k)
        if k == 1:
            raise ValueError("of the second")
        return k

    assert call_together([lambda k=k: call(2 * k) for k in range(3)], "test") == [0, 2, 4]  # type: ignore[misc]
    ended.clear()
    with pytest.raises(ValueError, match="of the second"):
        call_together([lambda k=k: call(k) for k in range(3)], "test")  # type: ignore[misc]
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize("n", [1, 2])
def test_calls_together_are_interrupted(n: int) -> None:
    """Wrong if Ctrl-C waited for the answers of a store, which may take minutes."""
    may_end, ended = threading.Event(), list[int]()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        may_end.wait(20)
        ended.append(1)

    with pytest.raises(KeyboardInterrupt):
        call_together([interrupt, *[lambda: may_end.wait(20)] * (n - 1)], "test")
    assert not ended
    may_end.set()
