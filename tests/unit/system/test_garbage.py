"""Do collections of garbage wait, and no longer than they should?"""

from __future__ import annotations

import gc
import threading

import pytest

from shardload.system.garbage import collections_wait


def test_collections_wait_and_go_on() -> None:
    """Wrong if an error, a call in another thread or an inner context left them off, or switched them on too early."""
    assert gc.isenabled()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collections_wait():
            inside.set()
            leave.wait(60)

    with pytest.raises(KeyError), collections_wait():
        assert not gc.isenabled()
        with collections_wait():
            pass
        assert not gc.isenabled()
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(60)
        raise KeyError
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_an_application_that_has_switched_them_off() -> None:
    gc.disable()
    try:
        with collections_wait():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with collections_wait(False):
        assert gc.isenabled()
