"""open -> agree -> plan -> read and exchange -> assemble -> verify

`load` is `plan` followed by `Plan.execute`; the values of a small array come to all ranks with its metadata, so that only
rank 0 opens the file. `scatter` is the same with one rank's memory in the place of the file.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from typing import Any

import jax
import numpy as np

from shardload.cost import ROOT
from shardload.errors import ConfigError
from shardload.execute import Plan
from shardload.options import AUTO, Progress
from shardload.prepare import Call, Request, plan_file, plan_memory
from shardload.region import Region
from shardload.sources import find_array, read_small
from shardload.sources.base import ArrayInfo
from shardload.sources.memory import MemorySource
from shardload.wire import sendable

__all__ = ["load", "plan", "scatter"]


def load(
    path: Any,
    mesh: Any,
    spec: Any = None,
    *,
    dataset: str | None = None,
    select: Any = None,
    dtype: Any = None,
    pad: Any = None,
    readers: str | int = AUTO,
    staging: str | int = "256MiB",
    verify: str = "index",
    comm: Any = None,
    progress: Progress = None,
    missing: str = "warn",
    outside: bool = False,
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
        what it holds; an int, that many ranks; ``"auto"`` decides from the plan.
    staging : str or int
        Cap on each process's host memory beyond its own pieces, in bytes or such as ``"256MiB"``.
    verify : {"index", "checksum"}
        ``"index"``: every shard is matched to the region that JAX asks for (always). ``"checksum"``: every part is also
        checksummed from the reader's block to the host piece.
    comm : mpi4py.MPI.Comm, optional
        The ranks that take part: at least every process of the mesh. Default: COMM_WORLD.
    progress : bool or callable, optional
        Show a progress bar on rank 0 (default: for large loads in a terminal), or a function ``(done_nbytes, total_nbytes)``.
    missing : {"warn", "error", "fill"}
        What to do about chunks that are not stored, whose values are then the file's fill value: one `MissingChunksWarning` on
        rank 0, a SourceError on every rank, or nothing. They are counted in `LoadReport.chunks_missing`.
    outside : bool
        Whether the file may lead outside of its folder (a Zarr store: outside of itself), by external links, virtual datasets,
        external storage or symbolic links. Without it such a file is refused.

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

    Examples
    --------
    >>> x = shardload.load("data.h5", mesh, P("a", "b"))  # doctest: +SKIP
    """
    options = dict(
        dataset=dataset, select=select, dtype=dtype, pad=pad, readers=readers, staging=staging, verify=verify,
        progress=progress, missing=missing, outside=outside,
    )  # fmt: skip
    request = Request.check(mesh, spec, comm, {"path": _describe_path(path)}, options)

    def find(call: Call) -> str:
        info = find_array(path, call.options.dataset, call.options.outside)
        values = read_small(path, info, call.options.outside) if call.options.readers == AUTO else None
        return json.dumps([info.to_json(), values and b64encode(values).decode()])

    def make(call: Call, found: str) -> Plan:
        text, values = json.loads(found)
        info = ArrayInfo.from_json(text)
        if values is None:
            return plan_file(call, info, path)
        array = np.frombuffer(b64decode(values), dtype=info.dtype).reshape(info.shape)
        return plan_file(call, info, MemorySource(array, info))

    return request.plan(find, make).execute()


def plan(
    path: Any,
    mesh: Any,
    spec: Any = None,
    *,
    dataset: str | None = None,
    select: Any = None,
    dtype: Any = None,
    pad: Any = None,
    readers: str | int = AUTO,
    staging: str | int = "256MiB",
    verify: str = "index",
    comm: Any = None,
    progress: Progress = None,
    missing: str = "warn",
    outside: bool = False,
) -> Plan:
    """Say what `load` with the same arguments would do, without doing it. ``print(plan)`` is for people.

    Opens the file for its metadata, reads no values. With a `jax.sharding.AbstractMesh` it needs no devices and no MPI: each
    device is taken to be a process of its own.

    Collective: yes, over `comm`; no with an AbstractMesh.

    Returns
    -------
    Plan
        With plain fields, and ``execute()``.

    Raises
    ------
    ConfigError, SourceError, PeerError
        As `load` does.
    """
    options = dict(
        dataset=dataset, select=select, dtype=dtype, pad=pad, readers=readers, staging=staging, verify=verify,
        progress=progress, missing=missing, outside=outside,
    )  # fmt: skip
    request = Request.check(mesh, spec, comm, {"path": _describe_path(path)}, options)
    return request.plan(
        lambda call: find_array(path, call.options.dataset, call.options.outside).to_json(),
        lambda call, found: plan_file(call, ArrayInfo.from_json(found), path),
    )


def scatter(
    array: Any,
    mesh: Any,
    spec: Any = None,
    *,
    root: int = 0,
    dtype: Any = None,
    pad: Any = None,
    staging: str | int = "256MiB",
    verify: str = "index",
    comm: Any = None,
    progress: Progress = None,
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
    mesh, spec, dtype, pad, staging, verify, comm, progress
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
    options = dict(dtype=dtype, pad=pad, staging=staging, verify=verify, progress=progress, readers=ROOT)
    request = Request.check(mesh, spec, comm, {"path": f"scatter from rank {root!r}"}, options)
    group = request.settle().group  # before anything is asked of the root: it may not be the same on all ranks
    if group is None:
        raise ConfigError("scatter needs a mesh of devices, found an AbstractMesh: pass a jax.sharding.Mesh")
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < group.size:
        raise ConfigError(f"root is {root!r}; expected a rank from 0 to {group.size - 1}")
    source: list[MemorySource] = []

    def find(call: Call) -> str:
        source.append(MemorySource(np.asarray(array() if callable(array) else array)))
        info = source[0].info
        view = source[0].view(Region.whole(info.shape))
        as_it_is = view is not None and sendable(view) and call.options.dtype in (None, source[0].dtype)
        return json.dumps([info.to_json(), as_it_is])

    def make(call: Call, found: str) -> Plan:
        text, as_it_is = json.loads(found)
        return plan_memory(call, ArrayInfo.from_json(text), source[0] if source else None, int(root), as_it_is)

    return request.plan(find, make, int(root)).execute()


def _describe_path(path: Any) -> str:
    if isinstance(path, (str, os.PathLike)):
        return repr(os.fspath(path))
    # Open arrays: the name inside says enough; how the file is called may differ from rank to rank.
    return f"an open array named {getattr(path, 'name', None)!r}"
