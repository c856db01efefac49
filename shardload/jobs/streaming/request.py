"""How does a call of `stream` come from its arguments to a plan? In the steps of a load, with batches in place of arrays.

1. The arguments are read as those of a load. The spec is that of a batch; the axis of a window, which is never cut, is taken out of
   it, so that the samples and the other axes of the array are left.
2. Rank 0 finds the arrays, with the names of their axes.
3. Every rank makes the same `StreamPlan`: leaves that name the same array, cut in the same way, read it once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardload.arrays.sharding import read_spec
from shardload.comm.agreement import Invocation
from shardload.comm.mpi import thread_level, world_rank_and_size
from shardload.engine.call import begin_call
from shardload.errors import ConfigError
from shardload.formats.contract.array import ArrayInfo
from shardload.jobs.loading.call import LoadCall, _positions, _Values
from shardload.jobs.loading.planner import (
    PlannedRanks,
    _lay_out,
    _max_block_nbytes,
    _source_layout,
    _staging_for,
    decoding_for,
    selection_for,
)
from shardload.jobs.loading.request import Request, mesh_of
from shardload.jobs.streaming.plan import Leaf, StreamArray, StreamPlan
from shardload.jobs.streaming.reader import RoundReader
from shardload.jobs.streaming.stream import Stream
from shardload.jobs.trees import ArrayTree, is_one, is_one_spec, where_text
from shardload.planning.batch_flow import BatchSchedule
from shardload.planning.blocks import plan_blocks
from shardload.planning.grid import Grid
from shardload.planning.sample_order import SampleOrder, block_steps
from shardload.planning.schedule import Owners, Schedule
from shardload.planning.shards import Shards
from shardload.units import format_nbytes, parse_nbytes

_SHARE_OF_SELECTION = 10  # pool="auto" is a tenth of what is selected
_MOST_POOL_NBYTES = 64 << 30
Window = int | tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """What a stream gives, as the caller passed it, checked.

    Attributes
    ----------
    along : str or int
        The axis of the steps.
    batch : int or None
        Samples of a batch; None: single steps without an axis for them.
    shuffle : int or None
        The seed.
    epochs : int or None
        How often all samples are given.
    remainder, border, gaps : str
        What becomes of samples that do not fill a batch, that cross the border of a block, that cross a gap.
    pool : int or str
        Bytes of the job for a shuffled order.
    prefetch : int
        Batches that are made ahead.
    """

    along: str | int
    batch: int | None
    shuffle: int | None
    epochs: int | None
    remainder: str
    border: str
    pool: int | str
    prefetch: int

    @classmethod
    def check(cls, **given: Any) -> Sampling:
        """Check the options. ConfigError names the one that is wrong."""
        for name, least, none in (("batch", 1, True), ("shuffle", 0, True), ("epochs", 1, True), ("prefetch", 0, False)):
            value = given[name]
            if value is None and none:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                raise ConfigError(f"{name} is {value!r}; expected an integer from {least} on{' or None' * none}")
            given[name] = int(value)
        for name, words in (("remainder", ("drop", "pad", "error")), ("border", ("reread", "drop"))):
            if given[name] not in words:
                raise ConfigError(f"{name} is {given[name]!r}; expected {' or '.join(map(repr, words))}")
        if given["pool"] != "auto":
            given["pool"] = parse_nbytes(given["pool"])
        along = given["along"]
        if isinstance(along, bool) or not isinstance(along, (str, int, np.integer)):
            raise ConfigError(f"along is {along!r}; expected the name of an axis, such as 'time', or its number")
        return cls(**given)


def _is_one_window(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, (int, np.integer))
        or (isinstance(value, (tuple, range)) and all(isinstance(step, (int, np.integer)) for step in value))
    )


def _read_window(value: Any, where: str) -> Window:
    if value is None:
        return 0
    steps = tuple(value) if isinstance(value, (tuple, range)) else value
    if steps == () or (isinstance(steps, tuple) and len(set(steps)) < len(steps)):
        raise ConfigError(f"window{where} is {value!r}; expected an integer, or a tuple of different integers such as (-1, 0)")
    return tuple(map(operator.index, steps)) if isinstance(steps, tuple) else operator.index(steps)


def _without_window(spec: Any, has_batch: bool, where: str) -> Any:
    """A spec without the entry of the window's axis."""
    entries = list(spec)
    k = 1 if has_batch else 0
    if len(entries) > k:
        if entries[k] is not None:
            raise ConfigError(
                f"the spec{where} {PartitionSpec(*entries)} cuts the axis of the window, axis {k} of a batch: leave it whole, "
                f"{PartitionSpec(*entries[:k], None, *entries[k + 1 :])}"
            )
        del entries[k]
    return PartitionSpec(*entries)


class StreamCall(LoadCall):
    """One call of `stream` on this rank."""

    def __init__(self, path: Any, mesh: Any, spec: Any, given: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        self._windows: list[Window] = []
        self._scales: list[Any] = []
        self._asked_sampling = dict(sampling)
        self.sampling: Sampling | None = None
        super().__init__("stream", path, mesh, spec, given)

    def _read(self) -> None:
        asked = dict(self._asked_sampling)
        window, scale = asked.pop("window"), asked.pop("scale")
        try:
            self.sampling = Sampling.check(**asked)
            if self.sampling.prefetch:
                _check_threads(self._given.get("comm"))
            tree = self._join()
            if tree.has_patterns:
                raise ConfigError("a stream needs the names of its arrays: pass dataset= with a name, or a dict of names")
            windows = tree.spread("window", window, _is_one_window)
            self._windows = [_read_window(value, where_text(where)) for value, where in zip(windows, tree.where, strict=True)]
            self._scales = tree.spread("scale", scale, lambda value: value is None or isinstance(value, (tuple, list)))
            self._spec, self._mesh = self._of_samples(tree)
        except ConfigError as error:
            self.error = error
            return
        super()._read()

    def _of_samples(self, tree: ArrayTree) -> tuple[Any, Any]:
        """The specs of a batch without the axis of its window, and the meshes."""
        has_batch = self.sampling is not None and self.sampling.batch is not None
        meshes, specs = tree.spread("mesh", self._mesh), tree.spread("spec", self._spec, is_one_spec)
        is_shared = is_one(self._mesh) and is_one_spec(self._spec)
        any_axis = any(isinstance(window, tuple) for window in self._windows)
        made_specs, made_meshes = [], []
        for mesh, spec, window, where in zip(meshes, specs, self._windows, tree.where, strict=True):
            if isinstance(mesh, NamedSharding) and spec is None:
                spec = mesh.spec
            if spec is None:
                spec = PartitionSpec()
            elif not isinstance(spec, PartitionSpec):
                spec = PartitionSpec(*spec) if isinstance(spec, tuple) else PartitionSpec(spec)
            if isinstance(window, tuple) or (is_shared and any_axis):
                spec = _without_window(spec, has_batch, where_text(where))
            if not has_batch:
                spec = PartitionSpec(None, *spec)
            kind = mesh.memory_kind if isinstance(mesh, NamedSharding) else None
            made_specs.append(None)
            made_meshes.append(NamedSharding(mesh_of(mesh), spec, memory_kind=kind) if mesh is not None else mesh)
        return None, tree.build(made_meshes)

    def _describe(self, place: Any, request: Request) -> dict[str, str]:
        told = super()._describe(place, request)
        k = next(k for k, other in enumerate(self.tree.places) if other is place)
        sampling = {} if self.sampling is None else {name: repr(value) for name, value in vars(self.sampling).items()}
        return told | sampling | {"window": repr(self._windows[k]), "scale": _scale_text(self._scales[k])}

    def _selections(self) -> list[Any]:
        """As for a load; and the names of the axes if the stream goes along one by its name."""
        selections = super()._selections()
        if self.sampling is not None and isinstance(self.sampling.along, str):
            selections.append({self.sampling.along: slice(None)})
        return selections

    def plan_file(self, request: Request, info: ArrayInfo, handle: Any, origin: Any = None, where: str = "") -> Any:
        """What is read of an array, and how it lies in its file."""
        options = request.options
        select = options.select
        if isinstance(select, Mapping):
            options = replace(options, select=_positions(select, info))
            request = replace(request, options=options)
        return _Found(request, info, selection_for(options, info), handle, where)

    def make(self, told: Any) -> Any:
        """Plan the stream."""
        found, _ = _Values.split(told)
        arrays = [
            self.plan_file(request, ArrayInfo.from_dict(of[0]), place.path, where=where_text(keys))
            for request, place, keys, of in zip(self.requests, self.tree.places, self.tree.where, found, strict=True)
        ]
        return _Planner(self, arrays).plan()

    def open(self) -> Stream:
        """Plan the stream on all ranks. Collective."""
        if self._begun is None or self.sampling is None:
            raise self.error or ConfigError("a stream needs devices")
        plan: StreamPlan = self._begun.plan(self.find, self.make, lambda plan: repr(plan.fingerprint))
        asked, title = self._begun.asked, f"batches of {plan.arrays[0].info}"
        comm, digest, timeout = self._given.get("comm"), f"{asked.digest:016x}", self.requests[0].options.timeout

        def make_reader(epoch: int, sample: int, n_batches: int | None = None) -> RoundReader:
            where = {"stream": digest, "epoch": str(epoch), "sample": str(sample), "n_batches": str(n_batches)}
            with begin_call(Invocation("stream", title, where), None, comm=comm, timeout=timeout) as call:
                call.settle()
                group = call.group.duplicate(timeout)
            return RoundReader(plan, group, digest, timeout, epoch, sample, n_batches)

        return Stream(plan, make_reader, self.tree.build)


def _check_threads(comm: Any) -> None:
    """Raise ConfigError if a thread of a stream may not call MPI, and would have to."""
    n_ranks = world_rank_and_size()[1] if comm is None else comm.size
    if n_ranks > 1 and thread_level() not in ("", "MULTIPLE"):
        raise ConfigError(
            "prefetch needs an MPI that several threads may call (THREAD_MULTIPLE), and this one was started with "
            f"THREAD_{thread_level()}: leave out mpi4py.rc.thread_level, MPI4PY_RC_THREAD_LEVEL and MPI.Init_thread, or pass "
            "prefetch=0"
        )


def _scale_text(scale: Any) -> str:
    if scale is None:
        return "None"
    return ", ".join(
        f"{np.shape(part)} {hash(np.asarray(part).tobytes()) if np.ndim(part) == 0 else np.asarray(part).sum()!r}"
        for part in scale
    )


@dataclass(frozen=True, eq=False)
class _Found:
    """An array that was found for a leaf."""

    request: Request
    info: ArrayInfo
    selection: Any
    handle: Any
    where: str


class _Planner:
    """Makes the plan of a stream from what was found."""

    def __init__(self, call: StreamCall, found: Sequence[_Found]) -> None:
        if call.sampling is None:
            raise ConfigError("the arguments were not read")
        self._call, self._found, self._sampling = call, found, call.sampling
        self._batch = call.sampling.batch or 1

    def plan(self) -> StreamPlan:
        """The plan."""
        made: dict[tuple[Any, ...], tuple[StreamArray, set[int]]] = {}
        keys = []
        for found, window in zip(self._found, self._call._windows, strict=True):
            request, options = found.request, found.request.options
            key = (
                found.info.path, found.info.dataset, found.selection, request.sharding, options.dtype, options.decode, options.pad
            )  # fmt: skip
            if key not in made:
                made[key] = self._array(found), set()
            made[key][1].update(window if isinstance(window, tuple) else (window,))
            keys.append(key)
        arrays = [replace(array, offsets=tuple(sorted(offsets))) for array, offsets in made.values()]
        numbers = {key: k for k, key in enumerate(made)}
        self._check_steps(arrays)
        order, pool_nbytes = self._order(arrays)
        leaves = [
            self._leaf(found, arrays[numbers[key]], numbers[key], window, scale)
            for found, key, window, scale in zip(self._found, keys, self._call._windows, self._call._scales, strict=True)
        ]
        ranks = self._call.ranks_for(self._found[0].request)
        staging = max(
            self._staging(found, ranks, array) for found, array in zip(self._found, (made[k][0] for k in keys), strict=True)
        )
        plan = StreamPlan(
            arrays=arrays,
            leaves=leaves,
            sample_order=order,
            batch=self._batch,
            has_batch_axis=self._sampling.batch is not None,
            epochs=self._sampling.epochs,
            remainder=self._sampling.remainder,
            pool_nbytes=pool_nbytes,
            n_ranks=ranks.n,
            n_threads=ranks.n_threads,
            staging_nbytes=staging,
            prefetch=self._sampling.prefetch,
            names=tuple(found.where.removeprefix("array ") for found in self._found),
        )
        if not plan.n_batches(plan.n_samples):
            raise ConfigError(
                f"the stream has {plan.n_samples} samples, and no batch of {plan.batch}: pass a smaller batch or window, or "
                "remainder='pad'"
            )
        if self._sampling.remainder == "error" and plan.n_samples % plan.batch:
            raise ConfigError(
                f"{plan.n_samples} samples are {plan.n_samples // plan.batch} batches of {plan.batch} and "
                f"{plan.n_samples % plan.batch} samples more: pass remainder='drop' or 'pad', or another batch"
            )
        return plan

    def _staging(self, found: _Found, ranks: PlannedRanks, array: StreamArray) -> int:
        return _staging_for(found.request, ranks, found.info, array.source)

    def _axis(self, found: _Found) -> int:
        """The stream's axis among those of the selected array."""
        along, info, kept = self._sampling.along, found.info, found.selection.kept
        labels = info.labels
        names = list(getattr(labels, "dims", None) or info.dims or ())
        if isinstance(along, str):
            if along not in names:
                raise ConfigError(
                    f"along is {along!r}, but the axes of {info} are {', '.join(map(repr, names)) or 'not named'}: pass one of "
                    "these, or the number of the axis"
                )
            axis = names.index(along)
        else:
            axis = along + len(info.shape) if along < 0 else along
            if not 0 <= axis < len(info.shape):
                raise ConfigError(f"along is {along}, but {info} has axes 0 to {len(info.shape) - 1}")
        if axis not in kept:
            raise ConfigError(f"select drops axis {axis} of {info}, along which the stream goes: pass a slice")
        return int(kept.index(axis))

    def _array(self, found: _Found) -> StreamArray:
        request, info = found.request, found.info
        ranks = self._call.ranks_for(request)
        decoding = decoding_for(request.options, info)
        source = _source_layout(request.options, info, found.selection, decoding)
        axis, shape = self._axis(found), source.selection.shape
        rest = (*shape[:axis], *shape[axis + 1 :])
        name = f"a batch of {info}"
        cuts = read_spec(request.sharding, 1 + len(rest))[0]
        n_parts = math.prod(tuple(request.sharding.mesh.shape.values())[m] for m in cuts)
        if self._batch % n_parts:
            raise ConfigError(
                f"batch is {self._batch}, but the spec cuts the samples of a batch into {n_parts}: pass a multiple of {n_parts}"
            )
        shards = _lay_out(request, ranks, (self._batch, *rest), source.dtype, name)
        if shards.has_halo:
            raise ConfigError("a stream takes no halo yet: exchange it inside the step, or load the array")
        chunks = source.chunks
        column = chunks.cell[axis] if source.has_chunks else 1
        one = Grid(
            tuple(min(n, column) if k == axis else n for k, n in enumerate(chunks.shape)),
            chunks.cell if source.has_chunks else tuple(1 if k == axis else n for k, n in enumerate(chunks.cell)),
            tuple(0 if k == axis else p for k, p in enumerate(chunks.phase)),
        )
        staging = _staging_for(request, ranks, info, source)
        most = _max_block_nbytes(ranks, staging, 0)
        blocks = plan_blocks(one, source.wide_itemsize, max_nbytes=most, n_owners=1)
        cell = tuple(column if k == axis else c for k, c in enumerate(blocks.cell))
        grid = Grid(chunks.shape, cell, chunks.phase)
        readers = request.options.readers
        n_readers = min(readers, ranks.n) if isinstance(readers, int) else 1 if readers == "root" else ranks.n
        owners = Owners(n_readers)
        held = Shards(chunks.shape, (1,) * len(chunks.shape), np.zeros((1, 1), dtype=np.int64))
        return StreamArray(
            info,
            found.handle,
            request.options,
            source,
            decoding,
            BatchSchedule(grid, axis, shards, ranks.n, owners),
            Schedule(grid, held, source.dtype.itemsize, ranks.n, owners),
            (),
        )

    def _check_steps(self, arrays: Sequence[StreamArray]) -> None:
        lengths = {str(array.info): array.n_steps for array in arrays}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise ConfigError(
                f"the arrays of a stream need the same number of steps: {told}. Pass select= to take the same of each"
            )

    def _order(self, arrays: Sequence[StreamArray]) -> tuple[SampleOrder, int]:
        """The order, and the pool from which it follows."""
        sampling = self._sampling
        first, last = min(array.offsets[0] for array in arrays), max(array.offsets[-1] for array in arrays)
        longest = max(arrays, key=lambda array: array.chunk_steps)
        block = min(
            block_steps(longest.chunk_steps, first, last), -(-longest.n_steps // longest.chunk_steps) * longest.chunk_steps
        )
        start = longest.source.selection.offset[longest.schedule.axis] if longest.source.has_chunks else 0
        step_nbytes = sum({(array.info.path, array.info.dataset): array.step_nbytes for array in arrays}.values())
        block_nbytes, n_steps = block * step_nbytes, longest.n_steps
        pool = sampling.pool
        if isinstance(pool, str):
            pool = min(_MOST_POOL_NBYTES, n_steps * step_nbytes // _SHARE_OF_SELECTION)
            pool = max(pool, 2 * block_nbytes)
        if sampling.shuffle is not None and pool < block_nbytes:
            raise ConfigError(
                f"pool is {format_nbytes(pool)}, less than one block of {block} steps ({format_nbytes(block_nbytes)}), which is "
                f"shuffled as a whole: pass pool='{-(-block_nbytes // (1 << 20))}MiB' or more, or write shorter chunks"
            )
        spread = max(1, pool // max(1, block_nbytes) - 1)
        if pool >= n_steps * step_nbytes:
            spread = 1 << 31
        order = SampleOrder(
            n_steps,
            first,
            last,
            block,
            start % block,
            sampling.shuffle,
            spread,
            crosses_blocks=sampling.border == "reread" or sampling.shuffle is None,
        )
        return order, pool

    def _leaf(self, found: _Found, array: StreamArray, number: int, window: Window, scale: Any) -> Leaf:
        offsets = window if isinstance(window, tuple) else (window,)
        has_axis, sampling = isinstance(window, tuple), self._sampling
        shape, entries = list(array.schedule.shards.shape_global), list(found.request.sharding.spec)
        entries += [None] * (len(shape) - len(entries))
        if has_axis:
            shape.insert(1, len(offsets))
            entries.insert(1, None)
        if sampling.batch is None:
            shape, entries = shape[1:], entries[1:]
        kind = found.request.sharding.memory_kind
        sharding = NamedSharding(found.request.sharding.mesh, PartitionSpec(*entries), memory_kind=kind)
        places = tuple(array.offsets.index(step) for step in offsets)
        dtype = array.source.dtype
        return Leaf(number, places, has_axis, sharding, tuple(shape), dtype, self._scale(scale, array, found))

    def _scale(self, scale: Any, array: StreamArray, found: _Found) -> tuple[Any, Any] | None:
        if scale is None:
            return None
        dtype, rest = array.source.dtype, array.schedule.rest.shape
        where = found.where.removeprefix("array ")
        if dtype.kind not in "fc":
            raise ConfigError(
                f"scale{where} needs floating-point values, but these are {dtype}: pass dtype='float32', or decode=True"
            )
        if len(scale) != 2:
            raise ConfigError(f"scale{where} is {scale!r}; expected a mean and a standard deviation")
        made = []
        for part in scale:
            values = np.asarray(part, dtype=dtype)
            try:
                np.broadcast_to(values, rest)
            except ValueError:
                raise ConfigError(
                    f"scale{where} has an array of shape {values.shape}, which does not fit the axes of a sample, {rest}: give "
                    f"one number, or a shape such as {(rest[0], *(1 for _ in rest[1:])) if rest else ()}"
                ) from None
            made.append(values.reshape((1,) * (len(rest) - values.ndim) + values.shape))
        return made[0], made[1]


def open_stream(path: Any, mesh: Any, spec: Any, given: Mapping[str, Any], sampling: Mapping[str, Any]) -> Stream:
    """Plan a stream. Collective: yes."""
    call = StreamCall(path, mesh, spec, given, sampling)
    with call.begin():
        return call.open()
