"""What does a caller of `stream` get? A `Stream`, with a length, an order and batches by number, and its iterator."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self

import numpy as np

from shardload.errors import ConfigError
from shardload.jobs.streaming.plan import StreamPlan
from shardload.jobs.streaming.reader import Inline, ReadAhead, RoundReader, StreamReport
from shardload.system.garbage import let_go
from shardload.units import shown

STATE_VERSION = 1


def _integer(value: Any) -> int | None:
    """An integer, which may be NumPy's; None for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return None


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
        """Batches of all epochs. TypeError if there is no end: by that progress bars know."""
        if self.plan.sampling.epochs is None:
            raise TypeError("a stream with epochs=None has no end, so it has no length: pass epochs=1")
        return self.plan.sampling.epochs * self.plan.n_batches(self.plan.n_samples)

    def order(self, epoch: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The anchors of all samples of an epoch, in the order in which they are given: steps of the selection."""
        number = _integer(epoch)
        if number is None or number < 0:
            raise ConfigError(f"epoch is {epoch!r}; expected the number of an epoch, 0 or more")
        return self.plan.sample_order.epoch(number).copy()

    def __getitem__(self, number: int) -> Any:
        """The batch with a number. Collective: yes."""
        n_epoch, integer = self.plan.n_batches(self.plan.n_samples), _integer(number)
        if integer is None:
            raise TypeError(f"a batch of a stream is taken by its number, such as 0, not by {number!r}")
        number = integer  # NumPy's overflow where the order is hashed
        epoch, k = divmod(number, max(1, n_epoch))
        if number < 0 or not n_epoch or (self.plan.sampling.epochs is not None and epoch >= self.plan.sampling.epochs):
            numbers = "0 or more" if self.plan.sampling.epochs is None else f"0 to {len(self) - 1}"
            raise IndexError(f"batch {number} of a stream; expected {numbers}, in the order in which they are given")
        with StreamIterator(self, epoch, k * self.plan.batch, 1) as batches:
            return next(batches)

    def __iter__(self) -> StreamIterator:
        """The batches from the first one on. Collective: yes, as is each `next`."""
        return StreamIterator(self)

    def to_grain(self) -> Any:
        """The batches as a ``grain.IterDataset``, for a pipeline in this process.

        Its iterators are collective as those of the stream are, and have the same state.

        Raises
        ------
        ConfigError
            If Grain is not installed.
        """
        try:
            import grain
        except ImportError as error:
            raise ConfigError("to_grain needs Grain, which cannot be imported here: pip install grain") from error
        stream = self

        class GrainBatches(StreamIterator, grain.DatasetIterator):  # type: ignore[misc, unused-ignore]
            """The batches from a state on."""

            def __init__(self) -> None:
                grain.DatasetIterator.__init__(self)
                StreamIterator.__init__(self, stream)

        class GrainDataset(grain.IterDataset):  # type: ignore[misc, unused-ignore]
            """All batches."""

            def __iter__(self) -> Iterator[Any]:
                return GrainBatches()

            def __reduce__(self) -> NoReturn:
                raise ConfigError(
                    "a stream is read by the ranks of an MPI job, not by processes that Grain starts, and it is read ahead "
                    "already (prefetch=2): leave mp_prefetch out"
                )

        return GrainDataset()

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
    report : StreamReport
        What the batches have cost until now.
    """

    def __init__(self, stream: Stream, epoch: int = 0, sample: int = 0, n_batches: int | None = None) -> None:
        self._stream, self._epoch, self._sample, self._n_batches = stream, epoch, sample, n_batches
        self._batches: Inline | ReadAhead | None = None
        self._is_closed = self._is_at_end = False
        self.report = StreamReport()
        self.index: np.ndarray[Any, Any] | None = None
        self.mask: np.ndarray[Any, Any] | None = None

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._end(error)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._batches is not None and not is_finalizing():  # at exit it was ended before, and modules are empty by now
            self._batches.close(wait=False)

    def __next__(self) -> Any:
        """The next batch. Collective: yes."""
        if self._is_at_end:
            raise StopIteration
        if self._is_closed:
            raise ConfigError("this iterator is closed: make a new one, iter(stream), and give it the state")
        try:
            if self._batches is None:
                reader = self._stream._make_reader(self._epoch, self._sample, self._n_batches)
                self.report, prefetch = reader.report, self._stream.plan.sampling.prefetch if self._n_batches is None else 0
                self._batches = ReadAhead(reader, prefetch) if prefetch else Inline(reader)
            batch = self._batches.next()
        except BaseException as error:
            self._end(error)
            let_go(error)
            raise
        if batch is None:
            self._is_at_end = True
            self._end()
            raise StopIteration
        plan, n_samples = self._stream.plan, len(batch.anchors)
        self._epoch, self._sample = batch.epoch, batch.first_sample + n_samples
        if self._sample == plan.n_samples:  # else another size of a batch may give what is left
            self._epoch, self._sample = batch.epoch + 1, 0
        self.index, self.mask = batch.anchors, np.arange(plan.batch) < n_samples
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
        """Go on where another iterator was, on any mesh and number of ranks. After a batch, on all ranks after the same one.

        Raises
        ------
        ConfigError
            If it is the state of another stream; it names the difference.
        """
        parts, plan = state if isinstance(state, Mapping) else {}, self._stream.plan
        epoch, sample = _integer(parts.get("epoch")), _integer(parts.get("sample"))
        expected, fingerprint = plan.fingerprint, parts.get("stream")
        is_known = parts.get("version") == STATE_VERSION and isinstance(fingerprint, Mapping)
        if not is_known or fingerprint is None or epoch is None or sample is None:
            raise ConfigError(
                f"this is no state of a stream, or one of another version than {STATE_VERSION}: {shown(state)}. Pass what "
                "get_state gave, or what json.loads made of it"
            )
        differ = [
            f"{name} is {expected.get(name)!r}, was {fingerprint.get(name)!r}"
            for name in {**expected, **fingerprint}
            if expected.get(name) != fingerprint.get(name)
        ]
        if differ:
            raise ConfigError(
                f"this state is of another stream, whose order is another one: {'; '.join(differ)}. Pass what was passed then"
            )
        n_left = plan.n_samples - sample
        if min(epoch, sample, n_left) < 0:
            raise ConfigError(
                f"this state is after sample {sample} of epoch {epoch}, but an epoch has {plan.n_samples} samples"
            )
        if plan.sampling.remainder == "error" and n_left % plan.batch:
            raise ConfigError(
                f"this state is after sample {sample} of an epoch of {plan.n_samples}; the {n_left} that are left are no whole "
                f"batches of {plan.batch}, which remainder='error' forbids. Pass the batch that was passed then, or "
                "remainder='drop' or 'pad'"
            )
        self._end()
        self._epoch, self._sample, self._is_closed, self._is_at_end = epoch, sample, False, False

    def close(self) -> None:
        """End the threads, close the files, and free the communicator. All ranks should do it after the same batch.

        If this rank has read ahead, and the others go on, they get an error that names it.
        """
        self._end()

    def _end(self, error: BaseException | None = None) -> None:
        self._is_closed = True
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close(error)
