"""How does a call of `load` or `plan` come from its arguments to arrays, or to a plan for the caller?

1. `LoadCall` reads the arguments: a tree of arrays, and a `Request` for each.
2. `LoadCall.begin` holds the ranks together until the call ends.
3. `find` looks for the arrays in their files. It runs on one rank, which opens each file once.
4. `make` plans them, on every rank, from what `find` returned. The ranks compare their arguments and plans.
5. A `Loader` loads what is planned; or `hand_out` gives the plan to the caller, who may execute it later.

Calls of `verify` and `scatter` (`given_arrays`) go the same way, with other arguments and another source.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardload.arrays.sharding import devices_per_process
from shardload.comm.group import Invocation
from shardload.comm.launch import rank_of_process
from shardload.comm.store import check_sent
from shardload.engine.call import begin_request
from shardload.errors import ConfigError
from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo, Labels, OnDemand, some
from shardload.formats.contract.format import Source
from shardload.formats.labelling import COORDINATE_NBYTES, SMALL_NBYTES, Labeller, read_labels
from shardload.formats.lookup import Finder, FoundArray, absolute
from shardload.formats.memory import MemorySource
from shardload.jobs.consistency import SINCE_LABELS, check_same_version, check_unchanged
from shardload.jobs.described import selection_of
from shardload.jobs.loading.endpoints import ArrayLoad
from shardload.jobs.loading.execution import Loader, execute
from shardload.jobs.loading.plan import Executor, Plan, TreePlan, describe_job, no_devices
from shardload.jobs.loading.planner import PlannedRanks, plan_array, read_in_turn
from shardload.jobs.loading.request import Request, read_requests
from shardload.jobs.trees import ArrayTree, Place, is_one, is_tree_of_specs, keys_text, naming_errors
from shardload.options import AUTO, OPTIONS, CallOptions
from shardload.planning.region import Region
from shardload.planning.schedule import DIRECT, MODES
from shardload.planning.selection import named_coordinates, needs_coordinates
from shardload.planning.staging import MOST_THREADS, least_together
from shardload.planning.tuning import default_tuning
from shardload.storage.remote import with_store, without_secrets
from shardload.system.garbage import collections_wait
from shardload.units import format_nbytes

_SHARE_OF_STAGING = 4  # values that are sent with the metadata: as read, as sent, as received, and as much again in MPI
_PER_ARRAY = {  # arguments that may differ from array to array
    "path",
    "sharding",
    *(option.name for option in OPTIONS.values() if option.is_per_array),
}


class LoadCall:
    """One call about arrays in files, on this rank: for one array or for a tree of arrays.

    Parameters
    ----------
    kind : str
        The function that was called.
    path, mesh, spec : object
        The arguments as the caller passed them.
    keywords : mapping
        The options of that function, as the caller passed them.

    Attributes
    ----------
    tree : ArrayTree
        The arrays. If the file had to say which arrays there are, `make` replaces it by a tree of them.
    requests : list of Request
        The request of each place of the tree.
    left_out : list of ArrayInfo
        Arrays that are no part of the tree, although a pattern stands for them: they hold no numbers.
    """

    def __init__(self, kind: str, path: Any, mesh: Any, spec: Any, keywords: Mapping[str, Any]) -> None:
        self.kind = kind
        self.tree, self.requests = ArrayTree.join(kind, None), list[Request]()
        self.left_out: list[ArrayInfo] = []
        self._path, self._mesh, self._spec, self._keywords = path, mesh, spec, keywords
        self.call: Any = None  # of all ranks; None for an abstract mesh, of which there is a plan only
        self._planned: dict[tuple[Any, ...], Plan] = {}

    def _join(self) -> ArrayTree:
        """The arrays that the caller names."""
        self._path, storage = with_store(self._path, self._keywords.get("storage"))
        self._keywords = {**self._keywords, "storage": storage}
        return ArrayTree.join(self._path, self._keywords.get("dataset"))

    def _read(self) -> Self:
        """Read the arguments. ConfigError says what is wrong with them."""
        self.tree = self._join()
        self.requests = read_requests(self.tree, self._mesh, self._spec, self._keywords)
        for name in ("processes", "ranks_per_node"):
            if self._keywords.get(name) is not None and not self._is_abstract:
                raise ConfigError(
                    f"{name} is {self._keywords[name]!r}, but the mesh has devices, which say that: leave it out, or plan over "
                    "a jax.sharding.AbstractMesh"
                )
        for request in self.requests:
            devices_per_process(request.sharding.mesh, self._keywords.get("processes"))
        OPTIONS["ranks_per_node"].check(self._keywords.get("ranks_per_node"))
        if self._is_abstract and self.kind != "plan":
            raise ConfigError(
                f"{self.kind} needs a mesh of devices, found an AbstractMesh, as jax.eval_shape and jax.typeof give below "
                "jax.set_mesh: pass a jax.sharding.Mesh, or a sharding over one: NamedSharding(mesh, x.sharding.spec)"
            )
        if self._is_abstract and any(request.sharding.mesh.empty for request in self.requests):
            raise ConfigError(
                "the mesh is empty, as jax.sharding.get_abstract_mesh gives one outside of jax.set_mesh: pass one with axes, "
                "such as jax.sharding.AbstractMesh((4,), ('a',))"
            )
        return self

    @property
    def _is_abstract(self) -> bool:
        meshes = jax.tree_util.tree_leaves(self._mesh, is_leaf=is_one)
        return any(isinstance(getattr(mesh, "mesh", mesh), AbstractMesh) for mesh in meshes)  # or a sharding over one

    # --- all ranks together

    @property
    def options(self) -> CallOptions:
        """The options of the call, which all arrays have."""
        return self.requests[0].options

    @contextmanager
    def begin(self) -> Iterator[Self]:
        """Hold the group of ranks until the call ends. Collective, except for a plan over an abstract mesh."""
        if self.kind == "plan" and self._is_abstract:
            yield self._read()
            return
        comm = self._keywords.get("comm")
        with begin_request(self.kind, self.kind, self._read, comm=comm, process=jax.process_index) as (self.call, _):
            yield self

    def invocation(self, kind: str, title: str) -> Invocation:
        """See `engine.call.begin_request`."""
        path = self._source_text(self.tree.places[0])["path"]
        title = path if path.startswith(kind) else f"{kind} of {path}"
        described = [self._describe(k) for k in range(len(self.requests))]
        if len(described) == 1:
            return Invocation(kind, title, described[0])
        names = [where.removeprefix("array ") for where in self.tree.where]
        title += f" ({len(described)} arrays: {some(names)})"
        shared = {name: text for name, text in described[0].items() if name not in _PER_ARRAY}
        per_array = [{name: text for name, text in texts.items() if name in _PER_ARRAY} for texts in described]
        return Invocation(kind, title, shared, tuple(names), list(zip(self.tree.where, per_array, strict=True)))

    def _describe(self, k: int) -> dict[str, str]:
        """What every rank must pass alike for the k-th array, as text."""
        place = self.tree.places[k]
        return {**self._source_text(place), **self.requests[k].text, "dataset": repr(place.dataset)}

    def _source_text(self, place: Place) -> dict[str, str]:
        """Where the array comes from, as text: the ``"path"``, and other arguments that no `Request` has."""
        return {"path": describe_path(place.path)}

    @cached_property
    def _ranks(self) -> PlannedRanks | None:
        """The ranks that make the call; None for an abstract mesh.

        Raises
        ------
        ConfigError, PeerError
            If MPI and JAX do not see the same processes.
        """
        if self.call is None:
            return None
        group, machine = self.call.group, self.call.group.machine
        ranks = PlannedRanks(group.rank, group.size, rank_of_process(group), has_mpi=group.has_mpi)
        ranks = replace(ranks, n_nodes=machine.n_nodes, n_threads=machine.n_threads, memory_nbytes=machine.memory_nbytes)
        return replace(ranks, n_arrays=len(self.tree.places))

    def ranks_for(self, request: Request) -> PlannedRanks:
        """The ranks that an array is planned for."""
        if self._ranks is not None:
            return self._ranks
        devices_per_rank = devices_per_process(request.sharding.mesh, self._keywords.get("processes"))
        n = request.sharding.mesh.size // devices_per_rank
        n_nodes = -(-n // min(n, self._keywords.get("ranks_per_node") or n))
        ranks = PlannedRanks(0, n, n_nodes=n_nodes, devices_per_rank=devices_per_rank, n_arrays=len(self.tree.places))
        return replace(ranks, n_threads=MOST_THREADS)  # their cores are not known: memory is that of ranks with many

    def plan(self, root: int | None = None) -> list[ArrayLoad]:
        """Run `find` on one rank and `make` on every rank, and check that all ranks plan the same. Collective.

        `root` is the rank that runs `find`, if the ranks have agreed on it (`settle`); by default rank 0.
        """
        with nullcontext() if self.tree.is_single else collections_wait():
            if self.call is None:
                return self.make(self.find())
            loads: list[ArrayLoad] = self.call.plan(self.find, self._make_checked, _describe_loads, root=root)
            return loads

    def _make_checked(self, arrays: Any) -> list[ArrayLoad]:
        """The plans. ConfigError if they send too much through JAX's coordinator, for want of MPI."""
        loads, ranks = self.make(arrays), self._ranks
        if ranks is not None and not ranks.has_mpi and ranks.n_nodes > 1:
            nbytes = sum(load.plan.costs[load.plan.readers].moved_nbytes for load in loads)
            check_sent(self.kind, nbytes, "" if self.kind == "scatter" else ", or pass readers='direct'")
        return loads

    def load(self, root: int | None = None) -> Any:
        """Do `plan`, and load what is planned: the arrays in the structure of the tree. Collective."""
        started = time.perf_counter()
        loads = self.plan(root)
        arrays, _ = Loader(self.call, loads).run(started)
        return self.tree.build(arrays)

    def hand_out(self, loads: list[ArrayLoad]) -> Plan | TreePlan:
        """The plan for the caller, with the executor that can do it later; each array of a tree has one of its own, too."""
        path_types = (str, os.PathLike)  # the working folder may be another one when the plan is executed
        loads = [replace(load, handle=absolute(load.handle)) if isinstance(load.handle, path_types) else load for load in loads]
        plans = [_with_names(load) for load in loads]
        executor: Executor = no_devices
        if self.call is not None:
            agreed, comm = self.call.invocation, self._keywords.get("comm")
            executor = partial(execute, comm, loads, agreed)
            plans = [
                replace(plan, _executor=partial(execute, comm, [load], agreed.also(array=load.where)))
                for load, plan in zip(loads, plans, strict=True)
            ]
        if self.tree.is_single:
            return plans[0]
        where = tuple(keys_text(load.where) for load in loads)
        return TreePlan(self.tree.build(plans), where, tuple(self.left_out), _executor=executor)

    # --- what one rank finds

    def find(self) -> Any:
        """The metadata of all arrays, and the values of small ones if `readers` is "auto".

        With names of axes and coordinates if a selection may name them.
        """
        options, tuning = self.options, default_tuning()
        if self.call is not None and self.call.group.size == 1:  # there is no other rank that would have to open the file
            tuning = replace(tuning, small_nbytes=min(tuning.small_nbytes, tuning.tiny_nbytes))
        most_nbytes = options.staging_nbytes // _SHARE_OF_STAGING
        caps = {name: min(getattr(tuning, name), most_nbytes) for name in ("small_nbytes", "small_total_nbytes")}
        small = replace(tuning, **caps) if self.kind == "load" and options.readers == AUTO else None
        with Finder(options.access, small, keeps_states=not self.tree.is_single, tells=True) as finder:
            return self._find_all(finder)

    @property
    def _selections(self) -> list[Any]:
        """The selections; and, where the file has to say which arrays there are, what the caller passed, a tree of them."""
        trees = [self._keywords.get("select")] if self.tree.has_patterns else []
        return [request.options.select for request in self.requests] + trees

    @property
    def _is_by_name(self) -> bool:
        """True if a selection, or a spec, names axes."""
        is_named = [isinstance(select, Mapping) for select in self._selections]
        is_named += [request.by_name is not None for request in self.requests]
        if self.tree.has_patterns:
            is_named.append(isinstance(self._spec, Mapping) and not is_tree_of_specs(self._spec, ()))
        return any(is_named)

    def _labeller(self, finder: Finder) -> Labeller | None:
        """The reader of names of axes and coordinates; None if neither a selection nor a spec needs them."""
        selections = self._selections
        most_nbytes = COORDINATE_NBYTES if any(map(needs_coordinates, selections)) else SMALL_NBYTES
        return Labeller(finder, most_nbytes, named_coordinates(selections)) if self._is_by_name else None

    def _find_all(self, finder: Finder) -> Any:
        """A `FoundArray` for each place; for a pattern those below its group, by name, and the arrays that are left out."""
        arrays = list[Any]()
        labeller = self._labeller(finder)

        def look(path: Any, select: Any, info: ArrayInfo, source: Source | None) -> tuple[ArrayInfo, Region | None]:
            return look_at(info.labels if labeller is None else labeller.label(path, info, source).labels, select, info)

        if not self.tree.is_single:
            finder.expect((place.path, place.dataset) for place in self.tree.places if not place.is_pattern)
        for place, where, request in zip(self.tree.places, self.tree.where, self.requests, strict=True):
            with naming_errors(where):
                if not place.is_pattern:
                    arrays.append(finder.find(place.path, place.dataset, partial(look, place.path, request.options.select)))
                    continue
                arrays_below, left_out = finder.find_below(place.path, place.group)
                if labeller is not None:
                    arrays_below = [array._replace(info=labeller.label(place.path, array.info)) for array in arrays_below]
                arrays.append(({array.info.dataset: array for array in arrays_below}, left_out))
        for path, before, now in finder.states():  # else the small arrays could be of different versions of the file
            check_unchanged(f"'{path}'", before, now, path, "")
        return arrays

    # --- what every rank plans

    def make(self, arrays: Any) -> list[ArrayLoad]:
        """Plan all arrays from what `find` has found."""
        if self.tree.has_patterns:
            arrays = self._grow(arrays)
        if self.tree.is_single:
            return [self.plan_file(self.requests[0], self.tree.places[0], "", arrays[0])]
        if any(request.by_name for request in self.requests):
            self._check_names([info.dims for info, *_ in arrays])
        loads, n_of_request = list[ArrayLoad](), Counter(map(id, self.requests))
        for request, place, where, array in zip(self.requests, self.tree.places, self.tree.where, arrays, strict=True):
            try:
                with naming_errors(where, str(array.info)):
                    loads.append(self.plan_file(request, place, where, array))
            except ConfigError as error:
                if n_of_request[id(request)] > 1:
                    fix = "and what is asked for counts for several arrays: pass trees, with a value for each"
                    error.args = (f"{error}. Its shape is {array.info.shape}, {fix}",)
                raise
        if len(loads) == 1:
            return loads
        request = self.requests[0]
        ranks = self.ranks_for(request)
        if ranks.n > 1:  # each of many small arrays is read by one rank
            plans = read_in_turn(ranks, [load.plan for load in loads])
            loads = [replace(load, plan=plan) for load, plan in zip(loads, plans, strict=True)]
        return share_staging(request, ranks, loads)

    def plan_file(self, request: Request, place: Place, where: str, array: FoundArray) -> ArrayLoad:
        """Plan the load of an array that `find` has found. Arrays of a kind share a plan."""
        options, info, is_sent = request.options, array.info, array.values is not None
        selection = selection_of(options.select, info)
        begin = None if array.region is None else array.region.start
        values = MemorySource(array.values, info, array.read_in, begin) if array.values is not None else None
        packing = json.dumps(dict(info.packing)) if options.decode else ""  # with the types
        by_name = request.by_name
        dims = () if by_name is None else info.dims
        kind = (info.shape, info.dtype, info.chunks, info.codec, info.shards, info.format, info.is_in_store, packing, dims)
        key = (id(request), is_sent, selection, kind)
        if key not in self._planned:
            if by_name is not None and not self.tree.is_single:  # of several arrays, some may lie along other axes
                request = replace(request, by_name={name: cut for name, cut in by_name.items() if name in info.dims})
            request = request.for_axes(info, [info.dims[axis] for axis in selection.kept])
            modes = (DIRECT,) if is_sent and self._ranks is not None else MODES  # else no rank needs to send any
            self._planned[key] = plan_array(request, self.ranks_for(request), info, selection, modes)
        return ArrayLoad(replace(self._planned[key], info=info), options, place.path, values, where)

    def _check_names(self, dims: Sequence[Sequence[str | None]]) -> None:
        """ConfigError if a spec by names of axes has one that no array has. `dims` are those of each array."""
        axes = list(dict.fromkeys(name for array_dims in dims for name in array_dims if name))
        for request in self.requests:
            for name in request.by_name or ():
                if name not in axes:
                    raise ConfigError(f"the spec {dict(request.by_name or {})} names the axis {name!r}; the arrays have {axes}")

    def _grow(self, arrays_by_place: list[Any]) -> list[Any]:
        """Replace the patterns by their arrays. `arrays_by_place` has what `_find_all` returns for each place."""
        patterns = {k: arrays_by_place[k] for k, place in enumerate(self.tree.places) if place.is_pattern}
        self.left_out = [info for _, left_out in patterns.values() for info in left_out]
        by_place = {id(place): array for place, array in zip(self.tree.places, arrays_by_place, strict=True)}
        tree = self.tree.grow({k: arrays for k, (arrays, _) in patterns.items()})
        requests = read_requests(tree, self._mesh, self._spec, self._keywords)
        for k, place in enumerate(tree.places):
            if place.array is not None and not place.array.info.shape:  # no axis that could be cut: the spec is of the others
                sharding = requests[k].sharding
                uncut = NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
                requests[k] = replace(requests[k], sharding=uncut)
        self.tree, self.requests = tree, requests
        return [by_place[id(place)] if place.array is None else place.array for place in tree.places]


def share_staging(request: Request, ranks: PlannedRanks, loads: list[ArrayLoad]) -> list[ArrayLoad]:
    """The same loads under one staging cap: that of the array that needs most or, if that is "auto", what all need together.

    Raises
    ------
    ConfigError
        If they do not fit under it together. (Each fits alone.)
    """
    layouts = {id(load.layout): load.layout for load in loads}.values()
    needed = least_together([(layout.schedule, layout.source) for layout in layouts])
    reason = f"these {len(layouts)} arrays share their staging buffers, which takes {format_nbytes(needed)}"
    cap = request.options.staging_cap(needed, reason, memory_nbytes=ranks.memory_nbytes, fix=", or load them one by one")
    staging_nbytes = max(cap, *(load.plan.staging_nbytes for load in loads))
    return [replace(load, plan=replace(load.plan, staging_nbytes=staging_nbytes)) for load in loads]


def _describe_loads(loads: Sequence[ArrayLoad]) -> str:
    """All plans as text. Arrays of a kind share theirs."""
    texts = {id(load.layout): describe_job(load.plan) for load in {id(load.layout): load for load in loads}.values()}
    return "; ".join(texts[id(load.layout)] for load in loads)


def _with_names(load: ArrayLoad) -> Plan:
    """The plan, whose `info` reads names of axes and coordinates from the file when they are first looked at."""
    info = load.info
    if isinstance(info.labels, Labels) and not info.labels.is_brief:
        return load.plan
    brief = info.labels if isinstance(info.labels, Labels) else None
    access = load.options.access
    labels = OnDemand(partial(_read_names, brief), load.handle, info, access, brief)
    return replace(load.plan, info=replace(info, labels=labels))


def _read_names(brief: Labels | None, handle: Any, info: ArrayInfo, access: Access, labeller: Labeller | None) -> Labels:
    """The labels of an array, of the same version of the file as those in which its selection was looked up."""
    labels = read_labels(handle, info, access, labeller)
    if brief is not None:
        check_same_version(str(info), brief.read_in, labels.read_in, info, SINCE_LABELS)
    return labels


def look_at(labels: Any, select: Any, info: ArrayInfo, _: Source | None = None) -> tuple[ArrayInfo, Region | None]:
    """The metadata of an array with its labels, and the region of a selection; None if it has none (`make` then says why)."""
    info = replace(info, labels=labels)
    if select is None:
        return info, Region.whole(info.shape)
    try:
        return info, selection_of(select, info).region
    except ConfigError:
        return info, None


def describe_path(path: Any) -> str:
    """A path or an open array as ranks compare it, and as messages name it."""
    if isinstance(path, (str, os.PathLike)):
        return repr(without_secrets(os.path.expanduser(os.fspath(path))))
    # An open array: its name in the file is enough, because the file's name may differ from rank to rank.
    kind = "NumPy array" if isinstance(path, np.ndarray) else type(path).__name__
    return f"an open {kind} named {getattr(path, 'name', None)!r}"
