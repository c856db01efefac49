"""Where does an HDF5 dataset lead? To other files, in three ways, none of which the HDF5 library asks anybody about.

1. A name may be an external link: `follow` walks a name link by link before HDF5 does.
2. A virtual dataset is made of datasets in other files, and they may be so again: `look_through` goes through all of them.
3. The values may be in files without any structure (external storage): `look_through` too.

Each other file has to be inside the fence, there, whole, and hold what it should: HDF5 delivers fill values for a part of a
virtual dataset that it cannot open, and zeros for what is past the end of a file. Where HDF5 looks for a file that is named
without a folder (HDF5_EXT_PREFIX, HDF5_VDS_PREFIX, HDF5_EXTFILE_PREFIX, the folder of the file that names it, the working
folder) is looked at in the same order.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import h5py

from shardload.sources.fence import TARGET_HINT, Fence, OutsideError, why_not_a_file
from shardload.sources.hdf5_filters import refuse_filters

__all__ = ["Others", "follow", "look_through"]

_MOST_LINKS = 40  # in one name, as for the system's own links
_MOST_LEVELS = 16  # of virtual datasets made of virtual datasets
_LONGEST_NAME = 159  # h5py does not give more of the name of a file of external storage
_UNLIMITED = 2**64 - 1


@dataclass
class Others:
    """The other files that the values of a dataset are in.

    Attributes
    ----------
    sizes : dict of str to int
        Bytes of each when it was looked at.
    refused : str or None
        Why the dataset cannot be loaded, in words that follow "holds"; None where it can.
    allow : collection of str
        Names and numbers of filters that the caller allows.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    refused: str | None = None
    allow: Collection[str] = ()

    def check_whole(self) -> None:
        """OSError if one of them is shorter than it was: HDF5 would give zeros or fill values."""
        for path, nbytes in self.sizes.items():
            found = os.stat(path).st_size
            if found < nbytes:
                raise OSError(f"'{path}', where values are, was cut to {found} bytes from {nbytes} since it was opened")


def follow(file: h5py.File, name: str, fence: Fence) -> None:
    """Walk `name` link by link, as HDF5 will. A name that is not there is left to HDF5 to report.

    Raises
    ------
    OutsideError
        If a link leads out of the fence, or to what is no file.
    OSError
        If there are too many links.
    """
    if fence.folders:
        _walk(file, name, fence, 0)


def _walk(file: h5py.File, name: str, fence: Fence, n_links: int) -> None:
    at, parts = "", deque(name.split("/"))
    while parts:
        part = parts.popleft()
        if part in ("", "."):
            continue
        here = f"{at}/{part}"
        try:
            kind = file.id.links.get_info(here.encode()).type
            target = None if kind == h5py.h5l.TYPE_HARD else file.id.links.get_val(here.encode())
        except (KeyError, OSError, RuntimeError, ValueError):
            return
        if target is None:
            at = here
            continue
        n_links += 1
        if n_links > _MOST_LINKS:
            raise OSError(f"'{name}' goes through more than {_MOST_LINKS} links")
        if kind == h5py.h5l.TYPE_SOFT:
            path = os.fsdecode(target)
            at = "" if path.startswith("/") else at
            parts.extendleft(reversed(path.split("/")))
            continue
        if kind != h5py.h5l.TYPE_EXTERNAL:
            raise OutsideError(f"'{here}' is a link of a kind that a program defined for itself; it may lead anywhere")
        other, inside = (os.fsdecode(text) for text in target)
        path = _place(other, "HDF5_EXT_PREFIX", file)
        _check_inside(path, f"'{here}' is a link to '{inside}' in '{other}'", fence)
        try:
            opened = h5py.File(path, "r")
        except OSError:
            return
        with opened:
            _walk(opened, "/".join([inside, *parts]), fence, n_links)
        return


def _check_inside(path: str, what: str, fence: Fence) -> None:
    """OutsideError unless `path` is inside, and a file where it is there at all."""
    if not fence.holds(path):
        raise OutsideError(f"{what}, which is outside the folder of this file; {TARGET_HINT}")
    if os.path.exists(path) and (why := why_not_a_file(path)) is not None:
        raise OutsideError(f"{what}, which is {why}")


def look_through(dataset: h5py.Dataset, fence: Fence, allow: Collection[str] = ()) -> Others:
    """Where the values of `dataset` are, beside its own file. Opens what virtual datasets are made of, reads no values."""
    others = Others(allow=allow)
    try:
        _look(dataset, fence, others, set(), 0)
    except (OutsideError, _RefusedError) as error:
        others.refused = str(error)
    return others


class _RefusedError(Exception):
    """Says why a dataset cannot be loaded."""


def _look(dataset: h5py.Dataset, fence: Fence, others: Others, seen: set[tuple[str, str]], level: int) -> None:
    creation = dataset.id.get_create_plist()
    layout = creation.get_layout()
    if level > _MOST_LEVELS:
        raise _RefusedError(f"virtual datasets made of virtual datasets, more than {_MOST_LEVELS} deep")
    if layout == h5py.h5d.CONTIGUOUS and creation.get_external_count() > 0:
        _look_at_storage(dataset, creation, fence, others)
    if level > 0 and (why := refuse_filters(dataset, others.allow)) is not None:
        raise _RefusedError(f"values of another dataset, '{dataset.name}' in '{dataset.file.filename}', which holds {why}")
    if layout != h5py.h5d.VIRTUAL:
        return
    for source in dataset.virtual_sources():
        for name, inside in _expanded(str(source.file_name), str(source.dset_name), dataset.file):
            path = str(dataset.file.filename) if name == "." else _place(name, "HDF5_VDS_PREFIX", dataset.file)
            if (os.path.realpath(path), inside) not in seen:
                seen.add((os.path.realpath(path), inside))
                _look_at_source(path, name, inside, fence, others, seen, level)


def _look_at_source(
    path: str, name: str, inside: str, fence: Fence, others: Others, seen: set[tuple[str, str]], level: int
) -> None:
    what = f"values of another file, '{name}'"
    _check_inside(path, what, fence)
    if (why := why_not_a_file(path)) is not None:
        raise _RefusedError(f"{what}, which is {why} (HDF5 would deliver fill values in its place)")
    try:
        others.sizes[path] = os.path.getsize(path)
        with h5py.File(path, "r") as file:
            follow(file, inside, fence)
            found = file[inside]
            if isinstance(found, h5py.Dataset):
                _look(found, fence, others, seen, level + 1)
                return
    except OutsideError:
        raise
    except (KeyError, OSError, RuntimeError, ValueError) as error:
        raise _RefusedError(
            f"{what}, whose '{inside}' cannot be opened (HDF5 may deliver fill values in its place; it says: {error})"
        ) from None
    raise _RefusedError(f"{what}, whose '{inside}' is a group (HDF5 would deliver fill values in its place)")


def _expanded(name: str, inside: str, file: h5py.File) -> Iterator[tuple[str, str]]:
    """The files and datasets that a pattern with ``%b`` stands for: numbers from 0 on, as long as there is such a file."""
    if "%b" not in name and "%b" not in inside:
        yield name.replace("%%", "%"), inside.replace("%%", "%")
        return
    for number in itertools.count():
        one, other = (text.replace("%b", str(number)).replace("%%", "%") for text in (name, inside))
        path = str(file.filename) if one == "." else _place(one, "HDF5_VDS_PREFIX", file)
        if why_not_a_file(path) is not None or ("%b" not in name and not _has(path, other)):
            return
        yield one, other


def _has(path: str, name: str) -> bool:
    with h5py.File(path, "r") as file:
        try:
            return bool(file.id.links.exists(name.encode()))
        except (KeyError, RuntimeError):
            return False


def _look_at_storage(dataset: h5py.Dataset, creation: Any, fence: Fence, others: Others) -> None:
    """The files of external storage, each of which must be as long as what it should hold."""
    left = math.prod(dataset.shape or ()) * int(dataset.id.get_type().get_size())
    beside = os.path.dirname(str(dataset.file.filename)) or "."
    for k in range(creation.get_external_count()):
        stored, offset, size = creation.get_external(k)
        name = os.fsdecode(stored)
        if len(stored) >= _LONGEST_NAME:
            raise _RefusedError("values of another file with a name that is too long to be told")
        prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", beside)
        path = os.path.join(prefix, name)  # without a prefix: from the working folder, unlike all else
        what = f"values of another file, '{name}'"
        _check_inside(path, what, fence)
        if (why := why_not_a_file(path)) is not None:
            raise _RefusedError(f"{what}, which is {why}")
        here = min(left, left if size == _UNLIMITED else int(size))
        left -= here
        found = os.path.getsize(path)
        if found < int(offset) + here:
            raise _RefusedError(
                f"{what}, which has {found} bytes where {int(offset) + here} are needed (HDF5 would deliver zeros for the rest)"
            )
        others.sizes[path] = int(offset) + here


def _place(name: str, variable: str, file: h5py.File) -> str:
    """Where HDF5 finds the file `name` that `file` names: the first place where there is one, or else beside `file`."""
    beside = os.path.dirname(str(file.filename)) or "."
    prefixes = [text.replace("${ORIGIN}", beside) for text in os.environ.get(variable, "").split(":") if text]
    places = [
        os.path.join(folder, name) for folder in (*prefixes, beside, "", os.path.dirname(os.path.realpath(file.filename)))
    ]
    if os.path.isabs(name):  # HDF5 looks for its last part elsewhere, if it is not where it should be
        last = os.path.basename(name)
        places = [name, *(os.path.join(folder, last) for folder in (*prefixes, beside, ""))]
    return next(filter(os.path.exists, places), name if os.path.isabs(name) else os.path.join(beside, name))
