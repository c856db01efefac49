"""Does a save in the background say when it has ended?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from shardload.jobs.saving.save import BackgroundSave
from tests.unit.files import raising


def test_an_interrupted_wait_is_no_end_of_the_save() -> None:
    """Wrong if it asked the thread, which up to Python 3.12 counts as ended after Ctrl-C in `join`."""
    goes_on, report = threading.Event(), object()

    def write(are_copied: Callable[[], None]) -> Any:
        are_copied()
        goes_on.wait(20)
        return report

    save = BackgroundSave("new.h5", 0, write)
    save._thread.is_alive = lambda: False  # type: ignore[method-assign]
    assert not save.is_done
    goes_on.set()
    assert save.wait() is report and save.is_done


def test_two_threads_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if one of them took it off the list between two lines of the other: a ValueError of a save that went well."""

    class Unfinished(list[BackgroundSave]):
        def __contains__(self, save: object) -> bool:
            self.clear()
            return True

        def remove(self, save: BackgroundSave) -> None:
            self.clear()
            super().remove(save)

    monkeypatch.setattr(import_module("shardload.jobs.saving.save"), "_unfinished", Unfinished())
    report: Any = object()
    assert BackgroundSave("new.h5", 0, lambda are_copied: report).wait() is report


def test_a_rank_that_can_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if it raised an error of which others knew nothing: their threads waited for it until the timeout."""

    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    report: Any = object()
    save = BackgroundSave("new.h5", 0, lambda are_copied: report)
    assert save.is_done and save.wait() is report
