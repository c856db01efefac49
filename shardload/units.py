"""How are numbers of bytes read from people and shown to them?"""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Integral
from typing import Any

from shardload.errors import ConfigError

__all__ = ["format_nbytes", "parse_nbytes"]

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
