"""Does a save in the background say when it has ended?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shardload.jobs.saving.save import BackgroundSave


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
