"""Does a call move on while one thread works alone, at thousands of arrays or files?

The watchdog of a call (`comm.watchdog`) takes a call in which nothing moves for failed. What goes through the chunks of arrays
counts them. Everything else that may take long does many small things, one after the other: it looks at a file, makes an array,
writes metadata. **Whoever has done one of them calls `step_done`**, in the lowest function that all of them go through. Whoever
watches says once, for its thread, what is called then (`steps_told_to`). If nobody watches, nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")

_told: ContextVar[Callable[[], object] | None] = ContextVar("told", default=None)


def step_done() -> None:
    """Say that one of many things is done, of which each takes little time."""
    tell = _told.get()
    if tell is not None:
        tell()


def steps_of(items: Iterable[Item]) -> Iterator[Item]:
    """The items, of which each is a step."""
    for item in items:
        yield item
        step_done()


@contextmanager
def steps_told_to(tell: Callable[[], object]) -> Iterator[None]:
    """Inside, `tell` is called for each step of this thread. It may raise.

    >>> n_steps = []
    >>> with steps_told_to(lambda: n_steps.append(1)):
    ...     step_done()
    >>> step_done()
    >>> n_steps
    [1]
    """
    before = _told.get()
    _told.set(tell)
    try:
        yield
    finally:
        _told.set(before)
