"""What does an open HDF5 file, or a dataset in it, say of itself? HDF5 is asked once, whoever needs the answer.

A call of the HDF5 library takes 1 to 10 microseconds. For a thousand small datasets that was most of the time. So `OpenFacts`
has what is the same for all datasets of a file, and an `OpenDataset` has what never changes while a load has it open.

`OpenFacts.raw` says which files may be read without the HDF5 library: plain files that are open for reading only. (A writer
keeps chunks in memory that are not in the file yet.) `swap_size` says which types NumPy takes as they are in the file. If there
is any doubt, the library reads. Reads are positional, on a duplicate of HDF5's own descriptor. So they read the same open file
even if it was renamed or replaced since, threads share no file offset, and no lock of HDF5 or Python is held. If the caller
closes the file during a load, the duplicate's number cannot come to mean another file.

An object has as many names as hard links lead to it; HDF5 tells one. Names are bytes to HDF5, mostly UTF-8; here they are text.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import h5py
import ml_dtypes
import numpy as np
from h5py._objects import phil

from shardload.storage.local import LocalFile, real_path_of
from shardload.storage.objects import StoredObject

_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def open_to_read(path: str) -> h5py.File:
    """``h5py.File(path, "r")``. HDF5 does not try again if a signal comes while it opens or locks the file."""
    while True:
        try:
            return h5py.File(path, "r")
        except InterruptedError:
            continue


def signature_at(stored: StoredObject) -> int | None:
    """Where HDF5's signature is: at byte 0, 512, 1024, 2048, ... None if nowhere."""
    offset = 0
    while offset == 0 or offset < stored.nbytes:
        if stored.read_at_most(offset, len(_SIGNATURE)) == _SIGNATURE:
            return offset
        offset = 2 * offset or 512
    return None


def file_number(identifier: Any) -> Any:
    """HDF5's number of the file that an object is in; another one than that of the open file, if one is mounted in it."""
    return h5py.h5g.get_objinfo(identifier).fileno  # `h5o.get_info` goes through the index of all chunks, damaged or not


def address_of(identifier: Any) -> int:
    """Where an object is in its file."""
    return int(h5py.h5g.get_objinfo(identifier).objno[0])


BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


@functools.lru_cache(maxsize=64)
def type_in_file(dtype: np.dtype[Any]) -> Any:
    """HDF5's type for values of `dtype`. A bfloat16 is a float of 16 bits with the exponent of a float32."""
    if dtype not in (BFLOAT16, BFLOAT16.newbyteorder()):
        return h5py.h5t.py_create(dtype, logical=True)
    kind = (h5py.h5t.IEEE_F16LE if dtype.isnative == (sys.byteorder == "little") else h5py.h5t.IEEE_F16BE).copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_ebias(127)
    return kind


def type_of_values(kind: Any) -> np.dtype[Any]:
    """NumPy's type for values of a type in the file: h5py's, which takes bfloat16 for float32, but for that."""
    dtype: np.dtype[Any] = kind.dtype
    if kind.get_class() == h5py.h5t.FLOAT and kind.get_size() == 2:
        for bfloat16 in (BFLOAT16, BFLOAT16.newbyteorder()):
            dtype = bfloat16 if kind.equal(type_in_file(bfloat16)) else dtype
    return dtype


def swap_size(in_file: Any, dtype: np.dtype[Any]) -> int | None:
    """How bytes of the type `in_file` (h5py's identifier) become values of `dtype`, a native type.

    Returns
    -------
    int or None
        0: they are the same. n > 1: reverse each group of n bytes (the real or imaginary part of a complex number is a group).
        None: HDF5 has to convert them, or may have to.
    """
    part = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    for is_native in (True, False):
        if any(in_file.equal(kind) for kind in _types_taken(dtype, is_native)):
            return 0 if is_native or part == 1 else part
    return None


@functools.lru_cache(maxsize=64)
def _types_taken(dtype: np.dtype[Any], is_native: bool) -> tuple[Any, ...]:
    """HDF5's types in the file whose values NumPy can take as they are, or with their bytes reversed."""
    kinds = [type_in_file(dtype if is_native else dtype.newbyteorder())]
    order = "LE" if is_native == (sys.byteorder == "little") else "BE"
    if dtype.kind == "u":
        kinds.append(getattr(h5py.h5t, f"STD_B{8 * dtype.itemsize}{order}"))  # bit fields
    if dtype.kind == "c":
        name = f"COMPLEX_IEEE_F{4 * dtype.itemsize}{order}"  # the complex type of HDF5 2.0
        kinds += [getattr(h5py.h5t, name)] if hasattr(h5py.h5t, name) else []
    return tuple(kinds)


HDF5_ERRORS = (KeyError, OSError, RuntimeError, ValueError)  # of h5py, for what is not there or is damaged


def encoded(name: str) -> bytes:
    """The name of an object as HDF5 stores it: UTF-8, whatever the locale's encoding, in which names of files are."""
    return name.encode("utf-8", "surrogateescape")


def decoded(name: str | bytes) -> str:
    """The inverse of `encoded`. h5py gives bytes for names that are not UTF-8, and text for others."""
    return name if isinstance(name, str) else name.decode("utf-8", "surrogateescape")


def names_below(group: h5py.Group, most: int | None = None) -> tuple[list[str], dict[str, str]]:
    """The names of all objects below a group to which hard links alone lead, in HDF5's order; and those of groups that HDF5
    cannot read, with the reason. What is in a group has one name, however many the group has. With `most`, each object has one
    name, and no more links than `most` are read.

    Raises
    ------
    RuntimeError
        If HDF5 cannot read `group` itself.
    """
    links, lost = _links_below(group, most)
    if most is None:
        return [name for name, _ in links], lost
    first: dict[int, str] = {}
    for name, address in links:
        first.setdefault(address, name)
    return list(first.values()), lost


def _links_below(group: h5py.Group, most: int | None) -> tuple[list[tuple[str, int]], dict[str, str]]:
    """Hard links below a group, each with the address of its object; and groups that HDF5 cannot read, with the reason.

    Not by HDF5's own visit: one object that it cannot read ends that, also one whose index of chunks is damaged.
    """
    links: list[tuple[str, int]] = []
    lost: dict[str, str] = {}
    groups = {address_of(group.id)}
    todo = [("", iter(_links_in(group.id)))]
    while todo and (most is None or len(links) < most):
        name, address = next(todo[-1][1], ("", 0))
        if not name:
            todo.pop()
            continue
        name = f"{todo[-1][0]}{name}"
        links.append((name, address))
        if address in groups:
            continue
        try:
            opened = h5py.h5o.open(group.id, encoded(name))
        except HDF5_ERRORS:  # who opens it is told
            continue
        if isinstance(opened, h5py.h5g.GroupID):
            groups.add(address)
            try:
                todo.append((f"{name}/", iter(_links_in(opened))))
            except HDF5_ERRORS as error:
                lost[name] = str(error)
    return links, lost


def _links_in(group: h5py.h5g.GroupID) -> list[tuple[str, int]]:
    """The hard links in a group."""
    links: list[tuple[str, int]] = []

    def add(name: bytes, link: Any) -> None:  # h5py hands the same `link` in for the next one
        if link.type == h5py.h5l.TYPE_HARD:
            links.append((decoded(name), int(link.u)))

    group.links.iterate(add, info=True)
    return links


_PLAIN_EDGES = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS


def are_edges_plain(creation: Any) -> bool | None:
    """True if the chunks over a dataset's edge are not filtered, by its creation properties; None if HDF5 does not say."""
    options = number_of("H5Pget_chunk_opts", creation)
    return None if options is None else bool(options & _PLAIN_EDGES)


def number_of(function: str, identifier: Any) -> int | None:
    """The number that a function of HDF5 tells about an object; None if the library does not say.

    Parameters
    ----------
    function : str
        A function of an identifier and a pointer to an unsigned integer.
    identifier : h5py.h5d.DatasetID, h5py.h5p.PropDCID, ...
        The object.
    """
    call, number = _function(function), ctypes.c_uint()
    with phil:
        return None if call is None or call(identifier.id, ctypes.byref(number)) < 0 else number.value


@functools.cache
def _function(name: str) -> Callable[..., int] | None:
    """A function of the library that h5py is linked with."""
    try:
        function = getattr(ctypes.CDLL(h5py.h5d.__file__), name)
    except (AttributeError, OSError):
        return None
    function.argtypes, function.restype = (ctypes.c_int64, ctypes.POINTER(ctypes.c_uint)), ctypes.c_int
    return function  # type: ignore[no-any-return]


_MOST_PARTS = 32  # HDF5 takes 570 KiB for each open file
T = TypeVar("T")


class cached(Generic[T]):
    """As `functools.cached_property`, without the lock that this has in Python 3.11, one for all objects of a class.

    A thread that asks HDF5 for a value would hold that lock and wait for h5py's, while another one holds h5py's
    and waits for that lock. Two threads may both ask HDF5; both take the first answer.
    """

    def __init__(self, method: Callable[[Any], T]) -> None:
        self._method, self.__doc__, self._name = method, method.__doc__, method.__name__

    def __get__(self, owner: Any, kind: type) -> T:
        if owner is None:
            return self  # type: ignore[return-value]
        values: dict[str, T] = owner.__dict__
        return values[self._name] if self._name in values else values.setdefault(self._name, self._method(owner))


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
    name : str
        What tells it from other files of the same `state`: its path, or URL; "" for one of an image.
    in_store : mapping
        The parts at URLs that its virtual datasets may have: see `Concatenation`.
    shared_parts : OpenParts or None
        Where it is kept open as a part of a virtual dataset: its own parts are kept there, too, so that one number limits all.
    opened_in : tuple of int or None
        Its `state` before anything of it was read but its first block, which leads to the rest.
    """

    def __init__(self, file: h5py.File, is_ours: bool = True, stored: StoredObject | None = None) -> None:
        self.file, self._is_ours, self._object, self.name = file, is_ours, stored, str(file.filename)
        self.is_in_store = stored is not None  # then it has no folder, and what HDF5 reads itself takes a request each
        self.shared_parts: OpenParts | None = None
        self.in_store: Mapping[tuple[str, str], Any] = {}  # `tiles.PartMetadata` of each
        # Dimension scales that arrays have, with their names, by address and the group of the array: see `metadata.scales_of`.
        self.scales: dict[tuple[int, str], tuple[str, OpenDataset] | None] = {}
        self._image_state: tuple[int, ...] | None = None
        self.opened_in = self.state()

    @classmethod
    def of_image(cls, image: bytes, in_store: Mapping[tuple[str, str], Any] | None = None) -> OpenFacts:
        """A file that is open from its bytes, which never change: its state is their number, and a digest. `in_store`: see
        `Concatenation`.
        """
        facts = cls(h5py.File(h5py.h5f.open_file_image(image)))
        facts.name = ""  # HDF5 has another one each time
        facts.in_store = in_store or {}
        facts._image_state = facts.opened_in = len(image), int.from_bytes(blake2b(image, digest_size=7).digest(), "little")
        return facts

    def dataset(self, identifier: Any, address: int | None = None) -> OpenDataset:
        """A dataset of this file that was opened."""
        return OpenDataset(identifier, self, address)

    @cached
    def stored(self) -> StoredObject | None:
        """The bytes of the file, if it is an object in a store, or a plain file that is open for reading only; else None."""
        if self._object is not None:
            return self._object
        file = self.file.id
        is_plain = file.get_access_plist().get_driver() == h5py.h5fd.SEC2
        is_plain = is_plain and file.get_intent() == h5py.h5f.ACC_RDONLY  # not SWMR either
        return LocalFile(os.dup(file.get_vfd_handle())) if is_plain else None

    @cached
    def raw(self) -> StoredObject | None:
        """`stored`, if addresses in it are positions; None if only the HDF5 library may read them."""
        return None if self.creation.get_userblock() else self.stored

    def path(self) -> str:
        """The name of the file, or its real path if the name no longer leads to it (a changed working folder)."""
        name = str(self.file.filename)
        if not isinstance(self.stored, LocalFile) or inode_of(name) == (self.state() or ())[2:]:
            return name
        return real_path_of(self.stored.descriptor, name)

    def state(self) -> tuple[int, ...] | None:
        """The state of the open file, if it is a plain one, open for reading only; else None. Never raises."""
        try:
            return self._image_state if self.stored is None else self.stored.version
        except (OSError, RuntimeError, ValueError):  # it was closed
            return None

    @cached
    def places(self) -> dict[int, list[str]]:
        """The full names of each object, by its address. HDF5 would search the whole file for each single one."""
        places: dict[int, list[str]] = {}
        for name, address in _links_below(self.file["/"], None)[0]:
            places.setdefault(address, []).append(f"/{name}")
        return places

    def names_of(self, address: int, group: str, likely_name: str) -> list[str]:
        """The full names of the object at an address; that in a group alone, if it has the likely name there.

        `places` takes long if there are thousands of names, and a file is opened for each array whose labels are asked for.
        """
        name = f"{group}/{likely_name}"
        if "/" not in likely_name and self._leads_to(name, address):
            return [name]
        return self.places.get(address, [])

    def _leads_to(self, name: str, address: int) -> bool:
        """True if hard links alone lead from the root by a full name to the object at an address."""
        ends = [*(k for k, letter in enumerate(name) if k and letter == "/"), len(name)]
        try:
            links = [self.file.id.links.get_info(encoded(name[:end])) for end in ends]
        except HDF5_ERRORS:  # there is no such link
            return False
        return all(link.type == h5py.h5l.TYPE_HARD for link in links) and int(links[-1].u) == address

    @cached
    def is_netcdf(self) -> bool:
        """True if the file has the netCDF library's marks."""
        try:
            return any(h5py.h5a.exists(self.file.id, key) for key in (b"_NCProperties", b"_nc3_strict"))
        except RuntimeError:  # damaged attributes of the root group are not those of an array
            return False

    @cached
    def parts(self) -> OpenParts:
        """The files of which virtual datasets in this one consist."""
        return OpenParts() if self.shared_parts is None else self.shared_parts

    @cached
    def creation(self) -> Any:
        """The properties with which the file was made."""
        return self.file.id.get_create_plist()

    def close(self) -> None:
        """Close what this object has opened."""
        if self.shared_parts is None:
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
    server takes milliseconds for each that is opened. The first `_MOST_PARTS` stay open, until `close`.
    """

    def __init__(self) -> None:
        self._files: dict[str, tuple[tuple[int, ...], OpenFacts]] = {}  # with the versions in which they were opened
        self._lock = threading.RLock()  # a call in a signal handler asks, too

    @contextlib.contextmanager
    def open(self, path: str, version: tuple[int, ...], open_file: Callable[[], OpenFacts]) -> Iterator[OpenFacts]:
        """The file at a path, in this version. From `open_file` if it is not open yet.

        A file that is open in another version is closed, even if another thread reads it: its values are no longer those of
        the file, and while it is open, HDF5 has the old metadata for whoever opens it again.
        """
        inode = inode_of(path)
        with self._lock:  # not while HDF5 is asked, whose own lock another thread may have that waits for this one
            changed = []
            for open_path, (open_version, facts) in list(self._files.items()):
                is_same_file = facts.opened_in is not None and facts.opened_in[2:] == inode
                if (is_same_file and open_version != version) or (open_path == path and not is_same_file):
                    changed.append(self._files.pop(open_path)[1])
            _, part = self._files.get(path, (version, None))
        close_all(changed)
        if part is None:
            part = open_file()
            part.shared_parts = self
            with self._lock:
                if len(self._files) < _MOST_PARTS:
                    self._files.setdefault(path, (version, part))
        try:
            yield part
        finally:
            if self._files.get(path, (version, None))[1] is not part:
                part.close()

    def close(self) -> None:
        """Close all of them."""
        while self._files:
            self._files.popitem()[1][1].close()


def inode_of(path: str) -> tuple[int, ...]:
    """Which file a path leads to, as in `LocalFile.version`; empty if to none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_dev


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
        self.answers: dict[Any, Any] = {}  # to questions that were asked before: see `metadata.asked_once`

    @property
    def file(self) -> h5py.File:
        """The file that it is in."""
        return self.facts.file

    def close(self) -> None:
        """Close it. May be called again."""
        if self.id.valid:
            self.id.close()

    @cached
    def creation(self) -> Any:
        """Its creation properties."""
        return self.id.get_create_plist()

    @cached
    def kind(self) -> Any:
        """The type of its values in the file."""
        return self.id.get_type()

    @cached
    def stored_filters(self) -> list[tuple[int, int, Any, bytes]]:
        """The filters of its chunks, in the order in which they are applied: number, flags, parameters, name."""
        return filters_of(self.creation)

    @cached
    def raw(self) -> StoredObject | None:
        """The bytes of its file; None if only the HDF5 library may read its values."""
        is_elsewhere = self._address is None and file_number(self.id) != file_number(self.file.id)  # in a file that is mounted
        return None if is_elsewhere else self.facts.raw

    @cached
    def extent(self) -> tuple[int, int] | None:
        """Where its values are, if they are in one piece, and their bytes; None if none were ever written."""
        offset = self.id.get_offset()
        return None if offset is None else (int(offset), int(self.id.get_storage_size()))

    @cached
    def n_stored(self) -> int:
        """How many of its chunks are stored."""
        return int(self.id.get_num_chunks())

    @property
    def header(self) -> int | None:
        """Where its object header is; None if that is not known, or addresses do not have the usual length."""
        return self._address if self.facts.creation.get_sizes() == (8, 8) else None


def filters_of(creation: Any) -> list[tuple[int, int, Any, bytes]]:
    """The filters that a dataset's creation properties have: see `OpenDataset.stored_filters`."""
    return [creation.get_filter(k) for k in range(creation.get_nfilters())]


_numbers = itertools.count()


def file_in_memory(**options: Any) -> h5py.File:
    """A new file in memory. The options are those of `h5py.File`."""
    return h5py.File(f"shardload {next(_numbers)}", "w", driver="core", backing_store=False, **options)


def image_of(file: h5py.File) -> bytes:
    """The bytes of a file."""
    file.flush()
    return bytes(file.id.get_file_image())


def file_of(image: bytes) -> h5py.File:
    """A file of these bytes, which may be written to."""
    return h5py.File(h5py.h5f.open_file_image(image, flags=h5py.h5f.FILE_IMAGE_OPEN_RW))
