"""From arguments and metadata to a plan: what is decided before anything is read.

A `Request` is the arguments as one rank sees them, and the agreement of all ranks on them; a `Call` is the same, checked.
`plan_file` and `plan_memory` turn it and an `ArrayInfo` into a `Plan`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from shardload.arrays.sharding import (
    describe_decomposition,
    describe_sharding,
    devices_per_process,
    layout_shards,
    padded_shape,
    read_sharding,
    read_spec,
    verify_layout,
)
from shardload.comm.group import Group, Invocation, group_of
from shardload.comm.launch import rank_of_process
from shardload.errors import ConfigError, ShardloadError, SourceError, StallError
from shardload.formats.base import ArrayInfo
from shardload.formats.memory import MemorySource
from shardload.jobs.describe import describe_job
from shardload.jobs.execution import Job, Plan
from shardload.options import AUTO, TIMEOUT, Options, pad_value
from shardload.planning.cost import Costs, Nodes, choose_mode, plan_cost
from shardload.planning.schedule import Grid, Schedule, Shards, plan_blocks, plan_row_chunks, plan_schedules
from shardload.planning.selection import select_axes
from shardload.planning.source_layout import SourceLayout
from shardload.planning.staging import least_staging, plan_staging
from shardload.planning.strategies import DIRECT, MODES, PARALLEL, ROOT, Root
from shardload.system.interruption import let_interruption_pass, outer_exception
from shardload.units import format_nbytes

__all__ = ["Call", "Request", "plan_file", "plan_memory"]

# Big enough that a read is efficient, small enough that reading and sending overlap. Inside a machine parts need no messages of
# their own, and smaller blocks stay in the cores' caches; between machines there should be few messages.
_BLOCK_NBYTES, _BLOCK_NBYTES_BETWEEN_NODES = 4 << 20, 16 << 20
# What one reading rank holds in blocks: three slots, two buffers with packed parts, and as much again in the threads that
# decode.
_BLOCKS_HELD = 7
_RECENT = 4  # plans that are kept, per group
_recent: WeakKeyDictionary[Group, OrderedDict[Any, Plan]] = WeakKeyDictionary()
_MOST_NBYTES, _MOST_SHARD_NBYTES = 2**63 - 1, 2**56  # that NumPy can count, and that processors can address
_NO_MPI = "without MPI these processes can send each other nothing"
_PLAN = "a plan"
_NAMES = tuple(Options.check().describe())


@dataclass
class Call:
    """The arguments of one call, checked, and the ranks that make it. `group` is None for an abstract mesh.

    `devices_per_rank` is of an abstract mesh: so many of its devices, in their order, are one process's.
    """

    sharding: NamedSharding
    options: Options
    group: Group | None
    devices_per_rank: int = 1

    @property
    def max_block_nbytes(self) -> int:
        """Cap on a block."""
        one_machine = self.group is None or len(set(self.group.machine.leaders)) == 1
        cap = _BLOCK_NBYTES if one_machine else _BLOCK_NBYTES_BETWEEN_NODES
        return min(cap, self.options.staging_nbytes // _BLOCKS_HELD)


@dataclass
class Request:
    """The arguments of one call as this rank sees them, not yet agreed on.

    Attributes
    ----------
    group : Group or None
        The ranks that make it; None for an abstract mesh.
    asked : Invocation
        What must be the same on every rank.
    call : Call or None
        The arguments, checked; None where `error` says what is wrong.
    """

    group: Group | None
    asked: Invocation
    call: Call | None
    error: ConfigError | None

    @classmethod
    @contextmanager
    def open(
        cls,
        kind: str,
        mesh: Any,
        spec: Any,
        comm: Any,
        what: dict[str, str],
        options: dict[str, Any],
        processes: Any = None,
        error: ConfigError | None = None,
    ) -> Iterator[Request]:
        """Check the arguments on this rank, and hold the group for all that the call does. Collective the first time.

        Parameters
        ----------
        kind : str
            The function that was called.
        mesh, spec, comm
            As the caller passed them.
        what : dict of str to str
            What else must be the same on every rank; ``"path"`` first.
        options : dict
            Keywords of `Options.check`.
        processes : int, optional
            How many processes an abstract mesh is of.
        error : ConfigError, optional
            What is wrong with other arguments on this rank.
        """
        given = mesh.mesh if isinstance(mesh, NamedSharding) else mesh
        values = {**what, "sharding": "", **dict.fromkeys(_NAMES, "")}
        call: Call | None = None
        timeout: float | None = TIMEOUT
        try:
            call = Call(read_sharding(mesh, spec), Options.check(**options), None, devices_per_process(given, processes))
            values |= {"sharding": describe_sharding(call.sharding), **call.options.describe()}
            timeout = call.options.timeout
        except ConfigError as found:
            error = error or found
        except Exception as found:  # an argument that nobody thought of: the others wait for this rank all the same
            let_interruption_pass(found)
            error = error or ConfigError(f"the arguments could not be read: {type(found).__name__}: {found}")
        title = what["path"] if what["path"].startswith(kind) else f"{kind} of {what['path']}"
        asked = Invocation(kind, title, values)
        if isinstance(given, AbstractMesh):
            if kind == "plan":
                yield cls(None, asked, call, error)
                return
            error = error or ConfigError(f"{kind} needs a mesh of devices, found an AbstractMesh: pass a jax.sharding.Mesh")
        group = group_of(comm, timeout)
        with outer_exception(), group.call(timeout) as refusal:
            group.watch.begin(what["path"], timeout)
            _ = group.machine, group.processes(jax.process_index())  # asked for where no rank can be missing
            error = refusal or error
            if call is not None:
                call.group = group
            yield cls(group, asked, None if error is not None else call, error)

    def agree(self) -> Call:
        """The call, if all ranks make the same one. Collective."""
        if self.group is not None:
            self.group.agree_same(self.asked, self.error)
        return self._checked()

    def _checked(self) -> Call:
        if self.call is None:
            raise self.error or ConfigError("the arguments could not be read")
        return self.call

    def settle(self) -> Call:
        """`agree`, in the messages that every call begins with. Collective."""
        if self.group is None:
            return self._checked()
        self.group.settle(self.asked, self.error)
        return self._checked()

    def plan(self, find: Callable[[Call], str], make: Callable[[Call, str], Plan], root: int | None = None) -> Plan:
        """What `make` plans from what `find` found on `root`, if all ranks call and plan the same. Collective.

        While all is well that takes one broadcast and one reduction. If something is wrong anywhere, the ranks go through it
        step by step, so that the first cause is named: a wrong argument, then calls and arguments that differ, then what `find`
        met.

        Parameters
        ----------
        find, make : callable
            Of the checked arguments, and of what was found.
        root : int, optional
            Where to find, after `settle`. Without it the call begins here, and rank 0 finds.
        """
        group, text, made = self.group, None, None
        self._enter("metadata")
        unfound: ShardloadError | None = None
        error: BaseException | None = None
        try:
            text = self._find(find, root)
        except StallError:
            raise  # there is nobody left to compare anything with
        except ShardloadError as found:  # the same on every rank
            unfound = error = found
        self._enter("plan")
        if text is not None and self.call is not None:
            try:
                made = make(self.call, text)
            except Exception as found:
                let_interruption_pass(found)
                error = found
        planned = {_PLAN: "" if made is None else describe_job(made)}
        asked = self.asked.also(**planned)
        if group is None or not group.all_same(asked, made is not None):
            self.agree()
            if unfound is not None:
                raise unfound
            if group is not None:
                group.agree_same(Invocation(_PLAN, asked.title, planned), error)
        if group is not None:
            group.watch.close()
        if made is None:
            raise error or ConfigError("nothing was planned")
        return replace(made, _job=replace(made._job, agreed=asked.values))

    def _enter(self, phase: str) -> None:
        if self.group is not None:
            self.group.watch.enter(phase)

    def _find(self, find: Callable[[Call], str], root: int | None) -> str | None:
        def run() -> str:
            return find(self._checked())

        if self.group is None:
            return run()
        return self.group.begin(self.asked, run) if root is None else self.group.tell(run, root)


def plan_file(call: Call, info: ArrayInfo, path: Any, origin: Any = None) -> Plan:
    """Plan the load of an array in a file: `info` is its metadata, `path` what opens it (or `origin`: then `path` has it)."""
    if call.group is None:
        return _plan_file(call, info, path)
    # A series of files of one kind is planned once: for small ones that is a good part of the time. What is kept holds nothing
    # of the caller's, and not the group that it is kept for.
    known = _recent.setdefault(call.group, OrderedDict())
    kind = (info.shape, info.dtype, info.chunks, info.codec, info.shards, info.format)
    key = (call.sharding, *call.options.describe().items(), *kind, jax.config.read("jax_enable_x64"))
    made = known.pop(key, None)
    if made is None:
        made = _plan_file(call, info, path)
    known[key] = replace(made, _job=replace(made._job, group=None, options=Options.check(), handle=None, origin=None))
    while len(known) > _RECENT:
        known.popitem(last=False)
    job = replace(made._job, group=call.group, options=call.options, handle=path, origin=origin)
    return replace(made, info=info, _job=job)


def _plan_file(call: Call, info: ArrayInfo, path: Any) -> Plan:
    options = call.options
    try:
        selection = select_axes(options.select, info.shape)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{error} ({info} has shape {info.shape})") from None
    dtype = _target_dtype(options.dtype, info)
    shards, n_ranks = _lay_out(call, selection.shape, dtype, str(info))
    layout = SourceLayout.cut(selection, info.chunks, np.dtype(info.dtype), dtype, info.codec)
    _check_staging(info, layout, options.staging_nbytes)
    n_owners = options.readers if isinstance(options.readers, int) else None
    modes, max_nbytes = _possible_modes(call), call.max_block_nbytes
    schedules = plan_schedules(layout, shards, n_ranks, max_nbytes=max_nbytes, n_owners=n_owners, modes=modes)
    return _choose(call, info, schedules, layout, path)


def _possible_modes(call: Call) -> tuple[str, ...]:
    """All of them, unless ranks cannot send each other anything."""
    if call.group is None or call.group.can_send:
        return MODES
    if call.options.readers not in (AUTO, DIRECT):
        raise ConfigError(
            f"readers is {call.options.readers!r}, but {_NO_MPI}: pass readers='direct' (or 'auto'), or start the job under MPI"
        )
    return (DIRECT,)


def plan_memory(call: Call, info: ArrayInfo, source: MemorySource | None, root: int, as_it_is: bool) -> Plan:
    """Plan the scatter of an array in the memory of `root`; `as_it_is` where it can be sent from views."""
    if call.group is not None and not call.group.can_send:
        raise ConfigError(f"scatter sends from one rank to the others, but {_NO_MPI}: start the job under MPI")
    dtype = _target_dtype(call.options.dtype, info)
    shards, n_ranks = _lay_out(call, info.shape, dtype, f"the array on rank {root}")
    max_nbytes, file_dtype = call.max_block_nbytes, np.dtype(info.dtype)
    itemsize, phase = max(dtype.itemsize, file_dtype.itemsize), (0,) * len(info.shape)
    if as_it_is:  # blocks are views: one per shard, however large
        blocks = chunks = Grid(info.shape, tuple(max(1, n) for n in shards.shard_shape), phase)
    else:
        chunks = Grid(info.shape, plan_row_chunks(info.shape, itemsize), phase)
        blocks = plan_blocks(chunks, itemsize, max_nbytes=max_nbytes, n_owners=1)
    layout = SourceLayout(select_axes(None, info.shape), chunks, None, file_dtype, dtype, info.codec)
    schedule = Schedule(blocks, shards, dtype.itemsize, n_ranks, Root(root), max_message_nbytes=max_nbytes)
    return _choose(call, info, {ROOT: schedule}, layout, source)


def _target_dtype(dtype: np.dtype[Any] | None, info: ArrayInfo) -> np.dtype[Any]:
    """The dtype that was asked for, or the file's."""
    found = np.dtype(info.dtype)
    if dtype is not None and found.kind == "c" and dtype.kind not in "cb":
        raise ConfigError(
            f"{info} is {found}; as {dtype} its imaginary part would be lost. Pass no dtype, or a complex one, and take the "
            "real part of the result"
        )
    return found if dtype is None else dtype


def _lay_out(call: Call, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> tuple[Shards, int]:
    """Cut the array by its sharding and check it all: dtype, axes, processes, JAX's index map. Also the number of ranks."""
    sharding, group = call.sharding, call.group
    axes = read_spec(sharding, len(shape))
    shape_global = padded_shape(shape, axes, sharding, pad=call.options.pad is not None, name=name)
    sizes = tuple(sharding.mesh.shape.values())
    held = [n // math.prod(sizes[m] for m in cut) for n, cut in zip(shape_global, axes, strict=True)]
    # NumPy counts the other axes also where one is empty.
    nbytes, shard_nbytes = (math.prod(max(1, n) for n in extent) * dtype.itemsize for extent in (shape_global, held))
    if nbytes > _MOST_NBYTES or shard_nbytes > _MOST_SHARD_NBYTES:
        raise SourceError(
            f"{name} would have shape {shape_global} as {dtype}, {tuple(held)} on each device: more than any machine can "
            "address. If that is no damage, pass select= with the part that is wanted"
        )
    if call.options.pad is not None:
        pad_value(call.options.pad, dtype)
    if group is None:
        n_devices, per_rank = math.prod(sharding.mesh.shape.values()), call.devices_per_rank
        return layout_shards(sharding, axes, shape_global, None, devices_per_rank=per_rank), n_devices // per_rank
    _refuse_lossy(dtype, name)
    shards = layout_shards(sharding, axes, shape_global, rank_of_process(group))
    verify_layout(shards, sharding, group.rank)
    return shards, group.size


def _refuse_lossy(dtype: np.dtype[Any], name: str) -> None:
    """ConfigError where JAX would make 32 bits of 64. Nobody has seen the values yet: no dtype is named without its limits."""
    if dtype.kind in "iufc" and not jax.config.read("jax_enable_x64"):
        parts = 2 if dtype.kind == "c" else 1
        if dtype.itemsize // parts > 4:
            if dtype.kind in "iu":
                loss, other = "wrap large values to 32 bits", "pass a dtype= of 32 bits or less that holds every value"
            else:
                small = "complex64" if dtype.kind == "c" else "float32"
                loss = f"lose half the digits, as {small}"
                other = f"pass dtype='{small}' if 7 digits, and nothing beyond {np.finfo(np.float32).max:.2g}, are enough"
            raise ConfigError(
                f"{name} would be loaded as {dtype}, but JAX has 64-bit types switched off and would silently {loss}. Switch "
                "them on before the first array: jax.config.update('jax_enable_x64', True), or JAX_ENABLE_X64=1 in the "
                f"environment. Or {other}: a value that does not fit is an error"
            )


def _check_staging(info: ArrayInfo, layout: SourceLayout, staging_nbytes: int) -> None:
    """ConfigError unless one chunk at a time can be read, decoded, and sent."""
    needed = least_staging(layout)
    if needed > staging_nbytes:
        raise ConfigError(
            f"one chunk of {info} is {format_nbytes(layout.chunk_nbytes)}, and reading it takes {format_nbytes(needed)} (the "
            "chunk as stored, as decompressed, as decoded, as read and as sent), but staging is "
            f"{format_nbytes(staging_nbytes)}. "
            f"Pass staging='{-(-needed // (1 << 20))}MiB' or more"
        )


def _choose(call: Call, info: ArrayInfo, plans: dict[str, Schedule], layout: SourceLayout, handle: Any) -> Plan:
    """Take one of the schedules: the one that was asked for, or the one that costs least."""
    options = call.options
    is_memory = ROOT in plans and len(plans) == 1
    machine = None if call.group is None else call.group.machine
    nodes = None if machine is None else Nodes(machine.ranks_per_node, machine.n_cores)
    n_threads = 1 if machine is None else machine.n_threads
    stagings = {mode: plan_staging([(plan, layout)], options.staging_nbytes, n_threads) for mode, plan in plans.items()}
    count = {
        mode: partial(plan_cost, plan, layout, nodes, staging_blocks=0 if is_memory else stagings[mode].n_blocks)
        for mode, plan in plans.items()
    }
    costs = Costs(count)
    if DIRECT in plans and len(plans) == 1:
        mode, why = DIRECT, f"{_NO_MPI}: each rank reads what it holds"
    elif options.readers == AUTO:
        mode, why = choose_mode(costs, plans[ROOT].n_ranks)
    elif isinstance(options.readers, int):
        mode, why = PARALLEL, f"readers={options.readers} was asked for"
    else:
        mode, why = options.readers, f"readers={options.readers!r} was asked for"
    plan = plans[mode]
    return Plan(
        info=info,
        shape=plan.blocks.shape,
        shape_global=plan.shards.shape_global,
        dtype=layout.dtype,
        sharding=call.sharding,
        decomposition=describe_decomposition(plan.shards),
        shard_shape=plan.shards.shard_shape,
        n_replicas=plan.shards.n_replicas,
        n_ranks=plan.n_ranks,
        readers=mode,
        n_readers=costs[mode].n_readers,
        why=why,
        costs=costs,
        staging_nbytes=options.staging_nbytes,
        _job=Job(
            call.group, options, plan, layout.selection, layout.chunks, layout.has_chunks, layout.dtype, handle, stagings[mode]
        ),
    )
