"""What must a file format implement?

1. A `Format` says which files are its own, and opens them.
2. An `OpenFile` is one such file, opened once.
3. A `Source` is one open array.

None of them knows ranks, devices or plans.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from shardload.formats.access import STRICT, Access
from shardload.formats.contract.array import ArrayInfo, Labels, Properties
from shardload.formats.contract.chunk_reader import ChunkReader
from shardload.planning.region import Region
from shardload.system.undo import Undo


class ChangedError(OSError):
    """A file has changed since the plan was made. The text says what to do."""


class UndecodedError(ValueError):
    """A chunk is encoded in a way that is not decoded here, though it may be whole. The text says what reads it."""


class HelperError(OSError):
    """A helper process died, took too long, needed too much memory, or gave an impossible answer."""


class Source(abc.ABC):
    """One open array. Not collective: each reading rank opens its own.

    A format must implement `info`, `dtype`, `read_into`, `plain`, `state` and `close`. It may override the other methods if it
    can do better than their defaults.
    """

    info: ArrayInfo
    """Shape, dtype, chunks and the other metadata."""

    dtype: np.dtype[Any]
    """Type of the values that `read_into` writes: that of the file, in native byte order."""

    opened_in: tuple[int, ...] | None = None
    """`state` before the metadata of this array were read, so that the caller notices any later change."""

    @abc.abstractmethod
    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> Sequence[tuple[int, ...]]:
        """Write the values of `region` (in the file's coordinates) into `out`. Returns the indices of the missing chunks (not
        stored) that meet it; their values are the fill value. ``[()]`` if an array without chunks has no stored values. Missing
        chunks that the format's library hides are left out.

        `out` is C-contiguous and writable, and has exactly `region.shape` and `dtype`. Call `check_request` first: it raises
        ValueError for anything else. Decode each chunk that meets `region` once. Empty regions are allowed and read nothing.
        Calls come from one thread at a time, not always the same thread. If something in the file is wrong, raise OSError,
        ValueError, RuntimeError or the library's own exception; the caller knows the chunk and adds it to the message. Never
        return values after `close`.
        """

    @abc.abstractmethod
    def state(self) -> tuple[int, ...] | None:
        """Size and time of last change of the open file, then other numbers that tell it from another file on this machine.
        None if the array is in no file. Never raises. See `state_of`.
        """

    def versions_read(self) -> Mapping[str, Sequence[Any]]:
        """Of each object elsewhere to which the file leads, and which was read: its name, and numbers of its version, by a key
        that is the same on all ranks. All have to read the same version. The default is that there is none.
        """
        return {}

    def interrupt(self) -> None:
        """Called after an error, by any thread: nobody needs the values that are being read now. The default does nothing."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Close what this object opened. An object that the caller passed in stays open. May be called again."""

    def expect(self, region: Region) -> None:
        """Called at most once, before anything is read: all reads will be inside `region`. The default does nothing.

        A format may then look up no more than this region. Other reads must still be right, but may be slower.
        """
        return None

    def expect_in_order(self, regions: Iterator[Region]) -> None:
        """Called if the file is in a store: `read_into` will get these regions, in this order. The default does nothing."""
        return None

    def tell(self, region: Region) -> Mapping[str, Any] | None:
        """What other ranks must know to open the array (`ArrayInfo.parts`), and to read values of `region` without looking them
        up in the file. The default is what `info` says.
        """
        return self.info.parts

    @abc.abstractmethod
    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """The values of `region` by the format library's own indexing, without code of this package: for verification. They may
        have any byte order.
        """

    def view(self, region: Region) -> np.ndarray[Any, Any] | None:
        """The values without a copy, if they are in memory already, with any dtype and strides. The default is None."""
        return None

    def labels(self) -> Labels:
        """The names of the axes, all attributes, and the names of the arrays that are its coordinates (without their values).

        By default axes have no names.
        """
        return Labels((None,) * len(self.info.shape), self.info.attributes)

    def group_attrs(self) -> Mapping[str, Any]:
        """The attributes of the group that the array is in, as plain Python. The default is none."""
        return {}

    def properties(self) -> Properties:
        """What must be known besides `info` to make another array like this one (`Properties`).

        The default follows from `info` and `labels`: a compressor with its usual options, attributes as plain Python.
        """
        info, labels = self.info, self.labels()
        attrs = dict(labels.attrs)
        for key, (kind, values) in info.packing.items():
            if kind not in ("number", "text", "unreadable"):
                attrs[key] = np.array(values[0] if len(values) == 1 else values, dtype=kind)[()]
        words = info.codec.split("+")
        codecs = [word for word in words if word not in ("none", "shuffle", "fletcher32", "crc32c")]
        compression = {"name": (codecs or ["none"])[0], "shuffle": "shuffle" in words or codecs == ["blosc"]}
        return Properties.of(labels, self.dtype, attrs, compression=compression if codecs or compression["shuffle"] else None)

    def chunk_reader(self) -> ChunkReader | None:
        """A reader of whole chunks as they are stored, to decode them in several threads. The default, None, means that only
        `read_into` can read.

        Called once per load. The reader is valid until `close`.
        """
        return None


class Format(abc.ABC):
    """One file format. A line in `registry` names it; nothing else in shardload knows it.

    A format must implement `name`, `claims_path`, `open_file`, an `OpenFile` and a `Source`. It may override the other methods
    if it can do better than their defaults. An `Access` says what the caller allows. If files of the format can name other
    files, open those only with `Fence.open`, or ask `Fence.holds` before the library opens them.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def claims_path(self, path: str) -> bool:
        """True if the existing file or folder at `path` has this format, by its content, not its suffix. OSError if the content
        cannot be read; raises nothing else.
        """

    @abc.abstractmethod
    def open_file(self, path: str, access: Access = STRICT) -> OpenFile:
        """Open a file that exists."""

    def claims_url(self, url: str) -> bool:
        """True if `url`, which has a ``://``, surely is of this format. Decides by the text alone. Never raises."""
        return False

    def claims_head(self, head: bytes) -> bool:
        """True if an object in a store that begins with these bytes is of this format (no bytes: there is no such object).
        Called if no format claims the URL. Never raises.
        """
        return False

    def describes(self, info: ArrayInfo) -> bool:
        """True if this format has described the array."""
        return info.format.startswith(self.name)

    def claims_object(self, obj: object) -> bool:
        """True if `obj` is an open array of this format's library. Never raises."""
        return False

    def open_object(self, obj: Any, access: Access = STRICT) -> Source:
        """Make a source of an open array that `claims_object` claims. The caller closes the array."""
        raise NotImplementedError(f"{self.name} claims objects, but does not open them")


class OpenFile(abc.ABC):
    """A file that is opened once for its arrays. Use it in a ``with`` statement.

    It must implement `list_arrays` and `open`.
    """

    @abc.abstractmethod
    def list_arrays(self, most: int | None = None, like: str = "", in_full: bool = True) -> list[ArrayInfo]:
        """Every array in the file, in the file's order, from metadata alone. Includes arrays that cannot be loaded, with the
        reason.

        With `most`, at most `most` + 1 of them, each under one name, quickly: for a message about which the caller could mean.
        If the file has more, the result includes arrays below `like`, or with a similar name, if the format lists names
        quickly. Unless `in_full`, what a load does not need may be left out, as text attributes: in some formats it is not safe
        to read those of a damaged file.
        """

    @abc.abstractmethod
    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Source:
        """Open one array by its full name, also one that cannot be loaded. It is valid until it or this file is closed.

        Raises ``KeyError(dataset)`` if there is no array of that name. `planned` is its description, maybe from another rank,
        which saves looking it up again. The caller compares shape, dtype and chunks of the source with it.
        """

    def expect(self, datasets: Iterable[str]) -> None:
        """Called before several arrays (and groups) are opened, by their full names. Never raises. By default it does nothing.

        A format for which each look is a request of its own may then send all of them together.
        """
        return None

    def list_linked(self, group: str, in_full: bool = True) -> list[ArrayInfo]:
        """The arrays below a `group` to which links lead, under the names by which `open` opens them. By default none.

        `list_arrays` follows no links, so it has none of these. With `in_full` they are described as there. Raises SourceError
        for a link without a target, and for one that the caller does not allow.
        """
        return []

    def state(self) -> tuple[int, ...] | None:
        """The state of the file itself, like `Source.state`; None if it has none. Never raises.

        With it a job sees if arrays of one file were read from different versions of it.
        """
        return None

    def groups(self) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[str]]:
        """The attributes of the file (``"/"``) and of its groups, by their full names; and what could not be read of them, in
        words. By default none.
        """
        return {}, ()

    def links(self) -> Mapping[str, str]:
        """The links in the file that give something a second name, or lead to another file: from their full names to what each
        leads to, in words. By default none.

        `list_arrays` need not have what they lead to.
        """
        return {}

    def close(self) -> None:
        """Close the file. Close its arrays first. May be called again. By default nothing is to be closed."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_alone(file: OpenFile, dataset: str, planned: ArrayInfo | None = None) -> Source:
    """Open an array of a file. The file is closed with it, or at once if the array cannot be opened."""
    with Undo(file.close):
        source = file.open(dataset, planned)

    def close_both() -> None:
        vars(source).pop("close", None)  # the class has its own; a source that refers to itself waits for the garbage collector
        source.close()
        file.close()

    source.close = close_both  # type: ignore[method-assign]
    return source
