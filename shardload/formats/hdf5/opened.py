"""What does an open HDF5 file, or a dataset in it, say of itself? It is asked once, however many parts of this package need it.

A call of the HDF5 library takes 1 to 10 microseconds, and an h5py object of a file 10 more. For a thousand small datasets that
was most of the time. So `OpenFacts` has what is the same for all datasets of a file, and an `OpenDataset` has what never
changes while it is open. An `h5py.Dataset` of the caller is asked each time: the file may be open for writing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import h5py

from shardload.formats.hdf5.on_disk import UnknownError, nbytes_of_attributes
from shardload.formats.hdf5.raw_file import RawFile, own_descriptor

__all__ = [
    "OpenDataset",
    "OpenFacts",
    "creation_of",
    "header_of",
    "kept",
    "kind_of",
    "nbytes_of_attributes_of",
    "nbytes_stored_of",
    "raw_of",
]

_MOST_GROUPS = 64
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
    """

    def __init__(self, file: h5py.File) -> None:
        self.file = file
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

    @kept
    def nbytes_of_attributes(self) -> int:
        """Bytes of the root group's attributes that are not in its object header."""
        return _nbytes_of_attributes(h5py.h5o.get_info(self.file.id))

    @kept
    def raw(self) -> RawFile | None:
        """The bytes of the file; None if only the HDF5 library may read them."""
        has_block = self.descriptor is None or self.creation.get_userblock()
        return None if has_block or self.descriptor is None else RawFile.of_plain(self.descriptor)

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
        """Close the groups and the descriptor of this object."""
        self._groups.clear()
        self.__dict__.pop("root", None)
        if (raw := self.__dict__.pop("raw", None)) is not None:
            raw.close()


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
            with contextlib.suppress(UnknownError, IndexError, OSError):  # then HDF5 says it
                return nbytes_of_attributes(raw.read_at_most, header)
        return _nbytes_of_attributes(h5py.h5o.get_info(self.id))


def nbytes_of_attributes_of(owner: h5py.Dataset | h5py.File) -> int:
    """Bytes of the attributes of a dataset, or of a file's root group, that are not in its object header."""
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


def raw_of(dataset: h5py.Dataset) -> RawFile | None:
    """The bytes of the file that holds a dataset; None if only the HDF5 library may read its values.

    Of an `OpenDataset` they belong to its file, and the file closes them.
    """
    if not isinstance(dataset, OpenDataset):
        return RawFile.open(dataset)
    return dataset.facts.raw
