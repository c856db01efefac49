"""What did the caller ask for? The arguments of a load, checked one by one before anything is opened.

Pure: no JAX, no MPI, no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.errors import ConfigError
from shardload.formats.access import Access, Limits
from shardload.formats.base import native_dtype, refusal
from shardload.planning.cost import MODES
from shardload.units import parse_nbytes

__all__ = ["AUTO", "CHECKSUM", "FILE", "FULL", "INDEX", "TIMEOUT", "Options", "Progress", "pad_value"]

AUTO = "auto"
VERIFY = INDEX, CHECKSUM, FILE, FULL = "index", "checksum", "file", "full"  # each with what those before it prove
MISSING = ("warn", "error", "fill")
TIMEOUT = 900.0  # a minute's hiccup of a busy file system is none; a night of a job that stands still is avoided
Progress = bool | Callable[[int, int], None] | None


@dataclass(frozen=True)
class Options:
    """Checked options of one call.

    Attributes
    ----------
    dataset : str or None
        Name inside the file.
    select : object
        As the caller gave it; its meaning depends on the array's shape.
    dtype : dtype or None
        What to cast to; None to keep the file's.
    pad : object
        Fill value for axes that do not divide; None to refuse them.
    readers : str or int
        ``"root"``, ``"parallel"``, ``"direct"``, ``"auto"``, or how many ranks read.
    staging_nbytes : int
        Cap on host memory per process beyond its own pieces.
    verify : str
        ``"index"``, ``"checksum"``, ``"file"`` or ``"full"``.
    progress : bool, callable or None
        Whether to show progress; None: where standard error is a terminal.
    timeout : float or None
        Seconds without progress on any rank after which a call fails; None: never.
    missing : str
        ``"warn"``, ``"error"`` or ``"fill"``: what is done about chunks that are not stored.
    allow_external : bool
        Whether the file may lead outside of its folder.
    untrusted : bool
        Whether the file is opened and decoded by helper processes alone.
    allow_filters : tuple of str
        Names and numbers of filters (codecs) that are used though damaged data may crash them, in order; or ``"all"``.
    """

    dataset: str | None
    select: Any
    dtype: np.dtype[Any] | None
    pad: Any
    readers: str | int
    staging_nbytes: int
    verify: str
    progress: Progress
    timeout: float | None = TIMEOUT
    missing: str = "warn"
    allow_external: bool = False
    untrusted: bool = False
    allow_filters: tuple[str, ...] = ()

    @property
    def limits(self) -> Limits | None:
        """What helper processes may take; None where this process reads by itself.

        All that staging allows; and a quarter of `timeout` for an answer, so that the error that names the chunk comes before
        the one that says that nothing moves, also where two are asked for to find out which chunk it is.
        """
        return Limits(self.staging_nbytes, None if self.timeout is None else self.timeout / 4) if self.untrusted else None

    @property
    def access(self) -> Access:
        """What may be done to obtain values."""
        return Access(self.allow_external, frozenset(self.allow_filters), self.limits)

    @property
    def checksums(self) -> bool:
        """Whether each part is checksummed from block to piece."""
        return self.verify != INDEX

    @classmethod
    def check(
        cls,
        *,
        dataset: Any = None,
        select: Any = None,
        dtype: Any = None,
        pad: Any = None,
        readers: Any = AUTO,
        staging: Any = "256MiB",
        verify: Any = "index",
        progress: Any = None,
        timeout: Any = TIMEOUT,
        missing: Any = "warn",
        allow_external: Any = False,
        untrusted: Any = False,
        allow_filters: Any = (),
    ) -> Options:
        """Check each argument by itself.

        Raises
        ------
        ConfigError
            Naming the argument, what was found and what is possible.
        """
        if dataset is not None and (not isinstance(dataset, str) or not dataset):
            raise ConfigError(f"dataset is {dataset!r}; expected a name inside the file such as '/density'")
        if isinstance(readers, str):
            if readers not in (*MODES, AUTO):
                raise ConfigError(f"readers is {readers!r}; expected 'root', 'parallel', 'direct', 'auto' or a number of ranks")
        elif isinstance(readers, bool) or not isinstance(readers, (int, np.integer)) or readers < 1:
            raise ConfigError(f"readers is {readers!r}; expected 'root', 'parallel', 'direct', 'auto' or a number of ranks")
        if not isinstance(verify, str) or verify not in VERIFY:
            raise ConfigError(f"verify is {verify!r}; expected 'index' (always happens), 'checksum', 'file' or 'full'")
        if progress is not None and not isinstance(progress, bool) and not callable(progress):
            raise ConfigError(f"progress is {progress!r}; expected True, False, None or a function(done_nbytes, total_nbytes)")
        if not isinstance(missing, str) or missing not in MISSING:
            raise ConfigError(f"missing is {missing!r}; expected 'warn', 'error' or 'fill': what is done about absent chunks")
        if not isinstance(allow_external, bool):
            raise ConfigError(
                f"allow_external is {allow_external!r}; expected True or False: may the file lead outside of its folder?"
            )
        if not isinstance(untrusted, bool):
            raise ConfigError(f"untrusted is {untrusted!r}; expected True or False: are helper processes to open the file?")
        return cls(
            dataset=dataset,
            select=select,
            dtype=_dtype(dtype),
            pad=pad,
            readers=readers if isinstance(readers, str) else int(readers),
            staging_nbytes=parse_nbytes(staging),
            verify=verify,
            progress=progress,
            timeout=_seconds(timeout),
            missing=missing,
            allow_external=allow_external,
            untrusted=untrusted,
            allow_filters=filter_names(allow_filters),
        )

    def describe(self) -> dict[str, str]:
        """What every rank must pass alike, as text."""
        return {
            "dataset": repr(self.dataset),
            "select": repr(self.select),
            "dtype": str(self.dtype),
            "pad": repr(self.pad),
            "readers": repr(self.readers),
            "staging": str(self.staging_nbytes),
            "verify": self.verify,
            "timeout": repr(self.timeout),
            "missing": self.missing,
            "allow_external": str(self.allow_external),
            "untrusted": str(self.untrusted),
            "allow_filters": ",".join(self.allow_filters),
        }


def _seconds(timeout: Any) -> float | None:
    if timeout is None:
        return None
    is_number = isinstance(timeout, (int, float, np.integer, np.floating)) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout < math.inf:
        raise ConfigError(f"timeout is {timeout!r}; expected seconds, such as 900, or None to wait for ever")
    return float(timeout)


def filter_names(given: Any) -> tuple[str, ...]:
    """Names and numbers as text, each once, in order.

    >>> filter_names("ZFP, 32008"), filter_names(["bitshuffle", 307]), filter_names(32013)
    (('32008', 'zfp'), ('307', 'bitshuffle'), ('32013',))
    """
    parts = [given] if isinstance(given, (str, int, np.integer)) and not isinstance(given, bool) else given
    if parts is None or isinstance(parts, (bool, bytes)) or not isinstance(parts, Collection):
        parts = [None]
    names = set()
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, (str, int, np.integer)) or (not isinstance(part, str) and part < 0):
            raise ConfigError(
                f"allow_filters is {given!r}; expected names or numbers of filters, such as 'bitshuffle', ['zfp', 32008] "
                "or 'all'"
            )
        names |= {name.strip().lower() for name in str(part).split(",")} - {""}
    return tuple(sorted(names))


def _dtype(dtype: Any) -> np.dtype[Any] | None:
    if dtype is None:
        return None
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        raise ConfigError(f"dtype is {dtype!r}; expected a NumPy dtype such as 'float32'") from None
    refused = refusal(found)
    if refused is not None:
        raise ConfigError(f"dtype is {dtype!r}, which holds {refused}; expected a type of numbers such as 'float32'")
    return native_dtype(found)


def pad_value(pad: Any, dtype: np.dtype[Any]) -> Any:
    """The fill value as an element of `dtype`.

    Raises
    ------
    ConfigError
        If `dtype` cannot hold it: NaN in an integer array, 300 in an int8 one.
    """
    try:
        given = np.asarray(pad)
        if given.ndim or given.dtype.kind not in "biufc":
            raise ValueError("not a number")
        if given.dtype.kind == "c" and dtype.kind != "c":
            if given.imag:
                raise ValueError("not a real number")
            given = given.real
        with np.errstate(all="ignore"):
            value = given.astype(dtype)[()]
        kept = value == given or (given != given and value != value)
        has_fractions = np.asarray(0.5).astype(dtype) == 0.5  # bfloat16 and its like are not np.inexact
        rounded = given.dtype.kind in "fc" and has_fractions and np.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        kept = rounded = False
        value = None
    if not (kept or rounded):
        raise ConfigError(f"pad is {pad!r}, which an array of {dtype} cannot hold; pass a value that it can, such as pad=0")
    return value
