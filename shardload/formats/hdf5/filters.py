"""May these filters be used on this dataset, and do their parameters fit it? This is checked before HDF5 sees a chunk.

A file names the filters of its chunks by number, and HDF5 loads and runs them. Some filters were written only for files that
their own program wrote: a damaged chunk, or a wrong parameter, makes them crash, loop for ever, take all memory or end the
process. Nothing in Python can catch that.

1. `SURVIVED` has the filters that did none of this in many thousands of tests with damaged chunks and parameters
   (``python -m benchmarks fuzz-filters``, docs/trust-files.md). Other filters are used only if the caller names them
   (`allow_filters`).
2. The parameters (``cd_values``) of the filters in `SURVIVED` are compared with the dataset's type and chunks, because filters
   trust them. Those of others are not: who allows such a filter trusts the file.
3. hdf5plugin registers all its filters with HDF5 when it is imported. It is imported only if an allowed filter needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterable
from typing import Any

import h5py
from h5py._objects import phil

from shardload.formats.access import STRICT, Access
from shardload.formats.codecs.chains import Stage
from shardload.formats.codecs.table import BLOSC_CODES, HDF5_CODECS, Codec, Parameters
from shardload.formats.hdf5.opened import OpenDataset

NAMES = {number: codec.word for number, codec in HDF5_CODECS.items()}
"""What people call the filters that are known. Numbers below 32000 are HDF5's own, except bzip2."""

SIZED = {number for number, codec in HDF5_CODECS.items() if codec.is_sized}
LOSSY = frozenset(number for number, codec in HDF5_CODECS.items() if codec.is_lossy)
SURVIVED = frozenset(number for number, codec in HDF5_CODECS.items() if codec.is_safe)

_OWN = frozenset({1, 2, 3, 4, 5, 6, 32000})  # filters of HDF5 and h5py themselves

# What damaged chunks did in tests, in words that follow "damaged data".
_SEEN = {
    4: "in its parameters crashed the process",
    5: "in its parameters crashed the process",
    6: "in its parameters crashed the process",
    307: "made it loop for ever",
    32008: "crashed the process, or made it loop for ever",
    32013: "in its parameters crashed the process and took memory without bound",
    32017: "crashed the process, or ended it without an error",
    32024: "crashed the process, or ended it without an error",
    32028: "crashed the process and took memory without bound",
}


def is_stacked(dataset: OpenDataset, access: Access = STRICT) -> bool:
    """True if its chunks are compressed more than once. Each compressor can expand one byte to a thousand.

    Filters that the caller allows are not always counted: see `Access.counts`.
    """
    return n_compressors((number for number, *_ in dataset.stored_filters), access) > 1


def n_compressors(numbers: Iterable[int], access: Access = STRICT) -> int:
    """How many of these filters count as compressors."""
    return sum(
        number not in SIZED and access.counts(str(number), NAMES.get(number, str(number)), survived=number in SURVIVED)
        for number in numbers
    )


def refuse_filters(dataset: OpenDataset, access: Access) -> str | None:
    """Why a dataset's chunks are not decoded, in words that follow "holds"; None if they are."""
    if dataset.creation.get_layout() != h5py.h5d.CHUNKED:
        return None
    chunk = tuple(dataset.creation.get_chunk())
    for k, (number, _, values, label) in enumerate(dataset.stored_filters):
        refused = refuse_filter(number, label, values, dataset.kind, chunk, access) or _missing(number, label)
        if refused is not None and not _is_unused(dataset, k):
            return refused
    return None


def _is_unused(dataset: h5py.Dataset, k: int) -> bool:
    """True if all stored chunks say that filter `k` was not applied to them: an optional filter may fail, and HDF5 goes on."""
    is_used = False

    def look(stored: Any) -> bool | None:
        nonlocal is_used
        is_used = not stored.filter_mask >> k & 1
        return is_used or None  # True ends it

    try:
        with phil:
            dataset.id.chunk_iter(look)
    except (OSError, RuntimeError, ValueError):  # the index is damaged
        return False
    return not is_used


def refuse_filter(
    number: int, label: bytes, values: tuple[int, ...], kind: Any, chunk: tuple[int, ...], access: Access
) -> str | None:
    """Why one filter is not used, in words that follow "holds"; None if it is. Does not ask HDF5 about the filter.

    Parameters
    ----------
    number : int
        Number of the filter.
    label : bytes
        The file's name for it; only shown in messages.
    values : tuple of int
        Its parameters, ``cd_values``.
    kind : h5py.h5t.TypeID
        Type of the values in the file.
    chunk : tuple of int
        Elements of a chunk along each axis.
    access : Access
        What the caller allows.
    """
    name = NAMES.get(number)
    if number not in SURVIVED and not access.may_use(str(number), *([name] if name else [])):
        seen = _SEEN.get(number)
        why = (
            f"its decoder does not survive damage (damaged data {seen})"
            if seen
            else "it is not known well enough how its decoder handles damage"
        )
        word = name or str(number)
        return (
            f"chunks encoded with {_told(number, label)}, which is not decoded by default: {why}. If you trust who wrote the "
            f"file, pass allow_filters='{word}'"
        )
    wrong = _unfit(number, values, kind, chunk)
    if wrong is not None:
        return (
            f"chunks encoded with {_told(number, label)}, whose parameters {values} do not fit the array: {wrong}. Its decoder "
            "trusts them, and may crash"
        )
    return None


def _told(number: int, label: bytes) -> str:
    given = "".join(letter for letter in label[:40].decode(errors="replace") if letter.isprintable())
    return f"HDF5 filter {number} ({NAMES.get(number) or given or 'unnamed'})"


def _missing(number: int, label: bytes) -> str | None:
    """Why this HDF5 cannot undo a filter; None if it can. HDF5 loads filters from HDF5_PLUGIN_PATH.

    This check comes last: importing netCDF4 sets that path to filters that are linked to another copy of HDF5.
    """
    if number not in _OWN:
        with contextlib.suppress(ImportError):  # the import registers its filters with HDF5; nothing else is used
            importlib.import_module("hdf5plugin")
    if h5py.h5z.filter_avail(number) and (h5py.h5z.get_filter_info(number) & h5py.h5z.FILTER_CONFIG_DECODE_ENABLED):
        return None
    return (
        f"chunks encoded with {_told(number, label)}, which the HDF5 library here cannot decode: "
        "`pip install hdf5plugin`, or set HDF5_PLUGIN_PATH to where the filter is"
    )


# --- a codec's parameters as ``cd_values``


def parameters_of(number: int, values: tuple[int, ...]) -> Parameters | None:
    """What a filter was told; None if its values are not understood here."""
    if number in (1, 32015) and len(values) == 1:
        return Parameters(values[0])
    if number == 2 and values and values[0] > 0:
        return Parameters(itemsize=values[0])
    if number == 32001 and len(values) >= 7:
        inner = next((name for name, code in BLOSC_CODES.items() if code == values[6]), None)  # HDF5's may have Snappy too
        return None if inner is None else Parameters(values[4], values[2], inner, values[5] if values[5] in (1, 2) else 0)
    return None


def values_of(codec: Codec, told: Parameters, chunk_nbytes: int) -> tuple[int, ...]:
    """The ``cd_values`` that tell a compressor the same."""
    if codec.number == 32001:
        return (2, 2, told.itemsize, chunk_nbytes, told.level, told.shuffle, BLOSC_CODES[told.inner])
    return (told.level,) if codec.levels else ()


def stage_of(number: int, values: tuple[int, ...]) -> Stage | None:
    """The stage that undoes a filter; None for a filter that only HDF5 undoes."""
    codec, told = HDF5_CODECS.get(number), parameters_of(number, values)
    if codec is None or codec.decoder is None:
        return None
    if told is None and (number == 2 or (number == 32001 and len(values) >= 7)):
        return None
    return codec.decoder(told or Parameters())


# --- do the parameters fit?


def _unfit(number: int, values: tuple[int, ...], kind: Any, chunk: tuple[int, ...]) -> str | None:
    """What is wrong with a filter's parameters for chunks of this type and shape; None if nothing is known to be wrong."""
    check = _CHECKS.get(number)
    return None if check is None else check(values, kind, chunk)


def _compare(*found_and_expected: tuple[str, Any, Any]) -> str | None:
    """The first value that differs from the expected one, in words; None if none does."""
    for what, found, expected in found_and_expected:
        fits = found in expected if isinstance(expected, range | tuple | frozenset) else found == expected
        if not fits:
            told = f"{expected.start} to {expected.stop - 1}" if isinstance(expected, range) else expected
            return f"{what} is {found}, expected {told}"
    return None


def _count(values: tuple[int, ...], expected: Any) -> str | None:
    return _compare(("their number", len(values), expected))


def _gzip(values: tuple[int, ...], kind: Any, chunk: tuple[int, ...]) -> str | None:
    return _count(values, 1) or _compare(("the level", values[0], range(10)))


def _shuffle(values: tuple[int, ...], kind: Any, chunk: tuple[int, ...]) -> str | None:
    return _count(values, 1) or _compare(("the size of an element", values[0], kind.get_size()))


def _lzf(values: tuple[int, ...], kind: Any, chunk: tuple[int, ...]) -> str | None:
    return _count(values, range(3, 5)) or _compare(("the bytes of a chunk", values[2], _nbytes(kind, chunk)))


def _blosc(values: tuple[int, ...], kind: Any, chunk: tuple[int, ...]) -> str | None:
    """Decoding takes nothing from them: each chunk has a header."""
    return _count(values, range(4, 1 << 16))


def _blosc2(values: tuple[int, ...], kind: Any, chunk: tuple[int, ...]) -> str | None:
    wrong = _count(values, range(4, 41)) or _compare(
        ("the size of an element", values[2], (kind.get_size(), 1)),
        ("the bytes of a chunk", values[3], _nbytes(kind, chunk)),
    )
    if wrong is not None or len(values) < 8:
        return wrong
    return _compare(("the shape of a chunk", values[7:], ((len(chunk), *chunk),)))


def _nbytes(kind: Any, chunk: tuple[int, ...]) -> int:
    return int(math.prod(chunk) * kind.get_size())


_CHECKS = {
    1: _gzip,
    2: _shuffle,
    32000: _lzf,
    32001: _blosc,
    32026: _blosc2,
}
