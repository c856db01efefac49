"""Which files are HDF5 or netCDF4, and how are they opened? On disk, or as an object of a store."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import h5py

from shardload.errors import ConfigError, SourceError
from shardload.formats.access import STRICT, Access
from shardload.formats.concatenation import SCHEME, Concatenation
from shardload.formats.contract.array import MOST_NAMED, ArrayInfo, some
from shardload.formats.contract.format import Format, OpenFile, Source
from shardload.formats.hdf5.file import ConcatenatedFile, Hdf5File
from shardload.formats.hdf5.in_store import StoreFile
from shardload.formats.hdf5.links import place_of
from shardload.formats.hdf5.opened import OpenFacts
from shardload.formats.hdf5.raw_file import has_signature, signature_at
from shardload.storage.containment import Fence, NotAFileError, open_file
from shardload.storage.remote import is_remote, without_secrets

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
            return ConcatenatedFile(path, access)
        if path.startswith(SCHEME):
            raise SourceError(
                f"'{path}' is the text of a concatenation, which does not lead to its files. Pass what shardload.concat "
                "returned, and the name of an array as dataset=",
                path=path,
            )
        return StoreFile(path, access) if "://" in path else Hdf5File.at(path, access)

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
