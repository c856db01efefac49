"""What limits a load beside its cores and messages, as far as the caller knows?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardload.errors import ConfigError

__all__ = ["WORKSTATION", "Machine"]

_INF = math.inf
_EXAMPLE = 'machine={"read_rate": 2e9, "operations_rate": 1e6, "network_rate": 25e9}'


@dataclass(frozen=True)
class Machine:
    """The figures of a machine. One that is infinite limits nothing: files are then in the page cache, or nodes near.

    Attributes
    ----------
    read_rate : float
        Bytes per second that one process reads from the file system.
    operations_rate : float
        Reads and opens per second that the file system serves to all processes together.
    network_rate : float
        Bytes per second into or out of a node.

    Examples
    --------
    >>> print(Machine.of({"read_rate": 2e9, "network_rate": 25e9}))
    read_rate=2e+09,network_rate=2.5e+10
    >>> Machine.of("read_rate=2e9,network_rate=25e9") == Machine.of({"read_rate": 2e9, "network_rate": 25e9})
    True
    """

    read_rate: float = _INF
    operations_rate: float = _INF
    network_rate: float = _INF

    @classmethod
    def of(cls, given: Any) -> Machine:
        """The machine that a caller gives: None, a mapping of figures, or text such as ``"read_rate=2e9"``.

        Raises
        ------
        ConfigError
            It names the figure, what was found and what was expected.
        """
        if given is None:
            return WORKSTATION
        if isinstance(given, cls):
            return given
        names = [figure.name for figure in fields(cls)]
        figures = dict(part.partition("=")[::2] for part in given.split(",")) if isinstance(given, str) else given
        if not isinstance(figures, Mapping) or not figures or not set(figures) <= set(names):
            raise ConfigError(f"machine is {given!r}; expected some of the figures {', '.join(names)}, such as {_EXAMPLE}")
        return cls(**{name: _rate(name, value) for name, value in figures.items()})

    @property
    def has_limits(self) -> bool:
        """True if anything but cores and messages limits a load."""
        return self != WORKSTATION

    @property
    def has_file_system(self) -> bool:
        """True if the file system limits a load; False if files are in the page cache."""
        return min(self.read_rate, self.operations_rate) < _INF

    def __str__(self) -> str:
        return ",".join(f"{name}={value:g}" for name, value in vars(self).items() if value < _INF)


WORKSTATION = Machine()
"""Files are in the page cache, and cores and messages are all that limits a load: what is planned with if nothing is known."""


def _rate(name: str, value: Any) -> float:
    try:
        rate = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        rate = math.nan
    if not rate > 0:  # NaN is not
        raise ConfigError(f"machine: {name} is {value!r}; expected a number per second, more than 0, such as {_EXAMPLE}")
    return rate
