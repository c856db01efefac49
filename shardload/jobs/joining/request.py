"""What shall be joined, and what became of it?"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from shardload.comm.group import Invocation
from shardload.errors import ConfigError, without_queries
from shardload.formats.lookup import split_path
from shardload.options import CallOptions, Options, check_names, check_path
from shardload.storage.remote import with_store
from shardload.units import PrintedReport, counted, format_nbytes

_NUMBER = re.compile(r"\d+")
_OF_PARTS = "the paths of the files, or a pattern such as 'era5_*.nc'"


@dataclass(frozen=True)
class PartsRequest:
    """Which files a caller wants to have as one, and how.

    Attributes
    ----------
    parts : str or tuple of str
        The files, in their order along the axis; or a pattern, whose files are put into order.
    axis : str, int or None
        By name, or by number; None: the axis that can grow, or the first one if axes have no names.
    dataset : tuple of str
        Names of arrays, and patterns; none for all arrays.
    stack : str or None
        The name of a new axis, along which the arrays of the parts are put one behind the other.
    word : str
        The caller's argument that names the axis.
    options : CallOptions
        ``allow_external``, ``storage``, ``progress``, ``timeout``.
    """

    parts: str | tuple[str, ...]
    axis: str | int | None
    dataset: tuple[str, ...]
    stack: str | None
    word: str
    options: CallOptions

    @classmethod
    def check(
        cls, parts: Any, axis: Any = None, *, dataset: Any = None, stack: Any = None, word: str = "axis", **keywords: Any
    ) -> PartsRequest:
        """The request, with its options checked. ConfigError names what was found and what is expected."""
        parts, storage = with_store(parts, keywords.pop("storage", None))
        options = Options.check(storage=storage, **keywords)
        names = check_names(dataset)
        if not isinstance(axis, str | None) and (isinstance(axis, bool) or not isinstance(axis, Integral) or axis < 0):
            raise ConfigError(f"{word} is {axis!r}; expected the name of an axis, or its number from 0 on")
        axis = int(axis) if isinstance(axis, Integral) else axis
        if stack is not None and (not isinstance(stack, str) or not stack or "/" in stack):
            raise ConfigError(f"stack is {stack!r}; expected the name of the new axis, such as 'time'")
        if stack is not None and axis is not None:
            raise ConfigError(
                f"{word} is {axis!r} and stack {stack!r}. Pass one: {word}= if the arrays have it, stack= if it is new"
            )
        is_several = isinstance(parts, Iterable) and not isinstance(parts, str)
        texts = [check_path("parts", part, _OF_PARTS) for part in (parts if is_several else [parts])]
        paths = tuple(map(os.path.expanduser, texts))
        if not paths:
            raise ConfigError("parts is empty: there is nothing to join. Pass the paths of the files, or a pattern")
        _check_order(paths)
        return cls(paths if is_several else paths[0], axis, names, stack, word, options)

    @property
    def title(self) -> str:
        """The files in a word, for messages."""
        return self.parts if isinstance(self.parts, str) else f"{self.parts[0]} ..."

    def invocation(self, call: str, title: str) -> Invocation:
        """See `engine.call.begin_request`."""
        values = {name: without_queries(repr(getattr(self, name))) for name in ("parts", "dataset", "stack")}
        values[self.word] = repr(self.axis)
        return Invocation(call, title, values | self.options.describe("allow_external", "timeout"))

    def find(self) -> tuple[str, ...]:
        """The files: those of a pattern in the order of the numbers in their names. ConfigError if it matches none."""
        if not isinstance(self.parts, str):
            return self.parts
        paths = [self.parts] if os.path.exists(self.parts) or "://" in self.parts else glob.glob(self.parts, recursive=True)
        if not paths:
            raise ConfigError(
                f"no file matches {self.parts!r} (looked for in '{os.getcwd()}'). Pass another pattern, or a list of paths"
            )
        texts = {path: _NUMBER.split(path) for path in paths}
        return tuple(sorted(paths, key=lambda path: (texts[path], [int(n) for n in _NUMBER.findall(path)])))


def is_one_file(files: Any) -> bool:
    """True for the path of one file, or its URL; False for a pattern or a list."""
    if not isinstance(files, str | os.PathLike):
        return False
    path = split_path(os.fspath(files))[0]
    return "*" not in path.partition("?")[0] if "://" in path else not glob.has_magic(path) or os.path.exists(path)


@dataclass(frozen=True)
class Row:
    """What became of one array.

    Attributes
    ----------
    name : str
        Its full name.
    shape : tuple of int
        In the new file.
    dtype : str
        Type of its values.
    how : str
        In words: what it is made of.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    how: str


@dataclass(frozen=True, repr=False)
class JoinReport(PrintedReport):
    """What was joined.

    Attributes
    ----------
    path : str
        The new file.
    n_parts : int
        Number of files.
    axis : str or int
        The axis along which they follow each other.
    rows : tuple of Row
        A row for each array.
    notes : tuple of str
        What was left out.
    nbytes : int
        Bytes of the values that the new file leads to, and has.
    needs_external : bool
        True if parts are outside the folder of the new file: loads then need ``allow_external=True``.
    """

    path: str
    n_parts: int
    axis: str | int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    nbytes: int
    needs_external: bool

    def __str__(self) -> str:
        axis = f"axis {self.axis!r}" if isinstance(self.axis, str) else f"axis {self.axis}"
        lines = [f"joined {counted(self.n_parts, 'file')} along {axis}: '{self.path}', {format_nbytes(self.nbytes)} of values"]
        lines += [f"  {row.name} {row.shape} {row.dtype}: {row.how}" for row in self.rows]
        lines += [f"  note: {note}" for note in self.notes]
        if self.needs_external:
            lines.append(
                "  note: parts are outside the folder of the new file: load it with allow_external=True, and leave them "
                "where they are"
            )
        return "\n".join(lines)


def _check_order(paths: Sequence[str]) -> None:
    """ConfigError if the paths are in the order of a sorted list of names, and their numbers are not: 10 before 2.

    >>> _check_order(["s.0.h5", "s.2.h5", "s.10.h5"])
    """
    numbers = [tuple(map(int, _NUMBER.findall(path))) for path in paths]
    if list(paths) != sorted(paths) or len({_NUMBER.sub("#", path) for path in paths}) > 1:
        return
    for before, after, first, second in zip(numbers, numbers[1:], paths, paths[1:], strict=False):
        if before > after:
            raise ConfigError(
                f"the parts are in the order of their names, not of their numbers: '{first}' comes before '{second}'. Pass "
                "them in their order: sorted(paths, key=lambda p: [int(n) for n in re.findall(r'[0-9]+', p)])"
            )
