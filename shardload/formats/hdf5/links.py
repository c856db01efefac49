"""Which other files does an HDF5 dataset lead to? There are two ways, and the HDF5 library checks none of them.

1. A name may go through soft links, and through external links into other files. `follow` takes it link by link, opens the
   other files itself, and returns the object at the end. The library never follows a link between files by itself.
2. A virtual dataset consists of datasets in other files, which may be virtual again. `look_through` checks all of them.

Values in raw files (external storage) are refused.

Each other file must be inside the fence, exist, and hold what it should: HDF5 gives fill values for a part of a virtual dataset
that it cannot open.

To find a file that is named without a folder, the same places are tried as in HDF5, in the same order: HDF5_EXT_PREFIX or
HDF5_VDS_PREFIX, the folder of the file that names it, the working folder. HDF5 takes the first place where it can open a file;
here the first place where anything exists must be that file. Names are bytes to HDF5, and to `follow`. A name that this module
does not understand is refused.

The library never reads a virtual dataset: each part is read as the dataset that it is (`tiles`).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import h5py

from shardload.errors import printable
from shardload.formats.access import STRICT, Access
from shardload.formats.hdf5.filters import Filters, refuse_filters
from shardload.formats.hdf5.opened import HDF5_ERRORS, OpenDataset, OpenFacts, close_all, decoded, encoded, open_to_read
from shardload.formats.hdf5.tiles import Names, PartMetadata, tell_parts, version_of
from shardload.storage.local import TARGET_HINT, Fence, LocalFile, OutsideError, state_of, why_not_a_file
from shardload.system.undo import Undo

_MOST_LINKS = 40  # links in one name, as for the system's own symbolic links
_MOST_LEVELS = 16  # levels of virtual datasets that consist of virtual datasets
_UNLIMITED = 2**64 - 1


@dataclass
class OtherFiles:
    """The other files that hold the values of a dataset.

    Attributes
    ----------
    refused : str or None
        Why the dataset cannot be loaded, in words that follow "holds"; None if it can.
    fence : Fence
        The folders where these files may be.
    is_virtual : bool
        True if its values are in other datasets.
    access : Access
        What the caller allows.
    names : list of Names
        For each mapping of a virtual dataset, the names of its file and of the dataset in it.
    metadata : dict of Names to PartMetadata
        Of the dataset at each of these names; by its real path, too.
    versions : dict of str to tuple of int
        Size and time of each of these files, and of those to which links in them lead, when it was checked.
    parts : dict or None
        Of a virtual dataset: what ranks that read must know of its parts (`tell_parts`).
    """

    refused: str | None = None
    fence: Fence = field(default_factory=Fence)
    is_virtual: bool = False
    access: Access = STRICT
    names: list[Names] = field(default_factory=list)
    metadata: dict[Names, PartMetadata] = field(default_factory=dict)
    versions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[str, Any] | None = None

    @property
    def filters(self) -> Filters:
        """Those of the first dataset that has chunks."""
        return next((part.filters for part in self.metadata.values() if part.chunks), [])

    def smallest_chunk(self, ndim: int) -> tuple[int, ...] | None:
        """The least length of their chunks along each of `ndim` axes, aligned at the last axis; None without chunks.

        HDF5 decodes chunks whole. A grid of this shape has them as they are if each dataset begins at a multiple of its chunks;
        otherwise two ranks decode some chunks twice.
        """
        padded = {((1,) * ndim + part.chunks)[len(part.chunks) :] for part in self.metadata.values() if part.chunks}
        return tuple(map(min, zip(*padded, strict=True))) if padded else None


def follow(facts: OpenFacts, name: str, fence: Fence) -> tuple[Any, list[OpenFacts]]:
    """Find the object that `name` leads to, link by link.

    Returns
    -------
    OpenDataset, h5py.Group or h5py.h5t.TypeID
        The object.
    list of OpenFacts
        The files that were opened on the way. Close them after the object.

    Raises
    ------
    KeyError
        If there is no such name.
    OutsideError
        If a link leads out of the fence, or to something that is not a file.
    OSError
        If a link on the way has no target, or it cannot be opened.
    """
    opened: list[OpenFacts] = []
    with Undo(lambda: close_all(opened)):
        identifier, address = _walk(facts, encoded(name), fence, opened)
    if isinstance(identifier, h5py.h5d.DatasetID):
        return (opened or [facts])[-1].dataset(identifier, address), opened
    return h5py.Group(identifier) if isinstance(identifier, h5py.h5g.GroupID) else identifier, opened


def _walk(file: OpenFacts, name: bytes, fence: Fence, opened: list[OpenFacts]) -> tuple[Any, int]:
    """The object, and the address in the last link to it."""
    parts = deque(name.split(b"/"))  # of the name, still to be looked up
    group, group_name, address = file.file.id, b"", 0
    link, n_of_link, n_links = "", 0, 0  # the last link, and how many of the parts come from it
    while parts:
        part, is_of_link = parts.popleft(), n_of_link > 0
        n_of_link = max(0, n_of_link - 1)
        if part in (b"", b"."):
            continue
        full_name = group_name + b"/" + part
        kind_and_target = _link_at(group, part, full_name)
        if kind_and_target is None:
            raise _lost(link, "there is no such name") if is_of_link else KeyError(decoded(name))
        kind, target = kind_and_target
        if kind == h5py.h5l.TYPE_HARD:
            try:
                group, group_name, address = h5py.h5o.open(group, part), full_name, target
            except (KeyError, RuntimeError, ValueError) as error:
                raise OSError(f"'{_shown(full_name)}' cannot be opened: {error}") from error
            continue
        link = f"'{_shown(full_name)}' in '{file.name or file.file.filename}' is a link to"
        if kind == h5py.h5l.TYPE_SOFT:
            link, inside = f"{link} '{_shown(target)}'", target
            if target.startswith(b"/"):
                group, group_name = file.file.id, b""
        elif kind == h5py.h5l.TYPE_EXTERNAL:
            file_name, inside = target
            link = f"{link} '{_shown(inside)}' in '{_shown(file_name)}'"
            if file.is_in_store:
                raise OutsideError(f"{link}; load that object by its own URL")
            file = open_other(SearchPath("HDF5_EXT_PREFIX", file).of(os.fsdecode(file_name)), link, fence)
            opened.append(file)
            group, group_name = file.file.id, b""
        else:
            raise OutsideError(f"{link} what a program defined for itself, which is not followed")
        n_links += 1
        if n_links > _MOST_LINKS:
            raise _lost(link, f"there are more than {_MOST_LINKS} links on the way")
        parts_of_link = inside.split(b"/")
        parts.extendleft(reversed(parts_of_link))
        n_of_link += len(parts_of_link)
    return group, address


def _shown(name: bytes) -> str:
    return printable(decoded(name))


def _link_at(group: Any, part: bytes, full_name: bytes) -> tuple[int, Any] | None:
    """The kind of the link `part` in a group, and its target (of a hard link the address); None if there is no such link."""
    if not isinstance(group, h5py.h5g.GroupID) or b"\0" in part:
        return None
    try:
        link = group.links.get_info(part)
        has_text = link.type in (h5py.h5l.TYPE_SOFT, h5py.h5l.TYPE_EXTERNAL)
        return link.type, group.links.get_val(part) if has_text else int(link.u)
    except (KeyError, RuntimeError, ValueError) as error:
        with contextlib.suppress(KeyError, RuntimeError, ValueError):
            if not group.links.exists(part):
                return None
        raise OSError(f"the link '{_shown(full_name)}' cannot be read: {error}") from error


def open_other(path: str, reference: str, fence: Fence) -> OpenFacts:
    """Open a file to which another one refers, and check the file that was opened. `reference` says that in messages.

    Raises
    ------
    OutsideError
        If it is outside the fence, or not a file.
    OSError
        If it is not there, or HDF5 cannot open it.
    """
    if not fence.holds(path):
        raise OutsideError(_leads_outside(reference))
    if not os.path.exists(path):
        raise _lost(reference, "there is no such file")
    if (why := why_not_a_file(path)) is not None:
        raise OutsideError(f"{reference}, which is {why}")
    return _open_checked(path, reference, fence)


def _open_checked(path: str, reference: str, fence: Fence) -> OpenFacts:
    try:
        facts = OpenFacts(open_to_read(path))
    except OSError as error:
        raise _lost(reference, f"HDF5 says: {error}") from error
    if isinstance(facts.stored, LocalFile) and not fence.holds_open(facts.stored.descriptor, path):
        facts.close()
        raise OutsideError(_leads_outside(reference))
    return facts


def _lost(reference: str, why: str) -> OSError:
    return OSError(f"{reference}, which cannot be opened ({why}). Restore the target, or name another array")


def _leads_outside(reference: str) -> str:
    return f"{reference}, which is outside the folder of this file; {TARGET_HINT}"


def look_through(dataset: OpenDataset, fence: Fence, access: Access = STRICT, are_known: bool = False) -> OtherFiles:
    """Find the other files that hold values of `dataset`. Reads no values.

    Opens the parts of a virtual dataset, unless they `are_known`: another rank has looked at them, or this one.
    """
    key = None if are_known else _key_of(dataset, fence, access)
    before = _LOOKS.get(key)
    if before is not None and all(state_of(path) == version for path, version in before.versions.items()):
        return replace(before)
    others = OtherFiles(fence=fence, access=access)
    try:
        _look(dataset, others, {}, are_known=are_known)
    except (OutsideError, _RefusedError) as error:
        others.refused = str(error)
    if key is not None and others.refused is None:
        if len(_LOOKS) >= _MOST_LOOKS:
            _LOOKS.clear()
        _LOOKS[key] = others
    return others


# Programs load regions of one virtual dataset in a loop, and looking at a thousand parts takes a second. What was found holds
# as long as size and time of all files are the same.
_LOOKS: dict[Any, OtherFiles] = {}
_MOST_LOOKS = 16


def _key_of(dataset: OpenDataset, fence: Fence, access: Access) -> Any:
    """What a look depends on, besides the files that it finds; None if the dataset is not virtual, or may be written to."""
    state = dataset.facts.state() if dataset.creation.get_layout() == h5py.h5d.VIRTUAL else None
    if state is None or dataset.facts.in_store:
        return None
    prefix = os.environ.get("HDF5_VDS_PREFIX")
    return os.getcwd(), dataset.facts.name, prefix, state, dataset.name, fence.folders, access


class _RefusedError(Exception):
    """A dataset cannot be loaded; the text says why."""


# The datasets that were looked at, by real path and name; None while that goes on.
Seen = dict[tuple[str, str], tuple[PartMetadata, OtherFiles] | None]


def _look(dataset: OpenDataset, others: OtherFiles, seen: Seen, level: int = 0, are_known: bool = False) -> None:
    creation = dataset.creation
    if level > _MOST_LEVELS:
        raise _RefusedError(f"virtual datasets made of virtual datasets, more than {_MOST_LEVELS} deep")
    if creation.get_external_count() > 0:
        raise _RefusedError(
            "values in raw files beside it (external storage), which are not loaded. Write it again with h5py: new[name] = "
            "old[name][...]"
        )
    if level > 0 and (why := refuse_filters(dataset, others.access)) is not None:
        raise _RefusedError(f"values of another dataset, '{dataset.name}' in '{dataset.file.filename}', which holds {why}")
    if creation.get_layout() != h5py.h5d.VIRTUAL:
        return
    if dataset.facts.is_in_store:
        raise _RefusedError(
            "values of other files (it is a virtual dataset), which are not looked for in a store. Load each by its own URL, "
            "or download all of them"
        )
    others.is_virtual = True
    mappings = range(creation.get_virtual_count())
    names = [_names_of_part(creation, k) for k in mappings]
    if any(_is_unlimited(creation.get_virtual_vspace(k)) for k in mappings):
        raise _RefusedError(
            "a virtual dataset that grows with its parts, which is not supported. Make a new file of them with shardload join"
        )
    others.names = names
    if are_known:
        return
    places = SearchPath("HDF5_VDS_PREFIX", dataset.facts)
    for name, inside in names:
        if (name, inside) in dataset.facts.in_store:
            others.metadata[name, inside] = dataset.facts.in_store[name, inside]
            continue
        path, real = places.find(name)
        if not others.fence.holds_real(real):
            raise OutsideError(_leads_outside(f"values of another file, '{printable(name)}'"))
        key = real, inside
        if key not in seen:
            seen[key] = None
            seen[key] = _look_at_part(dataset, path, (name, inside), others, seen, level)
        if (part := seen[key]) is None:
            raise _RefusedError(f"values of another file, '{printable(name)}', whose '{printable(inside)}' consists of itself")
        metadata, inner = part
        others.versions |= inner.versions
        others.metadata[name, inside] = others.metadata[key] = metadata
    others.parts = tell_parts(dataset, names, others.metadata, others.smallest_chunk(len(dataset.shape or ())))
    if others.parts is None:
        raise _RefusedError(
            "a virtual dataset whose parts overlap, are no boxes of other datasets, or have another shape or type than it "
            "says, which is not supported. Write it again with h5py: new[name] = old[name][...]"
        )


def _names_of_part(creation: Any, k: int) -> Names:
    """The names of the file and of the dataset in it from which a mapping of a virtual dataset takes its values."""
    try:
        names = os.fsdecode(creation.get_virtual_filename(k)), decoded(creation.get_virtual_dsetname(k))
    except UnicodeError:
        raise _RefusedError("values of another file, with a name that h5py cannot read") from None
    return _without_percents(names[0]), _without_percents(names[1])


def _without_percents(name: str) -> str:
    """A name as HDF5 reads it: ``%%`` is a percent sign.

    >>> _without_percents("part.h5"), _without_percents("x%%b")
    ('part.h5', 'x%b')
    """
    texts = name.split("%%")
    if any("%" in text for text in texts):
        raise _RefusedError(
            f"values of a pattern of files or datasets, '{printable(name)}', which is not supported. Make a new file of "
            "them with shardload join"
        )
    return "%".join(texts)


def _is_unlimited(space: Any) -> bool:
    """True if a selection has no end along some axis."""
    if space.get_select_type() != h5py.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        return False
    _, _, count, block = space.get_regular_hyperslab()
    return _UNLIMITED in (*count, *block)


def _look_at_part(
    virtual: OpenDataset, path: str, names: Names, others: OtherFiles, seen: Seen, level: int
) -> tuple[PartMetadata, OtherFiles]:
    """Check one dataset in a virtual dataset."""
    (name, inside), fence = names, others.fence
    reference = f"values of another file, '{printable(name)}'"
    if (why := why_not_a_file(path)) is not None:
        raise _RefusedError(f"{reference}, which is {why} (HDF5 would deliver fill values in its place)")
    try:
        version = state_of(path) or (0, 0)
        with virtual.facts.parts.open(path, version, lambda: _open_checked(path, reference, fence)) as facts:
            dataset, files = follow(facts, inside, fence)
            try:
                if isinstance(dataset, OpenDataset):
                    inner = OtherFiles(fence=fence, access=others.access, versions={path: version, **versions_of(files)})
                    _look(dataset, inner, seen, level + 1)
                    metadata = PartMetadata.of(dataset, version_of(inner.versions))
                    if inner.is_virtual:
                        chunks = inner.smallest_chunk(dataset.ndim)
                        metadata = replace(metadata, chunks=chunks, filters=inner.filters, is_raw=False)
                    return metadata, inner
            finally:
                close_all(files)
    except OutsideError:
        raise
    except HDF5_ERRORS as error:
        why = "there is no such name" if isinstance(error, KeyError) else str(error)
        raise _RefusedError(
            f"{reference}, whose '{printable(inside)}' cannot be opened (HDF5 may deliver fill values in its place; it says: "
            f"{why})"
        ) from None
    raise _RefusedError(f"{reference}, whose '{printable(inside)}' is a group (HDF5 would deliver fill values in its place)")


def versions_of(files: Sequence[OpenFacts]) -> dict[str, tuple[int, ...]]:
    """Path, and size and time, of open files."""
    versions = {}
    for file in files:
        path = os.path.join(os.getcwd(), str(file.file.filename))
        versions[path] = (file.state() or state_of(path) or (0, 0))[:2]
    return versions


class SearchPath:
    """Where HDF5 finds the files that `file` names: each in the first folder in which it exists, or else beside `file`.

    Parameters
    ----------
    variable : str
        The variable of the environment that names other folders for HDF5.
    file : OpenFacts
        The file.

    Attributes
    ----------
    path : str
        Where `file` is, as an absolute path.
    """

    def __init__(self, variable: str, file: OpenFacts) -> None:
        self.path, setting = os.path.join(os.getcwd(), file.path()), os.environ.get(variable, "")
        self._folder = folder = os.path.dirname(self.path)
        prefixes = [text.replace("${ORIGIN}", f"{folder}/") for text in setting.split(":") if text]  # with HDF5's own slash
        self._folders = (*prefixes, folder, "", os.path.dirname(os.path.realpath(self.path)))

    def of(self, name: str) -> str:
        """Where the file of this name is."""
        is_absolute = os.path.isabs(name)  # if that path does not exist, HDF5 looks for its last name
        paths = [os.path.join(folder, os.path.basename(name) if is_absolute else name) for folder in self._folders]
        if is_absolute:
            paths.insert(0, name)
        return next(filter(os.path.exists, paths), name if is_absolute else os.path.join(self._folder, name))

    def find(self, name: str) -> tuple[str, str]:
        """The same for a virtual dataset, as an absolute path, because the working folder may be another one when it is opened
        again; and that path without symbolic links.
        """
        path = os.path.join(os.getcwd(), self.path if name == "." else self.of(name))  # not abspath: ".." may follow a link
        return path, os.path.realpath(path)
