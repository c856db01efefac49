"""What does the caller allow a format to do? One object, `Access`, says it, and every step passes it on unchanged.

1. May a file refer to data outside its folder?
2. Which filters may decode its chunks?
3. Does this process open the file, or do helper processes?

A format asks `Access` and decides none of this by itself. `STRICT` allows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

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


STRICT = Access()
