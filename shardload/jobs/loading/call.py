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
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardload.comm.group import Invocation
from shardload.comm.launch import rank_of_process
from shardload.comm.store import check_sent
from shardload.engine.call import Call, begin_call, unforeseen
from shardload.errors import ConfigError
from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo, Labels, OnDemand
from shardload.formats.contract.format import Source
from shardload.formats.labelling import SMALL_NBYTES, Labeller, read_labels
from shardload.formats.lookup import Finder, FoundArray, absolute
from shardload.formats.memory import MemorySource
from shardload.jobs.consistency import check_names, check_unchanged
from shardload.jobs.loading.endpoints import ArrayLoad
from shardload.jobs.loading.execution import Loader, execute
from shardload.jobs.loading.plan import Executor, Plan, TreePlan, describe_job
from shardload.jobs.loading.planner import PlannedRanks, plan_array, read_in_turn, selection_of
from shardload.jobs.loading.request import Request, mesh_of, read_requests
from shardload.jobs.trees import ArrayTree, Place, is_one, keys_text, naming_errors, where_text
from shardload.options import AUTO, OPTIONS, TIMEOUT, CallOptions, Options
from shardload.planning.region import Region
from shardload.planning.schedule import DIRECT, MODES
from shardload.planning.selection import (
    Selection,
    named_coordinates,
    needs_coordinates,
)
from shardload.planning.staging import least_together
from shardload.planning.tuning import default_tuning
from shardload.storage.remote import with_store, without_secrets
from shardload.system.garbage import collections_wait
from shardload.units import format_nbytes

SEARCHED_NBYTES = 1 << 24  # of a coordinate in which a selection is searched
_SHARE_OF_STAGING = 4  # values that are sent with the metadata: as read, as sent, as received, and as much again in MPI
_OWN_NAMES = {
    "path",
    "sharding",
    *(option.name for option in OPTIONS.values() if option.is_per_array),
}  # may differ from array to array
_MOST_TOLD = 8  # arrays in a message


class LoadCall:
    """One call about arrays in files, on this rank: for one array or for a tree of arrays.

    Parameters
    ----------
    kind : str
        The function that was called.
    path, mesh, spec : object
        The arguments as the caller passed them.
    given : mapping
        The options of that function, as the caller passed them.

    Attributes
    ----------
    tree : ArrayTree
        The arrays. If the file had to say which arrays there are, `make` replaces it by a tree of them.
    requests : list of Request
        What is asked of each place of the tree; empty if `error` says what is wrong.
    error : ConfigError or None
        What is wrong with the arguments on this rank.
    left_out : list of ArrayInfo
        Arrays that are no part of the tree, although a pattern stands for them: they hold no numbers.
    """

    def __init__(self, kind: str, path: Any, mesh: Any, spec: Any, given: Mapping[str, Any]) -> None:
        self.kind = kind
        self.tree, self.requests = ArrayTree.join(kind, None), list[Request]()
        self.error: ConfigError | None = None
        self.left_out: list[ArrayInfo] = []
        self._path, self._mesh, self._spec, self._given = path, mesh, spec, given
        self._tuning = default_tuning()
        self._begun: Call | None = None
        self._planned: dict[tuple[Any, ...], tuple[Plan, Options]] = {}
        self._is_abstract = False
        self._read()

    def _join(self) -> ArrayTree:
        """The arrays that the caller names."""
        self._path, storage = with_store(self._path, self._given.get("storage"))
        self._given = {**self._given, "storage": storage}
        return ArrayTree.join(self._path, self._given.get("dataset"))

    def _read(self) -> None:
        """Read the arguments. What is wrong with them is kept, because the other ranks wait for this one."""
        try:
            tree = self._join()
            meshes = [mesh_of(mesh) for mesh in jax.tree_util.tree_leaves(self._mesh, is_leaf=is_one)]
            self._is_abstract = any(isinstance(mesh, AbstractMesh) for mesh in meshes)
            requests = read_requests(tree, self._mesh, self._spec, self._given)
            per_node = OPTIONS["ranks_per_node"].check(self._given.get("ranks_per_node"))
            if per_node is not None and not self._is_abstract:
                raise ConfigError(
                    f"ranks_per_node is {per_node!r}, but the mesh has devices, and the job knows its nodes: leave "
                    "it out, or plan over a jax.sharding.AbstractMesh"
                )
            self.tree, self.requests = tree, requests
        except ConfigError as error:
            self.error = error
        except Exception as error:
            self.error = unforeseen(error)

    # --- all ranks together

    @property
    def _options(self) -> CallOptions:
        """The options of the call, which all arrays have."""
        return self.requests[0].options

    @contextmanager
    def begin(self) -> Iterator[Self]:
        """Hold the group of ranks until the call ends. Collective, except for a plan over an abstract mesh."""
        if self._is_abstract and self.kind == "plan":
            if self.error is not None:
                raise self.error
            yield self
            return
        if self._is_abstract and self.error is None:
            self.error = ConfigError(f"{self.kind} needs a mesh of devices, found an AbstractMesh: pass a jax.sharding.Mesh")
        asked = self._invocation()
        timeout = self._options.timeout if self.requests else TIMEOUT
        how: dict[str, Any] = {"comm": self._given.get("comm"), "timeout": timeout, "process": jax.process_index}
        with begin_call(asked, self.error, watched_as=self._what(self.tree.places[0])["path"], **how) as begun:
            self._begun = begun
            yield self

    def _invocation(self) -> Invocation:
        """What the ranks compare. If the arguments are wrong, the error is what they agree on."""
        path = self._what(self.tree.places[0])["path"]
        title = path if path.startswith(self.kind) else f"{self.kind} of {path}"
        if self.error is not None:
            return Invocation(self.kind, title, {})
        told = [self._describe(place, request) for place, request in zip(self.tree.places, self.requests, strict=True)]
        if len(told) == 1:
            return Invocation(self.kind, title, told[0])
        where = [where_text(keys) for keys in self.tree.where]
        names = [text.removeprefix("array ") for text in where]
        title += f" ({len(told)} arrays: {', '.join(names[:_MOST_TOLD])}{', ...' if len(names) > _MOST_TOLD else ''})"
        shared = {name: text for name, text in told[0].items() if name not in _OWN_NAMES}
        own = [{name: text for name, text in texts.items() if name in _OWN_NAMES} for texts in told]
        return Invocation(self.kind, title, shared, tuple(names), list(zip(where, own, strict=True)))

    def _describe(self, place: Place, request: Request) -> dict[str, str]:
        """What every rank must pass alike for an array, as text."""
        return {**self._what(place), **request.text, "dataset": repr(place.dataset)}

    def _what(self, place: Place) -> dict[str, str]:
        """The arguments that no `Request` has, as text; ``"path"`` first."""
        return {"path": describe_path(place.path)}

    @cached_property
    def _ranks(self) -> PlannedRanks | None:
        """The ranks that make the call; None for an abstract mesh.

        Raises
        ------
        ConfigError, PeerError
            If MPI and JAX do not see the same processes.
        """
        if self._begun is None:
            return None
        group, machine = self._begun.group, self._begun.group.machine
        on_machine = (machine.n_nodes, machine.n_threads, machine.memory_nbytes)
        return PlannedRanks(
            group.rank, group.size, rank_of_process(group), *on_machine, has_mpi=group.has_mpi, tuning=self._tuning
        )

    def ranks_for(self, request: Request) -> PlannedRanks:
        """The ranks that an array is planned for."""
        if self._ranks is not None:
            return self._ranks
        n = request.sharding.mesh.size // request.devices_per_rank
        n_nodes = -(-n // min(n, self._given.get("ranks_per_node") or n))
        return PlannedRanks(0, n, n_nodes=n_nodes, devices_per_rank=request.devices_per_rank, tuning=self._tuning)

    def plan(self, root: int | None = None) -> list[ArrayLoad]:
        """Run `find` on one rank and `make` on every rank, and check that all ranks plan the same. Collective.

        `root` is the rank that runs `find`, if the ranks have agreed on it (`settle`); by default rank 0.
        """
        with collections_wait(not self.tree.is_single):
            if self._begun is None:
                return self.make(self.find())
            return self._begun.plan(self.find, self._make_checked, _describe_loads, root=root)

    def _make_checked(self, told: Any) -> list[ArrayLoad]:
        """The plans. ConfigError if they send too much through JAX's coordinator, for want of MPI."""
        loads, ranks = self.make(told), self._ranks
        if ranks is not None and not ranks.has_mpi and ranks.n_nodes > 1:
            nbytes = sum(load.plan.costs[load.plan.readers].moved_nbytes for load in loads)
            check_sent(self.kind, nbytes, "" if self.kind == "scatter" else ", or pass readers='direct'")
        return loads

    def load(self, root: int | None = None) -> Any:
        """Do `plan`, and load what is planned: the arrays in the structure of the tree. Collective."""
        started = time.perf_counter()
        loads = self.plan(root)
        arrays, _ = self.loader(loads).run(started)
        return self.tree.build(arrays)

    def loader(self, loads: list[ArrayLoad]) -> Loader:
        """What loads the planned arrays, inside this call."""
        return Loader(self.call.group, loads, self.call.asked, self._tuning)

    @property
    def call(self) -> Call:
        """This call of all ranks. Not for an abstract mesh, of which there is a plan only."""
        if self._begun is None:
            raise ConfigError("there are no ranks that could load anything")
        return self._begun

    def hand_out(self, loads: list[ArrayLoad]) -> Plan | TreePlan:
        """The plan for the caller, with the executor that can do it later; each array of a tree has one of its own, too."""
        is_path = (str, os.PathLike)  # the working folder may be another one when the plan is executed
        loads = [replace(load, handle=absolute(load.handle)) if isinstance(load.handle, is_path) else load for load in loads]
        plans = [_with_names(load) for load in loads]
        run: Executor | None = None
        if self._begun is not None:
            agreed = self._begun.asked
            comm = self._given.get("comm")
            run = partial(execute, comm, loads, agreed, self._tuning)
            plans = [
                replace(plan, _executor=partial(execute, comm, [load], agreed.also(array=load.where), self._tuning))
                for load, plan in zip(loads, plans, strict=True)
            ]
        if self.tree.is_single:
            return plans[0]
        where = tuple(keys_text(load.where) for load in loads)
        return TreePlan(self.tree.build(plans), where, tuple(self.left_out), _executor=run)

    # --- what one rank finds

    def find(self) -> bytes:
        """The metadata of all arrays, and the values of small ones if `readers` is "auto", as parts of one message.

        With names of axes and coordinates if a selection may name them.
        """
        options, tuning = self._options, self._tuning
        if self._begun is not None and self._begun.group.size == 1:  # there is no other rank that would have to open the file
            tuning = replace(tuning, small_nbytes=min(tuning.small_nbytes, tuning.tiny_nbytes))
        most_nbytes = options.staging_nbytes // _SHARE_OF_STAGING
        caps = {name: min(getattr(tuning, name), most_nbytes) for name in ("small_nbytes", "small_chunk_nbytes")}
        is_read = self.kind == "load" and options.readers == AUTO
        how = (replace(tuning, **caps) if is_read else None, most_nbytes, not self.tree.is_single)
        with Finder(options.access, *how, tells=True) as finder:
            return pickle.dumps(self._find_all(finder), protocol=5)  # with fewer copies of values

    def _labeller(self, finder: Finder) -> Labeller | None:
        """What reads names of axes, and coordinates, if a selection needs them."""
        selections = [*(request.options.select for request in self.requests), self._given.get("select")]
        room = SEARCHED_NBYTES if any(map(needs_coordinates, selections)) else SMALL_NBYTES
        is_named = any(isinstance(select, Mapping) for select in selections)
        is_named = is_named or any(request.by_name is not None for request in self.requests)
        return Labeller(finder, room, named_coordinates(selections)) if is_named else None

    def _find_all(self, finder: Finder) -> Any:
        """What was found of each place: a `FoundArray`, or of a pattern all of them, by their names, and what is left out."""
        found = list[Any]()
        labeller = self._labeller(finder)
        for place, keys, request in zip(self.tree.places, self.tree.where, self.requests, strict=True):
            with naming_errors(where_text(keys)):
                if not place.is_pattern:
                    look = partial(_look, labeller, place.path, request.options.select)
                    found.append(finder.find(place.path, place.dataset, look))
                    continue
                below, left_out = finder.find_below(place.path, place.group)
                if labeller is not None:
                    below = [array._replace(info=labeller.label(place.path, array.info)) for array in below]
                found.append(({array.info.dataset: array for array in below}, left_out))
        for path, before, now in finder.states():  # else the small arrays could be of different versions of the file
            check_unchanged(f"'{path}'", before, now, path, "")
        return found

    # --- what every rank plans

    def make(self, told: Any) -> list[ArrayLoad]:
        """Plan all arrays from their metadata."""
        found = pickle.loads(told)  # of this job's rank 0, never of a file
        if self.tree.has_patterns:
            found = self._grow(found)
        if self.tree.is_single:
            return [self.plan_file(self.requests[0], self.tree.places[0], "", found[0])]
        self._tuning = self._tuning.for_many(len(found))
        if any(request.by_name for request in self.requests):
            self._check_names([info.dims for info, *_ in found])
        loads: list[ArrayLoad] = []
        for k, (request, place, keys) in enumerate(zip(self.requests, self.tree.places, self.tree.where, strict=True)):
            where = where_text(keys)
            try:
                with naming_errors(where):
                    loads.append(self.plan_file(request, place, where, found[k]))
            except ConfigError as error:
                self._explain(error, k, found[k].info)
                raise
        if len(loads) == 1:
            return loads
        request = self.requests[0]
        ranks = self.ranks_for(request)
        if self._ranks is not None and ranks.n > 1:  # each of many small arrays is read by one rank
            plans = read_in_turn(ranks, [load.plan for load in loads])
            pairs = zip(loads, plans, strict=True)
            loads = [load if load.plan is plan else replace(load, plan=plan) for load, plan in pairs]
        return share_staging(request, ranks, loads)

    def plan_file(self, request: Request, place: Place, where: str, found: FoundArray) -> ArrayLoad:
        """Plan the load of an array that `find` has found. Arrays of a kind share a plan."""
        options, info, is_sent = request.options, found.info, found.values is not None
        begin = None if found.region is None else found.region.start
        values = MemorySource(found.values, info, found.read_in, begin) if found.values is not None else None
        kind: tuple[Any, ...] = (info.shape, info.dtype, info.chunks, info.codec, info.shards, info.format)
        if options.decode:
            kind = (*kind, json.dumps(dict(info.packing)))  # with the types
        if isinstance(options.select, Mapping):
            kind = (*kind, selection_of(options.select, info))
        key = (id(request), is_sent, None if request.by_name is None else info.dims, *kind)
        if key not in self._planned:
            selection = selection_of(options.select, info)
            mine = self._for_axes(request, info, selection)
            modes = (DIRECT,) if is_sent and self._ranks is not None else MODES  # else no rank needs to send any
            plan = plan_array(mine, self.ranks_for(request), info, selection, modes)
            if options.staging_nbytes != plan.staging_nbytes:
                options = replace(options, staging=plan.staging_nbytes)
            self._planned[key] = plan, options
            return ArrayLoad(plan, options, place.path, values, where)
        plan, options = self._planned[key]
        return ArrayLoad(replace(plan, info=info), options, place.path, values, where)

    def _check_names(self, dims: Sequence[Sequence[str | None]]) -> None:
        """ConfigError if a spec by names of axes has one that no array has. `dims` are those of each array."""
        there = list(dict.fromkeys(name for names in dims for name in names if name))
        for request in self.requests:
            for name in request.by_name or ():
                if name not in there:
                    raise ConfigError(
                        f"the spec {dict(request.by_name or {})} names the axis {name!r}; the arrays have {there}"
                    )

    def _for_axes(self, request: Request, info: ArrayInfo, selection: Selection) -> Request:
        """The request, with a spec by names of axes for the axes of this array."""
        if request.by_name is None:
            return request
        if not self.tree.is_single:  # of several arrays, some may lie along other axes
            request = replace(request, by_name={name: cut for name, cut in request.by_name.items() if name in info.dims})
        return request.for_axes(info, [info.dims[axis] for axis in selection.kept])

    def _grow(self, found: list[Any]) -> list[Any]:
        """Replace the patterns by the arrays that were found."""
        patterns = {k: below for k, (place, below) in enumerate(zip(self.tree.places, found, strict=True)) if place.is_pattern}
        self.left_out = [info for _, left_out in patterns.values() for info in left_out]
        by_place = {id(place): array for place, array in zip(self.tree.places, found, strict=True)}
        tree = self.tree.grow({k: arrays for k, (arrays, _) in patterns.items()})
        requests = read_requests(tree, self._mesh, self._spec, self._given)
        for k, place in enumerate(tree.places):
            if place.found is not None and not place.found.info.shape:  # no axis that could be cut: the spec is of the others
                requests[k] = _whole(requests[k])
        grown = [by_place[id(place)] if place.found is None else place.found for place in tree.places]
        self.tree, self.requests = tree, requests
        return grown

    def _explain(self, error: ConfigError, k: int, info: ArrayInfo) -> None:
        """Add to the error about the k-th array, which cannot be planned, what it is called, and what it shares with others."""
        text, where = str(error), where_text(self.tree.where[k])
        if str(info) not in text:
            text = text.replace(f"{where}:", f"{where}, {info}:", 1)
        is_shared = sum(request is self.requests[k] for request in self.requests) > 1
        if is_shared and ("select names the axis" in text or "P(" in text):
            what = "spec" if "P(" in text else "selection"
            text += f". Its shape is {info.shape}, and the {what} counts for several arrays: pass a tree of them, one for each"
        error.args = (text,)


def _whole(request: Request) -> Request:
    """A copy by which each device gets the whole array."""
    sharding = request.sharding
    return replace(request, sharding=NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind))


def share_staging(request: Request, ranks: PlannedRanks, loads: list[ArrayLoad]) -> list[ArrayLoad]:
    """The same loads under one staging cap: that of the array that needs most or, if that is "auto", what all need together.

    Raises
    ------
    ConfigError
        If they do not fit under it together. (Each fits alone.)
    """
    staging = max(load.options.staging_nbytes for load in loads)
    layouts = {id(load.layout): load.layout for load in loads}.values()
    needed = least_together([(layout.schedule, layout.source) for layout in layouts])
    told = f"these {len(layouts)} arrays share their staging buffers, which takes {format_nbytes(needed)}"
    cap = request.options.staging_cap(needed, told, room=ranks.staging_room_nbytes, fix=", or load them one by one")
    staging, shared = max(staging, cap), list[ArrayLoad]()
    for load in loads:
        if staging != load.options.staging_nbytes:
            plan = replace(load.plan, staging_nbytes=staging, staging_is_raised=True)
            load = replace(load, plan=plan, options=replace(load.options, staging=staging))
        shared.append(load)
    return shared


def _describe_loads(loads: Sequence[ArrayLoad]) -> str:
    """All plans as text. Arrays of a kind share theirs; neighbours of the same text are counted."""
    plans = {id(load.layout): load.plan for load in loads}
    texts = {key: describe_job(plan) for key, plan in plans.items()}
    counted = [(text, len(list(same))) for text, same in groupby(texts[id(load.layout)] for load in loads)]
    return "; ".join(f"{n} times {text}" if n > 1 else text for text, n in counted)


def _with_names(load: ArrayLoad) -> Plan:
    """The plan, whose `info` reads names of axes and coordinates from the file when they are first looked at."""
    info = load.info
    if isinstance(info.labels, Labels) and not info.labels.is_brief:
        return load.plan
    brief = info.labels if isinstance(info.labels, Labels) else None
    read = partial(_read_names, load.handle, info, load.options.access, brief)
    return replace(load.plan, info=replace(info, labels=OnDemand(read, brief)))


def _read_names(handle: Any, info: ArrayInfo, access: Access, brief: Labels | None) -> Labels:
    """The labels of an array, of the same version of the file as those in which its selection was looked up."""
    labels = read_labels(handle, info, access)
    if brief is not None:
        check_names(str(info), brief.read_in, labels.read_in, info.path, info.dataset)
    return labels


def _look(
    labeller: Labeller | None, path: Any, select: Any, info: ArrayInfo, source: Source | None
) -> tuple[ArrayInfo, Region | None]:
    """What `find` wants of an array: its metadata, and the region of a selection; None if it means nothing (`make` says so)."""
    info = info if labeller is None else labeller.label(path, info, source)
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
