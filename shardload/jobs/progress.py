"""How far is the load? Rank 0 shows a bar, in a terminal or below the cell of a notebook.

By default it shows nothing for short loads, or without a terminal or notebook.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from html import escape
from importlib import import_module
from typing import Any

from shardload.errors import printable
from shardload.options import Progress
from shardload.system.terminal import width_of
from shardload.units import format_nbytes

__all__ = ["progress_of", "progress_over_files"]

# A load of this size takes about a second with a slow codec. For shorter loads a bar would only flicker.
_WORTH_SHOWING_NBYTES = 256 << 20
_WORTH_SHOWING_FILES = 100  # to look at them takes a second
_REDRAWN_SECONDS = 0.1


def progress_of(
    progress: Progress, name: str | Callable[[], str], total_nbytes: int, rank: int
) -> AbstractContextManager[Callable[[int], None]]:
    """Give the function to call with the bytes of each part that has arrived.

    Parameters
    ----------
    progress : bool, callable or None
        As given to `load`. True shows a bar, False shows none, None shows one for a large load in a terminal or notebook. A
        function gets ``(done_nbytes, total_nbytes)`` of this rank's pieces, on every rank.
    name : str or callable
        Name of the array that is loaded, or what makes it if it is shown.
    total_nbytes : int
        Bytes of this rank's pieces.
    rank : int
        Only rank 0 shows a bar.
    """
    if not callable(progress) and (
        rank != 0 or progress is False or (progress is None and total_nbytes < _WORTH_SHOWING_NBYTES)
    ):
        return _UNSEEN
    return _shown(progress, f"rank 0: {name if isinstance(name, str) else name()}", total_nbytes, format_nbytes)


def progress_over_files(progress: Progress, name: str, n_files: int) -> AbstractContextManager[Callable[[int], None]]:
    """The same for one process that goes through files: give the function to call with how many more are done.

    Parameters
    ----------
    progress : bool, callable or None
        As above. None shows a bar for many files. A function gets ``(n_done, n_files)``.
    name : str
        What is made of them.
    n_files : int
        How many there are.
    """
    if not callable(progress) and (progress is False or (progress is None and n_files < _WORTH_SHOWING_FILES)):
        return _UNSEEN
    return _shown(progress, name, n_files, str)


def _ignore(nbytes: int) -> None:
    """Progress that nobody sees."""


_UNSEEN: AbstractContextManager[Callable[[int], None]] = nullcontext(_ignore)


@contextmanager
def _shown(progress: Progress, name: str, total: int, as_text: Callable[[int], str]) -> Iterator[Callable[[int], None]]:
    done = 0
    if callable(progress):

        def call(more: int) -> None:
            nonlocal done
            done += more
            progress(done, total)

        yield call
        return
    is_notebook = _is_notebook()
    is_seen = is_notebook or (sys.stderr is not None and sys.stderr.isatty())
    if progress is None and not is_seen:
        yield _ignore
        return
    name = printable(name)
    if is_notebook:
        with _in_notebook(name, total, as_text) as advance:
            yield advance
        return
    from rich.console import Console  # imported late: a job without a terminal never needs it
    from rich.markup import escape as escape_markup
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    width = width_of(sys.stderr)
    is_bytes = as_text is format_nbytes
    columns: list[Any] = [TextColumn("{task.description}"), DownloadColumn(True) if is_bytes else MofNCompleteColumn()]
    if width >= 60:
        columns = [columns[0], BarColumn(16 if width < 100 else 30), columns[1], TimeRemainingColumn()]
    if width >= 100 and is_bytes:
        columns.insert(3, TransferSpeedColumn())
    room = max(8, width - {2: 18, 4: 44, 5: 70}[len(columns)])  # the width that the columns leave for the name
    with Bar(*columns, console=Console(stderr=True, width=width)) as bar:
        task = bar.add_task(escape_markup(_short(name, room)), total=total)
        yield lambda more: bar.advance(task, more)


def _short(text: str, room: int) -> str:
    """`text`, or its beginning and its end (which has the file's name) if it is longer than `room`.

    >>> _short("rank 0: '/rho' in '/a/long/path/to/run.h5'", 28)
    "rank 0: '/r…path/to/run.h5'"
    """
    return text if len(text) <= room else text[: room * 2 // 5] + "…" + text[-(room * 3 // 5 - 1) :]


def _is_notebook() -> bool:
    """True if this process is a Jupyter kernel. Every kernel has imported IPython already."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class _Bar:
    """A bar as HTML for notebooks, and as text for consoles."""

    def __init__(self, name: str, done: int, total: int, seconds: float, as_text: Callable[[int], str]) -> None:
        self.name, self.done, self.total, self.seconds, self.as_text = name, done, total, seconds, as_text

    def __repr__(self) -> str:
        rate = f", {self.as_text(int(self.done / self.seconds))}/s" if self.seconds > 0 else ""
        return f"{self.name}: {self.as_text(self.done)} of {self.as_text(self.total)}{rate}"

    def _repr_html_(self) -> str:
        return f'<progress value="{self.done}" max="{max(1, self.total)}"></progress> {escape(repr(self))}'


@contextmanager
def _in_notebook(name: str, total: int, as_text: Callable[[int], str]) -> Iterator[Callable[[int], None]]:
    """A bar below the cell, drawn with IPython alone; rich's bar would need ipywidgets there."""
    began = drawn = time.monotonic()
    done = 0
    shown: Any = import_module("IPython.display").display(_Bar(name, 0, total, 0.0, as_text), display_id=True)

    def advance(more: int) -> None:
        nonlocal done, drawn
        done += more
        now = time.monotonic()
        if now - drawn >= _REDRAWN_SECONDS or done >= total:
            drawn = now
            shown.update(_Bar(name, done, total, now - began, as_text))

    try:
        yield advance
    finally:
        shown.update(_Bar(name, done, total, time.monotonic() - began, as_text))
