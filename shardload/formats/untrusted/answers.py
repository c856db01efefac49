"""Which answers of a helper process are accepted? Every answer is checked as if it were an attack: lengths, types, shapes.

A process that decodes hostile bytes may have been taken over by them. An answer that could be true of some file is accepted. An
answer that cannot be true of any file is a `HelperError`.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np

from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.dtypes import refusal
from shardload.formats.labels import Coordinate, Labels, Note
from shardload.values.decoding import ATTRIBUTES, Packing

__all__ = ["LONGEST_TEXT", "HelperError", "clean", "info_of", "is_int", "labels_of", "lie", "state_of"]

LONGEST_TEXT = 4096
_MOST_AXES = 64  # NumPy's
_LONGEST_STATE = 8
_INT64 = 2**63
_MOST_VALUES = 64


class HelperError(OSError):
    """A helper process died, took too long, needed too much memory, or gave an impossible answer."""


def clean(text: str) -> str:
    """Text from an untrusted process, with control characters escaped, so that it cannot control a terminal."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def lie(what: str) -> HelperError:
    """The error about an impossible answer."""
    return HelperError(f"the helper process that read it gave an answer that cannot be right: {what}")


def is_int(value: object, end: int) -> bool:
    """True if `value` is an integer from 0 to below `end`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end


def _text(value: object, what: str, is_clean: bool = True) -> str:
    if not isinstance(value, str) or len(value) > 16 * LONGEST_TEXT:
        raise lie(f"no text as {what}")
    return clean(value) if is_clean else value


def _numbers(value: object, what: str, least: int = 0) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MOST_AXES or not all(is_int(n, _INT64) and n >= least for n in value):
        raise lie(f"no lengths as {what}")
    return tuple(value)


def state_of(found: object) -> tuple[int, ...] | None:
    """A helper's answer for `Source.state`, checked."""
    if found is None:
        return None
    if not isinstance(found, list) or len(found) > _LONGEST_STATE:
        raise lie("no state of a file")
    if not all(isinstance(n, int) and not isinstance(n, bool) and -_INT64 <= n < 2 * _INT64 for n in found):
        raise lie("a state of a file that is not made of numbers")
    return tuple(found)


def info_of(found: object, path: str) -> ArrayInfo:
    """A helper's description of an array, checked. The path comes from the caller, not from the helper."""
    if not isinstance(found, dict):
        raise lie("no description of an array")
    refused = found.get("refused")
    info = ArrayInfo(
        path=path,
        dataset=_text(found.get("dataset"), "name", is_clean=False),
        format=_text(found.get("format"), "format"),
        shape=_numbers(found.get("shape"), "shape"),
        dtype=_text(found.get("dtype"), "dtype"),
        chunks=None if found.get("chunks") is None else _numbers(found["chunks"], "chunks", 1),
        codec=_text(found.get("codec"), "codec"),
        nbytes_stored=found.get("nbytes_stored"),
        shards=None if found.get("shards") is None else _numbers(found["shards"], "shards", 1),
        refused=None if refused is None else _text(refused, "reason"),
        is_coordinate=found.get("is_coordinate") is True,
        is_dimension=found.get("is_dimension") is True,
        attributes=_attributes(found.get("attributes")),
        packing=_packing(found.get("packing", {})),
    )
    if info.nbytes_stored is not None and not is_int(info.nbytes_stored, 2 * _INT64):
        raise lie("no number of stored bytes")
    if any(parts is not None and len(parts) != len(info.shape) for parts in (info.chunks, info.shards)):
        raise lie("chunks of another number of axes than the array")
    if info.refused is None:
        itemsize = _itemsize(info.dtype)
        if max(math.prod(info.shape), math.prod(info.chunks or ())) * itemsize >= _INT64:
            raise lie(f"an array of {info.shape} and chunks of {info.chunks}")
    return info


def _itemsize(name: str) -> int:
    """Bytes per element of a type of numbers or booleans, by its name."""
    if re.fullmatch(r"[a-z][a-z0-9_]{1,30}", name):
        try:
            dtype = np.dtype(name)
        except TypeError:
            dtype = np.dtype("V")
        if refusal(dtype) is None and dtype.name == name and dtype.isnative:
            return dtype.itemsize
    raise lie(f"values of the type '{name}'")


def _attributes(found: object) -> dict[str, Any]:
    """Attributes, unchecked so far: plain JSON values, or notes, with their texts cleaned."""

    def settled(value: Any) -> Any:
        if isinstance(value, dict):
            raise lie("an attribute that is an object")
        if isinstance(value, str):
            return clean(value)
        return [settled(part) for part in value] if isinstance(value, list) else value

    if not isinstance(found, dict):
        raise lie("no attributes")
    return {
        clean(key): Note(clean(value["note"])) if _is_note(value) else settled(value)
        for key, value in itertools.islice(found.items(), LONGEST_TEXT)
    }


def _is_note(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"note"} and isinstance(value["note"], str)


def labels_of(found: object, n_axes: int) -> Labels:
    """A helper's answer for labels, as from `labels.to_plain`, checked. Of coordinates there are the names."""
    if not isinstance(found, dict):
        raise lie("no labels")
    dims, coords = found.get("dims"), found.get("coords")
    if not isinstance(dims, list) or len(dims) != n_axes:
        raise lie("names of another number of axes than the array has")
    if not isinstance(coords, dict) or not all(isinstance(place, list) and place for place in coords.values()):
        raise lie("no coordinates")
    return Labels(
        tuple(None if name is None else _text(name, "name of an axis") for name in dims),
        _attributes(found.get("attrs")),
        {clean(name): Coordinate(_text(place[0], "name", is_clean=False)) for name, place in coords.items()},
    )


def _packing(found: object) -> Packing:
    """The attributes for decoding: known names, each with a type and a few numbers or texts."""
    if not isinstance(found, dict) or not set(found) <= {*ATTRIBUTES, "attributes"}:
        raise lie("no packing")
    for entry in found.values():
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str) or not isinstance(entry[1], list):
            raise lie("a packing without types")
        kind, values = entry
        if not 0 < len(values) <= _MOST_VALUES:
            raise lie(f"{len(values)} values of an attribute")
        if kind in ("text", "unreadable"):
            if not all(isinstance(value, str) and len(value) <= LONGEST_TEXT for value in values):
                raise lie("no text as an attribute")
            entry[1] = [clean(value) for value in values]
        elif kind != "number" and not re.fullmatch(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)", kind):
            raise lie(f"an attribute of type '{clean(kind)[:80]}'")
        else:
            parts = [
                v for value in values for v in (value if kind.startswith("complex") and isinstance(value, list) else [value])
            ]
            if not all(isinstance(value, int | float) and _fits(value, kind) for value in parts):
                raise lie("an attribute that is no number")
    return found


def _fits(value: int | float, kind: str) -> bool:
    """True if a number can have the type that it is said to have."""
    if not kind.lstrip("u").startswith("int"):
        return not isinstance(value, int) or abs(value) < 2 * _INT64
    return isinstance(value, int) and np.iinfo(kind).min <= value <= np.iinfo(kind).max
