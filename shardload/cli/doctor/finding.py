"""What is one thing that is wrong with a job, and how bad is it?

=========  ===============================================================================================
`ERROR`    Loads would fail, or each process would do the work of all.
`WARNING`  Loads work, slower than they could or on fewer devices than are there.
`NOTE`     Good to know; may be meant.
=========  ===============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ERROR", "NOTE", "WARNING", "Finding", "ranges", "ranks_text"]

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth a look.

    Attributes
    ----------
    name : str
        Short, for scripts.
    level : str
        `ERROR`, `WARNING` or `NOTE`.
    text : str
        What was found, and what comes of it.
    fix : str
        What to type.
    ranks : tuple of int
        Where.
    """

    name: str
    level: str
    text: str
    fix: str
    ranks: tuple[int, ...]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as ranges.

    >>> ranks_text([0, 1, 2, 5]), ranks_text([3])
    ('ranks 0-2,5', 'rank 3')
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def ranges(numbers: Sequence[int]) -> str:
    """Integers, short.

    >>> ranges([5, 0, 1, 2]), ranges([])
    ('0-2,5', '')
    """
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
