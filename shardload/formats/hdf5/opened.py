"""What does an open HDF5 file, or a dataset in it, say of itself? It is asked once, however many parts of this package need it.

A call of the HDF5 library takes 1 to 10 microseconds. For a thousand small datasets that was most of the time. So `OpenFacts`
has what is the same for all datasets of a file, and an `OpenDataset` has what never changes while a load has it open.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import h5py

from shardload.formats.hdf5.names import places_in
from shardload.formats.hdf5.raw_file import file_number, open_to_read, stored_file
from shardload.storage.objects import StoredObject

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
    """An open file.

    Parameters
    ----------
    file : h5py.File
        The file.
    is_ours : bool
        Whether `close` closes it.
    stored : StoredObject, optional
        Its bytes, if it is an object in a store. `close` closes it, too.

    Attributes
    ----------
    among : OpenParts or None
        What this file is a part of: its own parts are kept there, too, so that one number limits all.
    opened_in : tuple of int or None
        Its `state` before anything of it was read but its first block, which leads to the rest.
    """

    def __init__(self, file: h5py.File, is_ours: bool = True, stored: StoredObject | None = None) -> None:
        self.file, self._is_ours, self._in_store = file, is_ours, stored
        self.among: OpenParts | None = None
        self.opened_in = self.state()

    @classmethod
    def at(cls, path: str) -> OpenFacts:
        """Open a file for reading only. Raises OSError as h5py."""
        return cls(open_to_read(path))

    def dataset(self, identifier: Any, address: int | None = None) -> OpenDataset:
        """A dataset of this file that was opened."""
        return OpenDataset(identifier, self, address)

    @property
    def is_in_store(self) -> bool:
        """True if it is an object in a store: it has no folder, and what HDF5 reads itself takes a request each."""
        return self._in_store is not None

    @kept
    def stored(self) -> StoredObject | None:
        """The bytes of the file, if it is an object in a store, or a plain file that is open for reading only; else None."""
        return self._in_store or stored_file(self.file)

    @kept
    def raw(self) -> StoredObject | None:
        """The same, if addresses in it are positions; None if only the HDF5 library may read them."""
        return None if self.creation.get_userblock() else self.stored

    def state(self) -> tuple[int, ...] | None:
        """The state of the open file, if it is a plain one, open for reading only; else None. Never raises."""
        try:
            return None if self.stored is None else self.stored.version
        except (OSError, RuntimeError, ValueError):  # it was closed
            return None

    @property
    def name(self) -> str:
        """What tells it from others of the same `state`."""
        return str(self.file.filename)

    @kept
    def places(self) -> dict[int, list[str]]:
        """The names of all objects, by address."""
        return places_in(self.file)

    @kept
    def is_netcdf(self) -> bool:
        """True if the file has the netCDF library's marks."""
        try:
            return any(h5py.h5a.exists(self.file.id, key) for key in (b"_NCProperties", b"_nc3_strict"))
        except RuntimeError:  # damaged attributes of the root group are not those of an array
            return False

    @kept
    def parts(self) -> OpenParts:
        """The files of which virtual datasets in this one consist."""
        return OpenParts() if self.among is None else self.among

    @kept
    def creation(self) -> Any:
        """The properties with which the file was made."""
        return self.file.id.get_create_plist()

    def close(self) -> None:
        """Close what this object has opened."""
        if self.among is None:
            self.parts.close()
        if self.stored is not None:
            self.stored.close()
        if self._is_ours:
            with contextlib.suppress(OSError, RuntimeError):  # no error of that says anything of what was read
                self.file.close()


def close_all(files: Sequence[OpenFacts]) -> None:
    """Close files, the last one first."""
    for file in reversed(files):
        file.close()


class OpenParts:
    """Files that stay open from one virtual dataset to the next: those of a snapshot all consist of the same files, and a file
    server takes milliseconds for each that is opened. The first `_MOST_PARTS` are kept, until `close`.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[int, ...], OpenFacts]] = {}  # with the versions in which they were opened
        self._lock = threading.RLock()  # a call in a signal handler asks, too

    @contextlib.contextmanager
    def open(self, path: str, version: tuple[int, ...], ask: Callable[[], OpenFacts]) -> Iterator[OpenFacts]:
        """The file at a path, in this version. From `ask` if it is not open yet.

        One that is open in another version is closed, also for others, whose values are no longer those of the file: while it
        is open, HDF5 has the old metadata for whoever opens it again.
        """
        inode = inode_of(path)
        with self._lock:  # not while HDF5 is asked, whose own lock another thread may have that waits for this one
            changed = []
            for other, (seen, facts) in list(self._kept.items()):
                is_same = facts.opened_in is not None and facts.opened_in[2:] == inode
                if (is_same and seen != version) or (other == path and not is_same):
                    changed.append(self._kept.pop(other)[1])
            _, found = self._kept.get(path, (version, None))
        close_all(changed)
        if found is None:
            found = ask()
            found.among = self
            with self._lock:
                if len(self._kept) < _MOST_PARTS:
                    self._kept.setdefault(path, (version, found))
        try:
            yield found
        finally:
            if self._kept.get(path, (version, None))[1] is not found:
                found.close()

    def close(self) -> None:
        """Close all that are kept."""
        while self._kept:
            self._kept.popitem()[1][1].close()


def inode_of(path: str) -> tuple[int, ...]:
    """Which file a path leads to, as in `LocalFile.version`; empty if to none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_dev


class OpenDataset(h5py.Dataset):  # type: ignore[misc]  # h5py has no types
    """An open dataset.

    Parameters
    ----------
    identifier : h5py.h5d.DatasetID
        The open dataset.
    facts : OpenFacts
        The file that it is in.
    address : int or None
        Where its object header is, as the link to it says.
    """

    def __init__(self, identifier: Any, facts: OpenFacts, address: int | None = None) -> None:
        super().__init__(identifier, readonly=True)
        self.facts, self._address = facts, address

    @property
    def file(self) -> h5py.File:
        """The file that it is in."""
        return self.facts.file

    def close(self) -> None:
        """Close it. May be called again."""
        if self.id.valid:
            self.id.close()

    @kept
    def creation(self) -> Any:
        """Its creation properties."""
        return self.id.get_create_plist()

    @kept
    def kind(self) -> Any:
        """The type of its values in the file."""
        return self.id.get_type()

    @kept
    def element(self) -> tuple[Any, tuple[int, ...]]:
        """The type of its numbers in the file, and the axes of an element: none, unless elements are small arrays."""
        kind, shape = self.kind, tuple[int, ...]()
        while kind.get_class() == h5py.h5t.ARRAY:
            kind, shape = kind.get_super(), (*shape, *kind.get_array_dims())
        return kind, shape

    @kept
    def stored_filters(self) -> list[tuple[int, int, Any, bytes]]:
        """The filters of its chunks, in the order in which they are applied: number, flags, parameters, name."""
        return [self.creation.get_filter(k) for k in range(self.creation.get_nfilters())]

    @kept
    def raw(self) -> StoredObject | None:
        """The bytes of its file; None if only the HDF5 library may read its values."""
        is_elsewhere = self._address is None and file_number(self.id) != file_number(self.file.id)  # in a file that is mounted
        return None if is_elsewhere else self.facts.raw

    @kept
    def extent(self) -> tuple[int, int] | None:
        """Where its values are, if they are in one piece, and their bytes; None if none were ever written."""
        offset = self.id.get_offset()
        return None if offset is None else (int(offset), int(self.id.get_storage_size()))

    @kept
    def n_stored(self) -> int:
        """How many of its chunks are stored."""
        return int(self.id.get_num_chunks())

    @property
    def header(self) -> int | None:
        """Where its object header is; None if that is not known, or addresses do not have the usual length."""
        return self._address if self.facts.creation.get_sizes() == (8, 8) else None
