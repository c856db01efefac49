"""How does a save go on while the program computes? In a thread, with messages of its own, from copies of the shards."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 (see `_wait_at_exit`)
import logging
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from shardload.errors import ShardloadError
from shardload.system.garbage import let_go

if TYPE_CHECKING:
    from shardload.jobs.saving.save import SaveReport

_log = logging.getLogger("shardload")
_unfinished: list[BackgroundSave] = []  # and those that have failed without a `wait`


class BackgroundSave:
    """A save that goes on while the program computes, as `save(..., background=True)` returns it.

    Parameters
    ----------
    path : str
        The new file.
    rank : int
        This rank. Rank 0 logs an error at once, for the case that nobody waits.
    write : callable
        Saves, and returns the report. It calls the function that it gets when it needs the arrays no longer.
    """

    def __init__(self, path: str, rank: int, write: Callable[[Callable[[], None]], SaveReport]) -> None:
        self.path, self._rank = path, rank
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._are_copied = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(write,), name="shardload-save")
        _unfinished.append(self)
        _wait_at_exit()
        self._thread.start()
        self._are_copied.wait()

    def _run(self, write: Callable[[Callable[[], None]], SaveReport]) -> None:
        try:
            self._report = write(self._are_copied.set)
        except BaseException as error:
            let_go(error)
            self._error = error
            _log.log(
                logging.DEBUG if self._rank else logging.ERROR,
                "the save of '%s' in the background failed: %s",
                self.path,
                error,
            )
        finally:
            self._are_copied.set()

    @property
    def is_done(self) -> bool:
        """True if the file is there, or the save has failed. Collective: no; ranks may see it at different times."""
        return not self._thread.is_alive()

    def wait(self) -> SaveReport:
        """Wait until the file is there, and return the report; or raise the error of the save, which all ranks get.

        Collective: no. A rank that never calls it takes part in the save all the same.
        """
        self._thread.join()
        if self in _unfinished:
            _unfinished.remove(self)
        if self._report is None:
            raise self._error or ShardloadError("the save has ended without a report")
        return self._report

    def __repr__(self) -> str:
        state = "done" if self.is_done else "going on"
        return f"<BackgroundSave of {self.path!r}: {'failed' if self._error is not None else state}>"


@cache
def _wait_at_exit() -> None:
    """Let the end of the program wait for the threads, while Python still gives out threads and executors: zarr takes them.

    Python waits for a thread that is no daemon, and calls what `atexit` has, only after it has closed its executors. Of what is
    registered here the last is called first: before `concurrent.futures.thread`, which registers itself when it is imported.
    """
    threading._register_atexit(_join_all)  # type: ignore[attr-defined]


def _join_all() -> None:
    for save in list(_unfinished):
        save._thread.join()


def wait_for_unfinished() -> None:
    """Wait for the saves in the background. Raises the error of one that failed, if nobody has seen it."""
    for save in list(_unfinished):
        save.wait()
