"""How does a call of `stream` come from its arguments to a plan? In the steps of a load, with batches in place of arrays.

1. The arguments are read as those of a load.
2. Rank 0 finds the arrays, with the names of their axes and a checksum of some values.
3. The spec is that of a batch; the axes of a window and of a stack, which are never cut, are taken out of it, so that the
   samples and the other axes of the array are left.
4. Every rank makes the same `StreamPlan`: leaves that name the same array, in one dtype, read it once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardload.arrays.sharding import spec_text
from shardload.comm.group import Invocation
from shardload.comm.mpi import check_threads
from shardload.engine.call import begin_call
from shardload.errors import ConfigError, SourceError, is_unread
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.labelling import COORDINATE_NBYTES, Labeller
from shardload.formats.lookup import Finder, absolute, open_source
from shardload.jobs.consistency import State, checksum_of_samples
from shardload.jobs.described import selection_of
from shardload.jobs.loading.call import LoadCall, look_at
from shardload.jobs.loading.execution import warn_of_packed
from shardload.jobs.loading.request import Request
from shardload.jobs.streaming.plan import OF_LEAVES, Sampling, StreamPlan, file_of
from shardload.jobs.streaming.planner import (
    IGNORE,
    SAMPLES,
    STACK,
    WINDOW,
    LeafRequest,
    StreamPlanner,
    offsets_of,
    stream_axis,
)
from shardload.jobs.streaming.reader import RoundReader
from shardload.jobs.streaming.stream import Stream
from shardload.jobs.trees import NEEDED, ArrayTree, is_one, is_one_spec, naming_errors
from shardload.options import FILE, FULL, OPTIONS
from shardload.planning.region import Grid, Region
from shardload.planning.schedule import DIRECT
from shardload.planning.selection import Selection, named_coordinates

_Contents = tuple[int | None, State]


class StreamCall(LoadCall):
    """One call of `stream` on this rank."""

    sampling: Sampling

    def __init__(self, path: Any, mesh: Any, spec: Any, keywords: Mapping[str, Any]) -> None:
        self._of_leaves: list[dict[str, Any]] = []
        self._stacks: list[tuple[str, list[int]]] = []
        super().__init__("stream", path, mesh, spec, keywords)

    def _join(self) -> ArrayTree:
        self.sampling = Sampling.check(self._keywords)
        if self.sampling.prefetch:
            check_threads(self._keywords["comm"], "prefetch", "prefetch=0")
        tree = super()._join()
        if tree.has_patterns:
            raise ConfigError("a stream needs the names of its arrays: pass dataset= with a name, or a dict of names")
        self._of_leaves, self._stacks = self._spread(tree), self._read_stacks(tree)
        self._refuse_what_only_a_load_does()
        return tree

    def _spread(self, tree: ArrayTree) -> list[dict[str, Any]]:
        """The options that each array of a batch has for itself, checked."""
        of_leaves: list[dict[str, Any]] = [{} for _ in tree.places]
        for option in map(OPTIONS.__getitem__, OF_LEAVES):
            default = option.default if option.name == "window" else NEEDED  # values that are not scaled would not be seen
            values = tree.spread(option.name, self._keywords[option.name], option.is_one or is_one, default=default)
            for checked, value, where in zip(of_leaves, values, tree.where, strict=True):
                with naming_errors(where):
                    checked[option.name] = option.check(value)
        return of_leaves

    def _read_stacks(self, tree: ArrayTree) -> list[tuple[str, list[int]]]:
        """The axis of each stack, and the numbers of its leaves."""
        stack = self._keywords["stack"]
        for name in tree.spread("stack", stack):
            OPTIONS["stack"].check(name)
        structure: Any
        names, structure = jax.tree_util.tree_flatten(stack, is_leaf=is_one)
        leaves = map(jax.tree_util.tree_leaves, structure.flatten_up_to(tree.build(range(len(tree.places)))))
        return [(name, numbers) for name, numbers in zip(names, leaves, strict=True) if name is not None]

    def _build(self, arrays: list[Any]) -> Any:
        """A batch, of an array for each leaf; those of a stack are the same."""

        def of_stack(name: str | None, arrays: Any) -> Any:
            return arrays if name is None else jax.tree_util.tree_leaves(arrays)[0]

        return jax.tree_util.tree_map(of_stack, self._keywords["stack"], self.tree.build(arrays), is_leaf=is_one)

    def _refuse_what_only_a_load_does(self) -> None:
        for name, values in (("verify", (FILE, FULL)), ("readers", (DIRECT,))):
            if self._keywords[name] in values:
                raise ConfigError(
                    f"{name} is {self._keywords[name]!r}, but in a stream each chunk is read once, for all ranks: pass "
                    "verify='index' or 'checksum', readers='auto', 'root' or a number. shardload.verify compares arrays of a "
                    "batch with the file"
                )

    def _describe(self, k: int) -> dict[str, str]:
        """See `LoadCall`."""
        options = {**vars(self.sampling), **self._of_leaves[k], "stack": self._keywords["stack"]}
        texts = {name: text(value) for name, value in options.items() if (text := OPTIONS[name].text) is not None}
        return super()._describe(k) | texts

    def _labeller(self, finder: Finder) -> Labeller | None:
        """As for a load; and the name of the stream's axis, with its coordinate if windows may reach over a gap in it, or the
        steps of several arrays may be different ones.
        """
        along, names = self.sampling.along, named_coordinates(self._selections)
        steps = set(chain.from_iterable(offsets_of(options["window"]) for options in self._of_leaves))
        looks_at_steps = (len(steps) > 1 or len(self._of_leaves) > 1) and self.sampling.gaps != IGNORE
        if not (looks_at_steps or isinstance(along, str) or self._stacks or self._is_by_name):
            return None
        return Labeller(finder, COORDINATE_NBYTES, {*names, *([along] if looks_at_steps else ())})

    def _find_all(self, finder: Finder) -> Any:
        """See `LoadCall`; and a checksum of some values of each array, which tells its file from others, and its state."""
        arrays = super()._find_all(finder)
        contents: dict[tuple[str, str], _Contents] = {}
        names = [(file_of(place.path, info), info.dataset) for (info, *_), place in zip(arrays, self.tree.places, strict=True)]
        for name, (info, *_), place, request in zip(names, arrays, self.tree.places, self.requests, strict=True):
            if info.refused is None and name not in contents:
                contents[name] = _contents_of(place.path, info, request)
        return [(info, contents.get(name, (None, None))) for name, (info, *_) in zip(names, arrays, strict=True)]

    def _leaf_request(self, k: int, info: ArrayInfo, contents: _Contents) -> LeafRequest:
        """What the k-th leaf asks of its array."""
        request, place, options = self.requests[k], self.tree.places[k], self._of_leaves[k]
        selection, where = selection_of(request.options.select, info), self.tree.where[k]
        axis = stream_axis(self.sampling.along, info, selection)
        stack = next((name for name, leaves in self._stacks if k in leaves), None)
        has = {
            SAMPLES: self.sampling.batch is not None,
            WINDOW: isinstance(options["window"], tuple),
            STACK: stack is not None and stack not in info.dims,
        }
        leading = tuple(name for name in has if has[name])
        spec = self._spec_of(request, info, selection, axis, leading)
        of_samples = _spec_of_samples(spec, leading, len(leading) + len(selection.kept) - 1, where)
        sharding = NamedSharding(request.sharding.mesh, of_samples, memory_kind=request.sharding.memory_kind)
        request = replace(request, sharding=sharding, by_name=None)
        # The working folder may be another one when batches are read.
        handle = absolute(place.path) if isinstance(place.path, (str, os.PathLike)) else place.path
        return LeafRequest(request, info, selection, axis, handle, where, spec, leading, *contents, **options)

    def _spec_of(
        self, request: Request, info: ArrayInfo, selection: Selection, axis: int, leading: tuple[str, ...]
    ) -> PartitionSpec:
        """The spec of a leaf of a batch. By names of axes, that of the stream's axis cuts the samples."""
        has_batch = SAMPLES in leading
        if request.by_name is None:
            spec = [*request.sharding.spec]
            is_shared = is_one(self._mesh) and is_one_spec(self._spec)
            if is_shared and WINDOW not in leading and any(isinstance(each["window"], tuple) for each in self._of_leaves):
                del spec[has_batch : has_batch + 1]  # it has an entry for the windows of other leaves
            return PartitionSpec(*spec)
        axes = [info.dims[axis] for axis in selection.kept]
        entries = [*request.for_axes(info, axes).sharding.spec]
        entries += [None] * (len(axes) - len(entries))
        of_samples = entries.pop(axis)
        if of_samples is not None and not has_batch:
            raise ConfigError(
                f"batch is None, so there is no axis of samples that the spec could cut along {self.sampling.along!r}: "
                "pass batch="
            )
        return PartitionSpec(*(of_samples if name == SAMPLES else None for name in leading), *entries)

    def _make_plan(self, arrays: Any) -> StreamPlan:
        """The plan, from what rank 0 has found."""
        leaves = []
        for k, (info, contents) in enumerate(arrays):
            with naming_errors(self.tree.where[k]):
                leaves.append(self._leaf_request(k, info, contents))
        return StreamPlanner(self.sampling, leaves, self.ranks_for(self.requests[0]), self._stacks).plan()

    def open(self) -> Stream:
        """Plan the stream on all ranks. Collective."""
        plan: StreamPlan = self.call.plan(self.find, self._make_plan, lambda plan: repr(plan.fingerprint))
        warn_of_packed([(str(array.info), array.info, array.options) for array in plan.arrays], self.call.group.rank)
        title, digest = f"batches of {plan.arrays[0].info}", f"{self.call.invocation.digest:016x}"
        comm, timeout = self._keywords["comm"], self.options.timeout

        def make_reader(epoch: int, sample: int, n_batches: int | None = None) -> RoundReader:
            where = {"stream": digest, "epoch": str(epoch), "sample": str(sample), "n_batches": str(n_batches)}
            with begin_call(Invocation("stream", title, where), comm=comm, timeout=timeout) as call:
                call.settle()
                group = call.group.duplicate()
            return RoundReader(plan, group, digest, timeout, epoch, sample, n_batches)

        return Stream(plan, make_reader, self._build)


def _spec_of_samples(spec: PartitionSpec, leading: tuple[str, ...], ndim: int, where: str) -> PartitionSpec:
    """The spec of what is read for a batch of `ndim` axes: that of its samples, then those of the axes of a step of the array.

    ConfigError if it cuts another one of the leading axes.
    """
    entries = [*spec]
    for axis, name in enumerate(leading):
        if name != SAMPLES and any(entries[axis : axis + 1]):
            n_left_out = 0 if len(entries) < ndim else 1  # else the caller has not counted this axis
            to_pass = PartitionSpec(*entries[:axis], None, *entries[axis + n_left_out :])
            raise ConfigError(
                f"the spec{where.removeprefix('array ')} {spec_text(spec)} cuts {name}, axis {axis} of a batch, which stays "
                f"whole: pass {spec_text(to_pass)}"
            )
    of_samples = entries[0] if entries and SAMPLES in leading else None
    entries = [of_samples, *entries[len(leading) :]]
    while entries and entries[-1] is None:  # so that leaves which are cut in the same way are read together
        entries.pop()
    return PartitionSpec(*entries)


def _contents_of(handle: Any, info: ArrayInfo, request: Request) -> _Contents:
    """A checksum of selected values in at most two chunks, and the state of the file. Of a file in a store only where those are
    was found.

    The checksum is None if they are damaged: the stream says so when it comes to them. What a busy store or a device could not
    read just now is an error: a state without the checksum would not go on later, when it can be read.
    """
    region = look_at(info.labels, request.options.select, info)[1] or Region.whole(info.shape)
    chunks = None
    if info.chunks is not None:
        phase = tuple(start % n for start, n in zip(region.start, info.chunks, strict=True))
        chunks = Grid(region.shape, info.chunks, phase)
    selection = Selection(region, tuple(range(len(info.shape))))
    source = open_source(handle, info.dataset, request.options.access, info)
    try:
        return checksum_of_samples(source, selection, chunks, 2), source.opened_in
    except SourceError as error:
        if is_unread(error):
            raise
        return None, source.opened_in
    finally:
        source.close()
