"""What does an open HDF5 file, or a dataset in it, say of itself? It is asked once, however many parts of this package need it.

A call of the HDF5 library takes 1 to 10 microseconds, and an h5py object of a file 10 more. For a thousand small datasets that
was most of the time. So `OpenFacts` has what is the same for all datasets of a file, and an `OpenDataset` has what never
changes while it is open. An `h5py.Dataset` of the caller is asked each time: the file may be open for writing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, overload

import h5py

from shardload.formats.hdf5.names import places_in
from shardload.formats.hdf5.on_disk import UnknownStructureError, nbytes_of_attributes
from shardload.formats.hdf5.raw_file import close_all, own_descriptor, raw_file, raw_file_of
from shardload.storage.local import LocalFile

_MOST_GROUPS = 64
_MOST_PARTS = 32  # HDF5 takes 570 KiB for each open file
T = TypeVar("T")


class kept(Generic[T]):
    """As `functools.cached_property`, without the lock that this has in Python 3.11, one for all objects of a class.

    A thread that asks HDF5 for a value would have that lock and wait for h5py's, while another one has h5py's
    (`links.nothing_else_opened`) and waits for that lock. Two threads may both ask, and the first answer is kept.
    """

    def __init__(self, ask: Callable[[Any], T]) -> None:
        self._ask, self.__doc__, self._name = ask, ask.__doc__, ask.__name__

    @overload
    def __get__(self, owner: None, kind: type) -> kept[T]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self
        found = owner.__dict__
        return found[self._name] if self._name in found else found.setdefault(self._name, self._ask(owner))


class OpenFacts:
    """A file that this package has opened, for reading only.

    Parameters
    ----------
    file : h5py.File
        The file, from `open_to_read`. It stays the caller's; `close` ends what this object has opened besides.
    among : OpenParts, optional
        What this file is a part of: its own parts are kept there, too, so that one number limits all.
    version : tuple of int
        Its size and time, as it was looked up.
    """

    def __init__(self, file: h5py.File, among: OpenParts | None = None, version: tuple[int, ...] = ()) -> None:
        self.file, self._among, self.version = file, among, version
        self.descriptor = own_descriptor(file)
        self._groups: dict[bytes, Any] = {}
        self.has_marks: bool | None = None  # of the netCDF library; None until somebody has looked

    @kept
    def root(self) -> Any:
        """The root group."""
        return h5py.h5g.open(self.file.id, b"/")

    def group(self, name: bytes) -> Any:
        """The group of that name, if `keep_group` has kept it; else None."""
        return self._groups.get(name)

    def keep_group(self, name: bytes, group: Any) -> None:
        """Keep an open group to which hard links alone led: many datasets are in few groups."""
        if len(self._groups) >= _MOST_GROUPS:
            self._groups.clear()
        self._groups[name] = group

    def forget_groups(self) -> None:
        """Close those that were kept: the more objects are open, the longer HDF5 takes to close a file."""
        self._groups.clear()
        self.__dict__.pop("root", None)

    @kept
    def places(self) -> dict[int, list[str]]:
        """The names of all objects, by address."""
        return places_in(self.file)

    @kept
    def inode(self) -> tuple[int, ...] | None:
        """Which file it is, whatever its path leads to now."""
        return None if self.descriptor is None else _inode_of(self.descriptor)

    @kept
    def parts(self) -> OpenParts:
        """The files of which virtual datasets in this one consist."""
        return OpenParts() if self._among is None else self._among

    @kept
    def nbytes_of_attributes(self) -> int:
        """Bytes of the root group's attributes that are not in its object header."""
        return _nbytes_of_attributes(h5py.h5o.get_info(self.file.id))

    @kept
    def raw(self) -> LocalFile | None:
        """The bytes of the file; None if only the HDF5 library may read them."""
        has_block = self.descriptor is None or self.creation.get_userblock()
        return None if has_block or self.descriptor is None else raw_file(self.descriptor)

    @kept
    def creation(self) -> Any:
        """The properties with which the file was made."""
        return self.file.id.get_create_plist()

    @kept
    def sizes(self) -> tuple[int, int]:
        """Bytes of an address, and of a length, in the file."""
        offset, length = self.creation.get_sizes()
        return int(offset), int(length)

    def state_descriptor(self) -> int | None:
        """The descriptor of the file, if it is a plain one and still open."""
        return self.descriptor if self.descriptor is not None and self.file.id.valid else None

    def close(self) -> None:
        """Close the groups, the parts and the descriptor of this object."""
        if (parts := self.__dict__.pop("parts", None)) is not None and parts is not self._among:
            parts.close()
        self.forget_groups()
        if (raw := self.__dict__.pop("raw", None)) is not None:
            raw.close()


class OpenParts:
    """Files that stay open from one virtual dataset to the next: those of a snapshot all consist of the same files, and a file
    server takes milliseconds for each that is opened. The first `most` are kept, until `close`.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = _MOST_PARTS if most is None else most
        self._kept: dict[str, OpenFacts] = {}
        self._lock = threading.RLock()  # a call in a signal handler asks, too

    @contextlib.contextmanager
    def open(self, path: str, version: tuple[int, ...], ask: Callable[[], h5py.File]) -> Iterator[OpenFacts]:
        """The file at a path, in this version. From `ask` if it is not open yet.

        One that is open in another version is closed, also for others, whose values are no longer those of the file: while it
        is open, HDF5 has the old metadata for whoever opens it again.
        """
        inode = _inode_of(path)
        with self._lock:  # not while HDF5 is asked, whose own lock another thread may have that waits for this one
            facts = self._kept.get(path)
            older = [other for other, kept in self._kept.items() if kept.inode == inode and kept.version != version]
            if facts is not None and facts.inode != inode:
                older.append(path)
            changed = [self._kept.pop(other) for other in older]
        for facts in changed:
            facts.close()
            close_all([facts.file])
        if changed or facts is None:
            facts = OpenFacts(ask(), self, version)
            with self._lock:
                if len(self._kept) < self._most:
                    self._kept.setdefault(path, facts)
        try:
            yield facts
        finally:
            facts.forget_groups()
            if self._kept.get(path) is not facts:
                facts.close()
                close_all([facts.file])

    def close(self) -> None:
        """Close all that are kept."""
        while self._kept:
            facts = self._kept.popitem()[1]
            facts.close()
            close_all([facts.file])


def _inode_of(file: int | str) -> tuple[int, ...]:
    """Which file a path, or a descriptor, leads to; empty if to none."""
    try:
        found = os.stat(file)
    except OSError:
        return ()
    return found.st_dev, found.st_ino


class OpenDataset(h5py.Dataset):  # type: ignore[misc]  # h5py has no types
    """A dataset of a file that this package has opened for reading only: hard links alone lead to it, so it is in that file.

    Parameters
    ----------
    identifier : h5py.h5d.DatasetID
        The open dataset.
    facts : OpenFacts
        The file that it is in.
    address : int
        Where its object header is, as the link to it says.
    """

    def __init__(self, identifier: Any, facts: OpenFacts, address: int) -> None:
        super().__init__(identifier, readonly=True)
        self.facts, self.address = facts, address

    @property
    def file(self) -> h5py.File:
        """The file that it is in."""
        return self.facts.file

    @kept
    def creation(self) -> Any:
        """Its creation properties."""
        return self.id.get_create_plist()

    @kept
    def kind(self) -> Any:
        """The type of its values in the file."""
        return self.id.get_type()

    @kept
    def nbytes_of_attributes(self) -> int:
        """Bytes of its attributes that are not in its object header."""
        header, raw = header_of(self), self.facts.raw
        if header is not None and raw is not None:
            with contextlib.suppress(UnknownStructureError, IndexError, OSError):  # then HDF5 says it
                return nbytes_of_attributes(raw.read_at_most, header)
        return _nbytes_of_attributes(h5py.h5o.get_info(self.id))


def nbytes_of_attributes_of(owner: h5py.Dataset | h5py.Group) -> int:
    """Bytes of the attributes of a dataset or a group (of a file, its root), that are not in its object header."""
    if isinstance(owner, OpenDataset):
        return owner.nbytes_of_attributes
    return _nbytes_of_attributes(h5py.h5o.get_info(owner.id))


def _nbytes_of_attributes(about: Any) -> int:
    stored = about.meta_size.attr
    return int(stored.heap_size + stored.index_size)


def header_of(dataset: h5py.Dataset) -> int | None:
    """Where the object header of a dataset is; None unless this package has opened it, and addresses have the usual length."""
    return dataset.address if isinstance(dataset, OpenDataset) and dataset.facts.sizes == (8, 8) else None


def creation_of(dataset: h5py.Dataset) -> Any:
    """The creation properties of a dataset."""
    return dataset.creation if isinstance(dataset, OpenDataset) else dataset.id.get_create_plist()


def nbytes_stored_of(dataset: h5py.Dataset) -> int:
    """Bytes that a dataset's values take in the file. HDF5 goes through the index of its chunks for that."""
    return int(dataset.id.get_storage_size())


def kind_of(dataset: h5py.Dataset) -> Any:
    """The type of a dataset's values in the file."""
    return dataset.kind if isinstance(dataset, OpenDataset) else dataset.id.get_type()


def element_of(dataset: h5py.Dataset) -> tuple[Any, tuple[int, ...]]:
    """The type of the numbers of a dataset in the file, and the axes of an element: none, unless elements are small arrays."""
    kind, shape = kind_of(dataset), tuple[int, ...]()
    while kind.get_class() == h5py.h5t.ARRAY:
        kind, shape = kind.get_super(), (*shape, *kind.get_array_dims())
    return kind, shape


def raw_of(dataset: h5py.Dataset) -> LocalFile | None:
    """The bytes of the file that holds a dataset; None if only the HDF5 library may read its values.

    Of an `OpenDataset` they belong to its file, and the file closes them.
    """
    if not isinstance(dataset, OpenDataset):
        return raw_file_of(dataset)
    return dataset.facts.raw
