"""What does a caller of `stream` get? A `Stream`, with a length, an order and batches by number, and its iterator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from shardload.errors import ConfigError
from shardload.jobs.streaming.plan import StreamPlan
from shardload.jobs.streaming.reader import Ahead, Batch, Inline, RoundReader

STATE_VERSION = 1


class Stream:
    """Batches of arrays in files. Made by `shardload.stream`.

    Attributes
    ----------
    plan : StreamPlan
        What is read, in which order: print it.
    """

    def __init__(self, plan: StreamPlan, make_reader: Callable[..., RoundReader], build: Callable[[Any], Any]) -> None:
        self.plan, self._make_reader, self._build = plan, make_reader, build

    def __len__(self) -> int:
        """Batches of all epochs. ConfigError if there is no end."""
        if self.plan.epochs is None:
            raise ConfigError("a stream with epochs=None has no end, so it has no length: pass epochs=1")
        return self.plan.epochs * self.plan.n_batches(self.plan.n_samples)

    def order(self, epoch: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The anchors of all samples of an epoch, in the order in which they are given: steps of the selection."""
        return self.plan.sample_order.epoch(epoch).copy()

    def __getitem__(self, number: int) -> Any:
        """The batch with a number. Collective: yes."""
        n_epoch = self.plan.n_batches(self.plan.n_samples)
        epoch, k = divmod(number, max(1, n_epoch))
        if number < 0 or not n_epoch or (self.plan.epochs is not None and epoch >= self.plan.epochs):
            raise IndexError(f"batch {number} of a stream with {'no end' if self.plan.epochs is None else len(self)} batches")
        reader = self._make_reader(epoch, k * self.plan.batch, 1)
        source = Inline(reader)
        try:
            batch = source.next()
        finally:
            source.close(False)
        return self._build([] if batch is None else batch.arrays)

    def __iter__(self) -> StreamIterator:
        """The batches from the first one on. Collective: yes, as is each `next`."""
        return StreamIterator(self)

    def __repr__(self) -> str:
        return f"<{self.plan!r}>"


class StreamIterator:
    """The batches of a stream, one after the other. A context manager, which ends its threads.

    Attributes
    ----------
    index : ndarray of int or None
        The anchors of the batch just given.
    mask : ndarray of bool or None
        Which of its samples are real; the others fill the last batch up.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._epoch = self._sample = 0
        self._batches: Inline | Ahead | None = None
        self._reader: RoundReader | None = None
        self._is_closed = False
        self.index: np.ndarray[Any, Any] | None = None
        self.mask: np.ndarray[Any, Any] | None = None

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if self._batches is not None:
            self._batches.close(True, wait=False)

    def __next__(self) -> Any:
        """The next batch. Collective: yes."""
        if self._is_closed:
            raise ConfigError("this iterator is closed: make a new one, iter(stream), and give it the state")
        plan = self._stream.plan
        if self._batches is None:
            self._reader = self._stream._make_reader(self._epoch, self._sample)
            self._batches = Ahead(self._reader, plan.prefetch) if plan.prefetch else Inline(self._reader)
        batch: Batch | None
        try:
            batch = self._batches.next()
        except BaseException:
            self.close()
            raise
        if batch is None:
            self.close()
            raise StopIteration
        self._epoch, self._sample = batch.epoch, batch.first_sample + batch.n_samples
        order = plan.sample_order.epoch(batch.epoch)
        self.index = order[batch.first_sample : batch.first_sample + batch.n_samples]
        self.mask = np.arange(plan.batch) < batch.n_samples
        return self._stream._build(batch.arrays)

    def get_state(self) -> dict[str, Any]:
        """Where the stream is after the batches that were given: plain values for JSON, the same on all ranks."""
        return {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "sample": self._sample,
            "stream": self._stream.plan.fingerprint,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another iterator was, on any mesh and number of ranks. Before the first batch.

        Raises
        ------
        ConfigError
            If it is the state of another stream; it names the difference.
        """
        if self._batches is not None:
            raise ConfigError("this iterator has given batches already: set the state of a new one, iter(stream)")
        if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
            found = state.get("version") if isinstance(state, Mapping) else type(state).__name__
            raise ConfigError(f"this is no state of a stream, or one of another version: {found!r}, expected {STATE_VERSION}")
        mine, theirs = self._stream.plan.fingerprint, state["stream"]
        differ = [f"{name} is {mine.get(name)!r}, was {theirs.get(name)!r}" for name in mine if mine[name] != theirs.get(name)]
        if differ:
            raise ConfigError(
                f"this state is of another stream, whose order is another one: {'; '.join(differ)}. Pass what was passed then"
            )
        self._epoch, self._sample = int(state["epoch"]), int(state["sample"])

    def close(self) -> None:
        """End the threads, and close the files. Collective: yes, unless the stream is at its end."""
        self._is_closed = True
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close(True)
