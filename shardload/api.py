"""What can a caller do with an array in a file? Four functions: `load`, `plan`, `scatter` and `verify`.

1. `load` opens the file, agrees with the other ranks, plans, reads and exchanges, assembles, and verifies. A small array takes
   a shorter way: only rank 0 opens the file, and sends the values to all ranks together with the metadata.
2. `plan` stops after planning. `Plan.execute` does the rest.
3. `scatter` is a load from the memory of one rank instead of a file.
4. `verify` plans the load that would give the array, then compares the array with the file instead of loading it again.
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
from shardload.formats.labels import SMALL_NBYTES
from shardload.formats.lookup import Labeller, find_array, find_small, read_small
from shardload.formats.memory import MemorySource
from shardload.jobs.array_load import ArrayLoad
from shardload.jobs.execution import Loaded
from shardload.jobs.plan import Plan
from shardload.jobs.planner import check_together
from shardload.jobs.request import Call, Request, Target, plan_file, plan_memory
from shardload.options import AUTO, DEFAULTS, FILE, FULL, Progress, options_of
from shardload.planning.region import Region
from shardload.planning.selection import is_by_name, needs_coordinates
from shardload.planning.strategies import ROOT
from shardload.transfer.messages import sendable

__all__ = ["load", "plan", "scatter", "verify"]

_SEARCHED_NBYTES = 1 << 24  # of a coordinate in which a selection is searched


def load(
    path: Any,
    mesh: Any,
    spec: Any = None,
    *,
    dataset: str | None = DEFAULTS.dataset,
    select: Any = DEFAULTS.select,
    dtype: Any = DEFAULTS.dtype,
    decode: bool | str | None = DEFAULTS.decode,
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
    """Load an array of an HDF5, netCDF4 or Zarr file into a sharded `jax.Array`, and check that each shard is where it belongs.

    Collective: yes, over `comm`. Every rank passes the same arguments, and all return or all raise the same error.

    Parameters
    ----------
    path : str, PathLike, h5py.Dataset or zarr.Array
        The file (``"data.h5"``), the file and the array's name in it (``"data.h5:/group/rho"``), or an open array.
    mesh : jax.sharding.Mesh or NamedSharding
        The mesh of devices. Or a NamedSharding, which has both the mesh and the spec.
    spec : PartitionSpec, optional
        Which mesh axes cut which array axis: ``P("a", "b")``. Leave it out with a NamedSharding.
    dataset : str, optional
        Name of the array in the file. Optional if the file has exactly one array.
    select : slice, int or tuple of them, or dict, optional
        The region of the array to load, as NumPy would index it, with step 1. An integer drops its axis. Or by names of axes,
        ``{"time": -1, "lat": slice(10, 50)}``; `near` and `between` select by coordinate: ``{"lat": between(30, 60)}``.
    dtype : dtype, optional
        Cast the values to this dtype. By default the file's dtype is kept exactly; if JAX cannot hold it, that is an error.
        With `decode`, decoded values are cast.
    decode : bool, "valid" or None
        True turns stored numbers into values by their attributes, as xarray does: ``_Unsigned``, fill values (NaN),
        ``scale_factor``, ``add_offset``. ``"valid"`` also makes values outside of ``valid_range`` NaN. Times stay numbers.
        False loads the stored numbers. None, too, and a `PackedWarning` on rank 0 says if those are packed.
    pad : number, optional
        Fill value. Axes that do not divide evenly over the mesh are padded at their end with it; `Plan.shape` is then the
        shape without padding. By default such an axis is an error.
    readers : {"auto", "root", "parallel", "direct"} or int
        Who reads. ``"root"``: rank 0 alone. ``"parallel"``: all ranks, and each chunk is decoded once in the job. ``"direct"``:
        each process reads what its own devices hold. An int: that many ranks. ``"auto"``: the cheapest way by the plan.
    staging : str or int
        Cap on each process's host memory beyond its own pieces: bytes, or text such as ``"256MiB"``.
    verify : {"index", "checksum", "file", "full"}
        How to verify; each level includes those before it. ``"index"``: match every shard to the region that JAX asks for.
        ``"checksum"``: also checksum every part from the reader's block to the host piece, and the shards on the devices, with
        replicas on other processes. ``"file"``: each process also reads a few random regions of its shards again, with the
        format's own library, and compares them bit by bit with its devices. ``"full"``: the same for all elements.
        ``Plan.report.proven`` has the result.
    comm : mpi4py.MPI.Comm, optional
        The ranks that take part: at least every process of the mesh. Default: COMM_WORLD.
    progress : bool or callable, optional
        True shows a progress bar on rank 0; None shows it for large loads in a terminal or a notebook. Or a function
        ``(done_nbytes, total_nbytes)``, called on every rank.
    timeout : float or None
        Seconds. If nothing moves on any rank for this long, every rank raises `StallError`, which names the late ranks. None:
        wait for ever.
    missing : {"warn", "error", "fill"}
        What to do about missing chunks (not stored in the file): one `MissingChunksWarning` on rank 0, a SourceError on every
        rank, or nothing. Their values are the file's fill value, and `LoadReport.chunks_missing` counts them.
    allow_external : bool
        True allows the file to refer to data outside its folder (a Zarr store: outside itself), by external links, virtual
        datasets, external storage or symbolic links. By default such a file is refused.
    untrusted : bool
        True opens and decodes the file in helper processes only, with limits on memory (`staging`) and time. A file that
        crashes a library, makes it loop or take too much memory is then a SourceError. Slower; needs a path. Helpers may use
        all filters, so `allow_filters` is not needed.
    allow_filters : str, int or list of them
        Filters (Zarr: codecs), by name or number, to use although damaged data can crash or hang their decoders:
        ``"bitshuffle"``, ``["zfp", 32024]``, ``"all"``. By default an array that needs such a filter is refused, and the error
        names the filter. Filters that withstand damage (gzip, Zstandard, Blosc, LZF and others: docs/trust-files.md) are
        always allowed.

    Returns
    -------
    jax.Array
        The array, with the selected (and padded) shape, the file's dtype (or `dtype`) and the given sharding.

    Raises
    ------
    ConfigError
        The arguments or the launch are wrong.
    SourceError
        The file does not exist, is damaged or cannot be loaded.
    PeerError
        Ranks disagree, or one rank failed for a reason of its own.
    StallError
        Nothing moved for `timeout` seconds. After it the ranks can make no further call together, and the job ends when the
        first of them ends.

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
    decode: bool | str | None = DEFAULTS.decode,
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
    """Plan what `load` with the same arguments would do, without doing it. ``print(plan)`` shows it.

    It reads the file's metadata, but no values. With a `jax.sharding.AbstractMesh` it needs no devices and no MPI.

    Collective: yes, over `comm`; no with an AbstractMesh.

    Parameters
    ----------
    path, mesh, spec and all options
        As in `load`.
    processes : int, optional
        Only with an AbstractMesh: how many processes to plan for. Each gets the same number of devices, in the order of the
        mesh. By default each device is a process of its own.

    Returns
    -------
    Plan
        Plain fields to inspect, and ``execute()`` to do it.

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
        (made,) = request.plan(lambda calls: _labelled(path, _find(path, calls[0]), calls[0], True).to_json(), make)
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
    """Give every process its shards of an array that one rank has or makes.

    The root sends parts of its array from views: no pickle, and no second copy of the array. What the other ranks pass as
    `array` is ignored.

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
        The array, with its (padded) shape, its dtype and the given sharding.

    Raises
    ------
    ConfigError, SourceError, PeerError
        On every rank. If `array()` raises on the root, every rank raises a PeerError with that text; on the root the original
        error is its cause.
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
        request.settle()  # before any message from the root: the ranks may not agree on who it is
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
    decode: bool | str | None = DEFAULTS.decode,
    pad: Any = DEFAULTS.pad,
    how: str = DEFAULTS.how,
    seed: int = DEFAULTS.seed,
    staging: str | int = DEFAULTS.staging,
    comm: Any = DEFAULTS.comm,
    allow_external: bool = DEFAULTS.allow_external,
    untrusted: bool = DEFAULTS.untrusted,
    allow_filters: Any = DEFAULTS.allow_filters,
) -> VerifyReport:
    """Compare an array, wherever it comes from, with the file that it should match.

    Each process reads the regions that its own devices hold, with the format's own library, and compares them bit by bit.

    Collective: yes, over `comm`. Every rank passes the same arguments, and all return or all raise the same error.

    Parameters
    ----------
    x : jax.Array
        The array. It has a NamedSharding, or is on one device. It is not changed.
    path, dataset, select, dtype, decode, pad, comm, allow_filters
        As for the `load` that would give `x`: `pad` if it has padding, `dtype` if it was cast, `decode` if it was decoded.
    how : {"full", "file", "checksum", "index"}
        What to compare: all elements; some random regions; replicas with each other; or only shape and dtype.
    seed : int
        Seed for the random regions of ``"file"``.
    staging : str or int
        Cap on each process's memory for the comparison.
    allow_external : bool
        As in `load`: the file may refer to data outside its folder.
    untrusted : bool
        As in `load`: only helper processes open the file, and they may use all filters.

    Returns
    -------
    VerifyReport
        What was proven. ``print`` shows it.

    Raises
    ------
    VerifyError
        If an element differs. The error names the device, the element and both values. On every rank.
    ConfigError
        If `x` cannot be that array, because its shape or dtype differs.
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
                f"{made.plan.shape_global} and is {made.plan.dtype}. Pass the same select=, dtype=, decode= and pad= as to the "
                "load"
            )
        return [made]

    with Request.open("verify", [Target(_sharding_of(x), None, what, options)], comm, error=error) as request:
        made = request.plan(lambda calls: _labelled(path, _find(path, calls[0]), calls[0]).to_json(), make)
        return request.job(made).verify(x, int(seed))


def load_many(arrays: Sequence[tuple[Any, Any, Any, dict[str, Any]]], comm: Any = None) -> Loaded:
    """Load several arrays in one call: one agreement before, one exchange, one agreement after. Collective.

    Not public yet. `load` calls it with one array.

    Parameters
    ----------
    arrays : sequence of tuple
        For each array: path, mesh, spec and the keywords of `load`. Keywords that belong to the whole call (`Option.is_shared`)
        are the same in all.
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
    """The array's metadata as text, and its values if it is small and `readers` is "auto"."""
    options, access = call.options, call.options.access
    is_auto = options.readers == AUTO
    if is_auto and access.untrusted is not None:  # one helper process for both
        info, values = find_small(path, options.dataset, access)
    else:
        info = _find(path, call)
        values = read_small(path, info, access, call.tuning) if is_auto else None
    return [_labelled(path, info, call).to_json(), None if values is None else b64encode(values).decode()]


def _plan_found(call: Call, path: Any, found: list[str | None]) -> ArrayLoad:
    text, values = found
    info = ArrayInfo.from_json(text or "")
    if values is None:
        return plan_file(call, info, path)
    array = np.frombuffer(b64decode(values), dtype=info.dtype).reshape(info.shape)
    return plan_file(call, info, MemorySource(array, info), path)


def _find(path: Any, call: Call) -> ArrayInfo:
    options = call.options
    return find_array(path, options.dataset, options.access, needs_numbers=bool(options.decode))


def _labelled(path: Any, info: ArrayInfo, call: Call, always: bool = False) -> ArrayInfo:
    """The metadata with names and coordinates, if it is asked for or the selection needs them."""
    select = call.options.select
    if not always and not is_by_name(select):
        return info
    with Labeller(call.options.access, _SEARCHED_NBYTES if needs_coordinates(select) else SMALL_NBYTES) as labeller:
        return labeller.label(path, info)


def _sharding_of(x: Any) -> Any:
    """Its sharding; for an array on a single device, the same as a NamedSharding over a mesh of one device."""
    if not isinstance(x, jax.Array):
        return None
    if isinstance(x.sharding, jax.sharding.SingleDeviceSharding):
        return NamedSharding(Mesh(np.array(list(x.sharding.device_set)), ("device",)), PartitionSpec())
    return x.sharding


def _describe_path(path: Any) -> str:
    if isinstance(path, (str, os.PathLike)):
        return repr(os.path.expanduser(os.fspath(path)))
    # An open array: its name in the file is enough, because the file's name may differ from rank to rank.
    kind = "NumPy array" if isinstance(path, np.ndarray) else type(path).__name__
    return f"an open {kind} named {getattr(path, 'name', None)!r}"
