"""Which files are HDF5 or netCDF4, how are they opened, and what is in them? On disk, or as an object of a store.

1. `Hdf5Format` claims files, and opens them.
2. `Hdf5File` is one open file. A name is looked up through soft and external links (`links.follow`), `describe` turns the
   dataset's metadata into an `ArrayInfo`, and a `Hdf5Source` reads its values.
3. `StoreFile` is a file in an object store, or on an HTTP server. It sends no request before something is asked that was not
   told. The rank that finds the arrays opens it; HDF5 reads it as a file object (`BlockCache`), through blocks that are kept.
   To the others that rank tells where chunks are (`told`).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import h5py

from shardload.errors import ConfigError, SourceError, printable
from shardload.formats.access import STRICT, Access
from shardload.formats.concatenation import SCHEME, Concatenation
from shardload.formats.contract.array import MOST_NAMED, ArrayInfo, group_info, native_dtype, some
from shardload.formats.contract.format import ChangedError, Format, OpenFile, Source
from shardload.formats.diagnosis import known_by_head
from shardload.formats.hdf5.chunks import fill_value
from shardload.formats.hdf5.links import LostError, Others, SearchPath, follow, look_through, open_other, place_of, versions_of
from shardload.formats.hdf5.metadata import NON_COORDINATE, attribute_names, describe, groups_of, stands_for_axis
from shardload.formats.hdf5.opened import (
    OpenDataset,
    OpenFacts,
    close_all,
    decoded,
    encoded,
    has_signature,
    kept,
    names_below,
    open_to_read,
    signature_at,
    type_of_values,
)
from shardload.formats.hdf5.source import Hdf5Source
from shardload.formats.hdf5.tiles import Opener, Versions, code_of, find_boxes, tell_parts
from shardload.formats.hdf5.told import StoreSource, ToldSource
from shardload.storage.block_cache import BlockCache
from shardload.storage.local import Fence, NotAFileError, OutsideError, head_of, open_file, state_of
from shardload.storage.remote import RemoteError, is_remote, open_remote, without_secrets

FileVersions = tuple[tuple[str, tuple[int, ...]], ...]
_MOST_NAMES = 1 << 17  # names to read for the message about a name that does not exist
_ERRORS = (KeyError, OSError, RuntimeError, ValueError)


class Hdf5File(OpenFile):
    """An open file. Its datasets share it.

    Parameters
    ----------
    facts : OpenFacts
        The file.
    path : str
        As the user named it.
    access : Access
        What the caller allows.
    fence : Fence
        The folders that it may refer to.
    versions : tuple
        Other files, with their sizes and times: what is said of its arrays counts as long as none has changed.
    """

    _versions: FileVersions = ()

    def __init__(self, facts: OpenFacts, path: str, access: Access, fence: Fence, versions: FileVersions = ()) -> None:
        self._facts, self._path, self._access, self._fence = facts, path, access, fence
        self._versions = versions

    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Hdf5Source:
        """Open a dataset by its name, or by the name of a link to it. If it is virtual, parts of it that `planned` has are not
        looked at again.
        """
        looked_up, opened = self._look_up(dataset)
        if not opened:
            looked_up = self._variable_of(looked_up, dataset)
        return self.source(looked_up, dataset, _closing(looked_up, opened), planned, is_linked=bool(opened))

    def source(
        self,
        dataset: OpenDataset,
        name: str,
        closing: contextlib.ExitStack,
        planned: ArrayInfo | None = None,
        is_linked: bool = False,
    ) -> Hdf5Source:
        """The source of an open dataset, which the caller calls `name`. What `closing` has is closed with it."""
        try:
            others = look_through(dataset, self._fence, self._access, planned is not None and planned.parts is not None)
            info = self._describe(dataset, name, others, planned=planned)
            open_part = self._opener_of_parts(dataset) if others.is_virtual else None
            kind = StoreSource if dataset.facts.is_in_store else Hdf5Source
            return kind(dataset, info, others, open_part, closing.close, is_linked)
        except BaseException:
            closing.close()
            raise

    def _opener_of_parts(self, virtual: OpenDataset) -> Opener:
        """Opens the datasets of which a virtual one consists, each by its very name (that knows no names of netCDF), as if it
        were loaded from its own file. They are inside of the fence of this file.
        """
        places = functools.cache(lambda: SearchPath("HDF5_VDS_PREFIX", virtual.facts))  # when the first is opened

        def open_part(name: str, dataset: str) -> tuple[Source, Versions]:
            path, _ = places().find(name)
            what, closing = f"values of another file, '{printable(name)}'", contextlib.ExitStack()
            try:
                opening = virtual.facts.parts.open(path, state_of(path) or (0, 0), lambda: open_other(path, what, self._fence))
                facts = closing.enter_context(opening)
            except OutsideError as error:  # of the folder in which the file was opened
                before, now = os.path.join(os.getcwd(), str(virtual.file.filename)), places().own
                if before == now:
                    raise
                raise ChangedError(
                    f"'{printable(before)}' was moved or replaced since it was opened: it is '{printable(now)}' now, and its "
                    "parts are looked for there. Load it again"
                ) from error
            try:
                file = Hdf5File(facts, path, self._access, self._fence)
                looked_up, opened = file._look_up(dataset)
                versions = versions_of([facts, *opened])
                source = file.source(looked_up, dataset, _closing(looked_up, opened, closing), is_linked=bool(opened))
                if source.info.refused is not None:
                    raise OSError(f"{source.info} holds {source.info.refused}")
                return source, versions | source.others.versions
            except BaseException as error:
                closing.close()
                if isinstance(error, KeyError):
                    raise OSError(f"'{printable(path)}' has no '{printable(dataset)}' any more") from None
                raise

        return open_part

    def _describe(
        self, dataset: OpenDataset, name: str, others: Others, in_full: bool = False, planned: ArrayInfo | None = None
    ) -> ArrayInfo:
        """Describe a dataset. Of one that is refused nothing is asked, not even its shape: HDF5 may open files for that."""
        if planned is None or planned.parts is None:  # else a part is compared when it is opened
            for path, version in self._versions:
                if (others.versions.get(path) or state_of(path)) != version:
                    raise ChangedError(f"'{path}' has changed since shardload.concat looked at it. Call concat again")
        if others.refused is None:
            try:
                with others.watched():
                    info = describe(dataset, self._path, name, others, in_full)
                return _with_parts(info, dataset, others, planned) if others.is_virtual and info.refused is None else info
            except OutsideError as error:
                others.refused = str(error)
        return self._refused(name, others.refused)

    def _refused(self, name: str, why: str) -> ArrayInfo:
        return ArrayInfo(self._path, name, "HDF5", (), "unknown", refused=why)

    def _at_end_of(self, opened: list[OpenFacts]) -> Hdf5File:
        """The file to which links have led through these; the caller's path and allowance are those of this one."""
        return Hdf5File(opened[-1], self._path, self._access, self._fence) if opened else self

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
        except OutsideError as error:
            told = f"'{name}' in '{self._path}' cannot be loaded: {error}."
            raise SourceError(told, path=self._path, dataset=name) from None
        except LostError as error:
            where = f"'{name}' in '{self._path}'"
            text = str(error) if str(error).startswith(where) else f"{where} leads nowhere: {error}"
            raise SourceError(f"{text}. Restore the target, or name another array.", path=self._path, dataset=name) from error

    def _variable_of(self, dataset: OpenDataset, name: str) -> OpenDataset:
        """The variable of that name in netCDF, if the dataset of that name is only a dimension; else the dataset itself.

        A variable that has the name of a dimension, but is no coordinate of it, cannot have that name in HDF5. The netCDF
        library puts a prefix in front of it, and takes it away when it reads.
        """
        if not stands_for_axis(dataset):
            return dataset
        above, _, last = name.rpartition("/")
        try:
            variable, opened = follow(self._facts, f"{above}/{NON_COORDINATE}{last}", self._fence)
        except _ERRORS:
            return dataset
        close_all(opened)
        return variable if isinstance(variable, OpenDataset) and not opened else dataset

    # --- what is in it

    def list_arrays(self) -> list[ArrayInfo]:
        """Every dataset in the file; links to other files are not followed."""
        return list(self.list_below(in_full=True))

    def sketch(self, most: int | None = None, like: str = "") -> list[ArrayInfo]:
        """Like `list_arrays`, without what a load does not need; or at most `most` + 1 datasets, each under one name."""
        named = {info.dataset: info for info in self._below(like)}
        others = self.list_below(most=most, like=like, known=named)
        return list(itertools.islice(itertools.chain(named.values(), others), None if most is None else most + 1))

    def list_linked(self, group: str, in_full: bool = True) -> list[ArrayInfo]:
        """The datasets below a group to which links lead, as h5py follows them."""
        try:
            target, opened = self.follow(group)
        except KeyError:  # no such name
            return []
        try:
            return list(self._at_end_of(opened).list_below(target, group, in_full)) if isinstance(target, h5py.Group) else []
        finally:
            close_all(opened)

    def list_below(
        self,
        group: h5py.Group | None = None,
        called: str = "",
        in_full: bool = False,
        most: int | None = None,
        like: str = "",
        known: Collection[str] = (),
    ) -> Iterator[ArrayInfo]:
        """Describe every dataset below `group`, which the caller calls `called`, but those that are `known`. What cannot be
        opened is listed as refused.

        With `most`, only a limited number of names is read (16 microseconds each; a dataset takes 300), one of each array. If
        there are more than `most`, those most similar to `like` come first.
        """
        group, called = self._facts.file if group is None else group, called.rstrip("/")
        names, lost = names_below(group, None if most is None else max(most, _MOST_NAMES))
        if most is not None and len(names) > most and like:
            near = difflib.get_close_matches(like.strip("/"), names, n=MOST_NAMED)
            names = list(dict.fromkeys([*near, *names]))
        netcdf = _netcdf_names(group, names)
        dimensions = set(netcdf.values())  # whose names variables have
        for name in names:
            full = f"{called}/{netcdf.get(name, name)}"
            if name in dimensions or full in known:
                continue
            try:
                member = group[encoded(name)]
                if isinstance(member, h5py.Dataset):
                    dataset = self._facts.dataset(member.id)
                    yield self._describe(dataset, full, look_through(dataset, self._fence, self._access), in_full)
            except (AssertionError, TypeError, *_ERRORS) as error:  # h5py asserts, too
                yield self._refused(full, f"metadata that HDF5 cannot read ({error})")
        for name, why in lost.items():
            yield self._refused(f"{called}/{name}", f"a group that HDF5 cannot read ({why})")

    def _below(self, name: str) -> list[ArrayInfo]:
        """Some of the arrays below a group, to which links may lead, or what it is without arrays; nothing if there is no
        group.
        """
        try:
            group, opened = follow(self._facts, name, self._fence)
        except _ERRORS:  # the search for the array has said what is wrong
            return []
        try:
            if not name or not isinstance(group, h5py.Group):
                return []
            infos = list(itertools.islice(self._at_end_of(opened).list_below(group, name, most=MOST_NAMED), MOST_NAMED + 1))
            how = f"h5py.File({self._path!r})[{name!r}].attrs"
            return infos or [group_info(self._path, name, "HDF5", attribute_names(group), how)]
        except _ERRORS:
            return []
        finally:
            close_all(opened)

    def groups(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """The attributes of all groups; this goes through the whole file."""
        return groups_of(self._facts.file)

    def links(self) -> dict[str, str]:
        """All but the first hard link to an object. Nothing is opened to find out what they lead to."""
        others: dict[Any, int] = {}
        root = self._facts.file.id
        first: dict[int, str] = {int(h5py.h5o.get_info(root).addr): ""}
        found: dict[str, str] = {}

        def keep(name: Any, link: Any) -> None:
            if link.type != h5py.h5l.TYPE_HARD:
                others[name] = int(link.type)
            elif link.u in first:
                found[f"/{decoded(name)}"] = f"'/{first[link.u]}'"
            else:
                first[int(link.u)] = decoded(name)

        try:
            root.links.visit(keep, info=True)
            for name, kind in others.items():
                value: Any = root.links.get_val(name) if kind in (h5py.h5l.TYPE_SOFT, h5py.h5l.TYPE_EXTERNAL) else b"?"
                is_external = kind == h5py.h5l.TYPE_EXTERNAL
                to = f"'{decoded(value[1])}' in '{os.fsdecode(value[0])}'" if is_external else f"'{decoded(value)}'"
                found[f"/{decoded(name)}"] = to
        except _ERRORS:  # who lists the arrays is told what cannot be read
            return {}
        return found

    def state(self) -> tuple[int, ...] | None:
        """As `Hdf5Source.state`."""
        return self._facts.state()

    def close(self) -> None:
        """See `OpenFile`."""
        self._facts.close()


def _closing(dataset: OpenDataset, opened: list[OpenFacts], last: contextlib.ExitStack | None = None) -> contextlib.ExitStack:
    """Closes a dataset, then the files on the way to it, then what is left."""
    closing = contextlib.ExitStack() if last is None else last
    closing.callback(close_all, opened)
    closing.callback(dataset.close)
    return closing


def open_explained(path: str, content: BlockCache | None = None) -> h5py.File:
    """Open a file read-only; of one in a store, its content. If the library refuses, SourceError says what to do."""
    try:
        return open_to_read(path) if content is None else h5py.File(content, "r")
    except RemoteError:
        raise
    except OSError as error:
        said = str(error)
    if "unable to lock file" in said:
        why = (
            "another program has it open for writing, or its file system has no locks. If nobody writes to it, set "
            "HDF5_USE_FILE_LOCKING=FALSE in the environment of all ranks."
        )
    elif content is None and _has_driver(path):
        why = (
            "it is one of the files of HDF5's family, split or multi driver, which are one file together. Make one of them: "
            "`h5repart -family_to_sec2 part%d.h5 whole.h5`, or `h5repack` on the name before `-m.h5`."
        )
    elif "truncated file" in said:
        why = "it is shorter than its own header says: a copy or a writer was interrupted. Copy or write it again."
    elif "already open" in said:
        why = "it is open for writing, or its writer died. Close the writer; if it died, run `h5clear -s` on the file."
    else:
        why = "its metadata is damaged or of a newer version of HDF5. Try `h5dump -H` on it."
    raise SourceError(f"'{path}' is an HDF5 file that cannot be opened: {why} HDF5 says: {said}", path=path)


def _has_driver(path: str) -> bool:
    """True if HDF5 wrote the file by a driver that spreads one over several. Its name is in the first block."""
    head = head_of(path)
    return b"NCSAfami" in head or b"NCSAmult" in head


# --- descriptions


def _with_parts(info: ArrayInfo, dataset: OpenDataset, others: Others, planned: ArrayInfo | None) -> ArrayInfo:
    """What must be known of the parts of a virtual dataset, by those who look at them or by those who have."""
    if planned is not None and planned.parts is not None:
        return replace(info, chunks=planned.chunks, codec=planned.codec, parts=planned.parts)
    seen = others.behind
    boxes = find_boxes(dataset, others.names, lambda names: seen[names].shape if names in seen else None)
    if boxes is None:
        return info
    fill = fill_value(dataset, native_dtype(type_of_values(dataset.kind))).tobytes()
    return replace(info, parts=tell_parts(boxes, others.behind, info.shape, info.chunks, code_of(dataset.kind), fill))


def _netcdf_names(group: h5py.Group, names: list[str]) -> dict[str, str]:
    """The names in netCDF of variables that have another one in HDF5: see `Hdf5File._variable_of`."""
    found: dict[str, str] = {}
    for text in (text for text in names if NON_COORDINATE in text):
        above, _, last = text.rpartition("/")
        plain = f"{above}/{last.removeprefix(NON_COORDINATE)}".lstrip("/")
        with contextlib.suppress(*_ERRORS):  # `list_below` says what is wrong
            if last.startswith(NON_COORDINATE) and plain in names and isinstance(group[plain], h5py.Dataset):
                found |= {text: plain} if stands_for_axis(group[plain]) else {}
    return found


class StoreFile(Hdf5File):
    """A file in a store, which is opened when it is first needed.

    Parameters
    ----------
    url : str
        Its URL.
    access : Access
        What the caller allows, with the options of the store.
    """

    def __init__(self, url: str, access: Access) -> None:
        self._path, self._access = without_secrets(url), access
        self._fence = Fence(("://",))  # no folder: nothing is inside
        self._remote = open_remote(url, access.storage)

    @kept
    def _facts(self) -> OpenFacts:
        cache = BlockCache(self._remote.object())
        start = signature_at(cache.read_at_most, lambda: cache.nbytes)
        if start is None:
            head = cache.read_at_most(0, 512)
            what = known_by_head(head) or f"is not an HDF5 file: it begins with {head[:8]!r}"
            raise SourceError(f"'{self._path}' {what}", path=self._path)
        cache.start = start
        facts = OpenFacts(open_explained(self._path, cache), stored=cache)
        facts.name = self._path  # of a file object HDF5 has none
        return facts

    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Hdf5Source:
        """Open a dataset: in the file, or by what was told of it."""
        if planned is None or planned.parts is None:
            return super().open(dataset, planned)

        def open_whole() -> Hdf5Source:
            return super(StoreFile, self).open(dataset)

        return ToldSource(planned, self._remote.object(planned.parts["pin"]), self._access, open_whole)

    def state(self) -> tuple[int, ...] | None:
        """The version of the object; None if nothing was read of it yet. All ranks read the version that was told."""
        return super().state() if "_facts" in self.__dict__ else None

    def close(self) -> None:
        """Close the file, if it was opened."""
        if "_facts" in self.__dict__:
            super().close()


_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5", ".h5ad", ".nc", ".nc4", ".cdf", ".mat")


class Hdf5Format(Format):
    """HDF5 files, with any layout, and any filter that the installed HDF5 library can decode."""

    name = "HDF5"

    def claims_path(self, path: str) -> bool:
        """True if the file has the HDF5 signature."""
        try:
            file = open_file(path)
        except (NotAFileError, FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
            return False
        try:
            return has_signature(file)
        finally:
            os.close(file)

    def claims_object(self, obj: object) -> bool:
        """True if `obj` is an `h5py.Dataset`, group or file."""
        return isinstance(obj, h5py.Dataset | h5py.Group)

    def claims_url(self, url: str) -> bool:
        """True if the object has a name that HDF5 and netCDF4 files have, or several files stand for one."""
        return url.startswith(SCHEME) or (is_remote(url) and without_secrets(url).lower().endswith(_SUFFIXES))

    def claims_head(self, head: bytes) -> bool:
        """True if the HDF5 signature is in it."""
        return signature_at(lambda at, nbytes: head[at : at + nbytes], lambda: len(head)) is not None

    def describes(self, info: ArrayInfo) -> bool:
        """True for HDF5 and netCDF4."""
        return info.format in ("HDF5", "netCDF4")

    def open_file(self, path: str, access: Access = STRICT) -> OpenFile:
        """Open the file."""
        if isinstance(path, Concatenation):
            fence = Fence() if access.allow_external else path.fence
            return Hdf5File(OpenFacts.of_image(path.image), str(path), access, fence, path.versions)
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
        file = Hdf5File(facts, path, access, Fence.around_file(place_of(facts), access.allow_external))
        if isinstance(obj, h5py.Group):
            infos = file.list_below(obj, obj.name or "", most=MOST_NAMED)
            names = some([repr(info.dataset) for info in itertools.islice(infos, MOST_NAMED + 1)]) or "none"
            raise ConfigError(
                f"'{obj.name}' in '{path}' is a group, not an array. Pass group['name'] with a name of an array in it: {names}."
            )
        closing = contextlib.ExitStack()
        closing.callback(facts.close)
        return file.source(facts.dataset(obj.id), str(obj.name or "<unnamed>"), closing)


FORMAT = Hdf5Format()
