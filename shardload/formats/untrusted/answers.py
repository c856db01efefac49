"""Which answers of a helper process are accepted? Every answer is checked as if it were an attack: lengths, types, shapes.

A process that decodes hostile bytes may have been taken over by them. An answer that could be true of some file is accepted. An
answer that cannot be true of any file is a `HelperError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from shardload.errors import printable
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.dtypes import refusal
from shardload.formats.labels import Coordinate, Labels, Note
from shardload.values.decoding import ATTRIBUTES

_MOST_AXES = 64  # NumPy's
_INT64 = 2**63
_MOST_VALUES = 64
_LONGEST_STATE = 8


class HelperError(OSError):
    """A helper process died, took too long, needed too much memory, or gave an impossible answer."""


def lie(what: str) -> HelperError:
    """The error about an impossible answer."""
    return HelperError(f"the helper process that read it gave an answer that cannot be right: {what}")


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
    """A helper's answer for labels, as from `labels.to_plain`, checked. Of coordinates there are the names."""
    with _checking("labels"):
        dims = tuple(_cleaned(answer["dims"]))
        _require(len(dims) == n_axes and all(name is None or type(name) is str for name in dims), "names of axes")
        attrs = {
            printable(key): Note(printable(value["note"])) if isinstance(value, dict) else _cleaned(value)
            for key, value in answer["attrs"].items()
        }
        coords = {printable(name): Coordinate(one["dataset"]) for name, one in answer["coords"].items()}
        _require(all(type(coordinate.dataset) is str for coordinate in coords.values()), "coordinates")
    return Labels(dims, attrs, coords)
