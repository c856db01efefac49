"""Did all ranks read the same array, and did the file stay unchanged meanwhile?

If a file is replaced while ranks open it, or written while they read it, the array would be a mixture of old and new values,
without any error. Therefore:

1. Each reading rank takes the file's size and time of last change before its metadata are read (`Source.opened_in`), and again
   after reading (`Source.state`). They must be equal (`check_unchanged`).
2. An array that the caller has open or in memory may differ from rank to rank, with the same name and shape. So every rank,
   also one that does not read, takes a fingerprint of its own array (`contents_of`).
3. If a selection names axes or coordinates, one rank has looked these up. The file is still the same one when it is opened to
   be read, which may be much later, if a plan is executed (`check_same_version`).
4. All ranks compare these numbers (`to_sums`, `check_same`) in the sums of the last agreement: a few more integers, no further
   message.

The comparison: if each of `n` ranks has a number `h`, ``n * sum(h * h) == sum(h) ** 2`` holds exactly when all are equal.
`h` has 20 bits, so that the sums over a million ranks fit into 64 bits, and each rank has three such numbers.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

import numpy as np

from shardload.comm.group import Group
from shardload.errors import ShardloadError, SourceError, StallError
from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.format import OpenFile, Source
from shardload.formats.diagnosis import as_source_error
from shardload.formats.lookup import answers_slowly, file_of, open_file, open_source
from shardload.planning.region import Grid, Region
from shardload.planning.samples import sample_regions
from shardload.planning.selection import Selection
from shardload.system.thread_pool import call_together
from shardload.system.undo import Undo
from shardload.transfer.checksum import checksum
from shardload.transfer.read_errors import Naming

State = tuple[int, ...] | None
_N_COMPARED = 2  # size and time: the numbers after them tell files apart only on one machine
_BITS, _N_NUMBERS = 20, 3
Version = tuple[int, ...]
_N_BOXES = 8
_FIX = "Load it again when nothing writes to it any more; write a new version beside the old one and rename it"
_MIXTURE = f"Nothing was loaded, because it could have been a mixture of old and new. {_FIX}"
SINCE_FOUND = f"changed while it was read. {_MIXTURE}"
SINCE_LABELS = (
    "has changed since its axes and coordinates were looked up: what was found there may lie elsewhere now. Nothing was "
    "loaded. Make the plan again (or call load again), when nothing writes to the file any more"
)
SINCE_STREAM = (
    "is not what it was when the stream was made: its size, or the time of its last change, is another. It was replaced or "
    "written since, or each machine has a copy of its own: then copy it with its time (cp -p, sbcast -p, rsync -t). Batches "
    "could have been a mixture of old and new. Make the stream again, when nothing writes to it"
)


def is_open(handle: Any) -> bool:
    """True if `handle` is an array that the caller has open or in memory on every rank; False for a path.

    >>> is_open("data.h5"), is_open(None), is_open(np.zeros(3))
    (False, False, True)
    """
    return handle is not None and not isinstance(handle, (str, os.PathLike, Source))


def contents_of(source: Source, handle: Any, selection: Selection, chunks: Grid | None) -> tuple[int, int]:
    """A fingerprint of an open array: size and time of its file if it has one, else a size and checksum of its values.

    For a NumPy array the checksum is over the whole selection, at the speed of memory. For a memory map, or an array in a store
    without a file, it is over a few regions.

    Parameters
    ----------
    source : Source
        The array's source.
    handle : object
        The object that the caller passed.
    selection : Selection
        Which elements are loaded.
    chunks : Grid or None
        The selected array cut into the file's chunks, so that each region lies in one chunk.

    Raises
    ------
    SourceError
        If values cannot be read. It names the chunk.
    """
    state = source.opened_in
    if state is not None:
        return state[0], state[1]
    whole = Region.whole(selection.shape)
    if isinstance(handle, np.ndarray) and not _is_mapped(handle):
        selected = np.asarray(handle)[selection.to_file(whole).slices()]
        return selected.nbytes, checksum(np.atleast_1d(selected))
    return whole.size * source.dtype.itemsize, checksum_of_samples(source, selection, chunks, _N_BOXES)


def checksum_of_samples(source: Source, selection: Selection, chunks: Grid | None, most: int) -> int:
    """A checksum of the values of up to `most` small regions, the same ones in any file of that shape and those chunks."""
    sum_ = 0
    for region in sample_regions(Region.whole(selection.shape), chunks, source.dtype.itemsize, 0, most):
        place = selection.to_file(region)
        values = np.empty(place.shape, dtype=source.dtype)
        try:
            source.read_into(place, values)
        except (ShardloadError, MemoryError):
            raise
        except Exception as error:
            raise Naming(source, selection, chunks).explain(error, region) from error
        sum_ = checksum(values, sum_)
    return sum_


def _is_mapped(array: Any) -> bool:
    """True if the array's values are in a file (a memory map), so that reading all of them takes as long as a load."""
    return isinstance(array, np.memmap) or (isinstance(array, np.ndarray) and _is_mapped(array.base))


def to_sums(state: State) -> list[int]:
    """The numbers to sum over the ranks; all 0 for a rank that read nothing, or whose source has no state.

    >>> to_sums(None)
    [0, 0, 0, 0, 0, 0, 0]
    """
    if state is None:
        return [0] * (1 + 2 * _N_NUMBERS)
    numbers = version_of_state(state)
    return [1, *numbers, *(number * number for number in numbers)]


def version_of_state(state: tuple[int, ...]) -> Version:
    """Numbers that identify the version of a file by its state, the same on every rank."""
    digest = int.from_bytes(blake2b(repr(tuple(state[:_N_COMPARED])).encode(), digest_size=8).digest(), "little")
    return tuple(digest >> k * _BITS & ((1 << _BITS) - 1) for k in range(_N_NUMBERS))


def version_in(sums: list[int]) -> Version | None:
    """The version that all ranks have read, by the sums that `check_same` has found in order; None if none had a state.

    >>> version_in(to_sums((5, 7))) == version_of_state((5, 7)), version_in(to_sums(None))
    (True, None)
    """
    return tuple(first // sums[0] for first in sums[1 : 1 + _N_NUMBERS]) if sums[0] else None


def check_same(name: str, sums: list[int], path: str, dataset: str, is_open: bool = False) -> None:
    """Raise SourceError if the sums say that the ranks did not all read the same. Every rank gets the same answer."""
    n, firsts, seconds = sums[0], sums[1 : 1 + _N_NUMBERS], sums[1 + _N_NUMBERS :]
    if all(n * second == first * first for first, second in zip(firsts, seconds, strict=True)):
        return
    if is_open:
        text = (
            f"{name}: the {n} ranks that passed this array did not pass the same one: its values, or its file, differ from "
            "rank to rank. Nothing was loaded, because it could have been a mixture. Pass the same array on every rank; "
            "shardload.scatter takes one that only one rank has, jax.make_array_from_process_local_data one piece of each"
        )
    else:
        text = (
            f"{name}: the {n} ranks that read it did not see the same file (its size, or the time of its last change). It was "
            "replaced or written while they opened it, or a machine still sees an older version, or each machine has a copy of "
            "its own: then copy it with its time (cp -p, sbcast -p, rsync -t). Nothing was loaded, because it could have been "
            f"a mixture. {_FIX}"
        )
    raise SourceError(text, path=path, dataset=dataset)


def check_same_objects(group: Group, versions: Mapping[str, Sequence[Any]], known: dict[str, Any] | None = None) -> None:
    """Raise SourceError if two ranks have read two versions of an object: see `Source.versions_read`. Collective.

    `known`: those of earlier calls, which are compared, too. Those of this call are added.
    """
    known = {} if known is None else known
    for text in group.gather_text(json.dumps(versions)):
        for key, version in json.loads(text).items():
            if known.setdefault(key, version) != version:
                raise SourceError(
                    f"'{version[0]}', to which references lead, is not the same on all ranks: it was replaced or written while "
                    f"they read it. {_MIXTURE}",
                    path=version[0],
                )


def check_same_version(name: str, before: State, now: State, info: ArrayInfo, what_changed: str = SINCE_FOUND) -> None:
    """Raise SourceError if a file is another one than before, perhaps on another rank. Its text: `name`, `what_changed`."""
    if before is not None and now is not None and before[:_N_COMPARED] != now[:_N_COMPARED]:
        raise SourceError(f"{name} {what_changed}", path=info.path, dataset=info.dataset)


def as_planned(source: Source, info: ArrayInfo) -> Source:
    """Return `source` if its shape, dtype, chunks and packing are those of `info`; otherwise close it and raise SourceError.

    Parameters
    ----------
    source : Source
        What was opened on this rank.
    info : ArrayInfo
        What all ranks know of the array.
    """
    # As text, because NaN is not equal to itself.
    found, expected = (
        f"shape {each.shape}, {each.dtype}, chunks {each.chunks}, packing {dict(each.packing)}" for each in (source.info, info)
    )
    if found == expected:
        return source
    source.close()
    raise SourceError(
        f"{source.info} has {found} here, and rank 0 found {expected}: the file has changed, or this rank sees another file",
        path=info.path,
        dataset=info.dataset,
    )


def check_unchanged(name: str, before: State, after: State, path: str, dataset: str) -> None:
    """Raise SourceError if the file changed while it was read."""
    if before is not None and after != before:
        was = "is gone" if after is None else f"had {before[0]} bytes and has {after[0]}" if after[0] != before[0] else ""
        text = f"{name} changed while it was read{f' (it {was})' if was else ''}. {_MIXTURE}"
        raise SourceError(text, path=path, dataset=dataset)


@dataclass(frozen=True)
class ArrayToRead:
    """An array that `KeptSources` opens.

    Attributes
    ----------
    handle : object
        A path, or an open array.
    info : ArrayInfo
        What all ranks know of it.
    access : Access
        What the caller allows.
    state : State
        That of its file when it was found: it is an error if another one is opened.
    values : Source or None
        The array, if its values are in memory already.
    naming : callable
        Gives what lets errors name it.
    """

    handle: Any
    info: ArrayInfo
    access: Access
    state: State = None
    values: Source | None = None
    naming: Callable[[], AbstractContextManager[None]] = nullcontext

    @cached_property
    def file(self) -> str | None:
        """Equal for arrays of one file; None if the array is not in a file that is opened here."""
        return file_of(os.fspath(self.handle)) if isinstance(self.handle, (str, os.PathLike)) else None


class KeptSources:
    """The arrays that one rank reads, maybe in several rounds: each is opened when it is first read, and stays open.

    A file with several of them is opened once.

    Parameters
    ----------
    arrays : sequence of ArrayToRead
        The arrays. An array is named by its number here.
    what_changed : str
        What is said of a file that is not the one in which an array was found: see `check_same_version`.

    Attributes
    ----------
    file_states : dict
        The state of each file with several arrays that is open here, by the path in `ArrayInfo`.
    versions_read : dict
        See `Source.versions_read`: of all arrays, at the last `check_unchanged`.
    """

    def __init__(self, arrays: Sequence[ArrayToRead], what_changed: str = "") -> None:
        self._arrays, self._what_changed = arrays, what_changed
        self._files: dict[str, OpenFile] = {}
        self.file_states: dict[str, State] = {}
        self.versions_read: dict[str, Sequence[Any]] = {}
        self._opened: dict[int, tuple[Source, State]] = {}

    @cached_property
    def _n_arrays(self) -> Counter[str | None]:
        """How many arrays each file has: looked up by the first that opens one, since it may look at the file system."""
        return Counter(array.file for array in self._arrays)

    def open(self, number: int) -> Source:
        """The source of an array. SourceError if it is not as it was planned, or in another version of the file."""
        if number not in self._opened:
            array = self._arrays[number]
            source = self.open_again(number) if array.values is None else array.values
            state, info = source.opened_in, source.info
            with Undo(source.close):
                check_same_version(str(info), array.state, state, info, self._what_changed)
            self._opened[number] = source, state
        return self._opened[number][0]

    def open_again(self, number: int) -> Source:
        """Another source of an array, which the caller closes. SourceError if it is not as it was planned."""
        array = self._arrays[number]
        file, info = array.file, array.info
        if file is None or self._n_arrays[file] == 1:
            source = open_source(array.handle, info.dataset, array.access, info)
        else:
            if file not in self._files:
                opened = self._files[file] = open_file(array.handle, array.access, info)
                self.file_states[info.path] = opened.state()
            source = self._files[file].open(info.dataset, info)
        return as_planned(source, info)

    def check_unchanged(self) -> None:
        """Raise SourceError if the file of an open array has changed since it was opened. Where that takes a request for each
        array, they are sent together.
        """
        calls, sources = [partial(self._check, number) for number in self._opened], [s for s, _ in self._opened.values()]
        if all(answers_slowly(source.info) for source in sources):
            call_together(calls, "shardload-states")
        else:
            for call in calls:
                call()
        for source in sources:
            self.versions_read |= source.versions_read()

    def _check(self, number: int) -> None:
        source, before = self._opened[number]
        info = source.info
        with self._arrays[number].naming(), as_source_error(info.path, info.dataset):
            check_unchanged(str(info), before, source.state(), info.path, info.dataset)

    def close_first(self, most: int) -> None:
        """Close those that were opened first if there are more than `most`."""
        if len(self._opened) > most:
            self.check_unchanged()
        for number in list(self._opened)[: max(0, len(self._opened) - most)]:
            self._opened.pop(number)[0].close()

    def __enter__(self) -> KeptSources:
        return self

    def close(self, kind: type[BaseException] | None = None, *_error: object) -> None:
        """Close all, but not after a stall (the error `kind`): a thread may hang in a read, and the library would wait."""
        if kind is None or not issubclass(kind, StallError):
            with ExitStack() as closing_all:  # if one cannot be closed, the others are
                for file in self._files.values():
                    closing_all.callback(file.close)
                for source, _ in self._opened.values():
                    closing_all.callback(source.close)
        self._opened.clear()
        self._files.clear()

    __exit__ = close
