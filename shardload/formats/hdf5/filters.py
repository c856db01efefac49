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


def n_compressors(numbers: Iterable[int], access: Access = STRICT) -> int:
    """How many of these filters count as compressors, each of which can expand one byte to a thousand.

    Filters that the caller allows are not always counted: see `Access.counts`.
    """
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
        refused = refuse_filter(number, label, values, dataset.kind, chunk, access) or missing_filter(number, label)
        if refused is not None and not _is_unused(dataset, k):
            return refused
    compressors = [(number, label) for number, _, _, label in dataset.stored_filters if number not in SIZED]
    if n_compressors((number for number, _ in compressors), access) < 2:
        return None
    told = ", then ".join(name_of(number, label) for number, label in compressors)
    return (
        f"chunks compressed more than once ({told}), which HDF5 decodes without a limit on the size of the result. Write it "
        "again with one compressor: `h5repack -f GZIP=4`, or load it with untrusted=True"
    )


def name_of(number: int, label: bytes) -> str:
    """What people call a filter, which has this label in the file."""
    return NAMES.get(number) or f"{label.decode(errors='replace')}#{number}"


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
        return (
            f"chunks encoded with {_told(number, label)}, which is not decoded by default: damaged data may crash its decoder. "
            f"If you trust who wrote the file, pass allow_filters='{name or number}'"
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


def missing_filter(number: int, label: bytes) -> str | None:
    """Why this HDF5 cannot undo a filter, in words that follow "holds"; None if it can. HDF5 loads them from HDF5_PLUGIN_PATH.

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
    size = int(kind.get_size())
    nbytes = math.prod(chunk) * size
    in_blosc2 = (len(chunk), *chunk) if len(values) > 7 else ()  # it may know the shape of a chunk
    # How many there are, and what those are with which the decoder reckons. (Blosc takes all from the header of a chunk.)
    fits: dict[int, tuple[range, dict[int, Any]]] = {
        1: (range(1, 2), {0: range(10)}),
        2: (range(1, 2), {0: (size,)}),
        32000: (range(3, 5), {2: (nbytes,)}),
        32001: (range(4, 1 << 16), {}),
        32026: (
            range(8, 9 + len(chunk)) if in_blosc2 else range(4, 8),
            {2: (size, 1), 3: (nbytes,)} | {7 + k: (n,) for k, n in enumerate(in_blosc2)},
        ),
    }
    if number not in fits:
        return None
    counts, expected = fits[number]
    if len(values) not in counts:
        return f"there are {len(values)}"
    wrong = next((k for k, fitting in expected.items() if k >= len(values) or values[k] not in fitting), None)
    return None if wrong is None else f"number {wrong + 1} should be {expected[wrong]}"
