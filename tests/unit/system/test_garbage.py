"""Do collections of garbage wait, and no longer than they should?"""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections.abc import Iterator

import pytest

from shardload.system.garbage import collections_wait, let_go
from tests.unit.files import raising


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


class Held:
    """Something of which a test sees when it is freed."""


def test_an_error_that_is_kept_holds_nothing_of_the_calls_that_have_ended() -> None:
    """Also of those above it that caught it, and of what caused it. Wrong if the memory of a load that failed stayed."""
    freed: list[weakref.ref[Held]] = []

    def hold() -> Held:
        held = Held()
        freed.append(weakref.ref(held))
        return held

    def read() -> None:
        _held = hold()
        raise KeyError("damaged")

    def name() -> None:
        _held = hold()
        try:
            read()
        except KeyError as error:
            raise OSError("chunk 3") from error

    def load() -> Exception:
        _held, kept = hold(), list[Exception]()
        try:
            name()
        except OSError as error:
            kept.append(error)  # the call holds the error, and the error the call
        return kept[0]

    gc.collect()
    gc.disable()
    try:
        error = load()
        let_go(error)
        assert [one() for one in freed] == [None] * 3
        assert [found.name for found in traceback.extract_tb(error.__traceback__)] == ["load", "name"], "where it was, stays"
    finally:
        gc.enable()


def test_a_generator_that_has_caught_the_error_goes_on() -> None:
    """Wrong if its variables were cleared: that ends it."""
    kept: list[Exception] = []

    def steps() -> Iterator[int]:
        n = 7
        try:
            raising(KeyError("damaged"))()
        except KeyError as error:
            kept.append(error)
        yield n
        yield n + 1

    going = steps()
    assert next(going) == 7
    let_go(kept[0])
    assert next(going) == 8
