"""How are the arrays of an HDF5 file stored, and can they grow safely? This is found out before anything is written.

`read_file` reads the file with the HDF5 library, for all ranks: shapes, names of axes, filters. What could not grow so that a
kill leaves a whole file is refused, with what to do instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import h5py
import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats.contract.dtypes import dtype_text, is_added, native_dtype, refusal
from shardload.formats.hdf5.attributes import is_scale, scales_of
from shardload.formats.hdf5.in_memory import file_in_memory
from shardload.formats.hdf5.ledger import old_file
from shardload.formats.hdf5.making import properties_of
from shardload.formats.hdf5.metadata import axes_of, stands_for_axis
from shardload.formats.hdf5.names import encoded
from shardload.formats.hdf5.opened import OpenDataset, OpenFacts
from shardload.formats.hdf5.pipeline import Pipeline, create_type
from shardload.formats.hdf5.raw_file import file_number, has_signature, type_of_values
from shardload.formats.hdf5.unwrapped import are_edges_plain
from shardload.formats.sink import HOW_TO_GROW, ArraySpec, Compression, meaning_of
from shardload.storage.changes import complete_append, state_of_file
from shardload.storage.containment import open_file
from shardload.storage.local import LocalFile

Json = dict[str, Any]


def read_file(path: str, names: Iterable[str]) -> Json:
    """How the arrays of a file are stored: ``"arrays"`` by name, and ``"state"``, its size and time.

    Of each array: shape, names of the axes, and for each axis what else has it (``"scopes"``). Of those in `names` all that
    `GrowthSink` needs.

    Raises
    ------
    ConfigError
        If one of `names` cannot grow.
    SourceError
        If this is no HDF5 file, or it cannot be read.
    """
    path = os.path.realpath(path)
    complete_append(path)
    try:
        descriptor = open_file(path)
    except OSError as error:
        raise SourceError(f"'{path}' cannot be read: {error.strerror or error}", path=path) from error
    with closing(LocalFile(descriptor, path)) as stored:
        if not has_signature(descriptor):
            raise ConfigError(
                f"'{path}' is a file, but neither HDF5 nor netCDF4; append writes to these, and to Zarr stores in folders. "
                "A netCDF-3 file becomes netCDF4 by `nccopy -k nc4 OLD NEW`"
            )
        state = state_of_file(stored)
        try:
            with old_file(stored) as file:
                _check_kind(path, file)
                names = list(names)
                facts = OpenFacts(file, is_ours=False)
                arrays = _arrays(path, facts, names)
                names = [name for name in names if name in arrays]
                for name in names:
                    arrays[name] |= _details(path, facts.dataset(file[name].id))
                filters = {name: _filters(file[name]) for name in names}
        except (OSError, RuntimeError, KeyError) as error:
            raise SourceError(f"'{path}' cannot be read by HDF5: {error}", path=path) from error
    # Now that the file is closed: a filter that an open dataset has cannot be replaced by the one that we write with.
    for name in names:
        _check_filters(f"'{name}' in '{path}'", name, arrays[name], filters[name])
    return {"arrays": arrays, "state": state}


def unfit(where: str, what: object) -> ConfigError:
    """The error about something that cannot grow."""
    return ConfigError(
        f"{where} cannot grow safely: it has {what}. Make a file that can: `shardload copy OLD NEW`; or "
        "append with h5py, where a kill may cost the file"
    )


def _check_kind(path: str, file: h5py.File) -> None:
    """ConfigError if the file is of a kind that cannot grow."""
    creation = file.id.get_create_plist()
    strategy, persists, _ = creation.get_file_space_strategy()
    refused = {
        f"a user block of {creation.get_userblock()} bytes": creation.get_userblock() != 0,
        "addresses of {} and lengths of {} bytes in place of 8".format(*creation.get_sizes()): creation.get_sizes() != (8, 8),
        "its space in pages (`fs_strategy='page'`)": strategy == h5py.h5f.FSPACE_STRATEGY_PAGE,
        "a list of its free space (`fs_persist=True`)": persists,
    }
    for what, is_so in refused.items():
        if is_so:
            raise unfit(f"'{path}'", what)


def _arrays(path: str, facts: OpenFacts, names: Iterable[str]) -> dict[str, Json]:
    """The datasets of a file: shape, names of axes, scopes, and whether it is a dimension of netCDF without values. One with
    several names (hard links) has that by which it was asked for, if any.

    The scope of an axis is a text that arrays with the same axis have in common: the name of its scale, or group and label.
    """
    file, called = facts.file, _called(path, facts, names)
    arrays, known = dict[str, Json](), set(called.values())
    for name in called.values():
        thing = file[encoded(name)]
        if not isinstance(thing, h5py.Dataset) or thing.shape is None:
            continue
        dataset = facts.dataset(thing.id)
        dims, scopes = list(axes_of(dataset).dims), list[str | None]([None] * dataset.ndim)
        if is_scale(dataset):
            scopes[:1] = [name][: dataset.ndim]
        for axis, scales in enumerate([] if is_scale(dataset) else scales_of(dataset)[0]):
            if scales:
                scopes[axis] = called.get(int(h5py.h5o.get_info(scales[0][1].id).addr))
            elif dims[axis]:
                scopes[axis] = f"{name.rpartition('/')[0]}/:{dims[axis]}"
        for axis, scope in enumerate(scopes):  # by which it was asked for; a scale without values may have another name
            if scope in known and not stands_for_axis(file[encoded(scope or "")]):
                dims[axis] = str(scope).rpartition("/")[2]
        arrays[name] = {"shape": dataset.shape, "dims": dims, "scopes": scopes, "is_dimension": stands_for_axis(dataset)}
    return arrays


def _called(path: str, facts: OpenFacts, names: Iterable[str]) -> dict[int, str]:
    """The address of each object, and its name: that by which it is asked for, if any. ConfigError if it is by two."""
    called, wanted = {}, set(names)
    for address, known in facts.places.items():
        asked = [name for name in known if name in wanted]
        if len(asked) > 1:
            raise ConfigError(f"'{asked[0]}' and '{asked[1]}' in '{path}' are one array with two names. Pass it once")
        called[address] = (asked or known)[0]
    return called


def _details(path: str, dataset: OpenDataset) -> Json:
    """How one array is stored. ConfigError if nothing can be appended to it."""
    where = f"'{dataset.name}' in '{path}'"
    if dataset.is_virtual:
        raise ConfigError(
            f"{where} is virtual: its values are in other files, so that it cannot grow. Append to the last part, and join the "
            "parts anew (`shardload join`); or make one file of them: `shardload copy OLD NEW --unlimited AXIS`"
        )
    if dataset.chunks is None:
        raise ConfigError(f"{where} has no chunks, so that it cannot grow. {HOW_TO_GROW}")
    dtype = type_of_values(dataset.kind)
    if refusal(dtype) is not None or not _is_written(dataset, dtype):
        raise ConfigError(f"{where} holds {dtype} in a form that append does not write; append with h5py")
    creation = dataset.creation
    if file_number(dataset.id) != file_number(dataset.file.id):
        raise unfit(where, "a link to another file")
    if creation.get_alloc_time() == h5py.h5d.ALLOC_TIME_EARLY:
        raise unfit(where, "places for all of its chunks from the beginning (early allocation)")
    if are_edges_plain(creation):
        raise unfit(where, "chunks at its edge that are not filtered (H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS)")
    found = properties_of(dataset)
    fill = np.asarray(found.fill_value or 0, native_dtype(dtype))
    known = {
        "maxshape": dataset.maxshape,
        "dtype": dtype_text(dtype),
        "chunks": dataset.chunks,
        "compression": found.compression,
        "checksum": found.checksum,
        "fill": fill.tobytes().hex(),
        "format": "netCDF4" if "_NCProperties" in dataset.file.attrs else "HDF5",
        **meaning_of(
            native_dtype(dtype), {key: value for key, value in found.attrs.items() if not isinstance(value, h5py.Empty)}
        ),
    }
    return known


def _is_written(dataset: h5py.Dataset, dtype: np.dtype[Any]) -> bool:
    """True if what is written here has the type of this dataset."""
    kind, mine = (
        dataset.id.get_type().copy(),
        create_type(dataset.name, np.dtype(dtype_text(dtype)) if is_added(dtype) else dtype),
    )
    if isinstance(kind, h5py.h5t.TypeIntegerID) and kind.get_size() == 1:  # its byte order says nothing, and NumPy has none
        kind.set_order(mine.get_order())
    return bool(mine.equal(kind))


def spec_of(known: Json, shape: tuple[int, ...]) -> ArraySpec:
    """How chunks of an array are stored, of this shape."""
    dtype = np.dtype(known["dtype"])
    fill = np.frombuffer(bytes.fromhex(known["fill"]), native_dtype(dtype))[0]
    return ArraySpec(
        shape,
        dtype,
        tuple(known["chunks"]),
        compression=Compression.of(known["compression"]),
        checksum=known["checksum"],
        fill_value=fill,
    )


def _check_filters(where: str, name: str, known: Json, filters: list[tuple[int, tuple[int, ...]]]) -> None:
    """ConfigError unless chunks that are made here go through the filters of those in the file."""
    chunks, why = tuple(known["chunks"]), ""
    try:
        if isinstance(known["compression"], str):
            raise ConfigError(f"'{name}' {known['compression']}")
        mine = Pipeline(name, spec_of(known, chunks))
        with file_in_memory() as trial:
            space = h5py.h5s.create_simple(chunks)
            made = _filters(h5py.Dataset(h5py.h5d.create(trial.id, b"x", mine.kind, space, mine.creation)))
    except (ConfigError, OSError, RuntimeError, ValueError, TypeError) as error:
        made, why = [], f" ({error})"
    if made != filters:
        told = ", then ".join(f"{number} with {values}" for number, values in filters)
        raise ConfigError(
            f"the chunks of {where} go through the HDF5 filters {told or 'none'}, which append does not write{why}. "
            "Append with h5py, or make a file with other filters: `shardload copy OLD NEW --compression gzip`"
        )


def _filters(dataset: h5py.Dataset) -> list[tuple[int, tuple[int, ...]]]:
    creation = dataset.id.get_create_plist()
    stored = (creation.get_filter(k) for k in range(creation.get_nfilters()))
    return [(number, tuple(values)) for number, _, values, _ in stored]
