"""Which formats are there? Our own, and those of other installed packages.

1. Our own formats are asked first. So a file that HDF5 or Zarr claims is read the same way whatever else is installed, and the
   list of installed packages is not read for it (4 to 15 ms).
2. Another package names its formats as entry points of the group ``shardload.formats``::

       [project.entry-points."shardload.formats"]
       npy = "shardload_npy:FORMAT"

   They are asked by name.
3. For URLs, other packages are asked first, because Zarr claims any URL as a store.
4. A format is imported when its turn comes, so a rank that reads HDF5 never imports zarr. A format that cannot be imported, or
   that raises when it is asked, is skipped. If no other format claims the file, the error names the skipped format; if one
   does, a warning names it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from shardload.formats.contract.format import Format

GROUP = "shardload.formats"


class Entry(NamedTuple):
    """Where to import a format from.

    Attributes
    ----------
    name : str
        The package's name for the format, for messages.
    target : str
        ``"package.module:attribute"``: a `Format`, or a subclass of it.
    package : str
        The package that it comes from, with its version; empty for our own.
    """

    name: str
    target: str
    package: str = ""

    def __str__(self) -> str:
        return f"'{self.name}' of {self.package}" if self.package else f"'{self.name}'"


_warned: set[Entry] = set()


def own() -> tuple[Entry, ...]:
    """Our own formats, in the order of asking."""
    return Entry("HDF5", "shardload.formats.hdf5.file:FORMAT"), Entry("Zarr", "shardload.formats.zarr.source:FORMAT")


@functools.cache
def installed() -> tuple[Entry, ...]:
    """Formats of other packages, in the order of asking. The list of installed packages is read once per process."""
    from importlib.metadata import entry_points  # the import takes longer than reading the list

    entries = set()
    for point in entry_points(group=GROUP):
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"
        entries.add(Entry(point.name, point.value, package))
    return tuple(sorted(entries))


def claiming(is_claimed: Callable[[Format], bool], plugins_first: bool = False) -> tuple[Format | None, str]:
    """The first format for which `is_claimed` is true.

    If other formats failed before it, a warning names each of them once per process.

    Returns
    -------
    Format or None
        None if no format claims it.
    str
        If none does: the end of the error about that, with the formats that failed; empty if none failed.
    """
    failed: dict[Entry, str] = {}
    order = (installed, own) if plugins_first else (own, installed)
    for entry in itertools.chain.from_iterable(entries() for entries in order):
        file_format = load(entry)
        if isinstance(file_format, str):
            failed[entry] = f"{entry} ({file_format})"
            continue
        try:
            is_its_own = is_claimed(file_format)
        except (Exception, SystemExit) as error:  # whatever the module of another package does
            if not entry.package or isinstance(error, MemoryError):
                raise
            failed[entry] = f"{entry} (when it was asked: {type(error).__name__}: {error})"
            continue
        if is_its_own:
            _warn(failed)
            return file_format, ""
    return None, f" Installed, but not to be used: {'; '.join(failed.values())}." if failed else ""


def names() -> list[str]:
    """The names of the formats that files can have, for messages."""
    formats = [load(entry) for entry in (*own(), *installed())]
    return [file_format.name for file_format in formats if not isinstance(file_format, str)]


@functools.cache
def load(entry: Entry) -> Format | str:
    """Import a format. If that fails, return the reason as text."""
    module, _, attribute = entry.target.partition(":")
    try:
        target: Any = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        file_format = target() if isinstance(target, type) and issubclass(target, Format) else target
        if not isinstance(file_format, Format) or not isinstance(getattr(file_format, "name", None), str):
            raise TypeError(
                f"{entry.target} is a {type(file_format).__name__}; expected a shardload.formats.Format with a name"
            )
    except (Exception, SystemExit) as error:  # whatever the module of another package does
        if isinstance(error, MemoryError) or not (entry.package or isinstance(error, ImportError)):
            raise
        return f"{type(error).__name__}: {error}"
    return file_format


def _warn(failed: dict[Entry, str]) -> None:
    for entry in failed.keys() - _warned:
        _warned.add(entry)
        text = f"another format reads what may be a file of {failed[entry]}, which cannot be used"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
