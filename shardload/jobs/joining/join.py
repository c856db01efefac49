"""How do several files become one, without a copy of their values? By a small HDF5 file that says where they are.

That file has the arrays that go on from part to part as virtual datasets of HDF5, which every program reads. What they are
together is said by `JoinedParts`. `join` writes it: each part is looked up in it, and it gets its name (`JoinedFile`). For
`concat` rank 0 makes it in memory, and all ranks get its bytes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from shardload.engine.call import begin_request
from shardload.errors import ConfigError, SourceError, printable, without_queries
from shardload.formats.access import Access
from shardload.formats.concatenation import SCHEME, Concatenation
from shardload.formats.lookup import absolute, list_arrays
from shardload.formats.saving import SUFFIXES, format_for
from shardload.jobs.joining.parts import JoinedParts
from shardload.jobs.joining.request import JoinReport, PartsRequest
from shardload.options import TIMEOUT, Progress, check_path
from shardload.storage.local import Fence
from shardload.storage.remote import is_remote
from shardload.units import counted

_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix != ".zarr")


def join(
    path: str | os.PathLike[str],
    parts: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    axis: str | int | None = None,
    stack: str | None = None,
    dataset: str | Sequence[str] | None = None,
    mode: str = "w-",
    allow_external: bool = False,
    progress: Progress = None,
) -> JoinReport:
    """Join the arrays of several files, without a copy of their values: a small HDF5 file says where they are.

    Collective: no. Call it on one process, before the job, as ``shardload join`` does. The new file is an ordinary HDF5 or
    netCDF4 file with virtual datasets: `load`, h5py, xarray and the netCDF library read it, as long as the parts are where they
    were.

    Every array that has the axis goes on from part to part. It must have the same type, other axes, units, flags and packing in
    all of them; and it must be in all, or, without names of axes, in the same as the other arrays of its group (a part of a
    snapshot may have no stars). Every other array must be the same in all parts, value for value. The coordinate of the axis
    must go on in one direction. If parts count time from different days, it is counted from the day of the first. Attributes
    that differ are left out, and named in the report.

    Parameters
    ----------
    path : str or path-like
        The new file, ``.h5`` or ``.nc``. If the parts are in its folder or below, they may be moved with it; else they are
        noted by their absolute paths, and loads need ``allow_external=True``.
    parts : sequence of str or path-like, or str
        HDF5 and netCDF4 files, in their order along the axis. Or a pattern, ``"era5_*.nc"``: its files are put into the order
        of the numbers in their names.
    axis : str or int, optional
        The axis by name; by number, from 0, if axes have no names. By default the axis that can grow (netCDF's unlimited
        dimension), or the first one if axes have no names.
    stack : str, optional
        In place of `axis`: the name of a new first axis, if each part is one step of it. Every array gets it, but the
        coordinates of other axes, which must be the same in all parts.
    dataset : str or sequence of str, optional
        Names of the arrays, and patterns such as ``"PartType1/*"``. By default all arrays. What belongs to one is joined with
        it: coordinates, and what its attributes name.
    mode : str
        ``"w-"``: `path` must not exist. ``"w"``: it is replaced, when the new file is whole.
    allow_external : bool
        Whether links in the parts may lead outside their folders.
    progress : bool or callable, optional
        True shows a progress bar; None shows it for a hundred parts and more, in a terminal or a notebook. Or a function
        ``f(n_done, n_parts)``.

    Returns
    -------
    JoinReport
        A row for each array, and what was left out. ``print`` shows it.

    Warns
    -----
    LeftOutWarning
        Names what else was left out, before the file is made.

    Raises
    ------
    ConfigError
        If the parts do not belong together, or are in another order. No file is made.
    SourceError
        If a part cannot be opened, or the file cannot be written.
    """
    request = PartsRequest.check(parts, axis, stack=stack, dataset=dataset, allow_external=allow_external, progress=progress)
    target = os.path.expanduser(check_path("path", path, "the name of the new file, such as 'whole.nc', before the parts"))
    if not target.lower().endswith(_SUFFIXES):
        raise ConfigError(
            f"'{target}' would be an HDF5 file: only HDF5 has arrays that lie in other files. Expected one of the suffixes "
            f"{', '.join(_SUFFIXES)}"
        )
    joined = JoinedParts(request)
    if os.path.realpath(target) in map(os.path.realpath, joined.paths):
        raise ConfigError(f"'{target}' is the new file, and one of the parts. Choose another name")
    joined.look(target)
    joined.check()
    joined.describe(format_for(target))
    _protect_values(target, joined.places, request.options.access)
    folder = os.path.dirname(os.path.realpath(target))  # mode "w" replaces what a link leads to
    names = {}
    for part in joined.paths:
        real = os.path.realpath(part)
        is_inside = real.startswith(folder.rstrip(os.sep) + os.sep)
        names[part] = os.path.relpath(real, folder) if is_inside else real
    file = joined.file(target, names, mode)
    joined.warn(target)
    file.write(joined.values, lambda: joined.check_unchanged(target))
    needs_external = any(os.path.isabs(names[part.path]) for places in joined.places.values() for part in places)
    return JoinReport(target, len(names), joined.axis, tuple(joined.rows), joined.notes, joined.nbytes, needs_external)


def _protect_values(path: str, virtual: Collection[str], access: Access) -> None:
    """ConfigError if a file of that name has values itself: then the caller may have named a part as the new file."""
    if not os.path.isfile(path):
        return
    try:
        with_values = [info.dataset for info in list_arrays(path, access) if info.dataset in virtual and info.nbytes_stored]
    except SourceError as error:
        raise ConfigError(
            f"'{path}' exists, and cannot be read ({error}), so it is not replaced. Choose another name for the new file"
        ) from None
    if with_values:
        raise ConfigError(
            f"'{path}' exists, and has values of '{printable(with_values[0])}' itself: is it one of the parts? The new file "
            "comes in addition to them. Choose another name for it; if this file is not wanted, remove it first"
        )


def concat(
    parts: str | os.PathLike[str] | Sequence[Any],
    along: str | int | None = None,
    *,
    stack: str | None = None,
    dataset: str | Sequence[str] | None = None,
    allow_external: bool = False,
    storage: Mapping[str, Any] | None = None,
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
        HDF5 and netCDF4 files, or their URLs (or ``(store, key)`` of obstore), in their order along the axis. Or a pattern of
        files, ``"era5_*.nc"`` (``**``: folders, too): they are put into the order of the numbers in their names.
    along : str or int, optional
        The axis along which they follow each other, as `axis` of `join`.
    stack, dataset, allow_external, progress
        As in `join`. A load of what was found does not need `allow_external` again.
    storage : mapping, optional
        How the stores of URLs are reached, as in `load`, which does not need it again.
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
    PeerError, StallError
        As `load` does.

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
    keywords = {"allow_external": allow_external, "storage": storage, "progress": progress, "timeout": timeout}
    read = partial(PartsRequest.check, parts, along, stack=stack, dataset=dataset, word="along", **keywords)
    with begin_request("concat", f"concat of {without_queries(repr(parts))}"[:80], read, comm=comm) as (call, request):
        concatenation: Concatenation = call.plan(lambda: _find(request), lambda found: found, str)
    # Each rank's own: it has keys, and some of what it may have cannot be sent.
    return replace(concatenation, storage=request.options.storage)


def _find(request: PartsRequest) -> Concatenation:
    """What the files are together, without `storage`. Runs on rank 0."""
    with closing(JoinedParts(request)) as joined:
        joined.look(request.title)
        joined.check()
        joined.describe()
        names = {path: absolute(path) for path in joined.paths}
        local = [path for path in names.values() if not is_remote(path)]
        folders = {folder for path in local for folder in Fence.around_file(path, request.options.allow_external).folders}
        fence = Fence(tuple(sorted(folders)))
        image = joined.file(SCHEME, names).image(joined.values, fence, joined.in_store)
        joined.check_unchanged(request.title)
        versions = tuple((names[path], joined.versions[path] or (0, 0)) for path in joined.paths)
        digest = blake2b(repr((versions, tuple(joined.rows))).encode(), digest_size=4).hexdigest()
        name = f"{SCHEME}{_ends(joined)} ({counted(len(names), 'file')} along {joined.axis}, {digest})"
        joined.warn(name)
        shapes = [[os.path.basename(path) for path in names], [(row.name, row.shape) for row in joined.rows], joined.lengths()]
        identity = f"{counted(len(names), 'file')}, {_ends(joined)}, CRC {zlib.crc32(repr(shapes).encode()):08x}"
        report = JoinReport(name, len(names), joined.axis, tuple(joined.rows), joined.notes, joined.nbytes, False)
        return Concatenation(name, image, versions, fence, identity, str(report), joined.in_store)


def _ends(joined: JoinedParts) -> str:
    """The names of the first and the last file."""
    first, last = (os.path.basename(joined.paths[k]) for k in (0, -1))
    return first if len(joined.paths) == 1 else f"{first} to {last}"
