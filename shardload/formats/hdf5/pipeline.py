"""Through which HDF5 filters do the chunks of a new dataset go, and who applies them? We do, or HDF5 in memory.

1. gzip, zstd, blosc and lz4, shuffle and Fletcher-32 are made by the libraries of `codecs`, with the library's lock free.
2. A chunk for any other filter is written by HDF5 to a file in memory with the same properties. What lies there is taken out.

Either way no filter is left out of a chunk unless HDF5 itself left it out (`Stored.mask`).
"""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil

from shardload.errors import ConfigError
from shardload.formats.codecs.chains import EncodeChain, Step
from shardload.formats.codecs.table import HDF5_CODECS, Codec
from shardload.formats.codecs.transforms import encode_fletcher32, encode_shuffle
from shardload.formats.contract.dtypes import is_added, native_dtype
from shardload.formats.hdf5.filters import LOSSY, NAMES, values_of
from shardload.formats.hdf5.in_memory import file_in_memory
from shardload.formats.hdf5.raw_file import BFLOAT16, type_in_file
from shardload.formats.sink import ArraySpec, Compression, Stored

_NUMBERS = {name: number for number, name in NAMES.items()}
# Filters of hdf5plugin, with the classes that know their usual parameters.
_PLUGINS = {"blosc": "Blosc", "blosc2": "Blosc2", "bitshuffle": "Bitshuffle", "bzip2": "BZip2", "lz4": "LZ4", "zstd": "Zstd"}
_OPTIONAL = h5py.h5z.FLAG_OPTIONAL
_MOST_NBYTES = 2**32 - 1  # of a chunk


def create_type(name: str, dtype: np.dtype[Any]) -> h5py.h5t.TypeID:
    """The type in the file for values of `dtype`; ConfigError if HDF5 has none."""
    if (dtype.kind not in "biufc" or is_added(dtype)) and native_dtype(dtype) != BFLOAT16:
        raise ConfigError(
            f"'{name}' holds {dtype.name}, for which HDF5 has no type that others read. Save it as float32 or int8"
        )
    return type_in_file(dtype)


def let_list_grow(creation: h5py.h5p.PropDCID, name: str, spec: ArraySpec) -> None:
    """Let attributes of a coordinate have more than 64 KiB: as a scale it lists all arrays that have its axis, with 16 bytes
    each. Headers of the older version hold no such attribute; to keep an order of attributes makes it the newer one, as in
    files of the netCDF library.
    """
    if spec.dims == (name.rpartition("/")[2],):
        creation.set_attr_creation_order(h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED)


class Pipeline:
    """How the chunks of one dataset are made. Safe to use from several threads at once.

    Parameters
    ----------
    name : str
        Name of the array, for messages.
    spec : ArraySpec
        A checked spec.
    """

    def __init__(self, name: str, spec: ArraySpec) -> None:
        self._name, self._spec = name, spec
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
            self._set_fill(spec.fill_value)
        steps: list[Step] | None = []
        if spec.chunks is not None:
            self.creation.set_chunk(spec.chunks)
            steps = self._add_filters()
        # Without filters all chunks have one size, so HDF5 gives each its place when the dataset is made.
        self.is_placed_by_root = (spec.chunks is not None and self.creation.get_nfilters() > 0) or bool(spec.unlimited)
        self.creation.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR if self.is_placed_by_root else h5py.h5d.ALLOC_TIME_EARLY)
        fill = np.zeros((), spec.dtype)[()] if spec.fill_value is None else spec.fill_value
        self._by_library, self._local = steps is None, threading.local()
        self._chain = EncodeChain(steps or [], spec.chunks, spec.dtype, fill)

    @property
    def codec(self) -> str:
        """The filters, for people."""
        names = [NAMES.get(self.creation.get_filter(k)[0], str(self.creation.get_filter(k)[0])) for k in self._filters()]
        shuffled = [name for name in names if name != "shuffle"] + ["shuffle"] * ("shuffle" in names)
        return "+".join(shuffled) or "none"

    def _filters(self) -> range:
        return range(self.creation.get_nfilters())

    def encode(self, values: np.ndarray[Any, Any]) -> Stored:
        """The stored form of a chunk."""
        data = self._chain.encode(values)
        return self._through_library(data) if self._by_library else Stored(data)

    def _set_fill(self, value: Any) -> None:
        self.creation.set_fill_value(np.asarray(value, np.float32 if is_added(self._spec.dtype) else self._spec.dtype))

    def _add_filters(self) -> list[Step] | None:
        """Add the filters to the dataset's properties; returns the steps that do the same, None if the library must do it."""
        spec, compression = self._spec, self._spec.compression
        steps: list[Step] | None = []
        itemsize = spec.dtype.itemsize
        if compression is not None and compression.shuffle and compression.name not in ("blosc", "blosc2", "bitshuffle"):
            self.creation.set_shuffle()
            steps = [encode_shuffle(itemsize)] if itemsize > 1 else []
        if compression is not None and compression.name != "none":
            added = self._add_compressor(compression)
            steps = None if added is None or steps is None else [*steps, added]
        if spec.checksum:
            self.creation.set_fletcher32()
            steps = None if steps is None else [*steps, encode_fletcher32()]
        return steps

    def _add_compressor(self, compression: Compression) -> Step | None:
        name, step, is_named = compression.name, None, compression.name in _NUMBERS
        number = _NUMBERS.get(name, int(name) if name.isascii() and name.isdecimal() else None)
        values = None if number == 1 else compression.options.get("cd_values")
        if number is None or number in (0, 2, 3) or (number == 1 and not is_named) or number > h5py.h5z.FILTER_MAX:
            known = ", ".join(sorted(key for key, k in _NUMBERS.items() if k not in (2, 3) and k not in LOSSY))
            raise ConfigError(
                f"compression of '{self._name}' is {name!r}; expected one of {known}, or a filter's number as text. "
                "Pass compression='gzip', which every HDF5 has, or another of these"
            )
        if values is None and (number in LOSSY or (number == 6 and self._spec.dtype.kind == "f")):
            raise ConfigError(
                f"compression of '{self._name}' is {name!r}, which changes values unless it is told how not to. Pass "
                "compression='zstd', or the parameters of this one, 'cd_values': (...) in options (hdf5plugin knows them)"
            )
        codec = HDF5_CODECS[number] if is_named and values is None else Codec(name, number)
        if number != 1:
            _available(self._name, name, number)
            compression = replace(compression, options={k: v for k, v in compression.options.items() if k != "cd_values"})
        if compression.level is not None and not codec.levels:
            raise ConfigError(
                f"compression of '{self._name}' is {name!r} with level {compression.level}, which it does not have. Pass its "
                "name alone, or the parameters of this one, 'cd_values': (...) in options (hdf5plugin knows them)"
            )
        told = codec.parameters(self._name, compression, self._spec.dtype.itemsize, "HDF5")
        if codec.encoder is not None:
            step = codec.encoder(told)
            values = values_of(codec, told, math.prod(self._spec.chunks or ()) * self._spec.dtype.itemsize)
        if number == 1:
            self.creation.set_deflate(told.level)
        elif name == "szip" and values is None:
            self.creation.set_szip(h5py.h5z.SZIP_NN_OPTION_MASK, 16)
        else:
            self.creation.set_filter(number, _OPTIONAL, tuple(values or _usual(name)))
        return step

    def _through_library(self, data: Any) -> Stored:
        """Have HDF5 encode one chunk, in memory."""
        chunks, dataset = self._spec.chunks or (), getattr(self._local, "dataset", None)
        if dataset is None:  # of one chunk, which this thread writes again and again
            dataset = h5py.h5d.create(file_in_memory().id, b"x", self.kind, h5py.h5s.create_simple(chunks), self.creation)
            self._local.dataset = dataset
        values = np.frombuffer(data, dtype=np.uint8).view(np.dtype(f"V{self._spec.dtype.itemsize}")).reshape(chunks)
        with phil:  # other threads do the same, and raw reads did not always take the lock (h5py issue 2764)
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values, self.kind)
            dataset.flush()
            mask, stored = dataset.read_direct_chunk((0,) * len(chunks))
        return Stored(stored, int(mask))


def _usual(name: str) -> Sequence[int]:
    """The parameters that hdf5plugin gives a filter; none for HDF5's own."""
    if name not in _PLUGINS:
        return ()
    return tuple(getattr(importlib.import_module("hdf5plugin"), _PLUGINS[name])()["compression_opts"])


def _available(name: str, compressor: str, number: int) -> None:
    if number >= 256 and number != h5py.h5z.FILTER_LZF:
        with contextlib.suppress(ImportError):
            plugins = importlib.import_module("hdf5plugin")
            own = "bshuf" if compressor == "bitshuffle" else compressor
            if compressor in _PLUGINS and plugins.get_config().registered_filters.get(own, "unknown") == "unknown":
                # If netCDF4 was imported before, HDF5 found that package's filters, which are linked to another copy of HDF5
                # and cannot be used to make a dataset.
                try:
                    plugins.register(own, force=True)
                except RuntimeError as error:
                    raise ConfigError(
                        f"compression of '{name}' is {compressor!r}, and HDF5 has this filter from another package (netCDF4 "
                        f"has some); that of hdf5plugin cannot take its place: {error}. Close the files of h5py that have it, "
                        "or import hdf5plugin first"
                    ) from error
    able = h5py.h5z.filter_avail(number)
    if not able or not h5py.h5z.get_filter_info(number) & h5py.h5z.FILTER_CONFIG_ENCODE_ENABLED:
        raise ConfigError(
            f"compression of '{name}' is {compressor!r} (HDF5 filter {number}), which the HDF5 library here does not have: "
            "`pip install hdf5plugin`, or pass compression='gzip', which every HDF5 has"
        )
