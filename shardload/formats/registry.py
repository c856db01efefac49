"""Which formats are there? Our own, and those of other installed packages.

1. Our own formats are asked first. So a file that HDF5 or Zarr claims is read the same way whatever else is installed, and the
   list of installed packages is not read for it (4 to 15 ms).
2. Another package names its formats as entry points of the group ``shardload.formats``::

       [project.entry-points."shardload.formats"]
       npy = "shardload_npy:FORMAT"

   They are asked by priority, the highest first, then by name. The priority is part of the entry point's name, so that it is
   known without an import: ``"npy.20"`` has 20, ``npy`` has 0.
3. For URLs, other packages are asked first, because Zarr claims any URL as a store.
4. A format is imported when its turn comes, so a rank that reads HDF5 never imports zarr. A format that cannot be imported, or
   that raises when it is asked, is skipped. If no other format claims the file, the error names the skipped format; if one
   does, a warning names it.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shardload.formats.contract.format import Format
from shardload.system.interruption import let_interruption_pass

__all__ = ["GROUP", "Entry", "claiming", "installed", "load", "names", "own"]

GROUP = "shardload.formats"


@dataclass(frozen=True)
class Entry:
    """Where to import a format from.

    Attributes
    ----------
    name : str
        The package's name for the format, for messages.
    priority : int
        The highest is asked first.
    target : str
        ``"package.module:attribute"``: a `Format`, or a subclass of it.
    package : str
        The package that it comes from, with its version; empty for our own.
    """

    name: str
    priority: int
    target: str
    package: str = ""

    @classmethod
    def of(cls, name: str, target: str, package: str) -> Entry:
        """Make an entry from an entry point, whose name may end in a priority.

        >>> Entry.of("npy", "a:B", "c 1").priority, Entry.of("npy.20", "a:B", "c 1"), Entry.of("x.-5", "a:B", "").priority
        (0, Entry(name='npy', priority=20, target='a:B', package='c 1'), -5)
        """
        found = re.fullmatch(r"(.+)\.(-?\d+)", name)
        return cls(found[1], int(found[2]), target, package) if found else cls(name, 0, target, package)

    def __str__(self) -> str:
        return f"'{self.name}' of {self.package}" if self.package else f"'{self.name}'"


_OWN = (
    Entry("HDF5", 300, "shardload.formats.hdf5.source:FORMAT"),
    Entry("memory", 200, "shardload.formats.memory:FORMAT"),
    Entry("Zarr", 100, "shardload.formats.zarr.source:FORMAT"),
)
_told: set[Entry] = set()


def _in_order(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    return tuple(sorted(set(entries), key=lambda entry: (-entry.priority, entry.name, entry.package)))


@functools.cache
def own() -> tuple[Entry, ...]:
    """Our own formats, in the order of asking."""
    return _in_order(_OWN)


@functools.cache
def installed() -> tuple[Entry, ...]:
    """Formats of other packages, in the order of asking. The list of installed packages is read once per process."""
    from importlib.metadata import entry_points  # the import takes longer than reading the list

    found = []
    for point in entry_points(group=GROUP):
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"
        found.append(Entry.of(point.name, point.value, package))
    return _in_order(found)


def claiming(is_claimed: Callable[[Format], bool], plugins_first: bool = False) -> tuple[Format | None, list[str]]:
    """The first format for which `is_claimed` is true, and the formats that failed before it, with the reasons.

    If a format is found after others failed, a warning names each of those once per process.

    Returns
    -------
    Format or None
        None if no format claims it.
    list of str
        The failed formats: ``"'npy' of shardload-npy 0.1 (ModuleNotFoundError: ...)"``.
    """
    failed: dict[Entry, str] = {}
    for entries in (installed, own) if plugins_first else (own, installed):
        for entry in entries():
            found = load(entry)
            if isinstance(found, str):
                failed[entry] = f"{entry} ({found})"
                continue
            try:
                is_its_own = is_claimed(found)
            except (Exception, SystemExit) as error:  # whatever the module of another package does
                let_interruption_pass(error)
                if not entry.package or isinstance(error, MemoryError):
                    raise
                failed[entry] = f"{entry} (when it was asked: {type(error).__name__}: {error})"
                continue
            if is_its_own:
                _warn(failed)
                return found, list(failed.values())
    return None, list(failed.values())


def names() -> list[str]:
    """The names of the formats that files can have, for messages."""
    found = [load(entry) for entry in (*own(), *installed()) if entry.name != "memory"]
    return [file_format.name for file_format in found if not isinstance(file_format, str)]


@functools.cache
def load(entry: Entry) -> Format | str:
    """Import a format. If that fails, return the reason as text."""
    module, _, attribute = entry.target.partition(":")
    try:
        found: Any = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        made = found() if isinstance(found, type) and issubclass(found, Format) else found
        if not isinstance(made, Format):
            raise TypeError(f"{entry.target} is a {type(made).__name__}; expected a shardload.formats.Format")
        if not isinstance(getattr(made, "name", None), str):
            raise TypeError(f"{entry.target} has no name; expected a text such as name = 'HDF5'")
    except (Exception, SystemExit) as error:  # whatever the module of another package does
        let_interruption_pass(error)
        if isinstance(error, MemoryError) or not (entry.package or isinstance(error, ImportError)):
            raise
        return f"{type(error).__name__}: {error}"
    return made


def _warn(failed: dict[Entry, str]) -> None:
    for entry, why in failed.items():
        if entry not in _told:
            _told.add(entry)
            warnings.warn(
                f"another format reads what may be a file of {why}, which cannot be used", RuntimeWarning, stacklevel=2
            )
