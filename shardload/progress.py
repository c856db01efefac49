"""How far is it? One bar, on rank 0, where somebody can see it.

Nothing is shown for loads that take a moment, or where standard error is not a terminal, unless it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardload.options import Progress

__all__ = ["progress_of"]

# About a second's worth for a slow codec: a bar that is gone at once only flickers.
_WORTH_SHOWING_NBYTES = 256 << 20


@contextmanager
def progress_of(progress: Progress, name: str, total_nbytes: int, rank: int) -> Iterator[Callable[[int], None]]:
    """A function to be told of every part that has arrived.

    Parameters
    ----------
    progress : bool, callable or None
        As given to `load`: True and False speak for themselves, None shows a bar where it is useful, a function gets
        ``(done_nbytes, total_nbytes)`` of this rank's pieces, on every rank.
    name : str
        What is being loaded.
    total_nbytes : int
        Bytes of this rank's pieces.
    rank : int
        Only rank 0 shows a bar.
    """
    done = 0
    if callable(progress):

        def call(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, total_nbytes)

        yield call
        return
    wanted = sys.stderr.isatty() and total_nbytes >= _WORTH_SHOWING_NBYTES if progress is None else progress
    if rank != 0 or not wanted:
        yield lambda nbytes: None
        return
    from rich.console import Console  # only here: a job without a terminal never needs it
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"rank 0: {name}", total=total_nbytes)
        yield lambda nbytes: bar.advance(task, nbytes)
