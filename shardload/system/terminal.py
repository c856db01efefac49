"""How is output fitted to the terminal's width, and how is a command's output kept free of what libraries print?

1. `width_of` returns the number of columns: those of the terminal, or 80 if the output is no terminal.
2. `wrap` breaks text between words only. A word that is wider than the terminal is not broken, so that it can be copied.
3. `fit_table` prints a table: as many columns as fit, with the others in lines below each row. It leaves nothing out.
4. `own_stdout` redirects standard output, so that only the command prints there.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from shardload.errors import printable

WIDTH = 80  # if the output is no terminal: a log, a file, a launcher's pipe
_LEAST = 20  # columns, at least; narrower lines could not hold a word


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    title : str
        The heading; also put before a value that is printed below its row.
    is_number : bool
        Whether values are aligned to the right.
    """

    title: str
    is_number: bool = False


def width_of(stream: IO[str] | None = None) -> int:
    """The width from ``COLUMNS``, or of the terminal behind `stream` (default: standard output), or else `WIDTH`."""
    stream = sys.stdout if stream is None else stream
    with suppress(ValueError):
        if (columns := int(os.environ.get("COLUMNS", "0"))) > 0:
            return max(_LEAST, columns)
    with suppress(AttributeError, OSError, ValueError):  # closed, without a descriptor, or no terminal
        return max(_LEAST, os.get_terminal_size(stream.fileno()).columns or WIDTH)
    return WIDTH


def width_of_prints() -> int:
    """The width for what a script prints: the terminal's, or exactly `WIDTH` if standard output is no terminal.

    Without a terminal ``COLUMNS`` is ignored, so that logs are the same on every rank and every machine.
    """
    with suppress(AttributeError, ValueError):  # no standard output, or a closed one
        return width_of(sys.stdout) if sys.stdout.isatty() else WIDTH
    return WIDTH


def wrap(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """Break `text` between words into lines of at most `width`. `first` begins the first line, `rest` the others.

    >>> wrap("shape (64, 64), 1.0 MiB in all", 20, "  ")
    ['  shape (64, 64),', '  1.0 MiB in all']
    """
    rest = " " * len(first) if rest is None else rest
    lines = textwrap.wrap(
        text,
        max(width, len(rest) + 1, len(first) + 1),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [first.rstrip()]


def fit_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """A table in lines of at most `width`, unless a single word is wider.

    As many of the first columns as fit are side by side; the other cells are in lines below each row, with their titles.

    Parameters
    ----------
    columns, rows
        The table. Cells are strings; an empty cell is ``""`` or ``"-"``.
    width : int
        Columns of the terminal.
    """
    n, n_kept = len(rows), len(columns)
    while max(map(len, lines := _drawn(columns[:n_kept], [row[:n_kept] for row in rows]))) > width and n_kept > 1:
        n_kept -= 1
    table = lines[: len(lines) - n]
    for line, row in zip(lines[len(table) :], rows, strict=True):
        below = zip(columns[n_kept:], row[n_kept:], strict=True)
        parts = [f"{column.title} {cell}" for column, cell in below if cell not in ("", "-")]
        table += [line, *(wrap("; ".join(parts), width, " " * 4) if parts else [])]
    return table


def _drawn(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, as wide as needed."""
    table = [[column.title for column in columns], *rows]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    lines = (
        "  ".join(c.rjust(w) if column.is_number else c.ljust(w) for c, w, column in zip(row, widths, columns, strict=True))
        for row in table
    )
    return [line.rstrip() for line in lines]


def say_error(text: str) -> None:
    """Print one message on standard error. On a terminal it is red, and lines are broken between words."""
    from rich.console import Console
    from rich.text import Text

    message = "error: " + "\n".join(printable(line) for line in text.splitlines())
    if sys.stderr.isatty():
        width = width_of(sys.stderr)
        message = "\n".join(line for part in message.splitlines() for line in wrap(part, width, "", "  "))
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(message, style="red"))


@contextmanager
def own_stdout() -> Iterator[IO[str]]:
    """A stream to print to, while all other output to standard output (Gloo: a line per connection) is discarded.

    The file descriptor is redirected, because libraries in C and C++ do not use `sys.stdout`. What is printed leaves line by
    line, so that an error (a full disk) comes where it is printed, not when the stream is closed.
    """
    try:
        sys.stdout.fileno()
    except (AttributeError, io.UnsupportedOperation):  # it was closed by the parent process (None), or is in memory
        yield sys.stdout
        return
    sys.stdout.flush()
    descriptor = os.dup(1)
    out = open(descriptor, "w", 1, encoding=sys.stdout.encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield out
    finally:
        sys.stdout.flush()
        with suppress(OSError, AttributeError):  # what is in the C library's buffer would be printed after this
            ctypes.CDLL(None).fflush(None)
        os.dup2(descriptor, 1)
        with suppress(OSError):  # raised when it was printed
            out.close()
        os.close(descriptor)
