"""Which machine does a load run on, by what the user says? A name, or a TOML file of figures.

The first of these that is there:

1. The option `machine`: the name of a preset (`planning.presets`), or the path of a file.
2. The variable SHARDLOAD_MACHINE: the same.
3. ``shardload/machine.toml`` in the user's configuration folder (XDG_CONFIG_HOME, else ``~/.config``).
4. A workstation whose files are in the page cache.

One rank asks, and tells the others the figures, so that a thousand ranks do not open one file, and all plan the same. A file is
read once in a process.
"""

from __future__ import annotations

import os
import tomllib
from functools import cache
from pathlib import Path

from shardload.errors import ConfigError
from shardload.planning.machine import WORKSTATION, Machine

__all__ = ["VARIABLE", "configuration_file", "machine_for"]

VARIABLE = "SHARDLOAD_MACHINE"
_MOST_NBYTES = 1 << 20  # of a file of figures: more is something else


def machine_for(given: str | None) -> Machine:
    """The machine that the option names, or else the variable, or else the user's file.

    Raises
    ------
    ConfigError
        If there is no such name or file, or a file's content is wrong. It names the file, the key, and what was expected.
    """
    if given is not None:
        return _machine(given, "machine")
    named = os.environ.get(VARIABLE, "")
    return _machine(named, VARIABLE) if named else _of_user(configuration_file())


def configuration_file() -> str:
    """Where the user's file of figures is, if there is one."""
    folder = os.environ.get("XDG_CONFIG_HOME")
    return f"{folder or os.path.expanduser('~/.config')}/shardload/machine.toml"


@cache
def _of_user(path: str) -> Machine:
    return _read(path, "the user's configuration") if os.path.isfile(path) else WORKSTATION


@cache
def _machine(given: str, what: str) -> Machine:
    from shardload.planning.presets import PRESETS  # most loads need none

    if given in PRESETS:
        return PRESETS[given]
    path = os.path.expanduser(given)
    if not os.path.isfile(path):
        raise ConfigError(
            f"{what} is {given!r}; expected one of {', '.join(sorted(PRESETS))}, or the path of a TOML file with the machine's "
            "figures: there is no such file (docs/scale.md shows one)"
        )
    return _read(path, what)


def _read(path: str, what: str) -> Machine:
    """A machine from a TOML file. ``base = "perlmutter"`` in it names a preset that has the figures which it leaves out."""
    from shardload.planning.presets import PRESETS

    try:
        if os.path.getsize(path) > _MOST_NBYTES:
            raise ConfigError(f"{what}: {path!r} has {os.path.getsize(path):,} bytes; expected a TOML file with some figures")
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}: {path!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{what}: {path!r} is no TOML: {error}. Expected lines such as [file_system] and rate = 500e9"
        ) from None
    base = table.get("base")
    if base is not None and (not isinstance(base, str) or base not in PRESETS):
        raise ConfigError(f"machine {path}: base is {base!r}; expected the name of a preset: {', '.join(sorted(PRESETS))}")
    table.setdefault("name", Path(path).stem)
    return Machine.from_table(table, path, None if base is None else PRESETS[base])
