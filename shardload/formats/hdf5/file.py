"""Which files are HDF5 or netCDF4, how are they opened, and what is in them? On disk, or as an object of a store.

1. `Hdf5Format` claims files, and opens them.
2. `Hdf5File` is one open file. A name is looked up through soft and external links (`links.follow`), `describe` turns the
   dataset's metadata into an `ArrayInfo`, and a `Hdf5Source` reads its values.
3. `StoreFile` is a file in an object store, or on an HTTP server. The rank that finds the arrays opens it; HDF5 reads it as a
   file object (`BlockCache`), through blocks that are kept. That rank tells the others where chunks are (`skeleton`). They open
   the file only if they need something that it left out.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import h5py

from shardload.errors import SourceError, printable
from shardload.formats.access import STRICT, Access
from shardload.formats.concatenation import SCHEME, Concatenation
from shardload.formats.contract.array import MOST_NAMED, ArrayInfo
from shardload.formats.contract.format import ChangedError, Format, OpenFile, Source
from shardload.formats.diagnosis import known_by_head
from shardload.formats.hdf5.links import OtherFiles, SearchPath, follow, look_through, open_other, versions_of
from shardload.formats.hdf5.metadata import NON_COORDINATE, describe, groups_of, stands_for_axis
from shardload.formats.hdf5.opened import (
    HDF5_ERRORS,
    OpenDataset,
    OpenFacts,
    address_of,
    cached,
    close_all,
    decoded,
    encoded,
    names_below,
    open_to_read,
    signature_at,
)
from shardload.formats.hdf5.skeleton import SkeletonSource, StoreSource
from shardload.formats.hdf5.source import Hdf5Source
from shardload.formats.hdf5.tiles import PartOpener, Versions
from shardload.storage.block_cache import BlockCache
from shardload.storage.local import Fence, LocalFile, NotAFileError, head_of, open_file, state_of
from shardload.storage.objects import MemoryObject
from shardload.storage.remote import RemoteError, is_remote, open_remote, without_secrets
from shardload.system.undo import Undo

FileVersions = tuple[tuple[str, tuple[int, ...]], ...]
_MOST_NAMES = 1 << 17  # names to read for the message about a name that does not exist
_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5", ".h5ad", ".nc", ".nc4", ".cdf", ".mat")


class Hdf5File(OpenFile):
    """An open file. Its datasets share it.

    Parameters
    ----------
    facts : OpenFacts
        The file.
    path : str
        Its path as the user wrote it.
    access : Access
        What the caller allows.
    fence : Fence
        The folders that it may refer to.
    versions : tuple
        Other files, with their sizes and times: the file describes its arrays rightly as long as none has changed.
    """

    _versions: FileVersions = ()

    def __init__(self, facts: OpenFacts, path: str, access: Access, fence: Fence, versions: FileVersions = ()) -> None:
        self._facts, self._path, self._access, self._fence = facts, path, access, fence
        self._versions = versions

    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Hdf5Source:
        """Open a dataset by its name, or by the name of a link to it. If it is virtual, parts of it that `planned` has are not
        looked at again.
        """
        target, opened = self._look_up(dataset)
        if not opened:
            target = self._variable_of(target, dataset)
        return self.source(target, dataset, contextlib.ExitStack(), opened, planned)

    def source(
        self,
        dataset: OpenDataset,
        name: str,
        closing: contextlib.ExitStack,
        opened: list[OpenFacts] | None = None,
        planned: ArrayInfo | None = None,
    ) -> Hdf5Source:
        """The source of an open dataset, which has this name for the caller. Closing it closes the dataset and the files that
        were opened on the way to it (None: the dataset is the caller's), then what `closing` has.
        """
        if opened is not None:
            closing.callback(close_all, opened)
            closing.callback(dataset.close)
        with Undo(closing.close):
            others = look_through(dataset, self._fence, self._access, planned is not None and planned.parts is not None)
            info = self._describe(dataset, name, others, planned=planned)
            open_part = self._opener_of_parts(dataset) if others.is_virtual else None
            kind = StoreSource if dataset.facts.is_in_store else Hdf5Source
            return kind(dataset, info, others, open_part, closing.close, is_linked=bool(opened))

    def _opener_of_parts(self, virtual: OpenDataset) -> PartOpener:
        """Opens the parts of a virtual dataset, each by its name in HDF5 (not that in netCDF), as if it were loaded from its
        own file. They are inside of the fence of this file.
        """
        search_path = SearchPath("HDF5_VDS_PREFIX", virtual.facts)

        def open_part(name: str, dataset: str) -> tuple[Source, Versions]:
            if (name, dataset) in virtual.facts.in_store:
                file = StoreFile(name, self._access)
                source, state = file.open(dataset, virtual.facts.in_store[name, dataset].info), file.state()
                return source, {} if state is None else {name: state}
            path, _ = search_path.find(name)
            reference, version = f"values of another file, '{printable(name)}'", state_of(path) or (0, 0)
            with contextlib.ExitStack() as closing:
                opening = virtual.facts.parts.open(path, version, lambda: open_other(path, reference, self._fence))
                facts = closing.enter_context(opening)
                part = Hdf5File(facts, path, self._access, self._fence)
                try:
                    target, opened = part._look_up(dataset)
                except KeyError:
                    raise OSError(f"'{printable(path)}' has no '{printable(dataset)}' any more") from None
                versions = versions_of([facts, *opened])
                source = part.source(target, dataset, closing.pop_all(), opened)
            with Undo(source.close):
                if source.info.refused is not None:
                    raise OSError(f"{source.info} holds {source.info.refused}")
            return source, versions | source.others.versions

        return open_part

    def _describe(
        self, dataset: OpenDataset, name: str, others: OtherFiles, in_full: bool = False, planned: ArrayInfo | None = None
    ) -> ArrayInfo:
        """Describe a dataset. Of one that is refused not even the shape is read: HDF5 may open files for that."""
        if planned is None or planned.parts is None:  # else each part is compared when it is opened
            for path, version in self._versions:
                if (others.versions.get(path) or state_of(path)) != version:
                    raise ChangedError(f"'{path}' has changed since shardload.concat looked at it. Call concat again")
        if others.refused is not None:
            return self._refused(name, others.refused)
        info = describe(dataset, self._path, name, others, in_full)
        if planned is not None and planned.parts is not None and others.is_virtual:  # a rank has looked at the parts before
            return replace(info, chunks=planned.chunks, codec=planned.codec, parts=planned.parts)
        return replace(info, parts=others.parts) if info.refused is None else info

    def _refused(self, name: str, why: str) -> ArrayInfo:
        return ArrayInfo(self._path, name, "HDF5", (), "unknown", refused=why)

    def _look_up(self, name: str) -> tuple[OpenDataset, list[OpenFacts]]:
        """The dataset of that name, and the files opened on the way. KeyError if there is no such dataset; SourceError if a
        link has no target, or leads outside.
        """
        dataset, opened = self.follow(name)
        if not isinstance(dataset, OpenDataset):
            close_all(opened)
            raise KeyError(name)
        return dataset, opened

    def follow(self, name: str) -> tuple[Any, list[OpenFacts]]:
        """What `links.follow` finds; SourceError if a link has no target, or leads outside."""
        try:
            return follow(self._facts, name, self._fence)
        except RemoteError:
            raise
        except OSError as error:
            text = f"'{name}' in '{self._path}' cannot be loaded: {error}."
            raise SourceError(text, path=self._path, dataset=name) from error

    def _variable_of(self, dataset: OpenDataset, name: str) -> OpenDataset:
        """The variable that has this name in netCDF, if the dataset is only a dimension; else the dataset itself.

        A variable that has the name of a dimension, but is no coordinate of it, cannot have that name in HDF5. The netCDF
        library puts a prefix in front of it, and takes it away when it reads.
        """
        if not stands_for_axis(dataset):
            return dataset
        above, _, last = name.rpartition("/")
        try:
            variable, opened = follow(self._facts, f"{above}/{NON_COORDINATE}{last}", self._fence)
        except HDF5_ERRORS:
            return dataset
        close_all(opened)
        return variable if isinstance(variable, OpenDataset) and not opened else dataset

    # --- what is in it

    def list_arrays(self, most: int | None = None, like: str = "", in_full: bool = True) -> list[ArrayInfo]:
        """Every dataset in the file; links to other files are not followed."""
        below = self.list_below(in_full=in_full, most=most, like=like)
        return list(itertools.islice(below, None if most is None else most + 1))

    def list_linked(self, group: str, in_full: bool = True) -> list[ArrayInfo]:
        """The datasets below a group to which links lead, as h5py follows them."""
        try:
            target, opened = self.follow(group)
        except KeyError:  # no such name
            return []
        try:
            at_end = Hdf5File(opened[-1], self._path, self._access, self._fence) if opened else self
            return list(at_end.list_below(target, group, in_full)) if isinstance(target, h5py.Group) else []
        finally:
            close_all(opened)

    def list_below(
        self,
        group: h5py.Group | None = None,
        prefix: str = "",
        in_full: bool = False,
        most: int | None = None,
        like: str = "",
    ) -> Iterator[ArrayInfo]:
        """Describe every dataset below `group`. What cannot be opened is listed as refused. Names begin with `prefix`, the name
        of the group for the caller.

        With `most`, only a limited number of names is read (16 microseconds each; a dataset takes 300), one of each array. If
        there are more than `most`, those below `like` come first, or those most similar to it.
        """
        group, prefix = self._facts.file if group is None else group, prefix.rstrip("/")
        names, lost = names_below(group, None if most is None else max(most, _MOST_NAMES))
        if most is not None and len(names) > most and like:
            like = like.strip("/")
            below = [name for name in names if name.startswith(f"{like}/")]
            names = list(dict.fromkeys([*(below or difflib.get_close_matches(like, names, n=MOST_NAMED)), *names]))
        netcdf = _netcdf_names(group, names)
        dimensions = set(netcdf.values())  # whose names variables have
        for name in names:
            full = f"{prefix}/{netcdf.get(name, name)}"
            if name in dimensions:
                continue
            try:
                member = group[encoded(name)]
                if isinstance(member, h5py.Dataset):
                    dataset = self._facts.dataset(member.id)
                    yield self._describe(dataset, full, look_through(dataset, self._fence, self._access), in_full)
            except (AssertionError, TypeError, *HDF5_ERRORS) as error:  # h5py asserts, too
                yield self._refused(full, f"metadata that HDF5 cannot read ({error})")
        for name, why in lost.items():
            yield self._refused(f"{prefix}/{name}", f"a group that HDF5 cannot read ({why})")

    def groups(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """The attributes of all groups; this goes through the whole file."""
        return groups_of(self._facts.file)

    def links(self) -> dict[str, str]:
        """The target of each link, as text, but for the first hard link to an object. No target is opened."""
        soft_links: dict[Any, int] = {}  # and external ones, and others; with their kind
        root = self._facts.file.id
        first: dict[int, str] = {address_of(root): ""}
        targets: dict[str, str] = {}

        def add(name: Any, link: Any) -> None:
            if link.type != h5py.h5l.TYPE_HARD:
                soft_links[name] = int(link.type)
            elif link.u in first:
                targets[f"/{decoded(name)}"] = f"'/{first[link.u]}'"
            else:
                first[int(link.u)] = decoded(name)

        try:
            root.links.visit(add, info=True)
            for name, kind in soft_links.items():
                value: Any = root.links.get_val(name) if kind in (h5py.h5l.TYPE_SOFT, h5py.h5l.TYPE_EXTERNAL) else b"?"
                is_external = kind == h5py.h5l.TYPE_EXTERNAL
                target = f"'{decoded(value[1])}' in '{os.fsdecode(value[0])}'" if is_external else f"'{decoded(value)}'"
                targets[f"/{decoded(name)}"] = target
        except HDF5_ERRORS:  # listing the arrays reports what cannot be read
            return {}
        return targets

    def state(self) -> tuple[int, ...] | None:
        """As `Hdf5Source.state`."""
        return self._facts.state()

    def close(self) -> None:
        """See `OpenFile`."""
        self._facts.close()


_WHY_NOT_OPENED = {  # by a regex in HDF5's message, or in the first block of the file; the first that fits counts
    "unable to lock file": "another program has it open for writing, or its file system has no locks. If nobody writes to it, "
    "set HDF5_USE_FILE_LOCKING=FALSE in the environment of all ranks.",
    "NCSAfami|NCSAmult": "it is one of the files of HDF5's family, split or multi driver, which are one file together. Make "
    "one of them: `h5repart -family_to_sec2 part%d.h5 whole.h5`, or `h5repack` on the name before `-m.h5`.",
    "truncated file": "it is shorter than its own header says: a copy or a writer was interrupted. Copy or write it again.",
    "already open": "it is open for writing, or its writer died. Close the writer; if it died, run `h5clear -s` on the file.",
    "": "its metadata is damaged or of a newer version of HDF5. Try `h5dump -H` on it.",
}


def open_explained(path: str, content: BlockCache | None = None) -> h5py.File:
    """Open a file read-only: by its path, or by its content, if it is in a store. If the library refuses, SourceError says what
    to do.
    """
    try:
        return open_to_read(path) if content is None else h5py.File(content, "r")
    except RemoteError:
        raise
    except OSError as error:
        message = str(error)
    head = str(head_of(path)) if content is None else ""  # with the name of a driver that spreads one file over several
    why = next(why for words, why in _WHY_NOT_OPENED.items() if re.search(words, f"{message} {head}"))
    raise SourceError(f"'{path}' is an HDF5 file that cannot be opened: {why} HDF5 says: {message}", path=path)


def _netcdf_names(group: h5py.Group, names: list[str]) -> dict[str, str]:
    """The names in netCDF of variables that have another one in HDF5: see `Hdf5File._variable_of`."""
    netcdf_names: dict[str, str] = {}
    for name in names:
        above, _, last = name.rpartition("/")
        if not last.startswith(NON_COORDINATE):
            continue
        netcdf_name = f"{above}/{last.removeprefix(NON_COORDINATE)}".lstrip("/")
        with contextlib.suppress(*HDF5_ERRORS):  # `list_below` says what is wrong
            dimension = group[netcdf_name] if netcdf_name in names else None
            if isinstance(dimension, h5py.Dataset) and stands_for_axis(dimension):
                netcdf_names[name] = netcdf_name
    return netcdf_names


# --- in a store


class StoreFile(Hdf5File):
    """A file in a store, which is opened when it is first needed.

    Parameters
    ----------
    url : str
        Its URL.
    access : Access
        What the caller allows, with the options of the store.
    """

    _pin: Any = None  # the version that is read; None: the present one

    def __init__(self, url: str, access: Access) -> None:  # `_facts` is opened when it is first needed
        self._path, self._access = without_secrets(url), access
        self._fence = Fence(("://",))  # no folder: nothing is inside
        self._folder = open_remote(url, access.storage)

    @cached
    def _cache(self) -> BlockCache:
        return BlockCache(self._folder.object(self._pin))

    def expect(self, datasets: Iterable[str]) -> None:
        """Fetch the first MiB before HDF5 opens the file: HDF5 lets no other thread of the process open one meanwhile."""
        with contextlib.suppress(OSError):  # `_facts` says why
            self._cache.read_at_most(0, 1)

    @cached
    def _facts(self) -> OpenFacts:
        cache = self._cache
        start = signature_at(cache)
        if start is None:
            head = cache.read_at_most(0, 512)
            what = known_by_head(head) or f"is not an HDF5 file: it begins with {head[:8]!r}"
            raise SourceError(f"'{self._path}' {what}", path=self._path)
        cache.start = start
        facts = OpenFacts(open_explained(self._path, cache), stored=cache)
        facts.name = self._path  # of a file object HDF5 has none
        return facts

    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Hdf5Source:
        """Open a dataset: in the file, or by what another rank has told of it."""
        if planned is None or planned.parts is None:
            return super().open(dataset, planned)

        self._pin = planned.parts["pin"]
        open_whole = functools.partial(super().open, dataset)
        return SkeletonSource(planned, self._folder.object(self._pin), self._access, open_whole)

    def state(self) -> tuple[int, ...] | None:
        """The version of the object; None if nothing was read of it yet: then all ranks read the version of the plan."""
        return super().state() if "_facts" in self.__dict__ else None

    def close(self) -> None:
        """Close the file, if it was opened."""
        if "_facts" in self.__dict__:
            super().close()


# --- the format


class Hdf5Format(Format):
    """HDF5 files, with any layout, and any filter that the installed HDF5 library can decode."""

    name = "HDF5"

    def claims_path(self, path: str) -> bool:
        """True if the file has the HDF5 signature."""
        try:
            file = LocalFile(open_file(path))  # closed with its last reference
        except (NotAFileError, FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
            return False
        return signature_at(file) is not None

    def claims_object(self, obj: object) -> bool:
        """True if `obj` is an `h5py.Dataset`."""
        return isinstance(obj, h5py.Dataset)

    def claims_url(self, url: str) -> bool:
        """True if the object's name ends as those of HDF5 and netCDF4 files do; and for a `Concatenation`."""
        return url.startswith(SCHEME) or (is_remote(url) and without_secrets(url).lower().endswith(_SUFFIXES))

    def claims_head(self, head: bytes) -> bool:
        """True if the HDF5 signature is in it."""
        return signature_at(MemoryObject(head)) is not None

    def describes(self, info: ArrayInfo) -> bool:
        """True for HDF5 and netCDF4."""
        return info.format in ("HDF5", "netCDF4")

    def open_file(self, path: str, access: Access = STRICT) -> OpenFile:
        """Open the file."""
        if isinstance(path, Concatenation):
            fence = Fence() if access.allow_external else path.fence
            access = access if access.storage else replace(access, storage=path.storage)
            versions = tuple(part for part in path.versions if not is_remote(part[0]))
            return Hdf5File(OpenFacts.of_image(path.image, path.in_store), str(path), access, fence, versions)
        if path.startswith(SCHEME):
            raise SourceError(
                f"'{path}' is the text of a concatenation, which does not lead to its files. Pass what shardload.concat "
                "returned, and the name of an array as dataset=",
                path=path,
            )
        if "://" in path:
            return StoreFile(path, access)
        return Hdf5File(OpenFacts(open_explained(path)), path, access, Fence.around_file(path, access.allow_external))

    def open_object(self, obj: Any, access: Access = STRICT) -> Source:
        """Make a source of an open `h5py.Dataset`."""
        if not obj:
            raise SourceError(
                f"the {type(obj).__module__.partition('.')[0]}.{type(obj).__name__} handed in is closed, so nothing "
                "can be read from it. Keep its file open during the load, or pass the path of the file."
            )
        facts, path = OpenFacts(obj.file, is_ours=False), str(obj.file.filename)
        file = Hdf5File(facts, path, access, Fence.around_file(facts.path(), access.allow_external))
        closing = contextlib.ExitStack()
        closing.callback(facts.close)
        return file.source(facts.dataset(obj.id), str(obj.name or "<unnamed>"), closing)


FORMAT = Hdf5Format()
