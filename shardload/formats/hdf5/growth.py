"""How does an HDF5 or netCDF4 file grow along an axis, so that every reader finds the old arrays or the new ones?

HDF5 itself writes the new metadata, into a ledger on top of the old file. No byte of the old file changes before all of them
are on disk elsewhere:

1. `read_file` says how arrays are stored: shapes, names of axes, filters. What could not grow so that a kill leaves a whole
   file, it refuses, and says what to do instead. It runs on one rank, which tells the others.
2. `Hdf5Growth.create` opens the file on a `Ledger`, and makes each array as short as its whole chunks are (those of the rows
   that stay, if rows are replaced), then as long as it will be. So the library has no chunk at the old edge any more, and gives
   all new chunks a place behind the end of the file.
3. All ranks write chunks there, those at the old edge with their old rows. The library writes new metadata there.
4. `finish` has the library end its work. What it changed before the old end goes into a file of changes. The library reads the
   file as it will be, and so do the ranks that read back.
5. `commit` makes the changes (`changes`). If it is killed there, whoever reads the file next makes them.

Nobody else may write meanwhile: `AppendLock` keeps other appends away, and HDF5's own lock other programs.
docs/design/save.md says what is on disk after a kill.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Self

import h5py
import numpy as np

from shardload.errors import ConfigError
from shardload.formats.codecs.algorithms import numcodecs
from shardload.formats.contract.array import dtype_text, is_added, native_dtype, refusal
from shardload.formats.hdf5.filters import Hdf5Encoder, create_type
from shardload.formats.hdf5.ledger import HEAD_NBYTES, old_file
from shardload.formats.hdf5.metadata import (
    NON_COORDINATE,
    axes_of,
    dimensions_by_number,
    is_scale,
    properties_of,
    scales_of,
    stands_for_axis,
)
from shardload.formats.hdf5.opened import (
    OpenDataset,
    OpenFacts,
    address_of,
    are_edges_plain,
    encoded,
    file_in_memory,
    filters_of,
    signature_at,
    type_of_values,
)
from shardload.formats.hdf5.sink import Hdf5PlacedChunks, LedgerSink
from shardload.formats.sink import HOW_TO_GROW, ArraySpec, Compression, Decode, Growing, Ticket, meaning_of
from shardload.planning.region import Region
from shardload.storage.changes import GrowingFile, changed_meanwhile, complete_append, read_changes, state_of_file
from shardload.storage.local import LocalFile, open_file
from shardload.storage.objects import Ints
from shardload.storage.target import Change, WritableFile
from shardload.system.undo import Undo

Json = dict[str, Any]
SUPERBLOCK_NBYTES = 64  # of a file: its end and the checksum are in them
_END_AT = {0: 40, 1: 44, 2: 28, 3: 28}  # by the version of the superblock
_CHECKED_NBYTES = 44  # of a superblock of version 2 or 3: its checksum is behind them


def read_file(path: str, names: Iterable[str]) -> Json:
    """How the arrays of a file are stored: ``"arrays"`` by name, and ``"state"``, its size and time.

    Of each array: shape, names of the axes, and scopes (see `_arrays`). Of those in `names` all that `Hdf5Growth` needs.

    Raises
    ------
    ConfigError
        If one of `names` cannot grow.
    SourceError
        If this is no HDF5 file, or it cannot be read.
    """
    path = os.path.realpath(path)
    complete_append(path)
    with closing(LocalFile(open_file(path), path)) as stored:
        if signature_at(stored) is None:
            raise ConfigError(
                f"'{path}' is a file, but neither HDF5 nor netCDF4; append writes to these, and to Zarr stores in folders. "
                "A netCDF-3 file becomes netCDF4 by `nccopy -k nc4 OLD NEW`"
            )
        state = state_of_file(stored)
        with old_file(stored) as file:
            _check_kind(path, file)
            names = list(names)
            facts = OpenFacts(file, is_ours=False)
            arrays = _arrays(path, facts, names)
            names = [name for name in names if name in arrays]
            for name in names:
                arrays[name] |= _details(path, facts.dataset(file[name].id))
            filters = {name: _filters(file[name]) for name in names}
    # Now that the file is closed: as long as an open dataset has a filter, it cannot be replaced by the one that we write with.
    for name in names:
        _check_filters(f"'{name}' in '{path}'", name, arrays[name], filters[name])
    return {"arrays": arrays, "state": state}


def unfit(where: str, obstacle: str) -> ConfigError:
    """The error about something that cannot grow, because of an obstacle that it has."""
    return ConfigError(
        f"{where} cannot grow safely: it has {obstacle}. Make a file that can: `shardload copy OLD NEW`; or "
        "append with h5py, where a kill may cost the file"
    )


def _check_kind(path: str, file: h5py.File) -> None:
    """ConfigError if the file is of a kind that cannot grow."""
    creation = file.id.get_create_plist()
    strategy, persists, _ = creation.get_file_space_strategy()
    obstacles = {
        f"a user block of {creation.get_userblock()} bytes": creation.get_userblock() != 0,
        "addresses of {} and lengths of {} bytes in place of 8".format(*creation.get_sizes()): creation.get_sizes() != (8, 8),
        "its space in pages (`fs_strategy='page'`)": strategy == h5py.h5f.FSPACE_STRATEGY_PAGE,
        "a list of its free space (`fs_persist=True`)": persists,
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise unfit(f"'{path}'", obstacle)


def _arrays(path: str, facts: OpenFacts, names: Iterable[str]) -> dict[str, Json]:
    """Of each dataset of a file: shape, names of axes, scopes, and whether it is a dimension of netCDF without values. One with
    several names (hard links) has the one in `names`, if any.

    The scope of an axis is a text that arrays with the same axis have in common: the name of its scale, or group and label.
    """
    file, name_at = facts.file, _names_by_address(path, facts, names)
    arrays, all_names = dict[str, Json](), set(name_at.values())
    for name in name_at.values():
        member = file[encoded(name)]
        if not isinstance(member, h5py.Dataset) or member.shape is None:
            continue
        dataset = facts.dataset(member.id)
        dims, scopes = list(axes_of(dataset).dims), list[str | None]([None] * dataset.ndim)
        if is_scale(dataset):
            scopes[: dataset.ndim] = [name, *dimensions_by_number(dataset)[1:], *scopes][: dataset.ndim]
        for axis, scales in enumerate([] if is_scale(dataset) else scales_of(dataset)[0]):
            if scales:
                scopes[axis] = name_at.get(address_of(scales[0][1].id))
            elif dims[axis]:
                scopes[axis] = f"{name.rpartition('/')[0]}/:{dims[axis]}"
        for axis, scope in enumerate(scopes):  # the scale's name in `names`; but a scale without values may have another name
            if scope in all_names and not stands_for_axis(file[encoded(scope or "")]):
                dims[axis] = str(scope).rpartition("/")[2]
        arrays[name] = {"shape": dataset.shape, "dims": dims, "scopes": scopes, "is_dimension": stands_for_axis(dataset)}
    return arrays


def _names_by_address(path: str, facts: OpenFacts, names: Iterable[str]) -> dict[int, str]:
    """A name of each object, by its address: the one in `names`, if any. ConfigError if two are."""
    name_at, wanted = {}, set(names)
    for address, all_names in facts.places.items():
        passed = [name for name in all_names if name in wanted]
        if len(passed) > 1:
            raise ConfigError(f"'{passed[0]}' and '{passed[1]}' in '{path}' are one array with two names. Pass it once")
        name_at[address] = (passed or all_names)[0]
    return name_at


def _details(path: str, dataset: OpenDataset) -> Json:
    """How one array is stored. ConfigError if nothing can be appended to it."""
    where = f"'{dataset.name}' in '{path}'"
    if dataset.is_virtual:
        raise ConfigError(
            f"{where} is virtual: its values are in other files, so that it cannot grow. Append to the last part, and join the "
            "parts anew (`shardload join`); or make one file of them: `shardload copy OLD NEW --unlimited AXIS`"
        )
    if stands_for_axis(dataset):
        above, _, last = dataset.name.rpartition("/")
        variable = f"{above}/{NON_COORDINATE}{last}"
        fix = f". The array of that name is stored as '{variable}': append to it by that" if variable in dataset.file else ""
        raise ConfigError(f"{where} is an axis without values, which grows with the arrays that have it{fix}")
    if dataset.chunks is None:
        raise ConfigError(f"{where} has no chunks, so that it cannot grow. {HOW_TO_GROW}")
    dtype = type_of_values(dataset.kind)
    if refusal(dtype) is not None or not _is_written(dataset, dtype):
        raise ConfigError(f"{where} holds {dtype} in a form that append does not write; append with h5py")
    creation = dataset.creation
    if creation.get_alloc_time() == h5py.h5d.ALLOC_TIME_EARLY:
        if dataset.maxshape == dataset.shape:  # which a copy alone does not change
            raise ConfigError(f"{where} has no axis that can grow (its maxshape is {dataset.maxshape}). {HOW_TO_GROW}")
        raise unfit(where, "places for all of its chunks from the beginning (early allocation)")
    if are_edges_plain(creation):
        raise unfit(where, "chunks at its edge that are not filtered (H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS)")
    properties = properties_of(dataset)
    attrs = {key: value for key, value in properties.attrs.items() if not isinstance(value, h5py.Empty)}
    return {
        "maxshape": dataset.maxshape,
        "dtype": dtype_text(dtype),
        "chunks": dataset.chunks,
        "compression": properties.compression,
        "checksum": properties.checksum,
        "fill": np.asarray(properties.fill_value or 0, native_dtype(dtype)).tobytes().hex(),
        "format": "netCDF4" if "_NCProperties" in dataset.file.attrs else "HDF5",
        **meaning_of(native_dtype(dtype), attrs),
    }


def _is_written(dataset: h5py.Dataset, dtype: np.dtype[Any]) -> bool:
    """True if values that this package writes have the type of this dataset."""
    kind = dataset.id.get_type().copy()
    written = create_type(dataset.name, np.dtype(dtype_text(dtype)) if is_added(dtype) else dtype)
    if isinstance(kind, h5py.h5t.TypeIntegerID) and kind.get_size() == 1:  # its byte order says nothing, and NumPy has none
        kind.set_order(written.get_order())
    return bool(written.equal(kind))


def spec_of(stored: Json, shape: tuple[int, ...]) -> ArraySpec:
    """A spec of an array of this shape, whose chunks are stored like those of an array in the file: see `_details`."""
    dtype = np.dtype(stored["dtype"])
    fill = np.frombuffer(bytes.fromhex(stored["fill"]), native_dtype(dtype))[0]
    return ArraySpec(
        shape,
        dtype,
        tuple(stored["chunks"]),
        compression=Compression.of(stored["compression"]),
        checksum=stored["checksum"],
        fill_value=fill,
    )


def _check_filters(where: str, name: str, stored: Json, filters: list[tuple[int, tuple[int, ...]]]) -> None:
    """ConfigError unless new chunks go through the same filters as those in the file."""
    chunks, why = tuple(stored["chunks"]), ""
    try:
        if isinstance(stored["compression"], str):
            raise ConfigError(f"'{name}' {stored['compression']}")
        encoder = Hdf5Encoder("", name, spec_of(stored, chunks))
        with file_in_memory() as trial:
            space = h5py.h5s.create_simple(chunks)
            new_filters = _filters(h5py.Dataset(h5py.h5d.create(trial.id, b"x", encoder.kind, space, encoder.creation)))
    except (ConfigError, OSError, RuntimeError, ValueError, TypeError) as error:
        new_filters, why = [], f" ({error})"
    if new_filters != filters:
        text = ", then ".join(f"{number} with {values}" for number, values in filters)
        raise ConfigError(
            f"the chunks of {where} go through the HDF5 filters {text or 'none'}, which append does not write{why}. "
            "Append with h5py, or make a file with other filters: `shardload copy OLD NEW --compression gzip`"
        )


def _filters(dataset: h5py.Dataset) -> list[tuple[int, tuple[int, ...]]]:
    return [(number, tuple(values)) for number, _, values, _ in filters_of(dataset.id.get_create_plist())]


class GrowingHdf5Array(Hdf5Encoder, Growing):
    """See `Encoder` and `Growing`."""

    def __init__(self, path: str, name: str, stored: Json, axis: int, n_new: int) -> None:
        shape = self.begin(stored, axis, stored["chunks"][axis], n_new)
        super().__init__(path, name, spec_of(stored, shape), stored["format"])


class Hdf5Growth(LedgerSink):
    """What is added to a file: see this module.

    Parameters
    ----------
    path : str
        The file.
    stored : mapping
        What `read_file` says: ``"arrays"`` (those that grow) and ``"state"``.
    axes : mapping of str to int
        Along which axis each array grows.
    n_new : mapping of str to int
        By how much.
    dimensions : mapping of str to int
        Dimensions of netCDF without values: their new lengths.
    alignment : int
        As for `Hdf5Sink`.
    """

    def __init__(
        self,
        path: str,
        stored: Mapping[str, Any],
        axes: Mapping[str, int],
        n_new: Mapping[str, int],
        dimensions: Mapping[str, int] | None = None,
        alignment: int = 1,
    ) -> None:
        self.path, self.mode, self.state, self.alignment = path, "w", list(stored["state"]), alignment
        self.arrays: dict[str, GrowingHdf5Array] = {
            name: GrowingHdf5Array(path, name, array, axes[name], n_new[name])
            for name, array in stored["arrays"].items()
            if name in axes
        }
        self.dimensions = dict(dimensions or {})

    def new_shape(self, name: str) -> tuple[int, ...]:
        """The shape that an array, or a dimension without values, will have."""
        return self.arrays[name].new_shape if name in self.arrays else (self.dimensions[name],)

    def create(self) -> Self:
        """See `Sink`. The ticket leads to a small file beside the one that grows: what will be changed, for who reads back."""
        chunks = {
            name: Hdf5PlacedChunks(self.path, name, array.spec, name, array.in_file(Region.whole(array.spec.shape)).start)
            for name, array in self.arrays.items()
        }
        self._is_put = False
        file = GrowingFile(os.path.realpath(self.path), self.path, self.state)
        self.ticket = Ticket(file.temporary)
        with Undo(file.discard):
            # Of a very small file: `commit` writes its first bytes as a whole, so that no chunk may lie there.
            self._old_end = max(end_of(self.path, file.read_at_most(0, SUPERBLOCK_NBYTES)), HEAD_NBYTES)
            self.begin(file, chunks, self._old_end)
        with Undo(self.abandon), self.explained(), self.calls():
            file.is_as_before = self.ledger.is_as_before
            self._shorten(self.open_library("r+"))
            self.close_library()
            self._give_end_back()
            self.open_library("r+")
            for name in (*self.arrays, *self.dimensions):
                self.library[name].resize(self.new_shape(name))
        return self

    def file_of(self, ticket: Ticket) -> str:
        """See `LedgerSink`."""
        return os.path.realpath(self.path)

    def open(self, ticket: Ticket) -> WritableFile:
        """See `LedgerSink`."""
        file = super().open(ticket)
        if state_of_file(file) != self.state:  # another file has the name by now, in which these places are not free
            raise changed_meanwhile(self.path)
        return file

    @contextlib.contextmanager
    def decoding(self, ticket: Ticket, name: str) -> Iterator[Decode]:
        """See `Sink`. The HDF5 library reads the file as it will be."""
        changes = read_changes(ticket.temporary)
        with contextlib.closing(LocalFile(open_file(self.file_of(ticket)))) as stored, old_file(stored, changes) as file:
            dataset, array = file[name], self.arrays[name]
            yield lambda region: np.asarray(dataset[array.in_file(region).slices()])

    # --- on the rank that creates it

    def _shorten(self, file: h5py.File) -> None:
        """Take the chunks at the old edge out of their index: to the library all that come are new."""
        for name, array in self.arrays.items():
            file[name].resize(array.base, array.axis)

    def _give_end_back(self) -> None:
        """Set the end of the file as it was. The library took freed chunks there off the file, which still have the old values:
        nothing may be written there.
        """
        ledger = self.ledger
        ledger.seek(0)
        head = with_end(ledger.read(SUPERBLOCK_NBYTES), self._old_end)
        ledger.seek(0)
        ledger.write(head)
        ledger.truncate(self._old_end)

    def allocate(self, name: str, numbers: Sequence[int] | Ints, nbytes: Sequence[int] | Ints, masks: Any = 0) -> Ints:
        """See `Sink`."""
        if not self._is_put:  # no sooner: whoever opens the file to write checks that it is as it was
            self.ledger.put_from(self._old_end)
            self._is_put = True
        offsets = super().allocate(name, numbers, nbytes, masks)
        if len(offsets) and offsets.min() < self._old_end:
            raise unfit(f"'{name}' in '{self.path}'", f"room for new chunks among old bytes, at {offsets.min()}")
        return offsets

    @contextlib.contextmanager
    def finished(self, changes: list[Change]) -> Iterator[h5py.File]:
        """See `LedgerSink`."""
        with old_file(self._file, changes) as file:
            for name in (*self.arrays, *self.dimensions):
                if file[name].shape != self.new_shape(name):
                    raise OSError(f"'{name}' would have the shape {file[name].shape}")
            yield file


# --- the end of a file for HDF5, in its superblock


def end_of(path: str, head: bytes) -> int:
    """The end of the file for HDF5, by its first bytes; the file may be longer. ConfigError if they are no superblock."""
    if len(head) < SUPERBLOCK_NBYTES or not head.startswith(b"\x89HDF\r\n\x1a\n") or head[8] not in _END_AT:
        raise unfit(f"'{path}'", f"no superblock that is known here; it begins with {head[:9]!r}")
    return int.from_bytes(head[_END_AT[head[8]] :][:8], "little")


def with_end(head: bytes, end: int) -> bytes:
    """These first bytes with another end, and its checksum."""
    end_at = _END_AT[head[8]]
    changed = head[:end_at] + end.to_bytes(8, "little") + head[end_at + 8 :]
    if head[8] < 2:
        return changed
    return bytes(numcodecs().JenkinsLookup3().encode(changed[:_CHECKED_NBYTES])) + changed[_CHECKED_NBYTES + 4 :]
