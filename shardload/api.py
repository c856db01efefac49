"""open -> agree -> plan -> read and exchange -> assemble -> verify

`load` is `plan` followed by `Plan.execute`; the values of a small array come to all ranks with its metadata, so that only
rank 0 opens the file. `scatter` is the same with one rank's memory in the place of the file. `verify` plans the load
that an array came from, and compares the array with the file instead of reading it into another.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardload.arrays.verification import VerifyReport
from shardload.errors import ConfigError
from shardload.formats.base import ArrayInfo
from shardload.formats.lookup import find_array, find_small, read_small
from shardload.formats.memory import MemorySource
from shardload.jobs.array_load import ArrayLoad
from shardload.jobs.execution import Loaded
from shardload.jobs.plan import Plan
from shardload.jobs.planner import check_together
from shardload.jobs.request import Call, Request, Target, plan_file, plan_memory
from shardload.options import AUTO, DEFAULTS, FILE, FULL, Progress, options_of
from shardload.planning.region import Region
from shardload.planning.strategies import ROOT
from shardload.transfer.messages import sendable

__all__ = ["load", "plan", "scatter", "verify"]


def load(
    path: Any,
    mesh: Any,
    spec: Any = None,
    *,
    dataset: str | None = DEFAULTS.dataset,
    select: Any = DEFAULTS.select,
    dtype: Any = DEFAULTS.dtype,
    pad: Any = DEFAULTS.pad,
    readers: str | int = DEFAULTS.readers,
    staging: str | int = DEFAULTS.staging,
    verify: str = DEFAULTS.verify,
    comm: Any = DEFAULTS.comm,
    progress: Progress = DEFAULTS.progress,
    timeout: float | None = DEFAULTS.timeout,
    missing: str = DEFAULTS.missing,
    allow_external: bool = DEFAULTS.allow_external,
    untrusted: bool = DEFAULTS.untrusted,
    allow_filters: Any = DEFAULTS.allow_filters,
) -> jax.Array:
    """Load an array of an HDF5, netCDF4 or Zarr file into a sharded `jax.Array`, each shard proven to be where it belongs.

    Collective: yes, over `comm`. Every rank passes the same arguments, and all return or all raise the same error.

    Parameters
    ----------
    path : str, PathLike, h5py.Dataset or zarr.Array
        The file (``"data.h5"``), the file with the name inside it (``"data.h5:/group/rho"``), or an open array.
    mesh : jax.sharding.Mesh or NamedSharding
        The devices, or a sharding that says all.
    spec : PartitionSpec, optional
        Which mesh axes cut which array axis: ``P("a", "b")``. Left out with a NamedSharding.
    dataset : str, optional
        Name inside the file. May be left out where the file has exactly one array.
    select : slice, int or tuple of them, optional
        The part of the array to load, as NumPy would index it, with step 1. Integers drop their axis.
    dtype : dtype, optional
        Cast to this. Without it the file's dtype is kept exactly, or refused where JAX cannot hold it.
    pad : number, optional
        Fill value for the tail of axes that do not divide over the mesh; `Plan.shape` is then the true shape. Without it such
        an axis is an error.
    readers : {"auto", "root", "parallel", "direct"} or int
        Who reads: ``"root"``, rank 0 alone; ``"parallel"``, all ranks, each chunk once in the job; ``"direct"``, each process
        what its devices hold; an int, that many ranks; ``"auto"`` decides from the plan.
    staging : str or int
        Cap on each process's host memory beyond its own pieces, in bytes or such as ``"256MiB"``.
    verify : {"index", "checksum", "file", "full"}
        ``"index"``: every shard is matched to the region that JAX asks for (always). ``"checksum"``: every part is also
        checksummed from the reader's block to the host piece, and what the devices hold compared by checksum, replicas on other
        processes too. ``"file"``: each process also reads a few random boxes of its shards again, with the format's own
        library, and compares them bit by bit with its devices. ``"full"``: all elements. ``Plan.report.proven`` says what was
        proven.
    comm : mpi4py.MPI.Comm, optional
        The ranks that take part: at least every process of the mesh. Default: COMM_WORLD.
    progress : bool or callable, optional
        Show a progress bar on rank 0 (default: for large loads in a terminal), or a function ``(done_nbytes, total_nbytes)``.
    timeout : float or None
        Seconds: if nothing has moved on any rank for so long, every rank raises `StallError`, which names who is late. None:
        never.
    missing : {"warn", "error", "fill"}
        What to do about chunks that are not stored, whose values are then the file's fill value: one `MissingChunksWarning` on
        rank 0, a SourceError on every rank, or nothing. They are counted in `LoadReport.chunks_missing`.
    allow_external : bool
        Whether the file may lead outside of its folder (a Zarr store: outside of itself), by external links, virtual datasets,
        external storage or symbolic links. Without it such a file is refused.
    untrusted : bool
        Whether the file is opened and decoded by helper processes alone, with limits on memory (`staging`) and time: where it
        makes a library crash, go round in circles or take too much memory, that is a SourceError. Slower; it needs a path.
        All filters may be used there, so `allow_filters` is not needed.
    allow_filters : str, int or list of them
        Filters (Zarr: codecs), by name or number, that may be used though damaged data can crash or hang their decoders:
        ``"bitshuffle"``, ``["zfp", 32024]``, ``"all"``. Without it an array that needs such a one is refused, and the error
        names it. Those that withstand damage (gzip, Zstandard, Blosc, LZF and others: docs/trust-files.md) need no word.

    Returns
    -------
    jax.Array
        Of the selected (and padded) shape and the file's dtype (or `dtype`), with the given sharding.

    Raises
    ------
    ConfigError
        The arguments or the launch are wrong.
    SourceError
        The file is missing, damaged or not loadable.
    PeerError
        Ranks disagree, or one failed for a reason of its own.
    StallError
        Nothing moved for `timeout` seconds. The ranks can make no call together any more, and the job ends when the first of
        them does.

    Examples
    --------
    >>> import h5py, jax, numpy as np, shardload
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> shardload.initialize()
    >>> if jax.process_index() == 0:
    ...     with h5py.File("data.h5", "w") as file:
    ...         file["density"] = np.ones((8, 8, 4), "float32")
    >>> b = 2 if jax.device_count() % 2 == 0 else 1
    >>> mesh = Mesh(np.array(jax.devices()).reshape(-1, b), ("a", "b"))  # of the devices there are
    >>> x = shardload.load("data.h5", mesh, P("a", "b"))
    >>> x.shape, float(x.sum())
    ((8, 8, 4), 256.0)
    """
    options = options_of("load", locals())

    return load_many([(path, mesh, spec, options)], comm).arrays[0]


def plan(
    path: Any,
    mesh: Any,
    spec: Any = None,
    *,
    dataset: str | None = DEFAULTS.dataset,
    select: Any = DEFAULTS.select,
    dtype: Any = DEFAULTS.dtype,
    pad: Any = DEFAULTS.pad,
    readers: str | int = DEFAULTS.readers,
    staging: str | int = DEFAULTS.staging,
    verify: str = DEFAULTS.verify,
    comm: Any = DEFAULTS.comm,
    progress: Progress = DEFAULTS.progress,
    timeout: float | None = DEFAULTS.timeout,
    missing: str = DEFAULTS.missing,
    allow_external: bool = DEFAULTS.allow_external,
    untrusted: bool = DEFAULTS.untrusted,
    allow_filters: Any = DEFAULTS.allow_filters,
    processes: int | None = DEFAULTS.processes,
) -> Plan:
    """Say what `load` with the same arguments would do, without doing it. ``print(plan)`` is for people.

    Opens the file for its metadata, reads no values. With a `jax.sharding.AbstractMesh` it needs no devices and no MPI.

    Collective: yes, over `comm`; no with an AbstractMesh.

    Parameters
    ----------
    path, mesh, spec and all options
        As in `load`.
    processes : int, optional
        With an AbstractMesh alone: how many processes its devices are dealt to, in the order of the mesh, each as many (1: all
        are one process's). Without it each device is taken to be a process of its own.

    Returns
    -------
    Plan
        With plain fields, and ``execute()``.

    Raises
    ------
    ConfigError, SourceError, PeerError
        As `load` does.
    """
    options = options_of("plan", locals())
    target = Target(mesh, spec, {"path": _describe_path(path)}, options)

    def make(calls: list[Call], found: str) -> list[ArrayLoad]:
        return [plan_file(calls[0], ArrayInfo.from_json(found), path)]

    with Request.open("plan", [target], comm, processes) as request:
        (made,) = request.plan(lambda calls: _find(path, calls[0]).to_json(), make)
        return request.hand_out(made)


def scatter(
    array: Any,
    mesh: Any,
    spec: Any = None,
    *,
    root: int = DEFAULTS.root,
    dtype: Any = DEFAULTS.dtype,
    pad: Any = DEFAULTS.pad,
    staging: str | int = DEFAULTS.staging,
    verify: str = DEFAULTS.verify,
    comm: Any = DEFAULTS.comm,
    progress: Progress = DEFAULTS.progress,
    timeout: float | None = DEFAULTS.timeout,
) -> jax.Array:
    """Give every process its shard of an array that one rank has or makes.

    The root sends from views of its array, piece by piece: no pickle, no second copy of it. What other ranks pass as `array`
    is not looked at.

    Collective: yes, over `comm`.

    Parameters
    ----------
    array : array_like or callable
        On `root`: the array, or a function without arguments that returns it (called on `root` alone). Elsewhere: anything,
        usually None.
    mesh, spec, dtype, pad, staging, verify, comm, progress, timeout
        As in `load`.
    root : int
        The rank that has the array.

    Returns
    -------
    jax.Array
        Of the array's (padded) shape and dtype, with the given sharding.

    Raises
    ------
    ConfigError, SourceError, PeerError
        On every rank. What `array()` raises on the root is a PeerError with its text, and on the root its cause.
    """
    options = options_of("scatter", locals()) | {"readers": ROOT}
    error = None
    if verify in (FILE, FULL):
        error = ConfigError(f"verify is {verify!r}, but scatter has no file to read again; expected 'index' or 'checksum'")
    source: list[MemorySource] = []

    def find(calls: list[Call]) -> str:
        source.append(MemorySource(np.asarray(array() if callable(array) else array)))
        info = source[0].info
        view = source[0].view(Region.whole(info.shape))
        as_it_is = view is not None and sendable(view) and calls[0].options.dtype in (None, source[0].dtype)
        return json.dumps([info.to_json(), as_it_is])

    def make(calls: list[Call], found: str) -> list[ArrayLoad]:
        text, as_it_is = json.loads(found)
        return [plan_memory(calls[0], ArrayInfo.from_json(text), source[0] if source else None, int(root), as_it_is)]

    target = Target(mesh, spec, {"path": f"scatter from rank {root!r}"}, options)
    with Request.open("scatter", [target], comm, error=error) as request:
        request.settle()  # before anything is asked of the root: it may not be the same on all ranks
        group = request.group
        if group is None:
            raise ConfigError("scatter needs a mesh of devices")
        if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < group.size:
            raise ConfigError(f"root is {root!r}; expected a rank from 0 to {group.size - 1}")
        job = request.job(request.plan(find, make, int(root)))
        job.begin()
        return job.run().arrays[0]


def verify(
    x: jax.Array,
    path: Any,
    *,
    dataset: str | None = DEFAULTS.dataset,
    select: Any = DEFAULTS.select,
    dtype: Any = DEFAULTS.dtype,
    pad: Any = DEFAULTS.pad,
    how: str = DEFAULTS.how,
    seed: int = DEFAULTS.seed,
    staging: str | int = DEFAULTS.staging,
    comm: Any = DEFAULTS.comm,
    allow_external: bool = DEFAULTS.allow_external,
    untrusted: bool = DEFAULTS.untrusted,
    allow_filters: Any = DEFAULTS.allow_filters,
) -> VerifyReport:
    """Compare an array, wherever it comes from, with the file that it should be of.

    Each process reads what its own devices hold, with the format's own library, and compares it bit by bit.

    Collective: yes, over `comm`. Every rank passes the same arguments, and all return or all raise the same error.

    Parameters
    ----------
    x : jax.Array
        With a NamedSharding (or on one device). Not changed.
    path, dataset, select, dtype, pad, comm, allow_filters
        As for the `load` that would give `x`: `pad` where it has padding, `dtype` where it was cast.
    how : {"full", "file", "checksum", "index"}
        All elements, some boxes at random, replicas compared with each other, or shape and dtype alone.
    seed : int
        Of the boxes: others with another one.
    staging : str or int
        Cap on each process's memory for this.
    allow_external : bool
        As for `load`: whether the file may lead outside of its folder.
    untrusted : bool
        As for `load`: whether the file is opened by helper processes alone, which may use all filters.

    Returns
    -------
    VerifyReport
        What was proven; ``print`` it.

    Raises
    ------
    VerifyError
        If an element differs: naming the device, the element and both values. On every rank.
    ConfigError
        If `x` cannot be that array: another shape or dtype.
    SourceError, PeerError
        As `load` does.

    Examples
    --------
    >>> import h5py, jax, numpy as np, shardload
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> shardload.initialize()
    >>> if jax.process_index() == 0:
    ...     with h5py.File("data.h5", "w") as file:
    ...         file["density"] = np.ones((8, 8, 4), "float32")
    >>> mesh = Mesh(np.array(jax.devices()), "a")
    >>> x = shardload.load("data.h5", mesh, P("a"))
    >>> print(shardload.verify(x, "data.h5"))  # doctest: +ELLIPSIS
    verified by full: ... CRC-32 of the array b4e473c9
    """
    options = options_of("verify", locals()) | {"verify": how}
    error, found, given = None, "nothing", cast(Any, x)
    if not isinstance(given, jax.Array):
        error = ConfigError(f"x is a {type(given).__name__}; expected a jax.Array")
    elif isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        error = ConfigError(f"seed is {seed!r}; expected an integer, 0 or more")
    else:
        found = f"an array of shape {x.shape}, {x.dtype}"
    what = {"path": _describe_path(path), "x": found, "seed": str(seed)}

    def make(calls: list[Call], found: str) -> list[ArrayLoad]:
        made = plan_file(calls[0], ArrayInfo.from_json(found), path)
        if (made.plan.shape_global, made.plan.dtype) != (x.shape, x.dtype):
            raise ConfigError(
                f"x has shape {x.shape} and is {x.dtype}, but a load of {made.info} with these arguments has shape "
                f"{made.plan.shape_global} and is {made.plan.dtype}. Pass the same select=, dtype= and pad= as to the load"
            )
        return [made]

    with Request.open("verify", [Target(_sharding_of(x), None, what, options)], comm, error=error) as request:
        made = request.plan(lambda calls: _find(path, calls[0]).to_json(), make)
        return request.job(made).verify(x, int(seed))


def load_many(arrays: Sequence[tuple[Any, Any, Any, dict[str, Any]]], comm: Any = None) -> Loaded:
    """Load several arrays in one call: one agreement before, one exchange, one agreement after. Collective.

    Not public yet; `load` is this of one array.

    Parameters
    ----------
    arrays : sequence of tuple
        For each: path, mesh, spec, and the keywords of `load`. Keywords that are not about one array alone are the same in all.
    comm : mpi4py.MPI.Comm, optional
        As in `load`.
    """
    targets = [Target(mesh, spec, {"path": _describe_path(path)}, options) for path, mesh, spec, options in arrays]
    paths = [path for path, *_ in arrays]

    def find(calls: list[Call]) -> str:
        return json.dumps([_find_with_values(path, call) for path, call in zip(paths, calls, strict=True)])

    def make(calls: list[Call], found: str) -> list[ArrayLoad]:
        loads = [_plan_found(*one) for one in zip(calls, paths, json.loads(found), strict=True)]
        if len(loads) > 1:
            check_together([load.layout for load in loads], calls[0].options.staging_nbytes)
        return loads

    with Request.open("load", targets, comm) as request:
        job = request.job(request.plan(find, make))
        job.begin()
        return job.run()


def _find_with_values(path: Any, call: Call) -> list[str | None]:
    """The array as text, and its values where it is small and all ranks may get them that way."""
    options, access = call.options, call.options.access
    is_auto = options.readers == AUTO
    if is_auto and access.untrusted is not None:  # one process for both
        info, values = find_small(path, options.dataset, access)
    else:
        info = _find(path, call)
        values = read_small(path, info, access, call.tuning) if is_auto else None
    return [info.to_json(), None if values is None else b64encode(values).decode()]


def _plan_found(call: Call, path: Any, found: list[str | None]) -> ArrayLoad:
    text, values = found
    info = ArrayInfo.from_json(text or "")
    if values is None:
        return plan_file(call, info, path)
    array = np.frombuffer(b64decode(values), dtype=info.dtype).reshape(info.shape)
    return plan_file(call, info, MemorySource(array, info), path)


def _find(path: Any, call: Call) -> ArrayInfo:
    return find_array(path, call.options.dataset, call.options.access)


def _sharding_of(x: Any) -> Any:
    """Its sharding, in words of a mesh where it has none."""
    if not isinstance(x, jax.Array):
        return None
    if isinstance(x.sharding, jax.sharding.SingleDeviceSharding):
        return NamedSharding(Mesh(np.array(list(x.sharding.device_set)), ("device",)), PartitionSpec())
    return x.sharding


def _describe_path(path: Any) -> str:
    if isinstance(path, (str, os.PathLike)):
        return repr(os.path.expanduser(os.fspath(path)))
    # Open arrays: the name inside says enough; how the file is called may differ from rank to rank.
    kind = "NumPy array" if isinstance(path, np.ndarray) else type(path).__name__
    return f"an open {kind} named {getattr(path, 'name', None)!r}"
