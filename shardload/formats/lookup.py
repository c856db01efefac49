"""How do I obtain these values? Finds the format of a file or an open object, and the one array that was meant.

1. Every module of this package with a `FORMAT` is a format; a new one is a new file here and nothing else. Formats are
   imported one after the other, until one claims the path or object, so a rank that reads HDF5 never imports zarr.
2. `find_array` answers which array was meant, from metadata alone: run it on one rank and tell the others.
3. `open_source` opens that array on every rank that reads.
4. Files that nobody vouches for are opened by other processes, which answer the same questions: see `untrusted`.

What the caller can mend by writing something else is a `ConfigError`; what is wrong with the file is a `SourceError`,
whatever the library below raised.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import math
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from shardload.errors import ConfigError, ShardloadError, SourceError, printable
from shardload.formats.base import ArrayInfo, Format, Source, refusal, some
from shardload.formats.containment import NotAFileError, OutsideError, kind_of, open_file
from shardload.formats.untrusted import HelperError, Limits, UntrustedSource, find, list_all
from shardload.planning.region import Region
from shardload.planning.tuning import Tuning, default_tuning
from shardload.system.interruption import let_interruption_pass

__all__ = [
    "ArrayInfo",
    "Format",
    "Source",
    "find_array",
    "find_small",
    "list_arrays",
    "open_source",
    "read_small",
    "refusal",
    "split_path",
]

_MOST_LISTED = 1000  # arrays that are looked at to say which one could be meant

# Other kinds of files that scientists have: where the mark is, the mark, what the file is, and what to do.
_OTHERS = (
    (0, b"CDF", "a netCDF-3 classic file", "Convert it: `nccopy -k nc4 in.nc out.nc`."),
    (0, b"\x93NUMPY", "a NumPy .npy file", "Pass the array itself: `numpy.load(path, mmap_mode='r')`."),
    (0, b"SIMPLE  =", "a FITS file", "Write its array to HDF5 or Zarr first, with astropy and h5py for instance."),
    (0, b"GRIB", "a GRIB file", "Convert it: `cdo -f nc4 copy in.grib out.nc`, or `grib_to_netcdf -k 3`."),
    (0, b"\x0e\x03\x13\x01", "an HDF4 file", "Convert it: `h4toh5 in.hdf out.h5`."),
    (0, b"MATLAB 5.0", "a MATLAB file before version 7.3", "Save it anew: `save('out.mat', '-v7.3')`, which is HDF5."),
    (0, b"PAR1", "a Parquet file", "Write its columns to HDF5 or Zarr first."),
    (0, b"II*\x00", "a TIFF file", "Write its image to HDF5 or Zarr first."),
    (0, b"MM\x00*", "a TIFF file", "Write its image to HDF5 or Zarr first."),
    (0, b"\x1f\x8b", "a gzip file", "Unpack it: `gunzip`, or `tar -xzf` for an archive."),
    (257, b"ustar", "a tar archive", "Unpack it: `tar -xf`."),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the data", "Fetch the data: `git lfs pull`."),
    (0, b"PK", "a zip file without a Zarr store at its root", "Unpack it, or zip it from inside the store."),
)


def split_path(path: str) -> tuple[str, str | None]:
    """Cut ``"file.h5:/group/rho"`` into the path and the name of the array in it.

    ``~`` at the beginning is the user's home. A path that exists as it stands is kept whole. ``:`` separates where what
    precedes it exists; ``:/`` separates always (except in ``"s3://"``), so that the message about a missing file names the
    file.

    Examples
    --------
    >>> split_path("no-such-file.h5:/group/rho")
    ('no-such-file.h5', '/group/rho')
    >>> split_path("s3://bucket/store.zarr")
    ('s3://bucket/store.zarr', None)
    """
    path = _without_scheme(path)
    head, scheme, rest = path.rpartition("://")
    if scheme:
        left, found, name = rest.rpartition(":/")
        return (f"{head}://{left}", "/" + name) if found and left else (path, None)
    path = os.path.expanduser(path)
    if os.path.exists(path):
        return path, None
    colons = [k for k, letter in enumerate(path) if letter == ":" and k > 0]
    for k in reversed(colons):
        if os.path.exists(path[:k]):
            return path[:k], path[k + 1 :] or None
    for k in colons:
        if path[k + 1 : k + 2] == "/":
            return path[:k], path[k + 1 :]
    return path, None


def list_arrays(
    path: str,
    allow_external: bool = False,
    texts: bool = True,
    most: int | None = None,
    like: str = "",
    allow: Collection[str] = (),
    untrusted: Limits | None = None,
) -> list[ArrayInfo]:
    """Every array in the file or store at `path`, loadable or not, from metadata alone.

    Collective: no. A link to another place is not followed, but its name can be given to `find_array`.
    `allow_external`, `allow`: as there.
    Without `texts`, attributes that are texts may be left out: reading those of a damaged file is not safe in every format.
    With `most`, one more than that tells that there are more; those with a name like `like` are among them, if that is quick.
    `untrusted`: the limits of the process that looks, where this one should not.

    Raises
    ------
    SourceError
        If there is no such file, it is of no format known here, or it is damaged.
    """
    path = _without_scheme(path)
    if untrusted is not None:
        with _as_source_error(path):
            return list_all(path, allow_external, texts, untrusted)
    file_format = _format_of(path)
    with _as_source_error(path):
        return file_format.list_arrays(path, allow_external, texts, most, like, allow)


def find_array(
    path_or_object: Any,
    dataset: str | None = None,
    allow_external: bool = False,
    allow: Collection[str] = (),
    untrusted: Limits | None = None,
) -> ArrayInfo:
    """The one array that is meant, from metadata alone.

    Collective: no. One rank runs it, and the others are told.

    Parameters
    ----------
    path_or_object : str, os.PathLike, or an open array
        A path (``"file.h5"``, ``"file.h5:/group/rho"``), or an open `h5py.Dataset`, `zarr.Array` or NumPy array.
    dataset : str, optional
        Name of the array, with or without the leading ``/``. Without it the file must hold exactly one array that can
        be loaded and is not a coordinate of another.
    allow_external : bool
        Whether values may be outside of the file's folder (or the store), where external links, virtual datasets, external
        storage or symbolic links lead.
    allow : collection of str
        Names and numbers of filters (codecs) that are used though damaged data may crash them; ``"all"`` for every one.
    untrusted : Limits, optional
        Look in another process, with these limits.

    Returns
    -------
    ArrayInfo
        With `refused` None.

    Raises
    ------
    ConfigError
        If no array has this name, if the name is a group's, or if several could be meant; the names there are listed. If an
        open array is to be `untrusted`.
    SourceError
        If the file cannot be opened, or the array, or its type, cannot be loaded.
    """
    path = _as_path(path_or_object)
    if untrusted is not None:
        path = _untrusted_path(path_or_object)
        file, name = (path, dataset) if dataset is not None else split_path(path)
        with _as_source_error(file, name):
            return find(path, file, dataset, allow_external, untrusted)[0]
    if path is None:
        return _loadable(_info_of_object(path_or_object, dataset, allow_external, allow))
    if dataset is None:
        path, dataset = split_path(path)
    file_format = _format_of(path)
    if dataset is None:
        infos = list_arrays(path, allow_external, texts=False, most=_MOST_LISTED, allow=allow)
        if len(infos) > _MOST_LISTED and len(_fields(infos)) < 2:
            infos = list_arrays(path, allow_external, texts=False, allow=allow)
            return _only_array(path, infos, False)
        return _only_array(path, infos[:_MOST_LISTED], len(infos) > _MOST_LISTED)
    name = _full_name(dataset)
    try:
        with _as_source_error(path, name):
            source = file_format.open_path(path, name, allow_external, allow)
    except KeyError:
        infos = list_arrays(path, allow_external, texts=False, most=_MOST_LISTED, like=name, allow=allow)
        raise _no_such_array(path, name, infos[:_MOST_LISTED], len(infos) > _MOST_LISTED) from None
    source.close()
    return _loadable(source.info)


def open_source(
    path_or_object: Any,
    dataset: str,
    allow_external: bool = False,
    allow: Collection[str] = (),
    untrusted: Limits | None = None,
) -> Source:
    """Open for reading the array that `find_array` found.

    Collective: no. Each rank that reads opens its own, and closes it.

    Parameters
    ----------
    path_or_object : str, os.PathLike, or an open array
        As given to `find_array`.
    dataset : str
        The name that `find_array` returned; not looked at for an open array.
    allow_external, allow, untrusted
        As given to `find_array`.

    Raises
    ------
    SourceError
        If it cannot be opened here: gone, not visible from this machine, damaged, or of an encoding unknown here.
    """
    path = _as_path(path_or_object)
    if untrusted is not None:
        path, name = split_path(_untrusted_path(path_or_object))[0], _full_name(dataset)
        with _as_source_error(path, name):
            return UntrustedSource(path, name, allow_external, untrusted)
    if path is None:
        source = _format_of_object(path_or_object).open_object(path_or_object, allow_external, allow)
    else:
        path = split_path(path)[0]
        file_format = _format_of(path)
        name = _full_name(dataset)
        try:
            with _as_source_error(path, name):
                source = file_format.open_path(path, name, allow_external, allow)
        except KeyError:
            raise SourceError(
                f"'{path}' as seen from here holds no array '{name}', which was found in it before. It changed, or "
                "this machine sees another file under this path. Load from a file system that all ranks share.",
                path=path,
                dataset=name,
            ) from None
    try:
        _loadable(source.info)
    except SourceError:
        source.close()
        raise
    return source


def find_small(
    path_or_object: Any, dataset: str | None, allow_external: bool, untrusted: Limits
) -> tuple[ArrayInfo, bytes | None]:
    """What `find_array` and then `read_small` give, from one other process."""
    path = _untrusted_path(path_or_object)
    file, name = (path, dataset) if dataset is not None else split_path(path)
    with _as_source_error(file, name):
        return find(path, file, dataset, allow_external, untrusted, values=True)


def read_small(
    path_or_object: Any,
    info: ArrayInfo,
    allow_external: bool = False,
    allow: Collection[str] = (),
    tuning: Tuning | None = None,
) -> bytes | None:
    """All values of an array that `find_array` found, if it is small: C order, native byte order.

    Collective: no. One rank runs it, so that the others need not open the file.

    Returns
    -------
    bytes or None
        None where the array is large, empty or open already, or its chunks are large, which are decoded whole; or it cannot be
        read, or not all of it is stored, or it changes meanwhile: whoever reads it then says so.
    """
    tuning = tuning or default_tuning()
    if _as_path(path_or_object) is None or not 0 < _nbytes(info) <= tuning.small_nbytes:
        return None
    if _nbytes(info, info.shards or info.chunks or ()) > tuning.small_chunk_nbytes:
        return None
    try:
        source = open_source(path_or_object, info.dataset, allow_external, allow)
        try:
            before = source.state()
            values = np.empty(info.shape, dtype=source.dtype)
            source.read_into(Region.whole(info.shape), values)
            if (
                source.missing(Region.whole(info.shape)) or source.state() != before or source.info.to_json() != info.to_json()
            ):  # as text: a NaN is not itself
                return None
        finally:
            source.close()
    except Exception as error:
        let_interruption_pass(error)
        return None
    return values.tobytes()


def _formats() -> Iterator[Format]:
    """The formats, imported one by one as they are asked for; one whose library is not installed is left out."""
    for name in _MODULES:
        try:
            found = getattr(importlib.import_module(f"shardload.formats.{name}"), "FORMAT", None)
        except ModuleNotFoundError as error:
            if (error.name or "shardload").partition(".")[0] == "shardload":
                raise
            continue
        if found is not None:
            yield found


_MODULES = ("hdf5.source", "memory", "zarr.source")


def _possible() -> str:
    """The formats that files can have, for messages."""
    return ", ".join(f.name for f in _formats() if f.name != "memory")


def _as_path(path_or_object: Any) -> str | None:
    """The path, if it is one, with ``~`` read as shells read it outside of quotes; None for an open array."""
    if isinstance(path_or_object, str | os.PathLike):
        return os.path.expanduser(_without_scheme(os.fsdecode(path_or_object)))
    return None


def _without_scheme(path: str) -> str:
    """A URL of a file or folder of this machine as its path; all else as it is.

    >>> _without_scheme("file:///data/store.zarr"), _without_scheme("s3://bucket/store.zarr")
    ('/data/store.zarr', 's3://bucket/store.zarr')
    """
    scheme, found, rest = path.partition("://")
    return rest if found and scheme.lower() in ("file", "local") else path


def _untrusted_path(path_or_object: Any) -> str:
    """The path; ConfigError for an open array, which this process has opened already."""
    path = _as_path(path_or_object)
    if path is None:
        raise ConfigError(
            f"untrusted=True opens the file in another process, but this one has the {type(path_or_object).__name__} that was "
            "handed in. Pass the path of the file, or leave out untrusted=True"
        )
    return path


def _full_name(dataset: str) -> str:
    """``"rho"``, ``"/rho"`` and ``"/rho/"`` are the same array."""
    return "/" + dataset.strip("/")


@contextlib.contextmanager
def _as_source_error(path: str, dataset: str | None = None) -> Iterator[None]:
    """Turn whatever a format's library raises on a damaged file into a SourceError; KeyError (no such name) passes."""
    try:
        yield
    except (ShardloadError, KeyError, MemoryError) as error:
        let_interruption_pass(error)
        # "No such name" names the dataset; a library's own KeyError, from metadata that lacks something, does not.
        if not isinstance(error, KeyError) or (dataset is not None and error.args == (dataset,)):
            raise
        raise _damaged(path, dataset, error) from error
    except Exception as error:
        let_interruption_pass(error)
        raise _damaged(path, dataset, error) from error


def _damaged(path: str, dataset: str | None, error: Exception) -> SourceError:
    """The message about a file that its library cannot open."""
    what = f"'{path}'" if dataset is None else f"'{dataset}' in '{path}'"
    if isinstance(error, ModuleNotFoundError):
        text = f"{what} cannot be opened without '{error.name}', which is not installed: `pip install {error.name}`."
        return SourceError(text, path=path, dataset=dataset)
    if isinstance(error, HelperError):
        return SourceError(f"{what} could not be opened in a helper process: {error}.", path=path, dataset=dataset)
    if isinstance(error, NotAFileError | OutsideError):
        return SourceError(f"{what} cannot be opened: {error}.", path=path, dataset=dataset)
    return SourceError(
        f"{what} cannot be opened: its metadata is damaged, or asks for something unknown here. The library below "
        f"says: {type(error).__name__}: {error}",
        path=path,
        dataset=dataset,
    )


def _format_of(path: str) -> Format:
    """The format that claims the file; SourceError, with what the file is instead, if none does."""
    if "://" not in path:
        _check_access(path)
    for file_format in _formats():
        if file_format.claims_path(path):
            return file_format
    raise SourceError(f"{_what_it_is(path)} Formats that can be loaded here: {_possible()}.", path=path)


def _check_access(path: str) -> None:
    """SourceError unless `path` is there and readable by this user."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            os.scandir(path).close()  # opened, not listed: it may hold a million chunks
        elif not stat.S_ISREG(mode):
            raise SourceError(f"'{path}' is {kind_of(mode)}, expected a file or folder. Pass another path.", path=path)
        else:
            os.close(open_file(path))
        return
    except SourceError:
        raise
    except PermissionError as error:
        text = f"'{path}' may not be read by this user ({error.strerror}: '{error.filename}'). Ask for access."
    except (FileNotFoundError, NotADirectoryError):
        text = _what_is_there_instead(path)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            raise  # of this process, not of the file
        text = f"'{path}' cannot be read: {error}."
    raise SourceError(text, path=path)


def _what_is_there_instead(path: str) -> str:
    """The message about a file that does not exist, with names like it from the same folder."""
    if os.path.islink(path):
        return f"'{path}' is a symbolic link to '{os.readlink(path)}', which does not exist. Pass another path."
    folder, name = os.path.split(os.path.normpath(path))
    if folder and not os.path.isdir(folder):
        return f"there is no file '{path}', nor a folder '{folder}'. Pass a path that this machine sees."
    near = difflib.get_close_matches(name, os.listdir(folder or "."), n=3)
    if not near:
        return f"there is no file '{path}'. The working folder is '{os.getcwd()}'."
    return f"there is no file '{path}'. Near it: {', '.join(repr(os.path.join(folder, n)) for n in near)}."


def _what_it_is(path: str) -> str:
    """The message about a file that no format claims."""
    if os.path.isdir(path):
        inside = [n for n in sorted(os.listdir(path)) if n.endswith((".h5", ".hdf5", ".nc", ".nc4", ".zarr", ".zip"))]
        hint = f" In it: {some([repr(os.path.join(path, n)) for n in inside])}." if inside else ""
        return f"'{path}' is a folder, but not a Zarr store: it has no zarr.json, .zarray or .zgroup.{hint}"
    with os.fdopen(open_file(path), "rb") as file:
        head = file.read(512)
    if not head:
        return f"'{path}' is empty (0 bytes): its writer was interrupted, or wrote elsewhere."
    for offset, mark, what, fix in _OTHERS:
        if head[offset:].startswith(mark):
            return f"'{path}' is {what}, which cannot be loaded. {fix}"
    return f"'{path}' is of an unknown format: it starts with {head[:8]!r}."


def _format_of_object(obj: Any) -> Format:
    """The format whose library `obj` comes from."""
    for file_format in _formats():
        if file_format.claims_object(obj):
            return file_format
    raise ConfigError(
        f"nothing can be loaded from an object of type {type(obj).__module__}.{type(obj).__qualname__}. Pass a "
        "path, or an open h5py.Dataset, zarr.Array or numpy.ndarray."
    )


def _info_of_object(obj: Any, dataset: str | None, allow_external: bool, allow: Collection[str]) -> ArrayInfo:
    """The metadata of an open array; a name beside it must be its own."""
    info = _format_of_object(obj).open_object(obj, allow_external, allow).info
    if dataset is not None and _full_name(dataset) != info.dataset:
        raise ConfigError(
            f"the array handed in is {info}, but dataset='{dataset}' names another. Leave it out, or pass the path."
        )
    return info


def _loadable(info: ArrayInfo) -> ArrayInfo:
    """The same, or SourceError if it is refused."""
    if info.refused is not None:
        raise SourceError(
            f"{info} cannot be loaded: it holds {info.refused}.",
            path=info.path,
            dataset=info.dataset,
        )
    return info


def _fields(infos: Sequence[ArrayInfo]) -> list[ArrayInfo]:
    """Those that can be meant where none is named."""
    return [info for info in infos if info.refused is None and not info.is_coordinate]


def _only_array(path: str, infos: Sequence[ArrayInfo], has_more: bool) -> ArrayInfo:
    """The array that can be meant when no name is given."""
    fields = _fields(infos)
    if len(fields) == 1:
        return fields[0]
    if fields:
        fields.sort(key=_nbytes, reverse=True)
        n, which = f"{len(fields)}", "largest first"
        if has_more:
            n, which = f"more than {n}", f"of the first {len(infos)}, largest first"
        raise ConfigError(
            f"'{path}' holds {n} arrays; pass dataset='...' ({which}): "
            f"{some([_told(info) for info in fields], 'many' * has_more)}."
        )
    others = [f"{_told(i)}: {i.refused}" if i.refused else f"{_told(i)}: a coordinate" for i in infos]
    there = f"It holds {some(others)}. A coordinate can be loaded by its name." if others else "It holds none at all."
    raise SourceError(f"'{path}' holds no array that can be loaded without being named. {there}", path=path)


def _no_such_array(path: str, name: str, infos: Sequence[ArrayInfo], has_more: bool) -> ConfigError:
    """The message about a name that is no array's: a group's, or nobody's. With `has_more`, of some of those that are there."""
    more = "many" * has_more
    below = [info for info in infos if info.dataset.startswith(name.rstrip("/") + "/") and info.dataset != name]
    if below:
        what = f"'{name}' in '{path}' is a group, not an array. Pass dataset= one of those in it"
        return ConfigError(f"{what}: {some([_told(i) for i in below], more)}.")
    if not infos:
        return ConfigError(f"'{path}' holds no array '{name}', nor any other.")

    def likeness(info: ArrayInfo) -> float:
        pairs = (info.dataset, name), (info.dataset.rpartition("/")[2], name.rpartition("/")[2])
        return max(difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio() for a, b in pairs)

    near = some([_told(info) for info in sorted(infos, key=likeness, reverse=True)], more)
    return ConfigError(f"'{path}' holds no array '{name}'. Pass dataset= one of these (nearest first): {near}.")


def _nbytes(info: ArrayInfo, shape: tuple[int, ...] | None = None) -> int:
    """Bytes of the whole array, or of so many of its values."""
    n = math.prod(info.shape if shape is None else shape)
    try:
        return n * np.dtype(info.dtype).itemsize
    except TypeError:  # a name of ml_dtypes that nobody registered with NumPy
        return n


def _told(info: ArrayInfo) -> str:
    return f"'{printable(info.dataset)}' {info.shape} {info.dtype}"
