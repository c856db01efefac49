"""Through which HDF5 filters do chunks go? May those of a file be used? Who applies those of a new dataset, and how?

A file names the filters of its chunks by number, and HDF5 loads and runs them. Some filters were written only for files that
their own program wrote: a damaged chunk, or a wrong parameter, makes them crash, loop for ever, take all memory or end the
process. Nothing in Python can catch that. So, before HDF5 sees a chunk:

1. `Codec.is_safe` is true for the filters that did none of this in many thousands of tests with damaged chunks and parameters
   (``python -m benchmarks fuzz-filters``, docs/trust-files.md). Other filters are used only if the caller names them
   (`allow_filters`).
2. The parameters (``cd_values``) of these filters are compared with the dataset's type and chunks, because filters
   trust them. Those of others are not: who allows such a filter trusts the file.
3. hdf5plugin registers all its filters with HDF5 when it is imported. It is imported only if an allowed filter needs it.

Of a new dataset, an `Hdf5Encoder` has the filters:

1. gzip, zstd, blosc and lz4, shuffle and Fletcher-32 are made by the libraries of `codecs`, with the library's lock free.
2. A chunk for any other filter is written by HDF5 to a file in memory with the same properties. What lies there is taken out.

Either way no filter is left out of a chunk unless HDF5 itself left it out (`Stored.mask`).
"""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
from dataclasses import replace
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil

from shardload.errors import ConfigError
from shardload.formats.access import Access
from shardload.formats.codecs.algorithms import Stage, Step, encode_fletcher32, encode_shuffle
from shardload.formats.codecs.table import BLOSC_CODES, HDF5_CODECS, Codec, Parameters
from shardload.formats.contract.array import is_added, native_dtype
from shardload.formats.hdf5.opened import BFLOAT16, OpenDataset, file_in_memory, filters_of, type_in_file
from shardload.formats.sink import ArraySpec, Compression, Encoder, Stored
from shardload.planning.region import Region

Filters = list[tuple[int, int, Any, bytes]]
"""Number, flags, parameters and name of each filter of a dataset, in the order in which they are applied."""

GZIP, SHUFFLE, CHECKSUM = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32
HELPERS = (SHUFFLE, CHECKSUM)  # filters that rearrange or check bytes
_NUMBERS = {codec.word: number for number, codec in HDF5_CODECS.items()}
_MOST_NBYTES = 2**32 - 1  # of a chunk


def filter_of(number: int) -> Codec:
    """What is known of a filter: of one that is not in the table its number, as its name."""
    return HDF5_CODECS.get(number) or Codec(str(number), number)


def _is_built_in(number: int) -> bool:
    """True for filters of HDF5 and h5py themselves."""
    return number < 256 or number == h5py.h5z.FILTER_LZF


def is_counted(number: int, access: Access) -> bool:
    """True for a filter that counts as a compressor, which can expand one byte to a thousand: see `Access.counts`."""
    codec = filter_of(number)
    return not codec.is_sized and access.counts(str(number), codec.word, survived=codec.is_safe)


def refuse_filters(dataset: OpenDataset, access: Access) -> str | None:
    """Why a dataset's chunks are not decoded, in words that follow "holds"; None if they are."""
    if dataset.creation.get_layout() != h5py.h5d.CHUNKED:
        return None
    chunk = tuple(dataset.creation.get_chunk())
    for number, _, values, label in dataset.stored_filters:
        refused = refuse_filter(number, label, values, dataset.kind, chunk, access) or missing_filter(number, label)
        if refused is not None:
            return refused
    compressors = [name_of(number, label) for number, _, _, label in dataset.stored_filters if is_counted(number, access)]
    if len(compressors) < 2:
        return None
    return (
        f"chunks compressed more than once ({', then '.join(compressors)}), which HDF5 decodes without a limit on the size of "
        "the result. Write it again with one compressor: `h5repack -f GZIP=4`, or load it with untrusted=True"
    )


def changes_values(number: int, kind: str) -> bool:
    """True for a filter that may change values of this kind: scale-offset rounds floats only."""
    return filter_of(number).is_lossy or (number == h5py.h5z.FILTER_SCALEOFFSET and kind == "f")


def name_of(number: int, label: bytes) -> str:
    """What people call a filter, which has this label in the file."""
    return filter_of(number).word if number in HDF5_CODECS else f"{label.decode(errors='replace')}#{number}"


def codec_text(filters: Filters) -> str:
    """Filters for people: compressors first, then shuffle and checksum."""
    ordered = sorted(filters, key=lambda f: f[0] in HELPERS)
    return "+".join(name_of(number, label) for number, _, _, label in ordered) or "none"


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
    codec = filter_of(number)
    if not codec.is_safe and not access.may_use(str(number), codec.word):
        return (
            f"chunks encoded with {_shown(number, label)}, which is not decoded by default: damaged data may crash its "
            f"decoder. If you trust who wrote the file, pass allow_filters='{codec.word}'"
        )
    wrong = _unfit(number, values, kind, chunk)
    if wrong is not None:
        return (
            f"chunks encoded with {_shown(number, label)}, whose parameters {values} do not fit the array: {wrong}. Its "
            "decoder trusts them, and may crash"
        )
    return None


def _shown(number: int, label: bytes) -> str:
    printable = "".join(letter for letter in label[:40].decode(errors="replace") if letter.isprintable())
    return f"HDF5 filter {number} ({filter_of(number).word if number in HDF5_CODECS else printable or 'unnamed'})"


def missing_filter(number: int, label: bytes) -> str | None:
    """Why this HDF5 cannot undo a filter, in words that follow "holds"; None if it can. HDF5 loads them from HDF5_PLUGIN_PATH.

    This check comes last: importing netCDF4 sets that path to filters that are linked to another copy of HDF5.
    """
    if not _is_built_in(number):
        with contextlib.suppress(ImportError):  # the import registers its filters with HDF5; nothing else is used
            importlib.import_module("hdf5plugin")
    if h5py.h5z.filter_avail(number) and (h5py.h5z.get_filter_info(number) & h5py.h5z.FILTER_CONFIG_DECODE_ENABLED):
        return None
    return (
        f"chunks encoded with {_shown(number, label)}, which the HDF5 library here cannot decode: "
        "`pip install hdf5plugin`, or set HDF5_PLUGIN_PATH to where the filter is"
    )


# --- a codec's parameters as ``cd_values``


_BLOSC_USUAL = (5, 1, 0)  # level, shuffle and compressor of a filter that does not say them, as PyTables leaves out Blosc's own


def parameters_of(number: int, values: tuple[int, ...]) -> Parameters | None:
    """The parameters of a filter by its ``cd_values``; None if these are not understood here."""
    if number in (1, 32015) and len(values) == 1 and values[0] <= HDF5_CODECS[number].levels[-1]:  # a negative one is larger
        return Parameters(values[0])
    if number == SHUFFLE and values and values[0] > 0:
        return Parameters(itemsize=values[0])
    if number == 32001 and len(values) >= 4:
        values = (*values, *_BLOSC_USUAL[len(values) - 4 :])
        inner = next((name for name, code in BLOSC_CODES.items() if code == values[6]), None)  # HDF5's may have Snappy too
        return None if inner is None else Parameters(values[4], values[2], inner, values[5] if values[5] in (1, 2) else 0)
    return None


def values_of(codec: Codec, parameters: Parameters, chunk_nbytes: int) -> tuple[int, ...]:
    """The ``cd_values`` of a compressor with these parameters."""
    if codec.number == 32001:
        inner = BLOSC_CODES[parameters.inner]
        return (2, 2, parameters.itemsize, chunk_nbytes, parameters.level, parameters.shuffle, inner)
    return (parameters.level,) if codec.levels else ()


def stage_of(number: int, values: tuple[int, ...]) -> Stage | None:
    """The stage that undoes a filter; None for a filter that only HDF5 undoes."""
    codec, parameters = filter_of(number), parameters_of(number, values)
    is_odd = parameters is None and (number == SHUFFLE or (number == 32001 and len(values) >= 7))
    if codec.decoder is None or is_odd:
        return None
    return codec.decoder(parameters or Parameters())


# --- do the parameters fit?


def _unfit(number: int, values: tuple[int, ...], kind: Any, chunk: tuple[int, ...]) -> str | None:
    """What is wrong with a filter's parameters for chunks of this type and shape; None if nothing is known to be wrong."""
    size = int(kind.get_size())
    nbytes = math.prod(chunk) * size
    in_blosc2 = (len(chunk), *chunk) if len(values) > 7 else ()  # it may know the shape of a chunk
    # How many parameters there are, and the values of those with which the decoder reckons. (Blosc takes all from the header of
    # a chunk.)
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


def create_type(name: str, dtype: np.dtype[Any]) -> h5py.h5t.TypeID:
    """The type in the file for values of `dtype`; ConfigError if HDF5 has none."""
    if (dtype.kind not in "biufc" or is_added(dtype)) and native_dtype(dtype) != BFLOAT16:
        raise ConfigError(
            f"'{name}' holds {dtype.name}, for which HDF5 has no type that others read. Save it as float32 or int8"
        )
    return type_in_file(dtype)


def let_list_grow(creation: h5py.h5p.PropDCID, name: str, spec: ArraySpec) -> None:
    """Let attributes of a coordinate have more than 64 KiB: as a scale it lists all arrays that have its axis, with 16 bytes
    each. Object headers of the older version hold no such attribute. A header that keeps the order of attributes is one of the
    newer version, as in files of the netCDF library.
    """
    if spec.dims == (name.rpartition("/")[2],):
        creation.set_attr_creation_order(h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED)


class Hdf5Encoder(Encoder):
    """How the chunks of one dataset are made: see `Encoder`.

    Parameters
    ----------
    path, name : str
        The file and the array.
    spec : ArraySpec
        A checked spec.
    flavour : str
        ``"HDF5"`` or ``"netCDF4"``.
    """

    def __init__(self, path: str, name: str, spec: ArraySpec, flavour: str = "HDF5") -> None:
        self.name, self.spec = name, spec
        self.kind = create_type(name, spec.dtype)
        nbytes = math.prod(spec.chunks or ()) * spec.dtype.itemsize
        if spec.chunks is not None and nbytes > _MOST_NBYTES:
            raise ConfigError(
                f"chunks of '{name}' have {nbytes} bytes; in HDF5 a chunk has less than 4 GiB. Pass smaller chunks="
            )
        self.creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        self.creation.set_obj_track_times(False)
        self.creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        let_list_grow(self.creation, name, spec)
        if spec.fill_value is not None:
            self.creation.set_fill_value(np.asarray(spec.fill_value, np.float32 if is_added(spec.dtype) else spec.dtype))
        steps: list[Step | None] = []
        if spec.chunks is not None:
            self.creation.set_chunk(spec.chunks)
            steps = self._add_filters()
        self._by_library, self._local = None in steps, threading.local()
        is_placed_by_root = spec.chunks is not None
        self.creation.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR if is_placed_by_root else h5py.h5d.ALLOC_TIME_EARLY)
        steps_here = [step for step in steps if step is not None and not self._by_library]
        codec = codec_text(filters_of(self.creation))
        super().__init__(path, name, spec, flavour, codec, steps_here, is_placed_by_root=is_placed_by_root)

    def encode(self, region: Region, values: np.ndarray[Any, Any]) -> Stored:
        """See `Encoder`."""
        stored = super().encode(region, values)
        return self._through_library(stored.data) if self._by_library else stored

    def _add_filters(self) -> list[Step | None]:
        """Add the filters to the dataset's properties; returns the steps that do the same, None for one that only HDF5 has."""
        spec, compression = self.spec, self.spec.compression
        steps: list[Step | None] = []
        itemsize = spec.dtype.itemsize
        if compression is not None and compression.shuffle and compression.name not in ("blosc", "blosc2", "bitshuffle"):
            self.creation.set_shuffle()
            steps += [encode_shuffle(itemsize)] if itemsize > 1 else []
        if compression is not None and compression.name != "none":
            steps.append(self._add_compressor(compression))
        if spec.checksum:
            self.creation.set_fletcher32()
            steps.append(encode_fletcher32())
        return steps

    def _add_compressor(self, compression: Compression) -> Step | None:
        name, step, is_named = compression.name, None, compression.name in _NUMBERS
        number = _NUMBERS.get(name, int(name) if name.isascii() and name.isdecimal() else None)
        values = None if number == GZIP else compression.options.get("cd_values")
        is_no_compressor = number in (0, *HELPERS) or (number == GZIP and not is_named)
        if number is None or is_no_compressor or number > h5py.h5z.FILTER_MAX:
            known = [codec.word for k, codec in HDF5_CODECS.items() if k not in HELPERS and not codec.is_lossy]
            names = ", ".join(sorted(known))
            raise ConfigError(
                f"compression of '{self.name}' is {name!r}; expected one of {names}, or a filter's number as text. "
                "Pass compression='gzip', which every HDF5 has, or another of these"
            )
        if values is None and changes_values(number, self.spec.dtype.kind):
            raise ConfigError(
                f"compression of '{self.name}' is {name!r}, which changes values unless it is told how not to. Pass "
                "compression='zstd', or the parameters of this one, 'cd_values': (...) in options (hdf5plugin knows them)"
            )
        codec = HDF5_CODECS[number] if is_named and values is None else Codec(name, number)
        if number != GZIP:
            _check_available(self.name, name, number)
            compression = replace(compression, options={k: v for k, v in compression.options.items() if k != "cd_values"})
        if compression.level is not None and not codec.levels:
            raise ConfigError(
                f"compression of '{self.name}' is {name!r} with level {compression.level}, which it does not have. Pass its "
                "name alone, or the parameters of this one, 'cd_values': (...) in options (hdf5plugin knows them)"
            )
        parameters = codec.parameters(self.name, compression, self.spec.dtype.itemsize, "HDF5")
        if parameters.level < 0:
            raise ConfigError(f"compression of '{self.name}': {name} has no level below 0 in HDF5, found {parameters.level}")
        if codec.encoder is not None:
            step = codec.encoder(parameters)
            values = values_of(codec, parameters, math.prod(self.spec.chunks or ()) * self.spec.dtype.itemsize)
        if number == GZIP:
            self.creation.set_deflate(parameters.level)
        elif name == "szip" and values is None:
            self.creation.set_szip(h5py.h5z.SZIP_NN_OPTION_MASK, 16)
        else:
            if not values and is_named and (plugin := filter_of(number).plugin):
                values = tuple(getattr(importlib.import_module("hdf5plugin"), plugin)()["compression_opts"])
            self.creation.set_filter(number, h5py.h5z.FLAG_OPTIONAL, tuple(values or ()))
        return step

    def _through_library(self, data: Any) -> Stored:
        """Have HDF5 encode one chunk, in memory."""
        chunks, dataset = self.spec.chunks or (), getattr(self._local, "dataset", None)
        if dataset is None:  # of one chunk, which this thread writes again and again
            space = h5py.h5s.create_simple(chunks)
            dataset = self._local.dataset = h5py.h5d.create(file_in_memory().id, b"x", self.kind, space, self.creation)
        values = np.frombuffer(data, dtype=np.uint8).view(np.dtype(f"V{self.spec.dtype.itemsize}")).reshape(chunks)
        with phil:  # other threads do the same, and raw reads did not always take the lock (h5py issue 2764)
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values, self.kind)
            dataset.flush()
            mask, stored = dataset.read_direct_chunk((0,) * len(chunks))
        return Stored(stored, int(mask))


def _check_available(name: str, compressor: str, number: int) -> None:
    """ConfigError if the HDF5 library here cannot apply a filter."""
    if not _is_built_in(number):
        with contextlib.suppress(ImportError):
            plugins, codec = importlib.import_module("hdf5plugin"), filter_of(number)
            plugin = "bshuf" if codec.word == "bitshuffle" else codec.word
            if codec.plugin and plugins.get_config().registered_filters.get(plugin, "unknown") == "unknown":
                # If netCDF4 was imported before, HDF5 found that package's filters, which are linked to another copy of HDF5
                # and cannot be used to make a dataset.
                try:
                    plugins.register(plugin, force=True)
                except RuntimeError as error:
                    raise ConfigError(
                        f"compression of '{name}' is {compressor!r}, and HDF5 has this filter from another package (netCDF4 "
                        f"has some); that of hdf5plugin cannot take its place: {error}. Close the files of h5py that have it, "
                        "or import hdf5plugin first"
                    ) from error
    is_there = h5py.h5z.filter_avail(number)
    if not is_there or not h5py.h5z.get_filter_info(number) & h5py.h5z.FILTER_CONFIG_ENCODE_ENABLED:
        raise ConfigError(
            f"compression of '{name}' is {compressor!r} (HDF5 filter {number}), which the HDF5 library here does not have: "
            "`pip install hdf5plugin`, or pass compression='gzip', which every HDF5 has"
        )
