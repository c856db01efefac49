"""How are arrays appended to those of a file? As a save of what is new, laid out as the old arrays are.

1. Rank 0 reads how the arrays are stored (`_read`).
2. Each rank checks that the new arrays fit, and plans: chunks begin where those of the file do, so that the first of them may
   have rows already (`_make`).
3. Rounds are those of a save. The owner of a chunk at the old edge reads the rows that it has, and writes it as a whole. A file
   of several chunks (a Zarr shard) is written again as a whole too (`_Appending`).
4. The sink's `commit` puts what was written and read back into the file, its length last (`growth` of each format).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from shardload.arrays.local_shards import DeviceSource
from shardload.comm.group import Group
from shardload.engine.file_target import Chunk, FileTarget, WriteCounts
from shardload.engine.session import Round, Session
from shardload.errors import ConfigError, ShardloadError, SourceError
from shardload.formats.contract.array import native_dtype, some
from shardload.formats.contract.format import Source, open_alone
from shardload.formats.diagnosis import as_source_error, check_readable
from shardload.formats.lookup import open_file
from shardload.formats.sink import HOW_TO_GROW, Growing, Sink
from shardload.jobs.described import read_values
from shardload.jobs.saving.arguments import SavedArray, SaveRequest
from shardload.jobs.saving.plan import SavePlan, plan_into, shards_of
from shardload.jobs.saving.save import SaveReport, Saving, planned
from shardload.planning.region import Region
from shardload.planning.saving import page_nbytes
from shardload.planning.selection import Between, direction_of, first_break
from shardload.planning.staging import Item, plan_rounds
from shardload.storage.leftovers import ROOTS, refuse_leftover, whole_beside
from shardload.storage.remote import without_secrets
from shardload.transfer.cast import NEEDS_X64, is_wide
from shardload.transfer.counters import Counters
from shardload.transfer.moves import ArrayMove
from shardload.values.dates import as_dates, count_alike, has_dates, in_numbers, is_dates, numbers_of_dates

Array = np.ndarray[Any, Any]
_ROWS_OF_ORDER = 1024  # the last rows of a coordinate, which say in what direction it goes


@dataclass(frozen=True, repr=False)
class AppendReport(SaveReport):
    """What an append did. Counts and bytes are those that were written: chunks at the old edge count as a whole.

    Attributes
    ----------
    dim : str or int
        The axis.
    grown : mapping of str to (int, int)
        Old and new length of each array along it.
    kept : mapping of str to int
        How many of its old rows stayed: fewer than the old length if rows were replaced.
    """

    dim: str | int
    grown: Mapping[str, tuple[int, int]]
    kept: Mapping[str, int]

    def __str__(self) -> str:
        """For a person: one line."""
        lengths = sorted({(*self.grown[name], kept) for name, kept in self.kept.items()})
        lengths_text = ", ".join(
            f"{old:,} to {new:,}" + (f" (rows from {kept:,} on replaced)" if kept < old else "") for old, new, kept in lengths
        )
        return f"appended along {self.dim!r}, {lengths_text}: {super().__str__().replace('saved ', '', 1)}"


def _make(request: SaveRequest, existing: Any, group: Group) -> tuple[SaveRequest, SavePlan]:
    """See `save.planned`."""
    request = replace(request, arrays=[_in_numbers(array, request.path, existing["arrays"]) for array in request.arrays])
    axes, dimensions = _check(request, existing["arrays"])
    for array in request.arrays:
        if array.name in existing["orders"]:
            _check_order(array, request, *existing["orders"][array.name])
    n_new = {array.name: array.shape[axes[array.name]] for array in request.arrays}
    # Here, because whoever loads needs neither the libraries nor their compressors.
    if "state" not in existing:
        from shardload.formats.zarr.growth import GrowthSink

        sink: Sink = GrowthSink(request.path, existing, axes, n_new)
    else:
        from shardload.formats.hdf5.growth import Hdf5Growth

        sink = Hdf5Growth(request.path, existing, axes, n_new, dimensions, page_nbytes(group.machine.n_nodes))
    growing = cast(Mapping[str, Growing], sink.arrays)
    arrays = [replace(array, dtype=growing[array.name].spec.dtype) for array in request.arrays]
    request = replace(request, arrays=arrays)
    first = {
        name: tuple(array.old * (k == array.axis) for k in range(len(array.spec.shape))) for name, array in growing.items()
    }
    return request, plan_into(sink, request, shards_of(request, group), group, first)


def append(path: Any, tree: Any, keywords: Mapping[str, Any], comm: Any) -> AppendReport:
    """See `shardload.append`. Collective."""
    started = time.perf_counter()
    with planned("append", path, tree, keywords, comm, _read, _make) as (group, request, plan, digest):
        return cast(AppendReport, _Appending(group, request, plan, digest).run(started))


# --- does it fit?


def _read(request: SaveRequest) -> Any:
    """How the file's arrays are stored, as `read_file` or `read_store` says it. On rank 0.

    ``"arrays"`` has for each array of the file, by its full name, a dict (in this module `facts`): ``"shape"``; ``"dims"``, or
    None; ``"scopes"``, for each axis a text that all arrays with this axis have, or None; in HDF5 ``"is_dimension"``. Of arrays
    that grow also ``"dtype"``, ``"attrs"``, ``"packed"``, ``"bounds"``, in HDF5 ``"maxshape"``, and what the sink needs. If
    rows are replaced, ``"shape"`` is that of the rows that stay, and ``"stored_shape"`` that of the file. ``"orders"``: see
    `_with_orders`. Only HDF5 has a ``"state"``.

    Raises
    ------
    ConfigError, SourceError
        If there is no such file, or nothing can be appended to it.
    """
    path = request.path
    if "://" in path:
        raise ConfigError(
            f"'{without_secrets(path)}' is a URL; append writes to files and folders only. Append there, and upload it"
        )
    refuse_leftover(path)
    if not os.path.exists(path):
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            fix = whole_beside(path) or " Make it with shardload.save"
            raise SourceError(f"'{path}' does not exist, so nothing can be appended to it.{fix}", path=path) from None
        except OSError:  # a folder into which this user may not look
            check_readable(path)
    names = [array.name for array in request.arrays]
    if os.path.isfile(path):
        from shardload.formats.hdf5.growth import read_file

        with as_source_error(path):
            return _with_orders(request, read_file(path, names))
    if not any(os.path.lexists(os.path.join(path, name)) for name in ROOTS):
        raise SourceError(f"'{path}' is no Zarr store: it has none of {', '.join(ROOTS)}", path=path)
    from shardload.formats.zarr.growth import read_store

    with as_source_error(path):
        return _with_orders(request, read_store(path, names))


def _with_orders(request: SaveRequest, existing: dict[str, Any]) -> dict[str, Any]:
    """How arrays are stored; with the ``"orders"`` of the coordinates of the axis: whether each rises (None: it has one
    value), the last value that stays, and its attributes.

    If rows are replaced, the shape of all arrays with that axis has the length of what stays.
    """
    arrays, orders, path, dim, at = existing["arrays"], {}, request.path, request.dim, request.at
    for name in request.names:
        facts = arrays.get(name)
        if facts is None or facts["dims"] is None or list(facts["dims"]) != [dim] or name.rpartition("/")[2] != dim:
            continue
        n = facts["shape"][0]
        first = 0 if at is not None else max(0, n - _ROWS_OF_ORDER)
        with open_file(os.path.realpath(path)) as file:
            values = read_values(file, name, Region((first,), (n,)))
        if at is not None:
            values = values[: _n_before(at, f"'{name}' in '{path}'", str(dim), values, facts)]
            scope = facts["scopes"][0]
            for array in arrays.values():
                if scope is not None and scope in array["scopes"]:
                    axis = array["scopes"].index(scope)
                    array["stored_shape"] = tuple(array["shape"])
                    array["shape"] = (*array["shape"][:axis], len(values), *array["shape"][axis + 1 :])
        if len(values) and (rises := direction_of([values])) is not None:
            orders[name] = (rises if len(values) > 1 else None, values[-1], facts["attrs"])
    without = [name for name in request.names if "stored_shape" not in arrays.get(name, "stored_shape")]
    if at is not None and without:
        raise ConfigError(
            f"at is {at!r}, but '{without[0]}' in '{path}' has no coordinate {dim!r} among the arrays that are passed, so that "
            "nothing says which row that is. Pass it too; or make the arrays shorter by h5py or zarr, and leave out at="
        )
    return existing | {"orders": orders}


def _n_before(at: Any, where: str, dim: str, values: Array, facts: Mapping[str, Any]) -> int:
    """How many values of a coordinate come before `at`. ConfigError if that has no answer."""
    rises, low = direction_of([values]), at
    if facts["packed"] or (rises is None and len(values)):
        why = "holds packed numbers" if facts["packed"] else "does not go in one direction"
        raise ConfigError(f"at is {at!r}, but {where} {why}, so that nothing says which row that is. Mend it by h5py or zarr")
    try:
        if has_dates(Between(at, at)):
            low = cast(Between, in_numbers(Between(at, at), dim, facts["attrs"], values.dtype)).low
    except ValueError as error:
        raise ConfigError(f"at is {at!r}, which says no place in {where}: {error.__cause__ or error}") from None
    # A thousandth of a step: 3 * 0.1 is 0.3, and so is 0.3 of float32.
    slack = float(np.abs(np.diff(values.astype("f8"))).min(initial=np.inf)) / 1000 if values.dtype.kind == "f" else 0
    slack = slack if math.isfinite(slack) else 1e-6 * abs(low)
    return int(np.count_nonzero(values < low - slack if rises else values > low + slack))


def _check_order(array: SavedArray, request: SaveRequest, rises: bool | None, last: Any, attrs: Mapping[str, Any]) -> None:
    """ConfigError unless a coordinate of the axis goes on as it did; also if no process has all of it."""
    if not (array.is_everywhere or array.x.is_fully_replicated or array.x.is_fully_addressable):
        raise ConfigError(
            f"'{array.name}' is cut over processes, and is the coordinate of the axis that grows: its values must go on from "
            "those of the file. Pass it whole: a NumPy array of all values, the same on every rank"
        )
    new = np.asarray(array.x)[: array.shape[0]]
    values = np.concatenate([[last], new]).astype(np.asarray(last).dtype)
    if rises is None:  # a single row so far: new ones that ascend begin before it, or go on from it
        rises = bool(len(values) < 2 or values[1] > values[0] or values[-1] > values[-2])
    k = first_break(values, rises)
    if k is None:
        return
    before, after = as_dates(values[k - 1 : k + 1], attrs) or values[k - 1 : k + 1]
    place = "" if request.at is None else f" before at={request.at!r}"
    problem = f"ends with {before}{place}, and what is to be appended begins with {after}"
    shown_at = after if isinstance(after, np.generic) else repr(after)
    fix = f"To replace the rows from there on, as after a restart from an older checkpoint: append(..., at={shown_at})"
    if k > 1:
        problem, fix = f"has an order, and what is to be appended has {before}, then {after}", "Sort it"
    if np.isnan(values[k]):
        fix = "Give each row its value"
    raise ConfigError(
        f"'{array.name}' in '{request.path}' {problem}: searches by its values would find wrong rows. {fix}. If its rows have "
        f"no order, pass the number of the axis, such as dim=0, in place of its name"
    )


def _in_numbers(array: SavedArray, path: str, stored: Mapping[str, Any]) -> SavedArray:
    """The array, with dates and booleans as the numbers that the file has for them. ConfigError if it has none."""
    if array.name not in stored:
        return array
    facts = stored[array.name]
    dtype = native_dtype(np.dtype(facts["dtype"]))
    if array.dtype.kind == "b" and dtype == np.int8 and facts["attrs"].get("dtype") == "bool":  # netCDF has none
        return replace(array, x=array.x.astype("int8"), dtype=dtype)
    if not is_dates(array.x):
        return array
    packed = facts["packed"]
    if dtype.kind not in "iuf" or packed:
        content = f"packed numbers, with {', '.join(packed)}" if packed else dtype
        fix = ". Append the packed numbers" if packed else ""
        raise ConfigError(f"'{array.name}' in '{path}' holds {content}, what is to be appended are dates or spans of time{fix}")
    try:
        return replace(array, x=numbers_of_dates(array.x, _meaning(array.name, stored), dtype), dtype=dtype)
    except ValueError as error:
        raise ConfigError(
            f"these times cannot be appended to '{array.name}' in '{path}': {error}. Convert them, or append numbers"
        ) from None


def _meaning(name: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that say what numbers of an array mean. Bounds have those of their coordinate, which names them."""
    attrs: dict[str, Any] = stored[name]["attrs"]
    if "units" in attrs:
        return attrs
    folder, _, last_name = name.rpartition("/")
    coordinates = [stored[place] for dim in stored[name]["dims"] or () if (place := f"{folder}/{dim}") in stored]
    return next((coordinate["attrs"] for coordinate in coordinates if last_name in coordinate.get("bounds", ())), attrs)


def _check(request: SaveRequest, stored: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """The axis of each array, and the new lengths of dimensions without values. ConfigError if an array does not fit."""
    axes: dict[str, int] = {}
    for array in request.arrays:
        where = f"'{array.name}' in '{request.path}'"
        if array.name not in stored:
            names = some(list(map(repr, stored))) or "none"
            raise ConfigError(f"there is no array {where}; it has {names}. Append to an array that exists")
        facts = stored[array.name]
        shape, new = tuple(facts["shape"]), array.shape
        axis = axes[array.name] = _axis(where, request.dim, facts["dims"], shape)
        dims = tuple(facts["dims"] or ())
        if array.dims is not None and all(dims or [None]) and array.dims != dims:  # only objects of xarray have names here
            fix = f"Pass it with .transpose{dims}" if set(array.dims) == set(dims) else "Rename them"
            raise ConfigError(f"{where} has the axes {dims}, what is to be appended has {array.dims}. {fix}")
        attrs = _meaning(array.name, stored)
        for key, value in array.attrs.items():
            value_in_file = attrs.get(key)
            if value_in_file not in (None, value) and not count_alike(attrs, {**attrs, **array.attrs}):
                raise ConfigError(
                    f"{where} has the {key} {value_in_file!r}, what is to be appended has {value!r}. Convert it; or, if both "
                    f"mean the same, give it those of the file: x.attrs[{key!r}] = {value_in_file!r}"
                )
        expected = (*shape[:axis], new[axis] if len(new) > axis else 0, *shape[axis + 1 :])
        if new != expected or 0 in new:
            numpy = "numpy" if isinstance(array.x, np.ndarray) else "jax.numpy"
            row = f". For a single row, give it that axis: {numpy}.expand_dims(x, {axis})"
            fix = row if new == (*shape[:axis], *shape[axis + 1 :]) else ""
            raise ConfigError(
                f"{where} has the shape {facts.get('stored_shape', shape)} and can grow along axis {axis} only; what is to be "
                f"appended has {new}. Its other axes must be the same, and none without elements{fix}"
            )
        most = facts.get("maxshape", [None] * len(shape))[axis]
        if most is not None and shape[axis] + new[axis] > most:
            place = "" if request.at is None else f" before at={request.at!r}"
            raise ConfigError(
                f"axis {axis} of {where} has {shape[axis]} elements{place} and may have {most} (its maxshape), so that "
                f"{new[axis]} cannot be appended. {HOW_TO_GROW}"
            )
        dtype, new_dtype = native_dtype(np.dtype(facts["dtype"])), native_dtype(array.dtype)
        # Of floating point they may be values: if nothing says where they come from.
        may_be_values = array.is_decoded or (array.is_decoded is None and new_dtype != dtype and new_dtype.kind in "fc")
        if facts["packed"] and may_be_values:
            raise ConfigError(
                f"{where} holds packed numbers, {dtype} with {', '.join(facts['packed'])}, and what is to be appended is "
                f"{'values that were decoded' if array.is_decoded else new_dtype}. Pack them first: subtract add_offset, "
                "divide by scale_factor, round if these are integers, and cast; what is missing becomes _FillValue"
            )
        if new_dtype != dtype:
            needs = NEEDS_X64 if is_wide(dtype) and not isinstance(array.x, np.ndarray) else ""
            fix = f"Cast it: x.astype('{dtype}'){needs}"
            raise ConfigError(f"{where} holds {dtype}, what is to be appended is {new_dtype}. {fix}")
    return axes, _check_lengths(request, stored, axes)


def _axis(where: str, dim: str | int, dims: Any, shape: tuple[int, ...]) -> int:
    names = [name for name in dims or () if name]
    if isinstance(dim, int):
        if not -len(shape) <= dim < len(shape):
            raise ConfigError(f"dim is {dim}, but {where} has {len(shape)} axes")
        return dim % len(shape)
    if names.count(dim) != 1:
        reason = (
            f"its axes are {tuple(dims)!r}" if names else "its axes have no names. Pass the number of the axis, such as dim=0"
        )
        raise ConfigError(
            f"dim is {dim!r}, but {where} has {'no' if dim not in names else 'more than one'} such axis: {reason}"
        )
    return list(dims).index(dim)


def _check_lengths(request: SaveRequest, stored: Mapping[str, Any], axes: Mapping[str, int]) -> dict[str, int]:
    """The new lengths of dimensions without values. ConfigError if arrays with the same axis would get different lengths."""
    lengths: dict[str, tuple[int, int, str]] = {}
    dimensions: dict[str, int] = {}
    for array in request.arrays:
        axis, own_facts = axes[array.name], stored[array.name]
        scope = own_facts["scopes"][axis]
        if scope is None:
            continue
        dim = own_facts["dims"][axis]
        old, new = int(own_facts["shape"][axis]), int(array.shape[axis])
        before, more, first_name = lengths.setdefault(scope, (old, new, array.name))
        if (before, more) != (old, new):
            fix = "they must stay equally long"
            if before != old:
                fix = "an append that was killed at its very end leaves them so. Resize the longer one first, by h5py or zarr"
            raise ConfigError(
                f"along {dim!r} in '{request.path}' '{array.name}' would grow from {old} to {old + new}, '{first_name}' from "
                f"{before} to {before + more}: {fix}"
            )
        others = {name: facts for name, facts in stored.items() if scope in facts["scopes"] and name not in axes}
        # netCDF4 leaves a dimension without values at 0 if it is unlimited, others keep it as long as its arrays.
        valueless = {name for name, facts in others.items() if facts.get("is_dimension")}
        dimensions |= {name: old + new for name in valueless if tuple(others[name]["shape"]) == (old,)}
        if not_passed := [name for name in others if name not in valueless]:
            raise ConfigError(
                f"{some(list(map(repr, not_passed)))} in '{request.path}', with the axis {dim!r} too, would not grow with "
                f"'{array.name}'. Pass {some([repr(name.lstrip('/')) for name in not_passed])} too. If it holds text, which "
                "append does not write: `shardload copy OLD NEW --dataset NAME`, with each array to keep, makes a file without "
                "it"
            )
    return dimensions


# --- what is written


class _Appending(Saving):
    """One rank's part of one append. Every method is collective."""

    def __init__(self, group: Group, request: SaveRequest, plan: SavePlan, digest: str) -> None:
        super().__init__(group, request, plan, digest)
        self._growing = cast(Mapping[str, Growing], plan._sink.arrays)
        self._sources: dict[str, Source] = {}
        self._opened = ExitStack()
        self._rewritten: list[tuple[str, Region]] = []  # stored chunks that share a file with new ones

    def _report(self, written: WriteCounts, counters: Counters, started: float) -> AppendReport:
        report = super()._report(written, counters, started)
        grown = {name: (array.stored_shape[array.axis], array.new_shape[array.axis]) for name, array in self._growing.items()}
        kept = {name: array.old for name, array in self._growing.items()}
        return AppendReport(**vars(report), dim=self._request.dim, grown=grown, kept=kept)

    def _run(self, session: Session, source: DeviceSource, target: FileTarget) -> None:
        """The rounds of a save, then those of old chunks in the same files, of which each rank has its own number."""
        with self._opened:
            super()._run(session, source, target)
            sizes = [region.size * self._growing[name].spec.dtype.itemsize for name, region in self._rewritten]
            each_alone = ((k, range(1), nbytes) for k, nbytes in enumerate(sizes))
            items_by_round = list(plan_rounds(each_alone, self._plan._memory.round_nbytes))
            rounds = (Round((), self._staging, False, partial(self._chunks_again, items)) for items in items_by_round)
            session.run_own(rounds, len(items_by_round), source, target)

    def _chunks_again(self, items: Sequence[Item]) -> Iterator[Chunk]:
        for item in items:
            name, region = self._rewritten[item.array]
            yield Chunk(name, region, self._stored(name, self._growing[name].in_file(region)))

    def _chunks(self, items: Sequence[Item], moves: Sequence[ArrayMove]) -> Iterator[Chunk]:
        """See `Saving`: as chunks of the file."""
        return map(self._completed, super()._chunks(items, moves))

    def _completed(self, chunk: Chunk) -> Chunk:
        """A chunk of the new values as a chunk of the file, with the old rows that it has there."""
        array, new_values = self._growing[chunk.name], chunk.values
        axis, ahead = array.axis, array.old - array.base
        region = _along(chunk.region, axis, chunk.region.start[axis] + ahead, chunk.region.stop[axis] + ahead)
        if chunk.region.start[axis] or not ahead:
            return Chunk(chunk.name, region, new_values)
        begin = ahead // array.unit * array.unit
        index = tuple(a // c for a, c in zip(region.start, array.spec.chunks or (), strict=True))
        self._rewritten += [(chunk.name, array.region(old_index)) for old_index in array.old_chunks_with(index)]
        if begin == ahead:
            return Chunk(chunk.name, region, new_values)
        old = self._stored(chunk.name, _along(region, axis, array.base + begin, array.old))
        values = np.concatenate([old, new_values.astype(old.dtype, copy=False)], axis)
        return Chunk(chunk.name, _along(region, axis, begin, region.stop[axis]), values)

    def _stored(self, name: str, region: Region) -> Array:
        """Values that the file has, as the format's library reads them."""
        path, array = self._plan.path, self._growing[name]
        try:
            if name not in self._sources:
                opened = open_alone(open_file(os.path.realpath(path)), name)  # unchecked: what a load refuses may still grow
                source = self._opened.enter_context(closing(opened))
                if source.info.shape != array.stored_shape:
                    raise ConfigError(
                        f"'{name}' in '{path}' has the shape {source.info.shape} here, on rank 0 {array.stored_shape}. Nothing "
                        "was appended; run it again, when nobody else writes to it"
                    )
                self._sources[name] = source
            values = np.asarray(self._sources[name].plain(region)).reshape(region.shape)
            return values.astype(native_dtype(array.spec.dtype), copy=False)
        except (ShardloadError, MemoryError):
            raise
        except Exception as error:
            raise SourceError(
                f"old values of '{name}' in '{path}', which share a chunk or shard with new ones, cannot be read: elements "
                f"{region}: {type(error).__name__}: {error}. Nothing was appended",
                path=path,
                dataset=name,
            ) from error


def _along(region: Region, axis: int, start: int, stop: int) -> Region:
    starts, stops = list(region.start), list(region.stop)
    starts[axis], stops[axis] = start, stop
    return Region(tuple(starts), tuple(stops))
