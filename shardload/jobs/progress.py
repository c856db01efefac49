"""How far is the call? Rank 0 shows a bar of text, in a terminal (that of mpiexec or srun, too) or below a notebook's cell.

By default it shows nothing for short loads. Without a terminal or notebook, a line tells of what takes longer than 30 s.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shardload.errors import printable
from shardload.options import Progress
from shardload.system.terminal import width_of
from shardload.units import format_nbytes

# A load of this size takes about a second with a slow codec. For shorter loads a bar would only flicker.
_WORTH_SHOWING_NBYTES = 256 << 20
_SECONDS_OF_A_LINE = 30
_LAUNCHERS = ("mpiexec", "mpirun", "srun", "prterun", "orterun")
_MOST_PARENTS = 6  # between a launcher and what it starts: proxies, shells
_WORTH_SHOWING_FILES = 100  # to look at them takes a second


def progress_of(
    progress: Progress, name: str | Callable[[], str], total: int, rank: int = 0, *, is_bytes: bool = True
) -> AbstractContextManager[Callable[[int], None]]:
    """Give the function to call with the bytes of each part that has arrived, or with how many more files are done.

    Parameters
    ----------
    progress : bool, callable or None
        As given to `load`. True shows a bar, False shows none, None shows one for a large load, or for many files, in a
        terminal or notebook. A function gets ``(done, total)``, of bytes those of this rank's pieces, on every rank.
    name : str or callable
        Name of the array that is loaded, or what is made of the files; or what makes it if it is shown.
    total : int
        Bytes of this rank's pieces, or files.
    rank : int
        Only rank 0 shows a bar.
    is_bytes : bool
        False: files are counted.
    """
    least = _WORTH_SHOWING_NBYTES if is_bytes else _WORTH_SHOWING_FILES
    if not callable(progress) and (rank != 0 or progress is False or (progress is None and total < least)):
        return nullcontext(lambda n: None)
    title = name if isinstance(name, str) else name()
    return _shown(progress, f"rank 0: {title}" if is_bytes else title, total, is_bytes)


@contextmanager
def _shown(progress: Progress, name: str, total: int, is_bytes: bool) -> Iterator[Callable[[int], None]]:
    is_notebook, is_terminal = _is_notebook(), sys.stderr is not None and (sys.stderr.isatty() or launcher_has_terminal())
    if callable(progress) or (progress is None and not is_notebook and not is_terminal):
        tell, done = progress if callable(progress) else _line_at_times(name, is_bytes), 0

        def call(n: int) -> None:
            nonlocal done
            done += n
            tell(done, total)

        yield call
        return
    from rich.console import Console  # imported late: a job without a terminal never needs it
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    width = width_of(sys.stderr)
    columns: list[ProgressColumn] = [DownloadColumn(True) if is_bytes else MofNCompleteColumn()]
    if width >= 60:
        columns = [BarColumn(16), *columns, TimeRemainingColumn()]
    room = max(8, width - (44 if width >= 60 else 18))  # the width that the columns leave for the name
    # In a notebook it is a line of text too: rich's own bar would need ipywidgets there.
    console = Console(stderr=True, width=width, force_jupyter=False, force_terminal=is_notebook or is_terminal or None)
    with Bar(TextColumn("{task.description}"), *columns, console=console) as bar:
        task = bar.add_task(escape(_short(printable(name), room)), total=total)
        yield lambda n: bar.advance(task, n)


def _line_at_times(name: str, is_bytes: bool) -> Callable[[int, int], None]:
    """A function of what is done and the total, which prints a line each 30 s, for the log of a job."""
    began = last_print = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last_print
        now = time.monotonic()
        if now - last_print >= _SECONDS_OF_A_LINE and sys.stderr is not None:
            last_print = now
            text = format_nbytes if is_bytes else str
            share = f"{100 * done // max(1, total)} %"
            print(
                f"shardload: {printable(name)}: {text(done)} of {text(total)}, {share}, after {now - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    return tell


def launcher_has_terminal() -> bool:
    """True if mpiexec, mpirun or srun has started this process in a terminal of this machine, and passes on what it prints."""
    process = os.getppid()
    for _ in range(_MOST_PARENTS):
        try:
            with open(f"/proc/{process}/stat") as file:
                command, _, rest = file.read().partition("(")[2].rpartition(")")
            if command.startswith(_LAUNCHERS):
                return os.readlink(f"/proc/{process}/fd/2").startswith(("/dev/pts/", "/dev/tty"))
            process = int(rest.split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False


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
