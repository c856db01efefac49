"""How are several files loaded as one, without a file that says so? All ranks get that file from rank 0, in memory."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

from shardload.comm.agreement import Invocation
from shardload.engine.call import begin_request
from shardload.errors import LeftOutWarning
from shardload.formats.concatenation import SCHEME, Concatenation
from shardload.formats.lookup import absolute
from shardload.jobs.joining.parts import Joined, Parts
from shardload.jobs.joining.request import JoinReport, PartsRequest
from shardload.options import OPTIONS, TIMEOUT, Progress
from shardload.storage.containment import Fence
from shardload.system.caller import warn_once
from shardload.units import counted


@dataclass(frozen=True)
class ConcatRequest:
    """What a caller of `concat` asks for; see `engine.call.CallRequest`."""

    parts: PartsRequest
    progress: Progress
    timeout: float | None

    @classmethod
    def check(cls, parts: Any, along: Any, timeout: Any, progress: Any, **more: Any) -> ConcatRequest:
        """The request, with its options checked."""
        asked = PartsRequest.check(parts, along, word="along", **more)
        return cls(asked, OPTIONS["progress"].check(progress), OPTIONS["timeout"].check(timeout))

    def invocation(self, call: str, title: str) -> Invocation:
        """See `engine.call.CallRequest`."""
        return Invocation(call, title, {name: repr(value) for name, value in vars(self.parts).items()})


def concat(
    parts: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    along: str | int | None = None,
    *,
    stack: str | None = None,
    dataset: str | Sequence[str] | None = None,
    allow_external: bool = False,
    progress: Progress = None,
    timeout: float | None = TIMEOUT,
    comm: Any = None,
) -> Concatenation:
    """Take several files for one, wherever a path is taken: ``load``, ``plan``, ``stream``, ``verify``, ``open``, a copy.

    Nothing is written. Rank 0 opens each file once, and what it has found goes to all ranks: which arrays go on from file to
    file, and which are the same in all, by the rules of `join`. A file that changes afterwards is an error of the load.

    Collective: yes, over `comm`. Every rank passes the same arguments, and all return or all raise the same error.

    Parameters
    ----------
    parts : str, path-like or sequence of them
        HDF5 and netCDF4 files in their order along the axis. Or a pattern, ``"era5_*.nc"`` (``**``: folders, too): its files
        are put into the order of the coordinate of the axis; without one, into that of the numbers in their names.
    along : str or int, optional
        The axis along which they follow each other, as `axis` of `join`.
    stack, dataset, allow_external, progress
        As in `join`. A load of what was found does not need `allow_external` again.
    timeout, comm
        As in `load`.

    Returns
    -------
    Concatenation
        A path, for this process and its ranks. Its ``parts`` are the files, its ``summary`` says what they are together.

    Warns
    -----
    LeftOutWarning
        On rank 0: names what was left out.

    Raises
    ------
    ConfigError
        No file matches, or they do not belong together, or are in another order.
    SourceError
        A file cannot be opened, or changed meanwhile.

    Examples
    --------
    >>> import h5py, jax, numpy as np, shardload
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> shardload.initialize()
    >>> if jax.process_index() == 0:
    ...     for k in range(3):
    ...         with h5py.File(f"run.{k}.h5", "w") as file:
    ...             file["mass"] = np.arange(4 * k, 4 * k + 4, dtype="float32")
    >>> run = shardload.concat("run.*.h5")
    >>> shardload.load(run, Mesh(np.array(jax.devices()), "a"), P()).shape
    (12,)
    """
    how = {"stack": stack, "dataset": dataset, "allow_external": allow_external}
    read = partial(ConcatRequest.check, parts, along, timeout, progress, **how)
    with begin_request("concat", f"concat of {parts!r}"[:80], read, comm=comm) as (call, request):
        found: Concatenation = call.plan(lambda: pickle.dumps(_find(request)), pickle.loads, str)  # of this job's rank 0
        return found


def _find(request: ConcatRequest) -> Concatenation:
    """What the files are together. Runs on rank 0."""
    parts = Parts(request.parts)
    parts.look(request.progress, request.parts.told)
    parts.check()
    joined = parts.describe()
    names = {path: absolute(path) for path in joined.paths}
    folders = {folder for path in names.values() for folder in Fence.around_file(path, request.parts.allow_external).folders}
    fence = Fence(tuple(sorted(folders)))
    image = joined.file(SCHEME, names).image(joined.values, fence)
    joined.check_unchanged(request.parts.told)
    versions = tuple((names[path], joined.versions[path] or (0, 0)) for path in joined.paths)
    digest = blake2b(repr((versions, joined.rows)).encode(), digest_size=4).hexdigest()
    name = f"{SCHEME}{_ends(joined)} ({counted(len(names), 'file')} along {joined.axis}, {digest})"
    if joined.news:
        warn_once(f"'{name}': {'; '.join(joined.news)}", LeftOutWarning, 0)
    shapes = [[os.path.basename(path) for path in names], [(row.name, row.shape) for row in joined.rows], joined.steps]
    told = f"{counted(len(names), 'file')}, {_ends(joined)}, CRC {zlib.crc32(repr(shapes).encode()):08x}"
    report = JoinReport(name, len(names), joined.axis, joined.rows, joined.notes, joined.nbytes, False)
    return Concatenation(name, image, versions, fence, told, str(report))


def _ends(joined: Joined) -> str:
    """The names of the first and the last file."""
    first, last = (os.path.basename(joined.paths[k]) for k in (0, -1))
    return first if len(joined.paths) == 1 else f"{first} to {last}"
