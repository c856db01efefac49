"""How many requests to one store are under way in this process? Fewer while it says that it has too much to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SMALL_IN_ONE = 8


class Throttle:
    """At most `most` requests at a time; eight small ones count as one. The limit is halved when a server is busy, and grows by
    one after as many good answers.

    Attributes
    ----------
    has_answered : bool
        Whether the store has ever answered.
    """

    def __init__(self, most: int) -> None:
        self._most, self._limit, self._n_running = most, float(most), 0
        self._changed, self._halved = threading.Condition(), 0.0
        self.has_answered = False

    @contextmanager
    def slot(self, is_small: bool = False) -> Iterator[None]:
        """Wait until one more request may run, for a ``with`` statement around it."""
        n = 1 if is_small else _SMALL_IN_ONE  # all are counted in small ones
        with self._changed:
            self._changed.wait_for(lambda: self._n_running + n <= _SMALL_IN_ONE * max(1, int(self._limit)))
            self._n_running += n
        try:
            yield
        finally:
            with self._changed:
                self._n_running -= n
                self._changed.notify_all()  # all: a large one may still have to wait where a small one need not

    def good(self) -> None:
        """Note a good answer."""
        self.has_answered = True
        with self._changed:
            self._limit = min(self._most, self._limit + 1 / self._limit)

    def busy(self, since: float) -> None:
        """Halve the limit, after an answer to a request that began at `since`, unless it was halved after that."""
        with self._changed:
            if since > self._halved:
                self._limit, self._halved = max(1.0, self._limit / 2), time.monotonic()
