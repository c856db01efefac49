"""How is text fitted to the place where it is shown, and how is that place kept free of what libraries print?

1. `width_of` says how many columns there are: those of the terminal, 80 where output is none.
2. `wrap` and `wrap_parts` break text between words alone: a name, a shape, a number with its unit stay whole, and what is
   wider than the place stands out of it, so that it can still be copied.
3. `fit_table` shows a table in the first of its forms that fits: all columns; fewer columns, and the others of each row in
   lines below it; or a record for each row. No form leaves anything out.
4. `own_stdout` is standard output for a command alone.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from shardload.errors import printable

__all__ = [
    "WIDTH",
    "Column",
    "fit_table",
    "own_stdout",
    "say_error",
    "width_of",
    "width_of_prints",
    "wrap",
    "wrap_parts",
]

WIDTH = 80  # where output is no terminal: a log, a mail, a file, a launcher's pipe
_LEAST = 20  # of which a line should be able to take a word
_KEPT = "\u00a0"  # stands for a space at which no line is broken
# What is read as one: a shape or spec in parentheses, a product, a number and its unit, a version.
_WHOLE = re.compile(
    r"\((?:[^()]|\([^()]*\))*,(?:[^()]|\([^()]*\))*\)"
    r"|\w+(?:\+\w+)?(?: x \w+(?:\+\w+)?)+"
    r"|(?<![\w.])\d[\d.,]* (?:[KMGTP]?i?B|s)\b"
    r"|[A-Za-z][\w-]* \d+\.\d+\.[\w.]*\w"
)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    title : str
        Above the column; before the value where the value is in a line of its own.
    is_number : bool
        Set to the right.
    lead : str or None
        What stands before the value in a line of its own, if not the title; "" for values that speak for themselves.
    """

    title: str
    is_number: bool = False
    lead: str | None = None


def width_of(stream: IO[str] | None = None, *, fallback: int = WIDTH) -> int:
    """Columns of ``COLUMNS``, or of the terminal that `stream` (standard output) is; `fallback` where there is neither."""
    stream = sys.stdout if stream is None else stream
    with suppress(ValueError):
        if (columns := int(os.environ.get("COLUMNS", "0"))) > 0:
            return max(_LEAST, columns)
    with suppress(AttributeError, OSError, ValueError):  # closed, without a descriptor, or no terminal
        return max(_LEAST, os.get_terminal_size(stream.fileno()).columns or fallback)
    return fallback


def width_of_prints() -> int:
    """Columns for what a script prints: the terminal's, and `WIDTH` exactly where standard output is no terminal.

    There no variable is looked at: what goes to logs, or is compared, is then the same on every rank and every machine.
    """
    with suppress(AttributeError, ValueError):  # no standard output, or a closed one
        return width_of(sys.stdout) if sys.stdout.isatty() else WIDTH
    return WIDTH


def wrap(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """`text` in lines of at most `width`, broken between words; `first` opens the first line, `rest` the others.

    >>> wrap("shape (64, 64), 1.0 MiB in all", 20, "  ")
    ['  shape (64, 64),', '  1.0 MiB in all']
    """
    rest = " " * len(first) if rest is None else rest
    most = width - max(len(first), len(rest))
    text = _WHOLE.sub(lambda found: _keep(found[0]) if len(found[0]) <= most else found[0], text)
    lines = textwrap.wrap(
        text,
        max(width, len(rest) + 1, len(first) + 1),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_KEPT, " ") for line in lines] or [first.rstrip()]


def wrap_parts(parts: Sequence[str], width: int, first: str = "", rest: str | None = None) -> list[str]:
    """`parts`, one after the other with ``;`` between them, each in one line where it fits."""
    most = width - max(len(first), len(rest or ""))
    kept = [_keep(part) if len(part) < most else part for part in parts if part]
    return wrap("; ".join(kept), width, first, rest)


def _keep(text: str) -> str:
    return text.replace(" ", _KEPT)


def fit_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int,
    narrow: Sequence[Sequence[str]] = (),
    *,
    notes: Sequence[Sequence[str]] = (),
    rule: bool = False,
) -> list[str]:
    """A table in lines of at most `width`, where words allow it.

    Parameters
    ----------
    columns, rows
        What is shown; cells are texts, and one that says nothing is ``""`` or ``"-"``.
    width : int
        Columns of the terminal.
    narrow : sequence of sequences of str
        Titles of the columns to keep beside each other where not all fit: the first of these that does is taken. The others
        come in lines below each row. Where none fits each row is a record: its first cell, and lines below it.
    notes : sequence of sequences of str
        For each row what is said below it in any form.
    rule : bool
        Whether a line is drawn below the titles.
    """
    notes = notes or [()] * len(rows)
    all_titles = [column.title for column in columns]
    for titles in (all_titles, *narrow):
        places = [all_titles.index(title) for title in titles if title in all_titles]
        lines = _drawn([columns[k] for k in places], [[row[k] for k in places] for row in rows], rule)
        if max(map(len, lines)) <= width:
            break
    else:
        places, lines = [], []
    others = [k for k in range(len(columns)) if k not in places]
    if not places:
        others = others[1:]
    made = lines[: len(lines) - len(rows)]
    body = lines[len(made) :] if places else [row[0] for row in rows]
    for line, row, said in zip(body, rows, notes, strict=True):
        made.append(line)
        parts = [_with_lead(columns[k], row[k]) for k in others if row[k] not in ("", "-")]
        indent = " " * 4
        made += wrap_parts(parts, width, indent) if parts else []
        for note in said:
            made += wrap(note, width, indent, indent + "  ")
    return made


def _with_lead(column: Column, value: str) -> str:
    lead = column.title if column.lead is None else column.lead
    return f"{lead} {value}" if lead else value


def _drawn(columns: Sequence[Column], rows: Sequence[Sequence[str]], rule: bool) -> list[str]:
    """All in lines, as wide as they need to be."""
    table = [[column.title for column in columns], *rows]
    widths = [max(len(row[k]) for row in table) for k in range(len(columns))]
    lines = [
        "  ".join(c.rjust(w) if column.is_number else c.ljust(w) for c, w, column in zip(row, widths, columns, strict=True))
        for row in table
    ]
    if rule:
        lines.insert(1, "─" * (sum(widths) + 2 * (len(widths) - 1)))
    return [line.rstrip() for line in lines]


def say_error(text: str) -> None:
    """One message on standard error, in red where that is a terminal; a terminal's lines are broken between words."""
    from rich.console import Console
    from rich.text import Text

    said = "error: " + "\n".join(printable(line) for line in text.splitlines())
    if sys.stderr.isatty():
        width = width_of(sys.stderr)
        said = "\n".join(line for part in said.splitlines() for line in wrap(part, width, "", "  "))
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(said, style="red"))


@contextmanager
def own_stdout() -> Iterator[IO[str]]:
    """Where to print, while what libraries write to standard output (Gloo: a line per connection) goes nowhere.

    Libraries in C and C++ write to the descriptor, and know nothing of `sys.stdout`.
    """
    if sys.stdout is None:  # closed by who started this
        with open(os.devnull, "w") as nowhere:
            yield nowhere
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="backslashreplace") as out:
        _send_stdout_to(os.devnull)
        try:
            yield out
        finally:
            out.flush()
            sys.stdout.flush()
            with suppress(OSError, AttributeError):  # what they hold back would come out once all is as it was
                ctypes.CDLL(None).fflush(None)
            os.dup2(out.fileno(), 1)


def _send_stdout_to(path: str) -> None:
    with open(path, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
