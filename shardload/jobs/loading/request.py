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
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from numbers import Integral
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardload.arrays.sharding import describe_sharding, devices_per_process, read_sharding
from shardload.comm.group import Arguments, ArgumentsOfOne, Group, Invocation, Texts
from shardload.comm.launch import rank_of_process
from shardload.engine.call import Call as AgreedCall
from shardload.engine.call import begin_call, unforeseen
from shardload.errors import ConfigError
from shardload.formats.access import Access
from shardload.formats.base import ArrayInfo
from shardload.formats.labelling import read_labels
from shardload.formats.labels import Labels, OnDemand
from shardload.formats.memory import MemorySource
from shardload.jobs.consistency import check_names
from shardload.jobs.loading.array_load import ArrayLoad
from shardload.jobs.loading.describe import describe_job
from shardload.jobs.loading.execution import Execution, ExecutionOfMany, Job, Loaded, Outcome
from shardload.jobs.loading.plan import Plan
from shardload.jobs.loading.planner import Ask, Ranks, plan_array, plan_scatter, selection_for
from shardload.jobs.loading.tree_plan import TreePlan
from shardload.jobs.loading.trees import ArrayTree, Place, in_array, is_one, is_one_spec, keys_text, text_of, where_text
from shardload.options import OPTIONS, OWN, TIMEOUT, Options, key_of
from shardload.planning.selection import Between, Near, is_by_name, name_axes
from shardload.planning.source_layout import SourceLayout
from shardload.planning.strategies import DIRECT
from shardload.planning.tuning import Tuning, default_tuning
from shardload.system.garbage import collections_wait
from shardload.values.dates import has_dates, in_numbers

__all__ = [
    "Call",
    "Memo",
    "Planned",
    "Request",
    "Target",
    "for_each_kind",
    "plan_file",
    "plan_memory",
    "positions_of",
    "targets_of",
]

_RECENT = 32  # plans to keep, per group: those of the last calls, or of the arrays of a tree
# A kept `Plan` has facts only: no group, no communicator, no open file, nothing else of the caller's.
_recent: WeakKeyDictionary[Group, OrderedDict[Any, Plan]] = WeakKeyDictionary()
_described: WeakKeyDictionary[Plan, str] = WeakKeyDictionary()  # a `Plan` is equal to itself only, and never changes
_SIZES_PER_DOUBLING = 4  # stored sizes for which plans are made, with a machine: 19 % apart
_DATASET = OPTIONS["dataset"]
_NAMES = tuple(Options.check().describe())
_OWN_NAMES = {"path", "x", "sharding", "dataset", *(option.name for option in OWN)}  # may differ from array to array
_MOST_TOLD = 8  # arrays in a message


@dataclass(frozen=True)
class Call:
    """The checked arguments for one array, and the ranks that pass them. `group` is None for an abstract mesh.

    `devices_per_rank` is for an abstract mesh: the number of consecutive devices that belong to one process; and so is
    `ranks_per_node`, if the caller says how many of them share a node.
    """

    sharding: NamedSharding
    options: Options
    tuning: Tuning
    group: Group | None = None
    devices_per_rank: int = 1
    ranks_per_node: int | None = None
    known: Known | None = field(default=None, compare=False, repr=False)  # if these are the arguments of an earlier call, too

    def but(self, **changes: Any) -> Call:
        """A copy with other arguments."""
        return replace(self, known=None, **changes)

    def by(self, group: Group) -> Call:
        """A copy for the ranks that make this call."""
        return Call(
            self.sharding,
            self.options,
            self.tuning,
            group,
            self.devices_per_rank,
            self.ranks_per_node,
            self.known,
        )

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
        return Ask(self.sharding, self.options, self._ranks(), self.tuning)

    def _ranks(self) -> Ranks:
        if self.group is None:
            n = self.sharding.mesh.size // self.devices_per_rank
            per_node = None if self.ranks_per_node is None else min(n, self.ranks_per_node)
            return Ranks(0, n, devices_per_rank=self.devices_per_rank, per_node=per_node)
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
    dataset : object
        Its name in the file, if `options` has no ``dataset`` because it is that of many arrays.
    """

    mesh: Any
    spec: Any
    what: dict[str, str]
    options: dict[str, Any]
    where: str = ""
    has_own: bool = False
    is_pattern: bool = False
    dataset: Any = None

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
            if self.dataset is not None:
                _DATASET.check(self.dataset)
            return memo.call(memo.sharding(self.mesh, self.spec), memo.options(self.options), tuning, n)
        except ConfigError as error:
            raise in_array(self.where if self.has_own else "", error) from None

    def describe(self, call: Call | None, memo: Memo | None = None) -> dict[str, str]:
        """What every rank must pass alike, as text. If the check failed (None), the same names with empty text."""
        return {**self.what, **self.describe_rest(call, memo)}

    def describe_rest(self, call: Call | None, memo: Memo | None = None) -> dict[str, str]:
        """All of it but `what`."""
        if call is None:
            return {"sharding": "", **dict.fromkeys(_NAMES, "")}
        memo = Memo() if memo is None else memo
        told = {"sharding": memo.text(call.sharding, describe_sharding), **memo.texts(call.options)}
        if self.dataset is not None:
            told["dataset"] = _text_of_dataset(self.dataset)
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


class Known:
    """The checked arguments of a call about one array, and their text: kept for the next call that has the same.

    All but the path. Nothing in it can change: not the mesh, not the spec, not the options (`options.key_of`). What comes from
    a file is not here.

    Attributes
    ----------
    call : Call
        The arguments, without a group.
    texts : Texts
        What every rank must pass alike.
    plans : tuple
        What is equal for calls that plan alike: all but what is selected, and the name of the array.
    held : object
        What has its id in the key.
    """

    __slots__ = ("call", "held", "plans", "texts")

    def __init__(self, call: Call, texts: Texts, target: Target) -> None:
        options = key_of({**target.options, "select": None, "dataset": None}) or ()
        self.plans = (call.tuning, call.sharding, repr(call.sharding.spec), *options)
        self.call, self.texts, self.held = replace(call, known=self), texts, target.mesh

    @staticmethod
    def key(kind: str, target: Target) -> tuple[Any, ...] | None:
        """What is equal for the same arguments, and for no others; None if they are not kept."""
        mesh, spec = target.mesh, target.spec
        options = key_of(target.options)
        if options is None or target.is_pattern or target.dataset is not None:
            return None
        if type(mesh) is Mesh and type(spec) is PartitionSpec:
            return (kind, mesh, repr(spec), *options)  # as text, because specs may be equal that are not written alike
        if type(mesh) is NamedSharding and type(mesh.mesh) is Mesh and spec is None:
            return (kind, id(mesh), None, *options)
        return None


_MOST_KNOWN = 32
_known: OrderedDict[tuple[Any, ...], Known] = OrderedDict()


def _find_known(key: tuple[Any, ...], tuning: Tuning) -> Known | None:
    """What is known of a call with these arguments."""
    found = _known.get(key)
    return found if found is not None and found.call.tuning is tuning else None


def _keep(key: tuple[Any, ...], known: Known) -> Known:
    """Keep what is known for the next call."""
    _known[key] = known
    while len(_known) > _MOST_KNOWN:
        with suppress(KeyError):  # another thread was first
            _known.popitem(last=False)
    return known


def _refuse_traced(given: Mapping[str, Any]) -> None:
    """ConfigError if a number in an option is traced by `jax.jit`, `jax.vmap` or `jax.grad`: it has no value yet."""
    for name in ("select", "pad", "edge"):
        if any(isinstance(one, jax.core.Tracer) for one in _numbers_in(given.get(name))):
            fix = ", or load all of it and index the array" if name == "select" else ""
            raise ConfigError(
                f"{name} has a traced number, which has no value yet, and files are read while the function is traced. Call "
                f"this outside of jax.jit, or pass a Python number{fix}"
            )


def _numbers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, slice):
        yield from (value.start, value.stop)
    elif isinstance(value, Near | Between):
        yield from vars(value).values()
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers_in(one)
    else:
        yield value


class Memo:
    """What was checked for one array of a call, for the next one that has the same: many arrays share all but their name."""

    def __init__(self) -> None:
        self._shardings: dict[tuple[int, int], NamedSharding] = {}
        self._options: dict[int, Options] = {}
        self._calls: dict[tuple[int, int, int], Call] = {}
        self._texts: dict[int, Any] = {}
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
        key = id(given)
        if key not in self._options:
            _refuse_traced(given)
            self._options[key] = Options.check(**given)
            self._held.append(given)
        return self._options[key]

    def call(self, sharding: NamedSharding, options: Options, tuning: Tuning, devices_per_rank: int) -> Call:
        """The `Call` of these; one for all arrays that share them."""
        key = id(sharding), id(options), devices_per_rank
        if key not in self._calls:
            self._calls[key] = Call(sharding, options, tuning, devices_per_rank=devices_per_rank)
        return self._calls[key]

    def derived(self, call: Call, make: Callable[[], Call]) -> Call:
        """What `make` makes of a `Call` of this memo; made once, so that it does not cost each of many arrays."""
        key = id(call), 0, 0
        if key not in self._calls:
            self._calls[key] = make()
            self._held.append(call)
        return self._calls[key]

    def text(self, value: Any, describe: Callable[[Any], str]) -> str:
        """The text of a value that many arrays share."""
        if id(value) not in self._texts:
            self._texts[id(value)] = describe(value)
            self._held.append(value)
        text: str = self._texts[id(value)]
        return text

    def texts(self, options: Options) -> dict[str, str]:
        """See `Options.describe`."""
        if id(options) not in self._texts:
            self._texts[id(options)] = options.describe()
            self._held.append(options)
        texts: dict[str, str] = self._texts[id(options)]
        return texts


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
    shared = {name: value for name, value in options.items() if name != "dataset"}
    many: dict[tuple[int, ...], dict[str, Any]] = {}  # arrays with the same values share a dict, and `Memo` checks it once
    targets = []
    for k, place in enumerate(tree.places):
        own = [values[k] for values in trees.values()]
        key = tuple(map(id, own))
        if key not in many:
            many[key] = {**shared, **dict(zip(trees, own, strict=True))}
        dataset = place.dataset if "dataset" in options else None
        where = where_text(tree.where[k])
        targets.append(Target(meshes[k], specs[k], what(place), many[key], where, has_own, place.is_pattern, dataset))
    return targets


def _text_of_dataset(name: Any) -> str:
    return repr(name) if _DATASET.text is None else _DATASET.text(name)


def _dataset(place: Place, options: dict[str, Any]) -> dict[str, Any]:
    return {"dataset": place.dataset} if "dataset" in options else {}


@dataclass
class Request:
    """The arguments of one call as this rank sees them, not yet agreed on.

    Attributes
    ----------
    begun : engine.call.Call or None
        The call of all ranks; None for an abstract mesh.
    comm : mpi4py.MPI.Comm or None
        The communicator that the caller passed.
    asked : Invocation
        What must be the same on every rank. After `plan` it includes the plan.
    calls : list of Call or None
        The checked arguments for each array; None if `error` says what is wrong.
    is_many : bool
        True if the call is about several arrays, or all of a group.
    loaded : Loaded or None
        After `plan`: the arrays, if they are loaded already.
    """

    begun: AgreedCall | None
    comm: Any
    asked: Invocation
    calls: list[Call] | None
    error: ConfigError | None
    _processes: Any = None
    _ranks_per_node: int | None = None
    is_many: bool = False
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
        is_many = len(targets) > 1 or any(target.is_pattern for target in targets)
        try:
            if error is not None and not targets:
                raise error
            may_be_known = len(targets) == 1 and processes is None and ranks_per_node is None
            key = Known.key(kind, targets[0]) if may_be_known else None
            known = None if key is None else _find_known(key, tuning)
            if known is None:
                calls = [target.check(processes, tuning, memo) for target in targets]
                if ranks_per_node is not None:
                    _check_ranks_per_node(ranks_per_node, targets)
                    n = int(ranks_per_node)
                    calls = for_each_kind(calls, lambda call: call.but(ranks_per_node=n))
                for options in {id(call.options): call.options for call in calls}.values():
                    calls[0].options.check_shared(options)
                if key is not None:
                    texts = Texts(targets[0].describe_rest(calls[0], memo))
                    known = _keep(key, Known(calls[0], texts, targets[0]))
            if known is not None:
                calls = [known.call]
            asked = _invocation(kind, targets, calls, memo)
        except ConfigError as found:
            error = error or found
        except Exception as found:
            error = error or unforeseen(found)
        if asked is None:
            calls, asked = None, _invocation(kind, targets, None, memo)
        timeout = TIMEOUT if calls is None else calls[0].options.timeout
        if any(isinstance(_mesh_of(target.mesh), AbstractMesh) for target in targets):
            if kind == "plan":
                yield cls(None, comm, asked, calls, error, processes, ranks_per_node, is_many)
                return
            error = error or ConfigError(f"{kind} needs a mesh of devices, found an AbstractMesh: pass a jax.sharding.Mesh")
        watched_as = targets[0].what["path"] if targets else kind
        how = {"comm": comm, "timeout": timeout, "watched_as": watched_as, "process": jax.process_index}
        with begin_call(asked, error, **how) as begun:
            if calls is not None:
                calls = for_each_kind(calls, lambda call: call.by(begun.group))
            yield cls(begun, comm, asked, calls, error, processes, is_many=is_many)

    def call_of(self, target: Target, memo: Memo) -> Call:
        """The checked arguments of an array that was found by a pattern."""
        call = target.check(self._processes, default_tuning(), memo)
        return memo.derived(call, lambda: call.but(group=self.group, ranks_per_node=self._ranks_per_node))

    @property
    def group(self) -> Group | None:
        """The ranks that make the call; None for an abstract mesh."""
        return None if self.begun is None else self.begun.group

    def _checked(self) -> list[Call]:
        if self.calls is None:
            raise self.error or ConfigError("the arguments could not be read")
        return self.calls

    def settle(self) -> list[Call]:
        """Compare the arguments of all ranks, without a plan. Collective."""
        if self.begun is not None:
            self.begun.settle()
        return self._checked()

    def plan(
        self,
        find: Callable[[list[Call]], Any],
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
            Takes the checked arguments; returns the metadata as bytes, or in parts (`Agreement.begin`). Runs on one rank.
        make : callable
            Takes the checked arguments and these bytes; returns the planned arrays. Runs on every rank.
        root : int, optional
            The rank that runs `find`; call `settle` first. Without it, rank 0 runs `find`, and this begins the call.
        loads : bool
            True to load arrays whose values `find` has sent too (`loaded`).
        """
        with collections_wait(self.is_many):
            return self._plan(find, make, root, loads)

    def _plan(
        self,
        find: Callable[[list[Call]], Any],
        make: Callable[[list[Call], bytes], list[ArrayLoad]],
        root: int | None,
        loads: bool,
    ) -> list[ArrayLoad]:
        started, begun, jobs = time.perf_counter(), self.begun, list[Job]()
        if begun is None:
            found = find(self._checked())
            return make(self._checked(), b"".join(found) if isinstance(found, list) else found)

        def do_early(made: list[ArrayLoad], agreed: Invocation) -> Outcome | None:
            job = Job(begun.group, made, agreed.values, self._checked()[0].tuning)
            if not job.is_apart:
                return None
            jobs.append(job)
            return job.do_apart()

        made = begun.plan(
            lambda: find(self._checked()),
            lambda told: make(self._checked(), told),
            _describe_jobs,
            root=root,
            do_early=do_early if loads else None,
        )
        self.asked = begun.asked
        if isinstance(begun.early, Outcome):
            self.loaded = jobs[0].finish(begun.early, begun.sums, started)
        return made

    def load(
        self, find: Callable[[list[Call]], Any], make: Callable[[list[Call], bytes], list[ArrayLoad]], root: int | None = None
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
        load = load.anywhere
        plan = _with_names(load)
        if self.group is None:
            return plan
        executor = Execution(self.comm, load.options, load.handle, self.asked.values, self._checked()[0].tuning)
        return replace(plan, _executor=executor)

    def hand_out_tree(
        self, loads: list[ArrayLoad], build: Callable[[Sequence[Any]], Any], left_out: Sequence[ArrayInfo]
    ) -> TreePlan:
        """The plan of a tree for the caller, with the executor of all arrays, and of each by itself."""
        loads = [load.anywhere for load in loads]
        where = tuple(keys_text(load.where) for load in loads)
        if self.group is None:
            return TreePlan(build([_with_names(load) for load in loads]), where, tuple(left_out))
        tuning, agreed = self._checked()[0].tuning, self.asked.values
        plans = [
            replace(
                _with_names(one),
                _executor=Execution(self.comm, one.options, one.handle, _with(agreed, array=one.where), tuning),
            )
            for one in loads
        ]
        return TreePlan(
            build(plans), where, tuple(left_out), _executor=ExecutionOfMany(self.comm, tuple(loads), agreed, tuning)
        )


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
    if len(targets) < 2:
        if not targets:
            return Invocation(kind, title, {})
        call = calls[0] if calls else None
        known = None if call is None else call.known
        texts = Texts(targets[0].describe_rest(call, memo)) if known is None else known.texts
        return Invocation(kind, title, ArgumentsOfOne(targets[0].what, texts))
    described = [target.describe(None if calls is None else calls[k], memo) for k, target in enumerate(targets)]
    shared = {name: text for name, text in described[0].items() if name not in _OWN_NAMES}
    own_names = [name for name in described[0] if name in _OWN_NAMES]
    own = [(target.where, {name: one[name] for name in own_names}) for target, one in zip(targets, described, strict=True)]
    names = [target.where.removeprefix("array ") for target in targets]
    told = ", ".join(names[:_MOST_TOLD]) + (", ..." if len(names) > _MOST_TOLD else "")
    return Invocation(kind, f"{title} ({len(targets)} arrays: {told})", Arguments(shared, own), tuple(names))


def for_each_kind(calls: Sequence[Call], make: Callable[[Call], Call]) -> list[Call]:
    """What `make` makes of each of some calls. Calls that are one object stay one: many arrays share theirs."""
    made = {id(call): call for call in calls}
    made = {key: make(call) for key, call in made.items()}
    return [made[id(call)] for call in calls]


def _describe_jobs(loads: Sequence[ArrayLoad]) -> str:
    """All plans as text. Arrays of the same kind share theirs. Neighbours of the same text are counted: which plans are kept,
    and so one object, may differ from rank to rank after a call that failed.
    """
    kinds = {id(load.layout): load.kind for load in loads}
    said = {key: _describe_kind(plan) for key, plan in kinds.items()}
    counted = [(text, len(list(same))) for text, same in groupby(said[id(load.layout)] for load in loads)]
    return "; ".join(f"{n} times {text}" if n > 1 else text for text, n in counted)


def _describe_kind(plan: Plan) -> str:
    """`describe_job`, of a plan that is kept only once."""
    text = _described.get(plan)
    if text is None:
        text = _described[plan] = describe_job(plan)
    return text


def _with(values: Mapping[str, str], **more: str) -> Mapping[str, str]:
    return values.also(more) if isinstance(values, Arguments) else {**values, **more}


def _with_names(load: ArrayLoad) -> Plan:
    """The plan, whose `info` reads names of axes and coordinates from the file when they are first looked at."""
    info = load.info
    if isinstance(info.labels, Labels) and not info.labels.is_brief:
        return load.plan
    brief = info.labels if isinstance(info.labels, Labels) else None
    read = partial(_read_names, load.handle, info, load.options.access, brief)
    return replace(load.kind, info=replace(info, labels=OnDemand(read, brief)))


def _read_names(handle: Any, info: ArrayInfo, access: Access, brief: Labels | None) -> Labels:
    """The labels of an array, of the same version of the file as those in which its selection was looked up."""
    labels = read_labels(handle, info, access)
    if brief is not None:
        check_names(str(info), brief.read_in, labels.read_in, info.path, info.dataset)
    return labels


def _mesh_of(mesh: Any) -> Any:
    return mesh.mesh if isinstance(mesh, NamedSharding) else mesh


Planned = dict[tuple[Any, ...], tuple[Plan, Options]]


def plan_file(
    call: Call, info: ArrayInfo, path: Any, origin: Any = None, where: str = "", planned: Planned | None = None
) -> ArrayLoad:
    """Plan the load of an array in a file.

    Parameters
    ----------
    call : Call
        The checked arguments.
    info : ArrayInfo
        Its metadata.
    path, origin : object
        `path` opens it; if `path` is a source that has the values already, `origin` opens the file.
    where : str
        As in `ArrayLoad`.
    planned : dict, optional
        The plans of other arrays of the same job, to which this one is added. The calls that were planned exist until then.
    """
    kind: tuple[Any, ...] = (info.shape, info.dtype, info.chunks, info.codec, info.excerpt_nbytes, info.shards, info.format)
    if call.options.decode:
        kind = (*kind, json.dumps(dict(info.packing)))  # with the types
    if (
        call.options.machine.has_limits and info.nbytes_stored
    ):  # its file system sends them; about, for files of a series differ a bit
        kind = (*kind, round(_SIZES_PER_DOUBLING * math.log2(info.nbytes_stored)))
    of_call = (id(call), origin is None, *kind)
    found = None if planned is None else planned.get(of_call)
    if found is None:
        is_same = not is_by_name(call.options.select)  # names mean something else for each array
        found = _plan_kind(call, info, origin is not None, kind)
        if is_same and call.group is not None and planned is not None:
            planned[of_call] = found
    return ArrayLoad(found[0], info, found[1], path, origin, where)


def _plan_kind(call: Call, info: ArrayInfo, is_sent: bool, kind: tuple[Any, ...]) -> tuple[Plan, Options]:
    """A plan for arrays of a kind, and the options with its staging cap; `is_sent` if every rank has the values."""
    if is_by_name(call.options.select):
        call = call.but(options=_with_positions(call.options, info))
    group, selection = call.group, selection_for(call.options, info)
    if group is None:
        alone = plan_array(call.ask(), info, selection)
        return alone, _with_staging(call.options, alone)
    # A series of files of the same kind, or of parts of an array, is planned once: planning takes long for a small load.
    kept = _recent.get(group)
    if kept is None:
        kept = _recent[group] = OrderedDict()
    asked = _key_of_call(call) if call.known is None else call.known.plans
    pattern = SourceLayout.pattern(selection, info.chunks)
    key = (*asked, *pattern, is_sent, *kind, jax.config.read("jax_enable_x64"))
    made = kept.get(key)
    if made is not None:
        kept.move_to_end(key)
    else:
        if is_sent:  # none needs to send any
            call = call.but(options=replace(call.options, readers=DIRECT))
        made = kept[key] = plan_array(call.ask(), info, selection)
        while len(kept) > _RECENT:
            kept.popitem(last=False)
    text, made = _described.get(made), made.at(selection)
    kept[key] = made  # the next array of a tree is mostly cut out at the same place
    if text is not None:
        _described[made] = text  # it says nothing of the place
    return made, _with_staging(call.options, made)


def _key_of_call(call: Call) -> tuple[Any, ...]:
    """What is equal for calls that plan alike. The name of the array changes nothing; what is selected is asked apart."""
    how = call.options.describe() | {"dataset": "", "select": ""}
    return (call.sharding, call.tuning, *how.items())


def _with_staging(options: Options, made: Plan) -> Options:
    """The options with the staging cap that was planned."""
    return options if options.staging_nbytes == made.staging_nbytes else replace(options, staging=made.staging_nbytes)


def positions_of(select: Any, info: ArrayInfo) -> tuple[Any, ...]:
    """The NumPy-style index of an array for a selection by names of its axes. ValueError if there is none."""
    # Of that axis alone: an array that has its name may lie along another one.
    own = {name: one for name, one in info.coords.items() if one.dims in ((name,), (None,))}
    found = dict(select)
    for name, part in found.items():
        values = own[name].values if name in own else None
        if isinstance(part, Near | Between) and values is not None and values.dtype.kind in "iuf" and has_dates(part):
            found[name] = in_numbers(part, name, own[name].attrs, values.dtype)
    return name_axes(found, info.dims, {name: one.values for name, one in own.items()}, info.shape)


def _with_positions(options: Options, info: ArrayInfo) -> Options:
    """The options, with positions in the place of names of axes."""
    try:
        index = positions_of(options.select, info)
    except ValueError as error:
        raise ConfigError(f"{error} ({info} has shape {info.shape})") from None
    return replace(options, select=index)


def plan_memory(call: Call, info: ArrayInfo, source: MemorySource | None, root: int, as_it_is: bool) -> ArrayLoad:
    """Plan the scatter of an array in the memory of `root`; `as_it_is` if it can be sent from views."""
    return ArrayLoad(plan_scatter(call.ask(), info, root, as_it_is), info, call.options, source)
