"""What does the caller allow a format to do? One object, `Access`, says it, and every step passes it on unchanged.

1. May a file refer to data outside its folder?
2. Which filters may decode its chunks?
3. Does this process open the file, or do helper processes?

A format asks `Access` and decides none of this by itself. `STRICT` allows nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shardload.storage.local import TARGET_HINT, Fence, OutsideError, open_file
from shardload.storage.remote import StorageOptions


@dataclass(frozen=True)
class Limits:
    """The limits of a helper process.

    Attributes
    ----------
    memory_nbytes : int
        Memory beside that of its libraries: what `staging` allows. The helpers of all files share it.
    seconds : float or None
        Time for one answer; None: no limit. (A file system may pause for a minute.)
    cpu_seconds : float
        CPU time for one answer, plus one second for each MiB of values. It does not depend on how busy the machine or how slow
        its file system is, and an endless loop reaches it.
    """

    memory_nbytes: int = 256 << 20
    seconds: float | None = 225.0
    cpu_seconds: float = 40.0


@dataclass(frozen=True)
class Access:
    """What the caller allows.

    Attributes
    ----------
    allow_external : bool
        True if external links, virtual datasets or symbolic links may lead outside the file's folder (or
        outside the store).
    allow_filters : frozenset of str
        Names and numbers of filters (codecs) to use although damaged data may crash them; ``"all"`` for every filter. Any
        collection may be given.
    untrusted : Limits or None
        The limits of the helper processes that open the file instead of this process; None: this process opens it.
    is_limited : bool
        True if the system limits the memory of this process (a helper process). Then no other limit is needed on how far
        stacked compressors can expand a few bytes.
    storage : StorageOptions
        How stores are reached (`storage.remote`): keys, region. Its text has the names alone, not the values.

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
    storage: StorageOptions = field(default_factory=StorageOptions)

    def __post_init__(self) -> None:
        names: object = self.allow_filters
        if not isinstance(names, Iterable) or isinstance(names, str | bytes):  # a text would become its letters
            raise TypeError(f"allow_filters is {names!r}; expected a collection of names")
        object.__setattr__(self, "allow_filters", frozenset(names))

    def may_use(self, *names: str) -> bool:
        """True if the caller allows a filter that has one of these names."""
        return "all" in self.allow_filters or not self.allow_filters.isdisjoint(names)

    def counts(self, *names: str, survived: bool) -> bool:
        """True if a compressor counts towards the limit on stacked compressors, which can expand a few bytes without bound.

        A compressor that is always allowed (`survived`) counts. A compressor that the caller had to allow, and did, does not
        count. None counts if the system limits this process's memory.

        >>> everything = Access(allow_filters={"all"})
        >>> everything.counts("gzip", survived=True), everything.counts("zfp", survived=False)
        (True, False)
        """
        return not self.is_limited and (survived or not self.may_use(*names))

    def shared_by(self, n_files: int) -> Access:
        """The same for each of `n_files` that are open at once: their helper processes share the memory that one may take."""
        if self.untrusted is None or n_files < 2:
            return self
        return replace(self, untrusted=replace(self.untrusted, memory_nbytes=self.untrusted.memory_nbytes // n_files))

    def fence(self, path: str) -> Fence:
        """The fence of the file or store at `path`: its own folder (a store: itself), or no fence if the caller allows that."""
        around = Fence.around_store if os.path.isdir(path) else Fence.around_file
        return around(path, self.allow_external)

    def open_file(self, path: str, named_by: str | None = None, fence: Fence | None = None) -> int:
        """Open a file for reading and return its descriptor. For formats whose files name other files.

        Parameters
        ----------
        path : str
            The file to open. If it is a pipe, a device or a folder, it is not opened, and nothing waits for it.
        named_by : str, optional
            The file or store that the caller passed, if it refers to `path`. A relative `path` is relative to the process's
            working folder: join it with the file's folder first.
        fence : Fence, optional
            Where `path` may be, if not in the fence of `named_by`.

        Raises
        ------
        OutsideError
            If `path`, with symbolic links resolved, is outside the fence of `named_by`.
        NotAFileError
            If it is not a regular file.
        OSError
            If it does not exist or cannot be opened.
        """
        if named_by is None:
            return open_file(path)
        fence = fence or self.fence(named_by)
        if fence.holds(path):
            descriptor = open_file(path)
            if fence.holds_open(descriptor, path):
                return descriptor
            os.close(descriptor)  # a link that was put there in between
        folder = "that store" if os.path.isdir(named_by) else "the folder of that file"
        raise OutsideError(f"'{named_by}' leads to '{os.path.realpath(path)}', outside {folder}; {TARGET_HINT}")


STRICT = Access()
