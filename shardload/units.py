"""How are numbers of bytes read from people and shown to them?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral
from typing import Any

from shardload.errors import ConfigError

__all__ = ["first_ranks", "format_nbytes", "parse_nbytes"]

_UNITS = {"": 1, "B": 1} | {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}


def parse_nbytes(text: Any) -> int:
    """A number of bytes from ``"256MiB"``, ``"1.5 GB"`` or an int.

    >>> parse_nbytes("256MiB"), parse_nbytes("1.5 kB"), parse_nbytes(10)
    (268435456, 1500, 10)
    """
    if not isinstance(text, bool) and isinstance(text, Integral):
        n = int(text)
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
        units = {u.lower(): factor for u, factor in _UNITS.items()}
        if found is None or found[2].lower() not in units:
            raise ConfigError(f"staging is {text!r}; expected bytes, as an int or such as '256MiB' or '2GB'")
        n = int(Fraction(found[1]) * units[found[2].lower()])
    if n <= 0:
        raise ConfigError(f"staging is {text!r}; expected more than 0 bytes, such as '256MiB'")
    return n


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
