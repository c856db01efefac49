"""What may be done to obtain values? What the caller allows, in one object that every step hands on as it is.

`Access` says whether a file may lead outside of its folder, which filters may decode its chunks, and whether the file is opened
by this process at all. A format asks it, and decides nothing of that by itself. `STRICT` allows nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from shardload.formats.containment import TARGET_HINT, Fence, OutsideError, open_file

__all__ = ["STRICT", "Access", "Limits"]


@dataclass(frozen=True)
class Limits:
    """What a helper process may take.

    Attributes
    ----------
    memory_nbytes : int
        Beside its libraries: what `staging` allows. All helpers of an array have so much together.
    seconds : float or None
        In which it must answer; None: without limit. (A file system may stand still for a minute.)
    cpu_seconds : float
        That it may compute for one answer, and a second more for each MiB of values. It does not matter how busy the machine
        is, or how slow its file system; a loop that does not end reaches it.
    """

    memory_nbytes: int = 256 << 20
    seconds: float | None = 225.0
    cpu_seconds: float = 20.0


@dataclass(frozen=True)
class Access:
    """What the caller allows.

    Attributes
    ----------
    allow_external : bool
        Whether values may be outside of the file's folder (or the store), where external links, virtual datasets, external
        storage or symbolic links lead.
    allow_filters : frozenset of str
        Names and numbers of filters (codecs) that are used though damaged data may crash them; ``"all"`` for every one. Any
        collection of them may be given.
    untrusted : Limits or None
        The limits of the helper processes that open the file in the place of this one; None: this process opens it.
    is_limited : bool
        Whether the system limits the memory of this process, so that nothing else has to bound what compressors over each
        other make of a few bytes. True in a helper process.

    Examples
    --------
    >>> access = Access(allow_filters=["zfp", "32008"])
    >>> access.may_use("bitshuffle", "32008"), access.may_use("sz"), Access(allow_filters={"all"}).may_use()
    (True, False, True)
    """

    allow_external: bool = False
    allow_filters: frozenset[str] = frozenset()
    untrusted: Limits | None = None
    is_limited: bool = False

    def __post_init__(self) -> None:
        given: object = self.allow_filters
        if not isinstance(given, Iterable) or isinstance(given, str | bytes):  # a text would become its letters
            raise TypeError(f"allow_filters is {given!r}; expected a collection of names")
        object.__setattr__(self, "allow_filters", frozenset(given))

    def may_use(self, *names: str) -> bool:
        """Whether the caller allows a filter that has one of these names."""
        return "all" in self.allow_filters or not self.allow_filters.isdisjoint(names)

    def counts(self, *names: str, survived: bool) -> bool:
        """Whether a compressor counts as one of those over each other, where nothing bounds what they make of a few bytes.

        What may be used unasked (`survived`) always counts; what the caller had to allow, and did, does what it does. None
        counts where memory is limited.

        >>> everything = Access(allow_filters={"all"})
        >>> everything.counts("gzip", survived=True), everything.counts("zfp", survived=False)
        (True, False)
        """
        return not self.is_limited and (survived or not self.may_use(*names))

    def fence(self, path: str) -> Fence:
        """Where the file, or the store that is a folder, at `path` may lead: into its own folder, or anywhere if allowed."""
        around = Fence.around_store if os.path.isdir(path) else Fence.around_file
        return around(path, self.allow_external)

    def open_file(self, path: str, named_by: str | None = None) -> int:
        """Open a file for reading; its descriptor. For formats of files that name other files.

        Parameters
        ----------
        path : str
            What to open. A pipe, a device or a folder in its place is neither opened nor waited for.
        named_by : str, optional
            The file or store that the caller named, where `path` is what it leads to. Relative paths are still those of the
            process: join them with the folder first.

        Raises
        ------
        OutsideError
            If `path` is outside of what `named_by` may lead to, symbolic links resolved.
        NotAFileError
            If it is no regular file.
        OSError
            If it is not there, or cannot be opened.
        """
        if named_by is None:
            return open_file(path)
        fence = self.fence(named_by)
        if not fence.holds(path):
            raise self._outside(path, named_by)
        descriptor = open_file(path)
        if not fence.holds_open(descriptor, path):  # a link that was put there in between
            os.close(descriptor)
            raise self._outside(path, named_by)
        return descriptor

    def _outside(self, path: str, named_by: str) -> OutsideError:
        folder = "that store" if os.path.isdir(named_by) else "the folder of that file"
        return OutsideError(f"'{named_by}' leads to '{os.path.realpath(path)}', outside {folder}; {TARGET_HINT}")


STRICT = Access()
