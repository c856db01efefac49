"""What do the ranks ask for, and do all ask for the same?

1. A `Target` has the arguments for one array as the caller passed them; a `Call` has them checked. `targets_of` makes the
   targets of a tree of arrays.
2. A `Request` has the arguments of the whole call on this rank. `Request.plan` makes the ranks agree on them: in the normal
   case with one broadcast and one reduction, with which every call begins.
3. `plan_file` and `plan_memory` make an `ArrayLoad` from a `Call` and the array's metadata. Recent plans are kept, and used
   again for arrays of the same kind.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardload.arrays.sharding import describe_sharding, devices_per_process, read_sharding
from shardload.comm.agreement import MOST_COUNTS
from shardload.comm.group import Group, Invocation, group_of
from shardload.comm.launch import rank_of_process
from shardload.errors import ConfigError, ShardloadError, StallError
from shardload.formats.base import ArrayInfo
from shardload.formats.labels import OnDemand
from shardload.formats.lookup import read_labels
from shardload.formats.memory import MemorySource
from shardload.jobs.array_load import ArrayLoad
from shardload.jobs.describe import describe_job
from shardload.jobs.execution import Execution, ExecutionOfMany, Job, Loaded
from shardload.jobs.plan import Plan
from shardload.jobs.planner import Ask, Ranks, plan_array, plan_scatter
from shardload.jobs.tree_plan import TreePlan
from shardload.jobs.trees import ArrayTree, Place, in_array, is_one, is_one_spec, keys_text, text_of, where_text
from shardload.options import OPTIONS, OWN, TIMEOUT, Options
from shardload.planning.machine import WORKSTATION, Machine
from shardload.planning.selection import is_by_name, name_axes
from shardload.planning.strategies import DIRECT
from shardload.planning.tuning import Tuning, default_tuning
from shardload.system.interruption import let_interruption_pass, outer_exception

__all__ = ["Call", "Memo", "Request", "Target", "plan_file", "plan_memory", "targets_of"]

_RECENT = 32  # plans to keep, per group: those of the last calls, or of the arrays of a tree
# A kept `Plan` has facts only: no group, no communicator, no open file, nothing else of the caller's.
_recent: WeakKeyDictionary[Group, OrderedDict[Any, Plan]] = WeakKeyDictionary()
_PLAN = "a plan"
_NAMES = tuple(Options.check().describe())
_OWN_NAMES = {"path", "x", "sharding", "dataset", *(option.name for option in OWN)}  # may differ from array to array
_MOST_TOLD = 8  # arrays in a message


@dataclass(frozen=True)
class Call:
    """The checked arguments for one array, and the ranks that pass them. `group` is None for an abstract mesh.

    `devices_per_rank` is for an abstract mesh: the number of consecutive devices that belong to one process; and so is
    `ranks_per_node`, if the caller says how many of them share a node. `machine` has the figures to plan with.
    """

    sharding: NamedSharding
    options: Options
    tuning: Tuning
    group: Group | None = None
    devices_per_rank: int = 1
    ranks_per_node: int | None = None
    machine: Machine = WORKSTATION

    @property
    def is_alone(self) -> bool:
        """True if a single rank makes the call."""
        return self.group is not None and self.group.size == 1

    def ask(self) -> Ask:
        """The same arguments for the planner, with the ranks as plain numbers.

        Raises
        ------
        ConfigError, PeerError
            If MPI and JAX do not see the same processes.
        """
        return Ask(self.sharding, self.options, self._ranks(), self.tuning, self.machine)

    def _ranks(self) -> Ranks:
        if self.group is None:
            n = self.sharding.mesh.size // self.devices_per_rank
            given = self.ranks_per_node or self.machine.ranks_per_node
            per_node = None if given is None else min(n, given)
            memory_nbytes = self.machine.memory_nbytes
            of_rank = None if memory_nbytes is None else memory_nbytes // (per_node or n)
            return Ranks(0, n, devices_per_rank=self.devices_per_rank, per_node=per_node, memory_nbytes=of_rank)
        group = self.group
        return Ranks(group.rank, group.size, rank_of_process(group), group.machine, group.can_send)


@dataclass(frozen=True)
class Target:
    """One array that a call is about, as the caller passed it.

    Attributes
    ----------
    mesh, spec : object
        The caller's mesh and spec.
    what : dict of str to str
        Other arguments that must be the same on every rank, as text; ``"path"`` first.
    options : dict
        Keywords for `Options.check`.
    where : str
        Which array of the call it is, for messages: ``"array ['gas']"``; empty if it is the only one.
    has_own : bool
        True if some of its arguments are its own, because the caller passed a tree of them.
    is_pattern : bool
        True if it stands for all arrays below a group. `mesh`, `spec` and the options of arrays may then be trees.
    """

    mesh: Any
    spec: Any
    what: dict[str, str]
    options: dict[str, Any]
    where: str = ""
    has_own: bool = False
    is_pattern: bool = False

    def check(self, processes: Any, tuning: Tuning, memo: Memo | None = None) -> Call:
        """The checked arguments, without a group of ranks yet. For a pattern: all values are checked, the first are returned.

        `memo` has what was checked for other targets of the same call.
        """
        memo = Memo() if memo is None else memo
        if self.is_pattern:
            first, *_ = [one.check(processes, tuning, memo) for one in self._singles()]
            return first
        try:
            n = devices_per_process(_mesh_of(self.mesh), processes)
            return Call(memo.sharding(self.mesh, self.spec), memo.options(self.options), tuning, devices_per_rank=n)
        except ConfigError as error:
            raise in_array(self.where if self.has_own else "", error) from None

    def describe(self, call: Call | None, memo: Memo | None = None) -> dict[str, str]:
        """What every rank must pass alike, as text. If the check failed (None), the same names with empty text."""
        if call is None:
            return {**self.what, "sharding": "", **dict.fromkeys(_NAMES, "")}
        memo = Memo() if memo is None else memo
        told = {**self.what, "sharding": memo.text(call.sharding, describe_sharding), **call.options.describe()}
        if self.is_pattern:
            told["sharding"] = f"{_tree_text(self.mesh, _mesh_text)}, {_tree_text(self.spec, repr)}"
            for option in OWN:
                if option.name in self.options and option.text is not None:
                    told[option.name] = _tree_text(self.options[option.name], repr)
        return told

    def _singles(self) -> Iterator[Target]:
        """For a pattern: targets that together have every value of its trees."""
        leaves = {o.name: _leaves(self.options[o.name], o.is_one or is_one) for o in OWN if o.name in self.options}
        meshes, specs = _leaves(self.mesh, is_one), _leaves(self.spec, is_one_spec)
        for k in range(max(len(values) for values in (meshes, specs, *leaves.values()))):
            own = {name: values[k % len(values)] for name, values in leaves.items()}
            mesh, spec = meshes[k % len(meshes)], specs[k % len(specs)]
            yield replace(self, mesh=mesh, spec=spec, options=self.options | own, is_pattern=False)


def _leaves(tree: Any, is_one: Callable[[Any], bool]) -> list[Any]:
    """The single values in a tree of values; at least one."""
    return jax.tree_util.tree_leaves(tree, is_leaf=is_one) or [None]


def _tree_text(tree: Any, text: Callable[[Any], str]) -> str:
    """A tree of values as text."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_one_spec)[0]
    return "; ".join(f"{text_of(where)} {text(value)}".strip() for where, value in found)


def _mesh_text(mesh: Any) -> str:
    return describe_sharding(mesh if isinstance(mesh, NamedSharding) else NamedSharding(mesh, PartitionSpec()))


class Memo:
    """What was checked for one array of a call, for the next one that has the same: many arrays share all but their name."""

    def __init__(self) -> None:
        self._shardings: dict[tuple[int, int], NamedSharding] = {}
        self._options: dict[tuple[int, ...], Options] = {}
        self._texts: dict[int, str] = {}
        self._held: list[Any] = []  # whatever has its id in a key

    def sharding(self, mesh: Any, spec: Any) -> NamedSharding:
        """See `read_sharding`."""
        key = id(mesh), id(spec)
        if key not in self._shardings:
            self._shardings[key] = read_sharding(mesh, spec)
            self._held += [mesh, spec]
        return self._shardings[key]

    def options(self, given: dict[str, Any]) -> Options:
        """See `Options.check`."""
        key = tuple(id(value) for name, value in given.items() if name != "dataset")
        if key not in self._options:
            self._options[key] = Options.check(**given)
            self._held += given.values()
            return self._options[key]
        return replace(self._options[key], dataset=OPTIONS["dataset"].check(given.get("dataset")))

    def text(self, value: Any, describe: Callable[[Any], str]) -> str:
        """The text of a value that many arrays share."""
        if id(value) not in self._texts:
            self._texts[id(value)] = describe(value)
            self._held.append(value)
        return self._texts[id(value)]


def targets_of(
    tree: ArrayTree, mesh: Any, spec: Any, options: dict[str, Any], what: Callable[[Place], dict[str, str]]
) -> list[Target]:
    """The targets of a tree of arrays: each with its own value of each argument that is a tree.

    Parameters
    ----------
    tree : ArrayTree
        The arrays.
    mesh, spec, options : object, object, dict
        As the caller passed them, without the tree of names.
    what : callable
        `Target.what` of a place.

    Raises
    ------
    ConfigError
        If a tree of values does not match the tree of arrays.
    """
    if tree.is_single:
        (place,) = tree.places
        return [Target(mesh, spec, what(place), options | _dataset(place, options))]
    meshes, specs = tree.spread("mesh", mesh), tree.spread("spec", spec, is_one_spec)
    trees = {o.name: tree.spread(o.name, options[o.name], o.is_one or is_one, o.may_be_dict) for o in OWN if o.name in options}
    has_own = not (is_one(mesh) and is_one_spec(spec)) or any(
        not (option.is_one or is_one)(options[option.name]) for option in OWN if option.name in options
    )
    return [
        Target(
            meshes[k],
            specs[k],
            what(place),
            {**options, **{name: values[k] for name, values in trees.items()}, **_dataset(place, options)},
            where_text(tree.where[k]),
            has_own,
            place.is_pattern,
        )
        for k, place in enumerate(tree.places)
    ]


def _dataset(place: Place, options: dict[str, Any]) -> dict[str, Any]:
    return {"dataset": place.dataset} if "dataset" in options else {}


@dataclass
class Request:
    """The arguments of one call as this rank sees them, not yet agreed on.

    Attributes
    ----------
    group : Group or None
        The ranks that make the call; None for an abstract mesh.
    comm : mpi4py.MPI.Comm or None
        The communicator that the caller passed.
    asked : Invocation
        What must be the same on every rank. After `plan` it includes the plan.
    calls : list of Call or None
        The checked arguments for each array; None if `error` says what is wrong.
    loaded : Loaded or None
        After `plan`: the arrays, if they are loaded already.
    """

    group: Group | None
    comm: Any
    asked: Invocation
    calls: list[Call] | None
    error: ConfigError | None
    _processes: Any = None
    _ranks_per_node: int | None = None
    loaded: Loaded | None = None

    @classmethod
    @contextmanager
    def open(
        cls,
        kind: str,
        targets: Sequence[Target],
        comm: Any,
        processes: Any = None,
        error: ConfigError | None = None,
        ranks_per_node: Any = None,
    ) -> Iterator[Request]:
        """Check the arguments on this rank, and hold the group until the call ends. Collective the first time.

        Parameters
        ----------
        kind : str
            The function that was called.
        targets : sequence of Target
            The arrays of the call, at least one.
        comm : mpi4py.MPI.Comm, optional
            The communicator that the caller passed.
        processes : int, optional
            Number of processes, for an abstract mesh.
        error : ConfigError, optional
            What is wrong with other arguments on this rank.
        ranks_per_node : int, optional
            Number of processes of a node, for an abstract mesh.
        """
        calls: list[Call] | None = None
        asked: Invocation | None = None
        tuning, memo = default_tuning(), Memo()
        try:
            if error is not None and not targets:
                raise error
            calls = [target.check(processes, tuning, memo) for target in targets]
            if ranks_per_node is not None:
                _check_ranks_per_node(ranks_per_node, targets)
                calls = [replace(call, ranks_per_node=int(ranks_per_node)) for call in calls]
            for call in calls[1:]:
                calls[0].options.check_shared(call.options)
            asked = _invocation(kind, targets, calls, memo)
        except ConfigError as found:
            error = error or found
        except Exception as found:  # an unforeseen argument: the other ranks wait for this one, so the error must be agreed on
            let_interruption_pass(found)
            error = error or ConfigError(f"the arguments could not be read: {type(found).__name__}: {found}")
        if asked is None:
            calls, asked = None, _invocation(kind, targets, None, memo)
        timeout = TIMEOUT if calls is None else calls[0].options.timeout
        if any(isinstance(_mesh_of(target.mesh), AbstractMesh) for target in targets):
            if kind == "plan":
                yield cls(None, comm, asked, calls, error, processes, ranks_per_node)
                return
            error = error or ConfigError(f"{kind} needs a mesh of devices, found an AbstractMesh: pass a jax.sharding.Mesh")
        group = group_of(comm, timeout)
        with outer_exception(), group.call(timeout) as refusal:
            group.watch.begin(targets[0].what["path"] if targets else kind, timeout)
            _ = group.machine, group.processes(jax.process_index())  # collective the first time, and here every rank is present
            error = refusal or error
            if calls is not None:
                calls = [replace(call, group=group) for call in calls]
            yield cls(group, comm, asked, None if error is not None else calls, error, processes)

    def call_of(self, target: Target, memo: Memo) -> Call:
        """The checked arguments of an array that was found by a pattern."""
        call = target.check(self._processes, default_tuning(), memo)
        return replace(call, group=self.group, ranks_per_node=self._ranks_per_node)

    def agree(self) -> list[Call]:
        """Return the calls if all ranks make the same calls; otherwise raise. Collective."""
        if self.group is not None:
            self.group.agree_same(self.asked, self.error)
        return self._checked()

    def _checked(self) -> list[Call]:
        if self.calls is None:
            raise self.error or ConfigError("the arguments could not be read")
        return self.calls

    def settle(self) -> list[Call]:
        """Do `agree` in the messages with which every call begins. Collective."""
        if self.group is not None:
            self.group.settle(self.asked, self.error)
        return self._checked()

    def plan(
        self,
        find: Callable[[list[Call]], bytes],
        make: Callable[[list[Call], bytes], list[ArrayLoad]],
        root: int | None = None,
        loads: bool = False,
    ) -> list[ArrayLoad]:
        """Run `find` on one rank and `make` on every rank, and check that all ranks plan the same. Collective.

        If nothing is wrong, this takes one broadcast and one reduction. If something is wrong on any rank, the ranks check step
        by step, so that the error names the first cause: a wrong argument, then calls or arguments that differ, then an error
        in `find`.

        Parameters
        ----------
        find : callable
            Takes the checked arguments; returns the metadata as bytes. Runs on one rank.
        make : callable
            Takes the checked arguments and these bytes; returns the planned arrays. Runs on every rank.
        root : int, optional
            The rank that runs `find`; call `settle` first. Without it, rank 0 runs `find`, and this begins the call.
        loads : bool
            True to load arrays whose values `find` has sent too (`loaded`).
        """
        started = time.perf_counter()
        group, told, made = self.group, None, None
        self._enter("metadata")
        unfound: ShardloadError | None = None
        error: BaseException | None = None
        try:
            told = self._find(find, root)
        except StallError:
            raise  # the ranks can compare nothing any more
        except ShardloadError as found:  # the same on every rank
            unfound = error = found
        self._enter("plan")
        if told is not None and self.calls is not None:
            try:
                made = make(self.calls, told)
            except Exception as found:
                let_interruption_pass(found)
                error = found
        planned = {_PLAN: "" if made is None else _describe_jobs(made)}
        asked = self.asked.also(**planned)
        job = None if group is None or made is None or not loads else Job(group, made, asked.values, self._checked()[0].tuning)
        mine = job.fill() if job is not None and job.is_here else None
        sums = [] if mine is None else list(mine.counts)
        fits = mine is not None and len(sums) <= MOST_COUNTS
        is_fine = made is not None and (mine is None or mine.error is None)
        if group is None or not group.all_same(asked, is_fine, sums if fits else None):
            self.agree()
            if unfound is not None:
                raise unfound
            if group is not None:
                group.agree_same(Invocation(_PLAN, asked.title, planned), error)
                if mine is not None:
                    group.agree(mine.error)
        if group is not None and mine is None:
            group.watch.close()
        if made is None:
            raise error or ConfigError("nothing was planned")
        self.asked = asked
        if job is not None and mine is not None:
            self.loaded = job.finish(mine, sums if fits else None, started)
        return made

    def load(
        self, find: Callable[[list[Call]], bytes], make: Callable[[list[Call], bytes], list[ArrayLoad]], root: int | None = None
    ) -> Loaded:
        """Do `plan`, and load what is planned. Collective.

        If rank 0 sends the values with the metadata, each rank makes its arrays before the ranks compare their plans, and the
        same message tells whether all ranks have made them: one broadcast and one reduction are all messages of the call.
        """
        loads = self.plan(find, make, root, loads=True)
        if self.loaded is not None:
            return self.loaded
        job = self.job(loads)
        job.begin()
        return job.run()

    def job(self, loads: list[ArrayLoad]) -> Job:
        """The job that loads the planned arrays, inside this call."""
        if self.group is None:
            raise ConfigError("there are no ranks that could load anything")
        return Job(self.group, loads, self.asked.values, self._checked()[0].tuning)

    def hand_out(self, load: ArrayLoad) -> Plan:
        """The plan for the caller, with the executor that can do it later."""
        plan = _with_names(load)
        if self.group is None:
            return plan
        executor = Execution(self.comm, load.options, load.handle, self.asked.values, self._checked()[0].tuning)
        return replace(plan, _executor=executor)

    def hand_out_tree(
        self, loads: list[ArrayLoad], build: Callable[[Sequence[Any]], Any], left_out: Sequence[ArrayInfo]
    ) -> TreePlan:
        """The plan of a tree for the caller, with the executor of all arrays, and of each by itself."""
        where = tuple(keys_text(load.where) for load in loads)
        if self.group is None:
            return TreePlan(build([_with_names(load) for load in loads]), where, tuple(left_out))
        tuning, agreed = self._checked()[0].tuning, self.asked.values
        plans = [
            replace(
                _with_names(one),
                _executor=Execution(self.comm, one.options, one.handle, {**agreed, "array": one.where}, tuning),
            )
            for one in loads
        ]
        return TreePlan(
            build(plans), where, tuple(left_out), _executor=ExecutionOfMany(self.comm, tuple(loads), agreed, tuning)
        )

    def _enter(self, phase: str) -> None:
        if self.group is not None:
            self.group.watch.enter(phase)

    def _find(self, find: Callable[[list[Call]], bytes], root: int | None) -> bytes | None:
        def run() -> bytes:
            return find(self._checked())

        if self.group is None:
            return run()
        return self.group.begin(self.asked, run) if root is None else self.group.tell(run, root)


def _check_ranks_per_node(given: Any, targets: Sequence[Target]) -> None:
    """Raise ConfigError unless it is a number of processes, and the mesh is abstract."""
    if isinstance(given, bool) or not isinstance(given, Integral) or given < 1:
        raise ConfigError(f"ranks_per_node is {given!r}; expected how many processes a node has, 1 or more")
    if not all(isinstance(_mesh_of(target.mesh), AbstractMesh) for target in targets):
        raise ConfigError(
            f"ranks_per_node is {given!r}, but the mesh has devices, and the job knows its nodes: leave it out, or plan over a "
            "jax.sharding.AbstractMesh"
        )


def _invocation(kind: str, targets: Sequence[Target], calls: Sequence[Call] | None, memo: Memo) -> Invocation:
    """What the ranks compare: the arguments for all arrays, as text."""
    path = targets[0].what["path"] if targets else "nothing"
    title = path if path.startswith(kind) else f"{kind} of {path}"
    values: dict[str, str] = {}
    for k, target in enumerate(targets):
        described = target.describe(None if calls is None else calls[k], memo)
        if k == 0:
            values = described if len(targets) == 1 else {}
            values |= {name: text for name, text in described.items() if name not in _OWN_NAMES}
        if len(targets) > 1:
            values |= {f"{name} of {target.where}": text for name, text in described.items() if name in _OWN_NAMES}
    if len(targets) > 1:  # a kind of its own, because it has other values
        names = [target.where.removeprefix("array ") for target in targets]
        kind = json.dumps([kind, *names])
        told = ", ".join(names[:_MOST_TOLD]) + (", ..." if len(names) > _MOST_TOLD else "")
        title = f"{title} ({len(targets)} arrays: {told})"
    return Invocation(kind, title, values)


def _describe_jobs(loads: Sequence[ArrayLoad]) -> str:
    """All plans as text. Arrays of the same kind share theirs."""
    texts = {id(load.layout): load.plan for load in loads}
    said = {key: describe_job(plan) for key, plan in texts.items()}
    return "; ".join(said[id(load.layout)] for load in loads)


def _with_names(load: ArrayLoad) -> Plan:
    """The plan, whose `info` reads names of axes and coordinates from the file when they are first looked at."""
    info = load.info
    if info.labels is not None:
        return load.plan
    read = partial(read_labels, load.handle, info, load.options.access)
    return replace(load.plan, info=replace(info, labels=OnDemand(read)))


def _mesh_of(mesh: Any) -> Any:
    return mesh.mesh if isinstance(mesh, NamedSharding) else mesh


def plan_file(call: Call, info: ArrayInfo, path: Any, origin: Any = None) -> ArrayLoad:
    """Plan the load of an array in a file.

    `info` is its metadata. `path` opens it; if `path` is a source that has the values already, `origin` opens the file.
    """
    if is_by_name(call.options.select):
        call = replace(call, options=_with_positions(call.options, info))
    group = call.group
    if group is None:
        alone = plan_array(call.ask(), info)
        return ArrayLoad(alone, _with_staging(call.options, alone), path)
    if origin is not None:  # every rank has the values, so none needs to send any
        call = replace(call, options=replace(call.options, readers=DIRECT))
    # A series of files of the same kind is planned once: planning takes a good part of the time of a small load.
    known = _recent.setdefault(group, OrderedDict())
    kind: tuple[Any, ...] = (info.shape, info.dtype, info.chunks, info.codec, info.shards, info.format)
    if call.options.decode:
        kind = (*kind, json.dumps(dict(info.packing)))  # with the types
    how = call.options.describe() | {"dataset": ""}  # its name changes nothing
    key = (call.sharding, call.tuning, call.machine, *how.items(), *kind, jax.config.read("jax_enable_x64"))
    made = known.pop(key, None)
    if made is None:
        made = plan_array(call.ask(), info)
    known[key] = made
    while len(known) > _RECENT:
        known.popitem(last=False)
    return ArrayLoad(replace(made, info=info), _with_staging(call.options, made), path, origin)


def _with_staging(options: Options, made: Plan) -> Options:
    """The options with the staging cap that was planned."""
    return options if options.staging_nbytes == made.staging_nbytes else replace(options, staging=made.staging_nbytes)


def _with_positions(options: Options, info: ArrayInfo) -> Options:
    """The options, with positions in the place of names of axes."""
    try:
        index = name_axes(options.select, info.dims, {name: one.values for name, one in info.coords.items()})
    except ValueError as error:
        raise ConfigError(f"{error} ({info} has shape {info.shape})") from None
    return replace(options, select=index)


def plan_memory(call: Call, info: ArrayInfo, source: MemorySource | None, root: int, as_it_is: bool) -> ArrayLoad:
    """Plan the scatter of an array in the memory of `root`; `as_it_is` if it can be sent from views."""
    return ArrayLoad(plan_scatter(call.ask(), info, root, as_it_is), call.options, source)
