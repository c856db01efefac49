"""How do several files become one, without a copy of their values? By a small HDF5 file that says where they are.

The new file has the arrays that go on from part to part as virtual datasets of HDF5, which every program reads. What they are
together is said by `Parts`. The new file is written, each part is looked up in it, and it gets its name (`JoinedFile`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

from shardload.errors import ConfigError, LeftOutWarning, SourceError, printable
from shardload.formats.access import Access
from shardload.formats.lookup import list_arrays
from shardload.formats.saving import format_for
from shardload.jobs.joining.parts import Parts
from shardload.jobs.joining.request import JoinReport, JoinRequest
from shardload.options import OPTIONS, Progress
from shardload.system.caller import warn_once


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
        of the coordinate of the axis; without one, into that of the numbers in their names.
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
    how: dict[str, Any] = {"axis": axis, "stack": stack, "dataset": dataset, "mode": mode, "allow_external": allow_external}
    return join_files(JoinRequest.check(path, parts, **how), OPTIONS["progress"].check(progress), is_warned=True)


def join_files(request: JoinRequest, progress: Progress = None, *, is_warned: bool = False) -> JoinReport:
    """Join files. Not collective: one process does it.

    Parameters
    ----------
    request : JoinRequest
        What is asked for.
    progress : bool, callable or None
        As for `join`.
    is_warned : bool
        True to warn of what is left out.

    Raises
    ------
    ConfigError
        If the parts do not belong together, or the axis is not theirs.
    SourceError
        If a part cannot be opened, or the new file cannot be written.
    """
    parts, path = Parts(request.parts), request.path
    if os.path.realpath(path) in map(os.path.realpath, parts.paths):
        raise ConfigError(f"'{path}' is the new file, and one of the parts. Choose another name")
    parts.look(progress, path)
    parts.check()
    joined = parts.describe(format_for(path))
    _keep_values(path, joined.places, Access(request.parts.allow_external))
    folder = os.path.dirname(os.path.realpath(path))  # mode "w" replaces what a link leads to
    names, outside = {}, set()
    for part in joined.paths:
        real = os.path.realpath(part)
        is_inside = real.startswith(folder.rstrip(os.sep) + os.sep)
        names[part] = os.path.relpath(real, folder) if is_inside else real
        outside |= set() if is_inside else {part}
    file = joined.file(path, names, request.mode)
    if is_warned and joined.news:
        warn_once(f"'{path}': {'; '.join(joined.news)}", LeftOutWarning, 0)
    file.write(joined.values, lambda: joined.check_unchanged(path))
    needs_external = any(part.path in outside for placed in joined.places.values() for part in placed)
    return JoinReport(path, len(names), joined.axis, joined.rows, joined.notes, joined.nbytes, needs_external)


def _keep_values(path: str, virtual: Collection[str], access: Access) -> None:
    """ConfigError if a file of that name has values itself: it may be a part, taken for the new file."""
    if not os.path.isfile(path):
        return
    try:
        lost = [info.dataset for info in list_arrays(path, access) if info.dataset in virtual and info.nbytes_stored]
    except SourceError as error:
        raise ConfigError(
            f"'{path}' exists, and cannot be read ({error}), so it is not replaced. Choose another name for the new file"
        ) from None
    if lost:
        raise ConfigError(
            f"'{path}' exists, and has values of '{printable(lost[0])}' itself: is it one of the parts? The new file "
            "comes in addition to them. Choose another name for it; if this file is not wanted, remove it first"
        )
