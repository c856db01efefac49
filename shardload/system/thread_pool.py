"""Which threads make calls that may block? Daemon threads, for which the process does not wait when it exits.

Python's own pool joins its threads when the interpreter exits, so a thread that hangs in a file system keeps the whole job from
ending. The threads of this pool end with the process, unless `Pool.close` has waited for them. One that hangs inside h5py holds
its lock, for which the end of the interpreter would wait: `_end_if_held_up`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from shardload.system.steps import step_done

_START_SECONDS = 0.5  # an operating system takes microseconds
_left: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of pools that were closed: it may have waited for them, or not


_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]  # a call, and the future that gets its result


class Pool:
    """Threads that are started when they are first needed, and run submitted calls in order.

    Parameters
    ----------
    n : int
        The largest number of threads.
    name : str
        Prefix of the threads' names.
    """

    def __init__(self, n: int, name: str) -> None:
        self._n, self._name = n, name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._waiting = threading.Semaphore(0)  # counts idle threads
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        # A pool that is deleted without `close` must not leave idle threads behind.
        weakref.finalize(self, _end, self._tasks, self._threads).atexit = False
        # The last to be registered is the first to be called: this must come before what h5py does at exit.
        atexit.unregister(_end_if_held_up)
        atexit.register(_end_if_held_up)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run a call in a thread. RuntimeError after `close`, or if no thread at all can be started."""
        if self._is_closed:
            raise RuntimeError("the pool is closed")
        future: Future[Any] = Future()
        self._tasks.put((future, call, arguments))
        if not self._waiting.acquire(blocking=False) and len(self._threads) < self._n:
            # The thread references the queue, not the pool, so that an unused pool can be garbage collected.
            name = f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self._tasks, self._waiting), name=name, daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:  # there may be no more of them; those that there are do the work
                self._threads.remove(thread)
                if not self._threads:
                    future.cancel()  # it is in the queue, and would begin whenever a thread can be started
                    raise
        return future

    def close(self, wait: bool = True, seconds: float | None = None) -> bool:
        """Cancel calls that have not begun, and end the threads; with `wait`, return when they have ended, or after so many
        seconds. True if they have.

        A thread that is blocked in a call, and not waited for, ends when the call returns, or with the process.
        """
        self._is_closed = True
        with suppress(Empty):  # a thread may take the last one
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    task[0].cancel()
        _end(self._tasks, self._threads)  # each time: a `close` after an interrupted one has taken out what that one put in
        _left.update(self._threads)
        deadline = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads if wait else ():
            _join(thread, deadline)
        return not any(thread.is_alive() for thread in self._threads)


def call_together(calls: Sequence[Callable[[], Any]], name: str, most: int = 16) -> list[Any]:
    """The results of some calls that wait for answers. Up to `most` wait at a time. Raises the first error when those that
    have begun have ended, but Ctrl-C at once.
    """
    if len(calls) < 2:  # as mostly: it needs no thread
        return [call() for call in calls]
    pool, results = Pool(min(most, len(calls)), name), list[Any]()
    try:
        for future in [pool.submit(call) for call in calls]:
            results.append(future.result())
            step_done()
    except BaseException as error:
        pool.close(wait=isinstance(error, Exception))
        raise
    pool.close()
    return results


def _work(tasks: SimpleQueue[_Task | None], waiting: threading.Semaphore) -> None:
    while (task := tasks.get()) is not None:
        _run(*task)
        del task  # or the objects that it references live until the next task
        waiting.release()


def _run(future: Future[Any], call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call(*arguments)
    except BaseException as error:
        future.set_exception(error)
        # The error has this call in its traceback, and its variables lead back to the error: neither would be freed before a
        # garbage collection. (`let_go` cannot clear them: who waits for the future may be there while this call still runs.)
        del future, call, arguments
    else:
        future.set_result(result)


def _join(thread: threading.Thread, deadline: float | None) -> None:
    """Return when the thread has ended, or at the deadline. Ctrl-C during its start leaves a thread that begins a little later,
    or never.
    """
    started_by = time.monotonic() + _START_SECONDS
    while True:
        try:
            return thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except RuntimeError:  # not started yet
            if time.monotonic() > started_by:
                return None
        time.sleep(0.001)


def _end(tasks: SimpleQueue[_Task | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        tasks.put(None)


def _end_if_held_up() -> None:
    """At exit: end this process at once if one of its threads hangs inside h5py."""
    h5py, deadline = sys.modules.get("h5py._objects"), time.monotonic() + _START_SECONDS
    while h5py is not None and any(thread.is_alive() for thread in _left):
        if h5py.phil.acquire(blocking=False):
            h5py.phil.release()
            return
        if time.monotonic() > deadline:
            flush()
            os._exit(1)
        time.sleep(0.001)


def flush() -> None:
    """Hand on what this process has printed, before it is ended."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it
            stream.flush()


def done_here(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run a call in this thread, at once: waking a thread takes longer than a small read. Ctrl-C is raised, not stored."""
    future: Future[Any] = Future()
    try:
        result = call(*arguments)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
    return future
