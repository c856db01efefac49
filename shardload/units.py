"""How are sizes in bytes parsed, and how are sizes, lists of ranks and wrong arguments written in messages?

And what does an array without axes stand for?
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from html import escape
from numbers import Integral
from typing import Any

from shardload.errors import ConfigError

_MOST_SHOWN = 8  # elements of an array, entries of a list
_UNITS = {"": 1, "B": 1} | {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}


def parse_nbytes(text: object, name: str = "staging") -> int:
    """A number of bytes from ``"256MiB"``, ``"1.5 GB"`` or an int; ConfigError about the option `name` for anything else.

    >>> parse_nbytes("256MiB"), parse_nbytes("1.5 kB"), parse_nbytes(10)
    (268435456, 1500, 10)
    """
    if not isinstance(text, bool) and isinstance(text, Integral):
        n = int(text)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
        units = {u.lower(): factor for u, factor in _UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise ConfigError(f"{name} is {text!r}; expected bytes, as an int or such as '256MiB' or '2GB'")
        n = int(Fraction(match[1]) * units[match[2].lower()])
    if n <= 0:
        raise ConfigError(f"{name} is {text!r}; expected more than 0 bytes, such as '256MiB'")
    return n


class PrintedReport:
    """What a call did, or will do, as text: in a terminal, in a log, in a notebook. A subclass has `__str__`."""

    def __repr__(self) -> str:
        """In one line."""
        return f"<{type(self).__name__}: {self}>"

    def _repr_html_(self) -> str:
        """HTML for a notebook: the text."""
        return f"<pre>{escape(str(self))}</pre>"


def scalar_of(value: Any) -> Any:
    """What an array without axes holds, as of NumPy or xarray (``ds.time[-1]``); anything else as it is."""
    if getattr(value, "ndim", None) != 0:
        return value
    import numpy as np  # here, because the command line imports this module for ``--help``

    try:
        array = np.asarray(value)
    except TypeError:  # inside of a traced function it holds nothing yet: the call says so
        return value
    return array.item() if array.dtype.kind in "iuf" else array[()]


def counted(n: int, noun: str) -> str:
    """So many of something.

    >>> counted(1, "chunk"), counted(1024, "chunk")
    ('1 chunk', '1,024 chunks')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def first_ranks(ranks: Sequence[int], most: int = 4) -> str:
    """Ranks in a sentence: the first few of them, and how many more.

    >>> first_ranks([3]), first_ranks([3, 5]), first_ranks(range(9))
    ('rank 3', 'ranks 3, 5', 'ranks 0, 1, 2, 3 and 5 more')
    """
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:most]))}{more}"


def format_nbytes(n: int) -> str:
    """Bytes for people.

    >>> format_nbytes(512), format_nbytes(3 << 20), format_nbytes(17 << 40)
    ('512 B', '3.0 MiB', '17.0 TiB')
    """
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if round(value, 1) < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{n} B" if unit == "B" else f"{value:.1f} {unit}"


def number_text(value: float, digits: int) -> str:
    """A number with so many digits, or with all before the point: never as 1.1e+02.

    >>> number_text(0.00017, 2), number_text(1.23, 2), number_text(112.4, 2), number_text(2048, 3), number_text(8.31e-7, 2)
    ('0.00017', '1.2', '112', '2,048', '8.3e-07')
    """
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text


def shown(value: Any, most: int = 200) -> str:
    """A wrong argument in a message: its `repr`, but arrays by shape and type, and not more than `most` characters.

    >>> shown({"rho": 1.5, "steps": range(3)}), shown("x" * 300, 10)
    ("{'rho': 1.5, 'steps': range(0, 3)}", "'xxxxxx...")
    >>> shown((["a"] * 9, (1,))), shown([]), shown(())
    ("(['a', 'a', 'a', 'a', 'a', 'a', 'a', 'a', ...], (1,))", '[]', '()')
    """
    if isinstance(value, Mapping) or type(value) in (list, tuple):
        entries = list(itertools.islice(value, _MOST_SHOWN))
        texts = [shown(entry, most) for entry in entries]
        if isinstance(value, Mapping):
            texts = [f"{key!r}: {shown(value[key], most)}" for key in entries]
        more = ", ..." if len(value) > len(entries) else "," if isinstance(value, tuple) and len(value) == 1 else ""
        text = (", ".join(texts) + more).join("()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}")
    elif getattr(value, "size", 0) and hasattr(value, "dtype") and value.size > _MOST_SHOWN:
        text = f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    else:
        text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."
