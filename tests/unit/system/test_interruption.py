"""Does an exception of a signal handler that a finalizer swallowed come again, by the same signal, and only if it is wanted?"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardload.system.interruption import interrupt_again

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted(number: int) -> None:
    """As a finalizer."""
    try:
        signal.raise_signal(number)
    except BaseException as error:
        interrupt_again(error)


class Handlers:
    """One function for several signals, and several closures of one code."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def method(self, number: int, frame: object) -> None:
        self.seen.append(number)
        raise TimeoutError(number)

    def of_any_form(self, *given: Any) -> None:
        self.method(*given)

    def before(self, text: str, number: int, frame: object) -> None:
        self.method(number, frame)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("form", ["method", "of_any_form", "partial"])
def test_the_same_signal_comes_again(form: str, number: int) -> None:
    """Wrong if another one came for which the program has the same handler: it may end the program with another status."""
    handlers = Handlers()
    handler: Callable[..., None] = functools.partial(handlers.before, "x") if form == "partial" else getattr(handlers, form)
    for one in SIGNALS:
        signal.signal(one, handler)
    with pytest.raises(TimeoutError, match=str(int(number))):
        interrupted(number)
        threading.Event().wait(60)
    assert handlers.seen == [number, number]


def test_a_signal_with_another_handler_by_then_does_not_come() -> None:
    """Wrong if the end of a ``with`` statement that limits a call's time were followed by its alarm."""
    handlers, others, number, before = Handlers(), list[int](), signal.SIGUSR1, set(threading.enumerate())

    def finalizer() -> None:
        try:
            signal.raise_signal(number)
        except TimeoutError as error:
            interrupt_again(error)
            signal.signal(number, lambda number, _: others.append(number))

    signal.signal(number, handlers.method)
    finalizer()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert handlers.seen == [number] and others == []
