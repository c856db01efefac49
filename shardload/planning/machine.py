"""How fast are the nodes, the network and the file system that a load runs on?

A `Machine` has figures only. Each is measured, given (by the site, the maker or the user) or assumed, and says so. A figure
that is infinite (a rate) or 0 (a latency) does not limit anything: the default machine, a workstation whose files are in the
page cache, has no other.

`Machine.from_table` and `to_table` are the text form: a TOML file of a user, and the message from the rank that read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shardload.errors import ConfigError

__all__ = ["ASSUMED", "GIVEN", "MEASURED", "WORKSTATION", "Machine"]

MEASURED, GIVEN, ASSUMED = "measured", "given", "assumed"
_ORIGINS = (MEASURED, GIVEN, ASSUMED)
_INF = math.inf
# In the text form: the group and name of each figure, its field, what it is, and an example.
_FIGURES: dict[tuple[str, str], tuple[str, str, str]] = {
    ("node", "ranks"): ("ranks_per_node", "ranks on a node", "4"),
    ("node", "cores"): ("cores_per_node", "cores of a node", "64"),
    ("node", "memory_rate"): ("memory_rate", "bytes per second of a node's memory", "200e9"),
    ("node", "memory_nbytes"): ("memory_nbytes", "bytes of a node's memory", "256e9"),
    ("node", "page_cache_nbytes"): ("page_cache_nbytes", "bytes of a node's memory that keep what was read; 0: none", "64e9"),
    ("network", "rate"): ("network_rate", "bytes per second into or out of a node", "25e9"),
    ("network", "latency"): ("network_latency", "seconds of a message", "2e-6"),
    ("file_system", "rate"): ("fs_rate", "bytes per second for all nodes together", "500e9"),
    ("file_system", "node_rate"): ("node_rate", "bytes per second to one node", "10e9"),
    ("file_system", "stream_rate"): ("stream_rate", "bytes per second of one thread that reads", "2e9"),
    ("file_system", "operations_rate"): ("operations_rate", "reads and opens per second for all nodes together", "1e6"),
    ("file_system", "open_seconds"): ("open_seconds", "seconds to open a file", "1e-3"),
    ("file_system", "read_seconds"): ("read_seconds", "seconds of a small read", "5e-4"),
    ("file_system", "read_ahead_nbytes"): ("read_ahead_nbytes", "bytes that one operation fetches at most", "4e6"),
    ("file_system", "target_rate"): ("target_rate", "bytes per second of one storage target", "10e9"),
    ("file_system", "target_nbytes"): ("target_nbytes", "bytes of a file for each target that it is striped over", "1e9"),
    ("file_system", "most_targets"): ("most_targets", "targets that one file is striped over at most", "72"),
}
_NAMES = {field: ".".join(key) for key, (field, _, _) in _FIGURES.items()}
_INTEGERS = {"ranks_per_node", "cores_per_node", "memory_nbytes", "page_cache_nbytes", "read_ahead_nbytes", "most_targets"}
_MAY_BE_ZERO = {"page_cache_nbytes", "network_latency", "open_seconds", "read_seconds"}
_GROUPS = tuple(dict.fromkeys(group for group, _ in _FIGURES))


@dataclass(frozen=True)
class Machine:
    """The figures of a machine. Rates are bytes per second.

    Attributes
    ----------
    name : str
        Its name, for people.
    ranks_per_node, cores_per_node : int or None
        Ranks and cores of a node, for plans without a job; in a job the real ones count. None: not known.
    memory_nbytes : int or None
        Memory of a node, for plans without a job. None: not known.
    memory_rate : float
        What a node's memory can read and write, shared by all cores.
    network_rate, network_latency : float
        Into or out of a node, and seconds of a message between nodes.
    fs_rate : float
        The file system's rate for all nodes together.
    node_rate, stream_rate : float
        The file system's rate to one node, and to one thread that reads.
    operations_rate : float
        Reads and opens per second that the file system serves to all nodes together.
    open_seconds, read_seconds : float
        Latency of an open and of a small read.
    read_ahead_nbytes : int
        What one operation fetches at most if a file is read on and on.
    page_cache_nbytes : int
        Memory of a node that keeps what any of its ranks has read; 0 if every read goes to the file system.
    target_rate, target_nbytes, most_targets : float, float, int
        A file is striped over one storage target (OST) for each `target_nbytes`, up to `most_targets`, each with `target_rate`.
    decode_rates : tuple of (str, float)
        Decoded bytes per second of one core, for codecs for which it is known; `rates.decode_rate` has the others.
    origins : tuple of (str, str)
        For each figure that is not assumed, by its name in the text form: ``"measured"`` or ``"given"``.
    sources : tuple of str
        Where the given figures are from.

    Examples
    --------
    >>> slow = Machine.from_table({"name": "slow", "file_system": {"rate": 1e9}}, "slow.toml")
    >>> slow.fs_rate, slow.origin_of("file_system.rate"), slow.origin_of("node.cores"), slow.has_file_system
    (1000000000.0, 'given', 'assumed', True)
    """

    name: str
    ranks_per_node: int | None = None
    cores_per_node: int | None = None
    memory_nbytes: int | None = None
    memory_rate: float = _INF
    network_rate: float = _INF
    network_latency: float = 0.0
    fs_rate: float = _INF
    node_rate: float = _INF
    stream_rate: float = _INF
    operations_rate: float = _INF
    open_seconds: float = 0.0
    read_seconds: float = 0.0
    read_ahead_nbytes: int = 1 << 22
    page_cache_nbytes: int = 1 << 62
    target_rate: float = _INF
    target_nbytes: float = _INF
    most_targets: int = 1
    decode_rates: tuple[tuple[str, float], ...] = ()
    origins: tuple[tuple[str, str], ...] = ()
    sources: tuple[str, ...] = ()
    _limits: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rates = (self.memory_rate, self.network_rate, self.fs_rate, self.node_rate, self.stream_rate, self.operations_rate)
        has_limit = min(*rates, self.target_rate) < _INF or max(self.network_latency, self.open_seconds, self.read_seconds) > 0
        object.__setattr__(self, "_limits", has_limit)

    @property
    def has_limits(self) -> bool:
        """True if anything but cores and messages limits a load."""
        return self._limits

    @property
    def has_file_system(self) -> bool:
        """True if the file system limits a load; False if files are in the page cache."""
        return min(self.fs_rate, self.node_rate, self.stream_rate, self.operations_rate, self.target_rate) < _INF

    def file_rate(self, nbytes: float) -> float:
        """Bytes per second of all nodes that read one file of so many bytes: of the file system, or of the file's targets.

        Many files, each small (infinity), are on all targets.

        >>> Machine("m", fs_rate=1e12, target_rate=1e10, target_nbytes=1e9, most_targets=72).file_rate(5.5e9)
        60000000000.0
        """
        if _INF in (self.target_rate, nbytes):
            return self.fs_rate
        n_targets = min(self.most_targets, max(1, math.ceil(nbytes / self.target_nbytes)))
        return min(self.fs_rate, n_targets * self.target_rate)

    def decode_rate(self, codec: str, otherwise: float) -> float:
        """Decoded bytes per second of one core: of the slowest known step of `codec`, else `otherwise`."""
        if not self.decode_rates:
            return otherwise
        known = dict(self.decode_rates)
        return min((known[step] for step in codec.lower().split("+") if step in known), default=otherwise)

    def origin_of(self, name: str) -> str:
        """``"measured"``, ``"given"`` or ``"assumed"``, of a figure by its name in the text form: ``"file_system.rate"``."""
        return dict(self.origins).get(name, ASSUMED)

    def figures(self) -> dict[str, float]:
        """The figures that limit something or are known, by their names in the text form."""
        found: dict[str, float] = {}
        default = {one.name: one.default for one in fields(self)}
        known = dict(self.origins)
        for one, name in _NAMES.items():
            value = getattr(self, one)
            if value is not None and (name in known or value != default[one]):
                found[name] = value
        return found | {f"decode.{codec}": rate for codec, rate in self.decode_rates}

    def to_table(self) -> dict[str, Any]:
        """The text form: the inverse of `from_table`."""
        table: dict[str, Any] = {"name": self.name, "sources": list(self.sources)}
        for name, value in self.figures().items():
            group, _, key = name.partition(".")
            table.setdefault(group, {})[key] = {"value": value, "origin": self.origin_of(name)}
        return table

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str, base: Machine | None = None) -> Machine:
        """A machine from its text form.

        Parameters
        ----------
        table : mapping
            ``{"name": ..., "file_system": {"rate": 1e9, "open_seconds": {"value": 1e-3, "origin": "measured"}}, ...}``.
        file : str
            Where it is from, for messages.
        base : Machine, optional
            Has the figures that the table leaves out.

        Raises
        ------
        ConfigError
            It names file, key, what was found and what was expected.
        """
        changes: dict[str, Any] = {}
        origins, rates = ({}, {}) if base is None else (dict(base.origins), dict(base.decode_rates))
        for group, content in table.items():
            if group in ("name", "base", "sources"):
                continue
            if group not in (*_GROUPS, "decode"):
                raise _wrong(file, group, "a table or value that no machine has", f"one of {', '.join([*_GROUPS, 'decode'])}")
            if not isinstance(content, Mapping):
                raise _wrong(file, group, repr(content), f"a table: [{group}]")
            for key, given in content.items():
                name = f"{group}.{key}"
                value, origin = _read(given, file, name)
                if group == "decode":
                    rates[key.lower()] = _number(value, file, name, "decoded bytes per second of a core", "0.65e9")
                else:
                    if (group, key) not in _FIGURES:
                        keys = ", ".join(k for g, k in _FIGURES if g == group)
                        raise _wrong(file, name, "a figure that no machine has", f"one of {keys}")
                    one, what, example = _FIGURES[group, key]
                    number = _number(value, file, name, what, example, may_be_zero=one in _MAY_BE_ZERO)
                    if one in _INTEGERS and (number == _INF or number != int(number)):
                        raise _wrong(file, name, repr(value), f"{what}, as an integer, such as {example}")
                    changes[one] = int(number) if one in _INTEGERS else number
                origins[name] = origin
        name, sources = table.get("name", file), table.get("sources", [])
        if not isinstance(name, str) or not name:
            raise _wrong(file, "name", repr(name), "the machine's name, as text")
        if not isinstance(sources, list) or not all(isinstance(one, str) for one in sources):
            raise _wrong(file, "sources", repr(sources), "a list of texts: where the figures are from")
        known = tuple(sorted((key, origin) for key, origin in origins.items() if origin != ASSUMED))
        changes |= {"name": name, "decode_rates": tuple(sorted(rates.items())), "origins": known, "sources": tuple(sources)}
        return cls(**changes) if base is None else replace(base, **changes)


WORKSTATION = Machine("workstation")
"""Files are in the page cache, and cores and messages are all that limits a load: what is planned with if nothing is known."""


def _read(given: Any, file: str, name: str) -> tuple[Any, str]:
    """A figure and where it is from: a number is given, unless a table says something else."""
    if not isinstance(given, Mapping):
        return given, GIVEN
    unknown = set(given) - {"value", "origin"}
    if unknown or "value" not in given:
        raise _wrong(file, name, repr(dict(given)), 'a number, or a table such as {value = 1e9, origin = "measured"}')
    origin = given.get("origin", GIVEN)
    if origin not in _ORIGINS:
        raise _wrong(file, f"{name}.origin", repr(origin), "'measured', 'given' or 'assumed'")
    return given["value"], origin


def _number(value: Any, file: str, name: str, what: str, example: str, may_be_zero: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (value >= 0 if may_be_zero else value > 0):  # NaN is neither
        least = "0 or more" if may_be_zero else "more than 0"
        raise _wrong(file, name, repr(value), f"{what}, {least}, such as {example}")
    return float(value)


def _wrong(file: str, key: str, found: str, expected: str) -> ConfigError:
    return ConfigError(f"machine {file}: {key} is {found}; expected {expected}")
