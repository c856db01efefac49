"""How does a stream become the source of a Grain pipeline? As an `IterDataset` whose elements are batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from shardload.errors import ConfigError

if TYPE_CHECKING:
    from shardload.jobs.streaming.stream import Stream


def grain_dataset(stream: Stream) -> Any:
    """The batches of a stream as a ``grain.IterDataset``. ConfigError if Grain is not installed."""
    try:
        import grain
    except ImportError as error:
        raise ConfigError("to_grain needs Grain, which cannot be imported here: pip install grain") from error

    class GrainBatches(grain.DatasetIterator):  # type: ignore[misc, unused-ignore]
        """The batches from a state on."""

        def __init__(self) -> None:
            super().__init__()
            self._batches = iter(stream)

        def __next__(self) -> Any:
            return next(self._batches)

        def get_state(self) -> dict[str, Any]:
            return self._batches.get_state()

        def set_state(self, state: dict[str, Any]) -> None:
            fresh = iter(stream)
            fresh.set_state(state)
            self._batches.close()
            self._batches = fresh

        def close(self) -> None:
            super().close()
            self._batches.close()

    class GrainDataset(grain.IterDataset):  # type: ignore[misc, unused-ignore]
        """All batches."""

        def __iter__(self) -> Iterator[Any]:
            return GrainBatches()

        def __reduce__(self) -> NoReturn:
            raise ConfigError(
                "a stream is read by the ranks of an MPI job, not by processes that Grain starts, and it is read ahead already "
                "(prefetch=2): leave mp_prefetch out"
            )

        def __str__(self) -> str:
            return repr(stream)

    return GrainDataset()
