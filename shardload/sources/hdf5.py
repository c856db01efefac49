"""How do I obtain values from HDF5, and so from netCDF4? With the HDF5 library, straight into the caller's buffer.

1. `open_path` opens the file read-only and looks the name up, through soft and external links.
2. `describe` turns the dataset's metadata into an `ArrayInfo`, without touching values; what cannot be loaded, and why,
   is settled there, so that reading is the plain case.
3. `Hdf5Source.read_into` is one ``H5Dread`` per region: HDF5 decodes each chunk that meets the region once, converts
   byte order on the way, and writes into the caller's buffer. Values that lie in the file as they are (contiguous) are read
   past it, by `hdf5_contiguous`.
4. `Hdf5Source.chunk_reader` gives single chunks to callers with several threads, by `hdf5_chunks`, where that is surely right.

Values that HDF5 has not stored (chunks never written) are its fill value, as HDF5 defines it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator
from typing import Any

import h5py
import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.region import Region
from shardload.sources.base import (
    ArrayInfo,
    ChunkReader,
    Source,
    check_request,
    native_dtype,
    read_by_chunks,
    state_of,
)
from shardload.sources.fence import TARGET_HINT, Fence, OutsideError
from shardload.sources.hdf5_chunks import leaves_gaps, open_chunks
from shardload.sources.hdf5_contiguous import Hdf5Contiguous, open_contiguous
from shardload.sources.hdf5_describe import describe, filters_of
from shardload.sources.hdf5_heads import check_heads
from shardload.sources.hdf5_links import Others, follow, look_through
from shardload.sources.hdf5_missing import Sizes, Unwritten, Whole
from shardload.sources.hdf5_raw import RawFile, plain_descriptor

__all__ = ["FORMAT", "Hdf5Format", "Hdf5Source", "describe"]

_SIGNATURE = b"\x89HDF\r\n\x1a\n"

_UNBOUNDED = {32001, 32015}  # HDF5's filters for these make as much of a chunk as it declares, a million times its bytes
_COMPLEX = {"complex64": "NATIVE_FLOAT_COMPLEX", "complex128": "NATIVE_DOUBLE_COMPLEX"}


class Hdf5Source:
    """One open HDF5 dataset.

    Parameters
    ----------
    dataset : h5py.Dataset
        Open; one that `info.refused` does not refuse.
    info : ArrayInfo
        What `describe` says of it.
    others : Others
        The other files that its values are in.
    file : h5py.File, optional
        The file to close with this source; None where the dataset is the caller's.
    """

    def __init__(self, dataset: h5py.Dataset, info: ArrayInfo, others: Others, file: h5py.File | None = None) -> None:
        self._dataset, self._info, self._others, self._file = dataset, info, others, file
        self._whole = Whole.of(dataset)
        self._absent: list[tuple[int, ...]] | None = None  # what `read_into` did not find, where it looked chunk by chunk
        self._dtype = np.dtype("V1") if info.refused else native_dtype(dataset.dtype)
        # h5py makes the type in memory from NumPy's. That is a pair (r, i) for complex numbers, which HDF5 does not
        # convert to from the complex type of HDF5 2.0 in the other byte order.
        is_native_complex = dataset.id.get_type().get_class() == getattr(h5py.h5t, "COMPLEX", None)
        name = _COMPLEX.get(self._dtype.name) if is_native_complex else None
        self._memory_type = getattr(h5py.h5t, name) if name else None
        self._leaves_gaps = leaves_gaps(dataset)

    @property
    def info(self) -> ArrayInfo:
        """Shape, dtype, chunks and the rest."""
        return self._info

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values, in native byte order."""
        return self._dtype

    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> None:
        """Read `region` into `out`: straight from the file, or with one ``H5Dread``."""
        check_request(self._info, self._dtype, region, out)
        if region.size == 0:
            return
        identifier = self._dataset.id
        if identifier.valid and self._contiguous is not None:
            self._contiguous.read_into(region, out)
            return
        self._absent = None
        if identifier.valid and self._bounded is not None:
            self._absent = read_by_chunks(self._bounded, self._info.chunks or (), region, out)
            return
        if identifier.valid:
            self._sizes.check()
        if self._leaves_gaps:
            out.fill(0)  # what h5py gives; `out` may hold another block's values
        try:
            if identifier.valid:
                check_heads(self._dataset, region)
            if region.ndim == 0:
                identifier.read(h5py.h5s.ALL, h5py.h5s.ALL, out, self._memory_type)
            else:
                space = identifier.get_space()
                space.select_hyperslab(region.start, region.shape)
                identifier.read(h5py.h5s.create_simple(region.shape), space, out, self._memory_type)
        finally:  # where the file was cut, that is the better reason
            if identifier.valid:
                self._whole.check()
                self._others.check_whole()

    def missing(self, region: Region) -> list[tuple[int, ...]]:
        """The chunks that meet `region` and were never written; ``[()]`` where there are no chunks, nor any values."""
        if region.size == 0 or not self._dataset.id.valid:
            return []
        return self._unwritten.meeting(region) if self._absent is None else self._absent

    @functools.cached_property
    def _bounded(self) -> ChunkReader | None:
        """Single chunks, where HDF5's filters take as much memory as the file says."""
        numbers = {number for number, *_ in filters_of(self._dataset)}
        return self.chunk_reader() if numbers & _UNBOUNDED and not self._info.refused else None

    @functools.cached_property
    def _sizes(self) -> Sizes:
        return Sizes(self._dataset)

    @functools.cached_property
    def _unwritten(self) -> Unwritten:
        return Unwritten(self._dataset)

    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """What h5py gives for these slices."""
        self._sizes.check()
        check_heads(self._dataset, region)
        return np.asarray(self._dataset[region.slices()])

    def view(self, region: Region) -> np.ndarray[Any, Any] | None:
        """None: the values are in a file."""
        return None

    def chunk_reader(self) -> ChunkReader | None:
        """Single chunks, decoded past HDF5; None where only HDF5 can."""
        if self._info.refused is not None or self._info.chunks is None or self._raw is None:
            return None
        return open_chunks(self._dataset, self._dtype, self._raw, self._whole)

    @functools.cached_property
    def _raw(self) -> RawFile | None:
        """The bytes of the file, where they may be read past HDF5."""
        return RawFile.open(self._dataset)

    @functools.cached_property
    def _contiguous(self) -> Hdf5Contiguous | None:
        """The dataset, where its values can be read past HDF5."""
        if self._info.chunks is not None or self._raw is None:
            return None
        return open_contiguous(self._dataset, self._dtype, self._raw)

    def state(self) -> tuple[int, ...] | None:
        """Of the open file that holds the dataset, where it is open for reading only and a plain file."""
        try:
            descriptor = plain_descriptor(self._dataset.file)
            return None if descriptor is None else state_of(descriptor)
        except (RuntimeError, ValueError):  # it was closed
            return None

    def close(self) -> None:
        """Close the dataset and the file, where this object opened them."""
        raw = self.__dict__.get("_raw")
        if raw is not None:
            raw.close()
        if self._file is not None and self._file.id.valid:
            # A dataset reached through an external link lives in another file, which closes with its last object.
            self._dataset.id.close()
            self._file.close()


class Hdf5Format:
    """HDF5 files, of any layout and with any filter that the HDF5 library at hand can decode."""

    name = "HDF5"

    def claims_path(self, path: str) -> bool:
        """Whether the HDF5 signature is at byte 0, 512, 1024, 2048, ... as the HDF5 file format asks."""
        try:
            size, at = os.path.getsize(path), 0
            with open(path, "rb") as file:
                while at < size:
                    file.seek(at)
                    if file.read(len(_SIGNATURE)) == _SIGNATURE:
                        return True
                    at = 2 * at or 512
        except (OSError, ValueError):
            return False
        return False

    def claims_object(self, obj: object) -> bool:
        """Whether `obj` is an `h5py.Dataset`, group or file."""
        return isinstance(obj, h5py.Dataset | h5py.Group)

    def list_arrays(self, path: str, outside: bool = False, texts: bool = True, allow: Collection[str] = ()) -> list[ArrayInfo]:
        """Every dataset in the file; links to elsewhere are not followed."""
        with _open_file(path) as file:
            return list(_describe_all(file, path, Fence.around_file(path, outside), texts, allow))

    def open_path(self, path: str, dataset: str, outside: bool = False, allow: Collection[str] = ()) -> Source:
        """Open a dataset by its name, or by the name of a link to it; KeyError if there is none."""
        file, fence = _open_file(path), Fence.around_file(path, outside)
        try:
            found = _look_up(file, path, dataset, fence)
            others = look_through(found, fence, allow)
            return Hdf5Source(found, describe(found, path, dataset, others, allow=allow), others, file)
        except BaseException:
            file.close()
            raise

    def open_object(self, obj: Any, outside: bool = False, allow: Collection[str] = ()) -> Source:
        """Take an open `h5py.Dataset`."""
        if not obj:
            raise SourceError(
                f"the {type(obj).__module__.partition('.')[0]}.{type(obj).__name__} handed in is closed, so nothing "
                "can be read from it. Keep its file open during the load, or pass the path of the file."
            )
        path = str(obj.file.filename)
        fence = Fence.around_file(path, outside)
        if isinstance(obj, h5py.Group):
            names = ", ".join(repr(info.dataset) for info in _describe_all(obj, path, fence)) or "none"
            raise ConfigError(
                f"'{obj.name}' in '{path}' is a group, not an array. Pass group['name'] with a name of an array in it: {names}."
            )
        others = look_through(obj, fence, allow)
        return Hdf5Source(obj, describe(obj, path, str(obj.name or "<unnamed>"), others, allow=allow), others)


FORMAT = Hdf5Format()


def _open_file(path: str) -> h5py.File:
    """Open read-only; SourceError, with what to do about it, if the library will not."""
    try:
        return h5py.File(path, "r")
    except OSError as error:
        said = str(error)
    if "unable to lock file" in said:
        why = (
            "another program has it open for writing, or its file system has no locks. If nobody writes to it, set "
            "HDF5_USE_FILE_LOCKING=FALSE in the environment of all ranks."
        )
    elif "truncated file" in said:
        why = "it is shorter than its own header says: a copy or a writer was interrupted. Copy or write it again."
    elif "already open" in said:
        why = "it is open for writing, or its writer died. Close the writer; if it died, run `h5clear -s` on the file."
    else:
        why = "its metadata is damaged or of a newer version of HDF5. Try `h5dump -H` on it."
    raise SourceError(f"'{path}' is an HDF5 file that cannot be opened: {why} HDF5 says: {said}", path=path)


def _look_up(file: h5py.File, path: str, name: str, fence: Fence) -> h5py.Dataset:
    """The dataset of that name; KeyError if there is none, SourceError if a link leads nowhere, or outside."""
    try:
        follow(file, name, fence)
        found = file[name]
        if not fence.holds(str(found.file.filename)):
            raise OutsideError(f"'{name}' is in '{found.file.filename}', outside the folder of this file; {TARGET_HINT}")
    except OutsideError as error:
        raise SourceError(f"'{name}' in '{path}' cannot be loaded: {error}.", path=path, dataset=name) from None
    except (KeyError, OSError, RuntimeError) as error:
        try:
            link = file.get(name, getlink=True)
        except (KeyError, OSError, RuntimeError):
            link = None
        if link is None:
            raise KeyError(name) from error
        if isinstance(link, h5py.SoftLink):
            target = f"'{link.path}'"
        elif isinstance(link, h5py.ExternalLink):
            target = f"'{link.path}' in '{link.filename}'"
        else:
            raise OSError(str(error)) from error  # a KeyError would say that there is no such name
        raise SourceError(
            f"'{name}' in '{path}' is a link to {target}, which cannot be opened. Restore the target, or name another "
            f"array. HDF5 says: {error}",
            path=path,
            dataset=name,
        ) from error
    if not isinstance(found, h5py.Dataset):
        raise KeyError(name)
    return found


def _describe_all(
    group: h5py.Group, path: str, fence: Fence, texts: bool = False, allow: Collection[str] = ()
) -> Iterator[ArrayInfo]:
    """What is known of every dataset below `group`; one that cannot be opened is listed as such."""
    names: list[str] = []
    group.visit(names.append)
    base = (group.name or "").rstrip("/")
    for name in names:
        full = f"{base}/{name}"
        try:
            found = group[name]
            if isinstance(found, h5py.Dataset):
                yield describe(found, path, full, look_through(found, fence, allow), texts, allow)
        except (AssertionError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:  # h5py asserts, too
            yield ArrayInfo(path, full, "HDF5", (), "unknown", refused=f"metadata that HDF5 cannot read ({error})")
