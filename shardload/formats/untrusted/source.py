"""How are values read from an untrusted file? By a format whose files and arrays are open in a helper process.

1. `UntrustedFormat` takes the place of all formats (`lookup.format_of`); the helper asks the real ones which claims the file.
2. An `UntrustedFile` has one helper, from the first question on. It passes on every question, one at a time.
3. A value may be wrong, as in any untrusted file. Everything else that a helper says is checked as if it were an attack:
   lengths, types, shapes. A process that decodes hostile bytes may have been taken over by them. An answer that could be true
   of some file is accepted. An answer that cannot be true of any file is a `HelperError`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from shardload.errors import SourceError, printable
from shardload.formats.access import STRICT, Access, Limits
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.chunk_reader import a_few_chunks, chunks_met
from shardload.formats.contract.dtypes import check_request, native_dtype, refusal, settle_bools
from shardload.formats.contract.format import Format, HelperError, OpenFile, Source
from shardload.formats.labels import Coordinate, Labels, Note
from shardload.formats.untrusted.helper import VALUES_AT, Helper, lie
from shardload.planning.region import Region
from shardload.values.decoding import ATTRIBUTES

_MOST_AXES = 64  # NumPy's
_INT64 = 2**63
_MOST_VALUES = 64
_LONGEST_STATE = 8


@contextmanager
def _checking(what: str) -> Iterator[None]:
    """Turn what goes wrong while an answer is looked at into the error about it."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise lie(f"no {what} ({printable(str(error))[:200]})") from None


def _require(is_so: bool, what: str) -> None:
    if not is_so:
        raise ValueError(what)


def _are_ints(values: Any, start: int, stop: int) -> bool:
    return all(type(n) is int and start <= n < stop for n in values)


def _cleaned(value: Any) -> Any:
    """JSON without control characters, so that it cannot control a terminal."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _cleaned(part) for key, part in value.items()}
    return [_cleaned(part) for part in value] if isinstance(value, list) else value


def state_of(answer: object) -> tuple[int, ...] | None:
    """A helper's answer for `Source.state`, checked."""
    if answer is None:
        return None
    if not isinstance(answer, list) or len(answer) > _LONGEST_STATE or not _are_ints(answer, -_INT64, 2 * _INT64):
        raise lie("no state of a file")
    return tuple(answer)


def missing_of(answer: Any, box: Sequence[range]) -> list[tuple[int, ...]]:
    """Which chunks of a box of the chunk grid are missing, as a helper says, checked: each at most once, in C order."""
    with _checking("list of missing chunks"):
        chunks = [tuple(index) for index in answer]
        for index in chunks:
            _require(all(type(k) is int and k in axis for k, axis in zip(index, box, strict=True)), "where they are")
        _require(all(a < b for a, b in pairwise(chunks)), "their order")
    return chunks


def info_of(answer: Any, path: str) -> ArrayInfo:
    """A helper's description of an array, checked. The path comes from the caller, not from the helper."""
    with _checking("description of an array"):
        _require(type(answer) is dict, "no object")
        cleaned = {key: _cleaned(value) for key, value in answer.items() if key != "dataset"}
        info = ArrayInfo.from_dict(cleaned | {"path": path, "dataset": answer["dataset"], "parts": None, "labels": None})
        texts = (info.dataset, info.format, info.codec, info.dtype, info.refused or "")
        _require(all(type(text) is str for text in texts), "texts")
        _require(len(info.shape) <= _MOST_AXES and _are_ints(info.shape, 0, _INT64), "shape")
        for sizes in (info.chunks or (1,) * len(info.shape), info.shards or (1,) * len(info.shape)):
            _require(len(sizes) == len(info.shape) and _are_ints(sizes, 1, _INT64), "chunks")
        _require(info.nbytes_stored is None or _are_ints([info.nbytes_stored], 0, 2 * _INT64), "stored bytes")
        _require(type(info.is_coordinate) is bool and type(info.is_dimension) is bool, "kind")
        _require(type(info.attributes) is dict, "attributes")
        if info.refused is None:
            dtype = np.dtype(info.dtype)
            _require(dtype.name == info.dtype and refusal(dtype) is None, "type of values")
            nbytes = max(math.prod(info.shape), math.prod(info.chunks or ())) * dtype.itemsize
            _require(nbytes < _INT64, "size")
        for name, (kind, values) in info.packing.items():
            _check_packing(name, kind, values)
    return info


def _check_packing(name: str, kind: str, values: Any) -> None:
    """Raise unless an attribute for decoding has a type, and a few numbers or texts of it."""
    _require(name in ATTRIBUTES and 0 < len(values) <= _MOST_VALUES, "packing")
    is_text = kind in ("text", "unreadable")
    leaves = [leaf for value in values for leaf in (value if isinstance(value, list) else [value])]
    _require(all(type(leaf) in ((str,) if is_text else (int, float)) for leaf in leaves), "values of packing")
    if not is_text and kind != "number":
        dtype = np.dtype(kind)
        _require(dtype.name == kind and dtype.kind in "biufc" and refusal(dtype) is None, "type of packing")
        np.array(leaves, dtype)  # raises if they do not fit


def labels_of(answer: Any, n_axes: int) -> Labels:
    """A helper's answer for labels, checked. Of coordinates there are the names."""
    with _checking("labels"):
        dims = tuple(_cleaned(answer["dims"]))
        _require(len(dims) == n_axes and all(name is None or type(name) is str for name in dims), "names of axes")
        attrs = {
            printable(key): Note(printable(value["note"])) if isinstance(value, dict) else _cleaned(value)
            for key, value in answer["attrs"].items()
        }
        coords = {printable(name): Coordinate(dataset) for name, dataset in answer["coords"].items()}
        _require(all(type(coordinate.dataset) is str for coordinate in coords.values()), "coordinates")
    return Labels(dims, attrs, coords)


_MOST_LIST_NBYTES, _MOST_LABELS_NBYTES = 32 << 20, 2 << 20  # of an answer
_PART_NBYTES, _MOST_CHUNKS = 1 << 24, 1 << 13  # values that are read at once, unless a chunk has more
_MOST_LOST = 3

Array = np.ndarray[Any, Any]


class UntrustedFormat(Format):
    """Any file that a helper process can open."""

    name = "untrusted"

    def claims_path(self, path: str) -> bool:
        """True: the helper says so if no format claims it."""
        return True

    def open_file(self, path: str, access: Access = STRICT) -> OpenFile:
        """The file, of which nothing is read yet."""
        return UntrustedFile(path, access)


class UntrustedFile(OpenFile):
    """A file that is open in a helper process.

    Attributes of groups are not asked for: nobody needs those of a file that is not trusted.

    Parameters
    ----------
    path : str
        Path of the file or store.
    access : Access
        What the caller allows, with the limits of the helper. It may use all filters.
    """

    def __init__(self, path: str, access: Access) -> None:
        self.path, self._allow_external = path, access.allow_external
        self._limits = access.untrusted or Limits()
        self.lock = threading.RLock()  # around a question, until the values of its answer are copied
        self._helper: Helper | None = None
        self._n_lost, self._last, self.is_closed = 0, "", False

    def ask(self, do: str, nbytes: int = 0, **what: Any) -> dict[str, Any]:
        """Ask the helper, which is started if there is none. See `Helper.ask`.

        Raises
        ------
        SourceError, KeyError, OSError, ValueError, RuntimeError
            As the file's own format does in the helper.
        HelperError
            If there is no answer. The next question then goes to a new helper, a few times.
        """
        with self.lock:
            helper = self._running()
            if self.is_closed:  # meanwhile, by another thread
                helper.end()
            try:
                return helper.ask(do, nbytes, path=self.path, allow_external=self._allow_external, **what)
            except SourceError as error:
                error.path, error.dataset = self.path, what.get("dataset")
                raise
            except HelperError as error:
                self._last = str(error)
                helper.end()
                raise

    def _running(self) -> Helper:
        if self._helper is not None and not self._helper.is_alive:
            self._helper, self._n_lost = None, self._n_lost + 1
        if self.is_closed:
            raise HelperError("the file was closed")
        if self._n_lost >= _MOST_LOST:
            raise HelperError(f"{self._n_lost} helper processes were lost in this file before; of the last: {self._last}")
        if self._helper is None:
            self._helper = Helper(self._limits)
        return self._helper

    def values(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """What the helper has put into shared memory. Copy it while you hold the lock."""
        if self._helper is None:
            raise HelperError("the file was closed")
        return self._helper.values(shape, dtype)

    def list_arrays(self) -> list[ArrayInfo]:
        """Every array in the file."""
        return self._list("list_arrays")

    def sketch(self, most: int | None = None, like: str = "") -> list[ArrayInfo]:
        """Some of them."""
        return self._list("sketch", most=most, like=like)

    def list_linked(self, group: str, in_full: bool = True) -> list[ArrayInfo]:
        """Those below a group to which links lead."""
        return self._list("list_linked", group=group, in_full=in_full)

    def _list(self, how: str, **arguments: Any) -> list[ArrayInfo]:
        infos = self.ask("list", most=_MOST_LIST_NBYTES, how=how, arguments=arguments).get("infos")
        if not isinstance(infos, list):
            raise lie("no list of arrays")
        return [info_of(info, self.path) for info in infos]

    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Source:
        """Open one array in the helper."""
        return UntrustedSource(self, dataset)

    def state(self) -> tuple[int, ...] | None:
        """The state of the file, as the helper sees it."""
        return self.state_of(None)

    def state_of(self, dataset: str | None) -> tuple[int, ...] | None:
        """The state of the file, or of an array in it; None if it has none, or if the helper cannot say."""
        try:
            return state_of(self.ask("state", dataset=dataset).get("state"))
        except (LookupError, OSError, RuntimeError, ValueError):
            return None

    def groups(self) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[str]]:
        """None: that is said."""
        return {}, ("what attributes of groups say, which are not read from an untrusted file,",)

    def give_up(self) -> None:
        """End a helper that lies: it is asked no more."""
        if self._helper is not None:
            self._helper.end()

    def close(self) -> None:
        """End the helper. A thread that waits for it gets a `HelperError`."""
        self.is_closed = True
        self.give_up()


class UntrustedSource(Source):
    """One array of a file that is open in a helper process.

    Parameters
    ----------
    file : UntrustedFile
        The file.
    dataset : str
        Full name of the array.
    """

    def __init__(self, file: UntrustedFile, dataset: str) -> None:
        self._file, self._dataset, self._is_closed = file, dataset, False
        self._missing: list[tuple[int, ...]] = []
        answer = file.ask("open", dataset=dataset)
        self._info, self._first_state = info_of(answer.get("info"), file.path), state_of(answer.get("state"))
        if self._info.dataset != dataset:
            raise lie(f"the array '{printable(self._info.dataset)}'")

    @property
    def info(self) -> ArrayInfo:
        """Shape, dtype, chunks and the other metadata."""
        return self._info

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values, in native byte order."""
        return native_dtype(np.dtype(self._info.dtype))

    def labels(self) -> Labels:
        """The names of the axes, the attributes as plain Python, and the names of coordinates."""
        return self._labels(False, len(self._info.shape))

    def group_attrs(self) -> Mapping[str, Any]:
        """The attributes of the array's group."""
        return self._labels(True, 0).attrs

    def _labels(self, of_group: bool, n_axes: int) -> Labels:
        answer = self._file.ask("labels", most=_MOST_LABELS_NBYTES, dataset=self._dataset, of_group=of_group)
        return labels_of(answer.get("labels"), n_axes)

    def read_into(self, region: Region, out: Array) -> None:
        """Have the helper read `region`, a few chunks at a time, and copy the values into `out`."""
        self._missing = []
        self._read("read_into", region, out)

    def missing(self, region: Region) -> list[tuple[int, ...]]:
        """The missing chunks that the helper reported with the values of this region."""
        return self._missing

    def plain(self, region: Region) -> Array:
        """The values by the format's own library, in the helper."""
        out = np.empty(region.shape, self.dtype)
        self._read("plain", region, out)
        return out

    def _read(self, how: str, region: Region, out: Array) -> None:
        check_request(self._info, self.dtype, region, out)
        chunks = self._info.chunks
        for part in self._parts(region) if region.size else ():
            into: Any = (*part.slices(region.start), ...)
            with self._file.lock:
                if self._is_closed:
                    raise HelperError("the file was closed")
                nbytes = part.size * self.dtype.itemsize
                what = {"start": part.start, "stop": part.stop, "how": how, "values_at": VALUES_AT}
                answer = self._file.ask("read", nbytes, dataset=self._dataset, **what)
                np.copyto(out[into], self._file.values(part.shape, self.dtype))
                try:
                    self._missing += missing_of(answer.get("missing"), chunks_met(part, chunks) if chunks else ())
                except HelperError:
                    self._file.give_up()
                    raise
        settle_bools(out)

    def _parts(self, region: Region) -> Iterator[Region]:
        chunks = self._info.chunks
        if not chunks:
            return iter((region,))
        n_chunks = _PART_NBYTES // (math.prod(chunks) * self.dtype.itemsize)
        return a_few_chunks(region, chunks, min(max(1, n_chunks), _MOST_CHUNKS))

    def state(self) -> tuple[int, ...] | None:
        """The state of the file, as the helper sees it."""
        return self._file.state_of(self._dataset)

    def opened_in(self) -> tuple[int, ...] | None:
        """The state that the helper saw when it opened the array."""
        return self._first_state

    def interrupt(self) -> None:
        """End the helper, in the middle of its work."""
        self._file.close()

    def close(self) -> None:
        """Read no more."""
        self._is_closed = True


FORMAT = UntrustedFormat()
