"""How are values read from an untrusted file? Through helper processes, which answer the same questions.

1. `find` and `list_all` ask one helper, before an array is open.
2. `UntrustedSource` and `UntrustedChunks` are a `Source` and a `ChunkReader`. Each reading thread has a helper, up to a few.
3. A value may be wrong, as in any untrusted file. `answers` checks everything else that a helper says.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from shardload.errors import SourceError
from shardload.formats.access import Access, Limits
from shardload.formats.base import (
    ArrayInfo,
    Encoded,
    Room,
    Source,
    check_chunk,
    check_request,
    fresh,
    native_dtype,
    settle_bools,
)
from shardload.formats.labelling import SMALL_NBYTES
from shardload.formats.labels import Labels
from shardload.formats.untrusted.answers import HelperError, clean, info_of, is_int, labels_of, lie, loadable, state_of
from shardload.formats.untrusted.helper import FIRST_NBYTES, Helper
from shardload.planning.region import Region

__all__ = ["UntrustedChunks", "UntrustedSource", "find", "find_labels", "list_all", "list_below"]

_FIND_FACTOR, _SMALL_FACTOR = 2.0, 0.25  # more CPU time for a file with many arrays, less for a small array
_MOST_LIST_NBYTES = 32 << 20  # of an answer to "list"
_MOST_LABELS_NBYTES = 2 << 20
_MOST_HELPERS = 4
_WORTH_NBYTES = 64 << 20  # memory that each helper must have
_WORTH_SECONDS = 1.0  # reading time after which another helper pays off: starting it takes half of that
_CHUNKS_HELD = 8  # copies of a chunk: as stored, decompressed twice, decoded, and those that libraries keep
_MOST_LOST = 3
_INT64 = 2**63

Array = np.ndarray[Any, Any]


def _limits_of(access: Access) -> Limits:
    """The caller's limits, or the default limits."""
    return Limits() if access.untrusted is None else access.untrusted


# --- questions before an array is open


@contextmanager
def _helper(access: Access, path: str, dataset: str | None = None) -> Iterator[Helper]:
    """A helper for a single question about a file."""
    helper = Helper(_limits_of(access))
    try:
        with _named(path, dataset):
            yield helper
    finally:
        helper.end()


@contextmanager
def _named(path: str, dataset: str | None) -> Iterator[None]:
    """Add the path and the dataset to a helper's SourceError."""
    try:
        yield
    except SourceError as error:
        error.path, error.dataset = path, dataset
        raise


def list_all(path: str, access: Access, most_labelled: int = 0, linked: str = "") -> list[ArrayInfo]:
    """Run `list_labelled` in a helper. With 0, arrays have no labels."""
    with _helper(access, path) as helper:
        answer = helper.ask(
            "list", 0, _FIND_FACTOR, _MOST_LIST_NBYTES, path=path, allow_external=access.allow_external,
            most_labelled=most_labelled, linked=linked,
        )  # fmt: skip
    return _infos_of(answer.get("infos"), path)


def list_below(path: str, access: Access, group: str) -> tuple[list[ArrayInfo], list[ArrayInfo]]:
    """Run `list_arrays`, and `list_labelled` for a group if only links lead to arrays below it, in one helper."""
    with _helper(access, path) as helper:
        answer = helper.ask(
            "list_below", 0, _FIND_FACTOR, _MOST_LIST_NBYTES, path=path, allow_external=access.allow_external, group=group
        )
    return _infos_of(answer.get("infos"), path), _infos_of(answer.get("linked"), path)


def _infos_of(infos: object, path: str) -> list[ArrayInfo]:
    if not isinstance(infos, list):
        raise lie("no list of arrays")
    return [info_of(found, path) for found in infos]


def find(
    path: str, inside: str, dataset: str | None, access: Access, values: bool = False, needs_numbers: bool = False
) -> tuple[ArrayInfo, bytes | None]:
    """Run `find_array` for `path` (`inside` is the file in it), and `read_small` if `values`, in one helper.

    If reading the values kills the helper, none are returned. The normal load then reports the error and the chunk.
    """
    if values:
        with suppress(HelperError):
            return _find(path, inside, dataset, access, True, needs_numbers)
    return _find(path, inside, dataset, access, False, needs_numbers)


def find_labels(info: ArrayInfo, access: Access, small_nbytes: int) -> ArrayInfo:
    """Add labels to an array's description, in a helper (`lookup.Labeller`)."""
    with _helper(access, info.path, info.dataset) as helper:
        answer = helper.ask(
            "label", 0, _FIND_FACTOR, _MOST_LABELS_NBYTES, path=info.path, dataset=info.dataset,
            allow_external=access.allow_external, small_nbytes=min(small_nbytes, SMALL_NBYTES),
        )  # fmt: skip
    return replace(info, labels=labels_of(answer.get("labels"), len(info.shape)))


def _find(
    path: str, inside: str, dataset: str | None, access: Access, values: bool, needs_numbers: bool
) -> tuple[ArrayInfo, bytes | None]:
    with _helper(access, inside, dataset) as helper:
        factor = _SMALL_FACTOR if values else _FIND_FACTOR
        answer = helper.ask(
            "find", 0, factor, path=path, dataset=dataset, allow_external=access.allow_external, values=values,
            needs_numbers=needs_numbers,
        )  # fmt: skip
        info = loadable(info_of(answer.get("info"), inside))
        if not values or answer.get("nbytes") is None:
            return info, None
        dtype = np.dtype(info.dtype)
        nbytes = math.prod(info.shape) * dtype.itemsize
        if answer["nbytes"] != nbytes or nbytes > FIRST_NBYTES:
            raise lie(f"{answer['nbytes']!r} bytes of values, expected {nbytes}")
        found = helper.values((nbytes,), np.dtype(np.uint8)).copy()
    settle_bools(found.view(dtype))
    return info, found.tobytes()


# --- an array


class UntrustedSource(Source):
    """One array of a file, open in helper processes (`Source`).

    Parameters
    ----------
    path : str
        Path of the file or store.
    dataset : str
        Full name of the array.
    access : Access
        What the caller allows, with the limits of all helpers together. Helpers may use all filters.

    Raises
    ------
    SourceError
        As `open_source` does.
    HelperError
        If the helper that opens the file does not survive it.
    """

    def __init__(self, path: str, dataset: str, access: Access) -> None:
        self._path, self._dataset, self._allow_external, self._access = path, dataset, access.allow_external, access
        limits = _limits_of(access)
        self._lock = threading.Condition()
        self._idle: list[Helper] = []
        self._all: list[Helper] = []
        self._n_started, self._n_lost, self._last = 0, 0, ""
        self._worth_from = math.inf  # the time from which another helper pays off
        self._is_closed = False
        self._missing: list[tuple[int, ...]] = []
        helper, self._info, self._first_state = self._start(limits)
        try:
            self._dtype = native_dtype(np.dtype(self._info.dtype))
            nbytes = math.prod(self._info.chunks or ()) * self._dtype.itemsize
            worth = max(_WORTH_NBYTES, _CHUNKS_HELD * nbytes)
            self._most = max(1, min(_MOST_HELPERS, limits.memory_nbytes // worth)) if self._info.chunks else 1
            self._share = Limits(limits.memory_nbytes // self._most, limits.seconds, limits.cpu_seconds)
            if self._most > 1:
                helper.ask("limit", memory_nbytes=self._share.memory_nbytes)
        except BaseException:
            helper.end()
            raise
        self._idle, self._all, self._n_started = [helper], [helper], 1
        self._worth_from = time.monotonic() + _WORTH_SECONDS

    def _start(self, limits: Limits) -> tuple[Helper, ArrayInfo, tuple[int, ...] | None]:
        helper = Helper(limits)
        try:
            with _named(self._path, self._dataset):
                answer = helper.ask(
                    "open", 0, _FIND_FACTOR, path=self._path, dataset=self._dataset, allow_external=self._allow_external
                )
            info, state = loadable(info_of(answer.get("info"), self._path)), state_of(answer.get("state"))
            if info.dataset != self._dataset:
                raise lie(f"the array '{clean(info.dataset)}'")
        except BaseException:
            helper.end()
            raise
        return helper, info, state

    @property
    def info(self) -> ArrayInfo:
        """Shape, dtype, chunks and the other metadata."""
        return self._info

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values, in native byte order."""
        return self._dtype

    def labels(self) -> Labels:
        """The names of the axes, the attributes as plain Python, and the names of coordinates: from a helper of its own."""
        found = find_labels(self._info, self._access, 0).labels
        return found if isinstance(found, Labels) else super().labels()

    def read_into(self, region: Region, out: Array) -> None:
        """Have a helper read `region`, and copy it into `out`."""
        check_request(self._info, self._dtype, region, out)
        self._missing = []
        if region.size == 0:
            return
        first, counts = self._grid_of(region)
        most = math.prod(counts)
        place = -(-out.nbytes // 8) * 8
        with self._a_helper() as helper:
            answer = helper.ask("read", place + 8 * most, start=region.start, stop=region.stop)
            n: Any = answer.get("n_missing")
            if not is_int(n, most + 1):
                raise lie(f"{n!r} missing chunks, of {most}")
            np.copyto(out, helper.values(region.shape, self._dtype))
            numbers = helper.values((n,), np.dtype(np.int64), place).copy()
            if n and (numbers[0] < 0 or numbers[-1] >= most or (np.diff(numbers) <= 0).any()):
                raise lie("numbers of chunks that are not there")
        settle_bools(out)
        if n:
            at = zip(*(axis.tolist() for axis in np.unravel_index(numbers, counts)), strict=True) if counts else [()]
            self._missing = [tuple(a + k for a, k in zip(first, index, strict=True)) for index in at]

    def missing(self, region: Region) -> list[tuple[int, ...]]:
        """The missing chunks that the helper reported with the values of this region."""
        return self._missing

    def _grid_of(self, region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The index of the first chunk that meets a region, and how many chunks meet it along each axis."""
        chunks = self._info.chunks
        if chunks is None:
            return (), ()
        first = tuple(a // c for a, c in zip(region.start, chunks, strict=True))
        return first, tuple(-(-b // c) - k for b, c, k in zip(region.stop, chunks, first, strict=True))

    def plain(self, region: Region) -> Array:
        """The values by the format's own library, in a helper."""
        out = np.empty(region.shape, self._dtype)
        check_request(self._info, self._dtype, region, out)
        if region.size:
            with self._a_helper() as helper:
                helper.ask("plain", out.nbytes, start=region.start, stop=region.stop)
                np.copyto(out, helper.values(region.shape, self._dtype))
            settle_bools(out)
        return out

    def chunk_reader(self) -> UntrustedChunks | None:
        """A reader of single chunks, with as many helpers as there is memory for; None if the array has no chunks."""
        return None if self._info.chunks is None else UntrustedChunks(self)

    def chunk(self, index: tuple[int, ...], out: Array) -> int | None:
        """Read one chunk into `out`, which has the chunk's shape. Returns its stored bytes; None if it is missing."""
        with self._a_helper() as helper:
            answer = helper.ask("chunk", out.nbytes, index=index)
            np.copyto(out, helper.values(out.shape, self._dtype))
            n = answer.get("nbytes_stored")
            if n is not None and not is_int(n, _INT64):
                raise lie(f"{n!r} bytes of a stored chunk")
        settle_bools(out)
        return None if n is None else int(n)

    def state(self) -> tuple[int, ...] | None:
        """The state of the file, as the helpers see it; None if it has none, or no helper is alive."""
        with self._lock:
            helpers, self._idle = self._idle, []
        found = self._first_state if helpers else None
        try:
            for helper in helpers:
                state = state_of(helper.ask("state").get("state"))
                if state != self._first_state:
                    found = state
        except (OSError, ValueError, RuntimeError):
            found = None
        finally:
            for helper in helpers:
                self._give(helper)
        return found

    def opened_in(self) -> tuple[int, ...] | None:
        """The state that the first helper saw when it opened the file."""
        return self._first_state

    def close(self) -> None:
        """End the helpers. A thread that waits for one gets a `HelperError`."""
        with self._lock:
            self._is_closed = True
            helpers, self._all, self._idle = self._all, [], []
            self._lock.notify_all()
        for helper in helpers:
            helper.end()

    # --- helpers, each for one thread at a time

    @contextmanager
    def _a_helper(self) -> Iterator[Helper]:
        helper = self._take()
        try:
            yield helper
        except HelperError as error:
            helper.end()
            self._last = str(error)
            raise
        except BaseException as error:
            if not isinstance(error, (OSError, ValueError, RuntimeError)):  # Ctrl-C: the helper may be in the middle of work
                helper.end()
            raise
        finally:
            self._give(helper)

    def _take(self) -> Helper:
        with self._lock:
            while not self._idle and not self._is_closed and self._n_started > 0:
                left = self._worth_from - time.monotonic()
                if self._n_started < self._most and left <= 0:
                    break
                self._lock.wait(left if self._n_started < self._most else None)
            if self._is_closed:
                raise HelperError("the file was closed")
            if self._idle:
                return self._idle.pop()
            if self._n_lost >= _MOST_LOST:
                raise HelperError(f"{self._n_lost} helper processes were lost in this file before; of the last: {self._last}")
            self._n_started += 1
        helper = None
        try:
            helper, info, state = self._start(self._share)
            if info.to_json() != self._info.to_json() or state != self._first_state:  # text, because of NaN
                raise OSError("the file was changed since it was opened")
        except BaseException:
            if helper is not None:
                helper.end()
            with self._lock:
                self._n_started -= 1
                self._lock.notify()
            raise
        self._keep(helper)
        return helper

    def _keep(self, helper: Helper) -> None:
        with self._lock:
            if not self._is_closed:
                self._all.append(helper)
                return
        helper.end()
        raise HelperError("the file was closed")

    def _give(self, helper: Helper) -> None:
        with self._lock:
            if helper.is_alive:
                self._idle.append(helper)
            else:
                self._n_started -= 1
                self._n_lost += 1
                if helper in self._all:
                    self._all.remove(helper)
            self._lock.notify()


class _Values:
    """The decoded values of a chunk. Its length is that of the stored chunk, for the counters."""

    def __init__(self, values: Array, nbytes_stored: int) -> None:
        self.values, self._nbytes_stored = values, nbytes_stored

    def __len__(self) -> int:
        return self._nbytes_stored


class UntrustedChunks:
    """The chunks of an array that is open in helpers (`ChunkReader`). A helper fetches and decodes in one step."""

    def __init__(self, source: UntrustedSource) -> None:
        self._source = source
        self._shape = source.info.chunks or ()
        self._counts = tuple(-(-n // c) for n, c in zip(source.info.shape, self._shape, strict=True))
        self._nbytes = math.prod(self._shape) * source.dtype.itemsize
        self._fill: Array = np.zeros((), source.dtype)

    def fetch(self, index: tuple[int, ...], room: Room = fresh) -> Encoded | None:
        """The values of a chunk; None if it is missing."""
        check_chunk(index, self._counts)
        values = room(self._nbytes).view(self._source.dtype).reshape(self._shape)
        n = self._source.chunk(index, values)
        if n is None:
            self._fill = values.reshape(-1)[:1].reshape(()).copy()
            return None
        return Encoded(_Values(values, n))

    def decode(self, encoded: Encoded | None, out: Array) -> None:
        """Copy the values that `fetch` returned."""
        np.copyto(out, self._fill if encoded is None else encoded.data.values)
