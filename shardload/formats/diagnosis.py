"""Which error says that no format claims a file, that no single array is meant, or that an array cannot be loaded?

Each error says what was found instead and what to type: similar names, the largest arrays, or how to convert a file of another
kind. This module opens files to see their first bytes, never to read values.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from shardload.errors import ConfigError, ShardloadError, SourceError, is_unread, printable
from shardload.formats.concatenation import Concatenation
from shardload.formats.contract.array import NOTHING, ArrayInfo, nbytes_of, refusal, some
from shardload.formats.contract.format import ChangedError, HelperError
from shardload.storage.leftovers import ROOTS, refuse_leftover, whole_beside
from shardload.storage.local import NotAFileError, OutsideError, open_file
from shardload.storage.objects import NoListingError
from shardload.storage.remote import RemoteError
from shardload.units import counted

# Other kinds of files that scientists have: the mark's offset, the mark, what the file is, and what to do.
_OTHER_KINDS = (
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
    (0, b"PK", "a zip file", "Unpack it: `unzip IN.zip -d OUT.zarr`, or pass an array in it that zarr-python has opened."),
)


# What Python and the formats' libraries raise about content. A server's refusal is of another type, that of its client.
_OF_CONTENT = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_WITH_FULL_TEXT = (ChangedError, HelperError, ImportError, NoListingError, NotAFileError, OutsideError)


@contextlib.contextmanager
def as_source_error(path: str, dataset: str | None = None) -> Iterator[None]:
    """Turn any error of a format's library into a SourceError; ``KeyError(dataset)`` (no such name) passes."""
    try:
        yield
    except Exception as error:
        # KeyError for "no such name" has the dataset as argument; a library's KeyError about incomplete metadata has not.
        is_no_such_name = isinstance(error, KeyError) and dataset is not None and error.args == (dataset,)
        if is_no_such_name or isinstance(error, ShardloadError | MemoryError):
            raise
        raise _damaged(path, dataset, error) from error


def _damaged(path: str, dataset: str | None, error: Exception) -> SourceError:
    """The error about a file that its library cannot open."""
    place = f"'{path}'" if dataset is None else f"'{dataset}' in '{path}'"
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, RemoteError):  # which names the object
        text = f"{error}"
    elif isinstance(error, _WITH_FULL_TEXT):
        text = f"{place} cannot be opened: {error}."
    elif isinstance(error, PermissionError) and "://" not in path:
        text = f"{place} may not be read by this user ({error}). Ask for access."
    elif isinstance(error, FileNotFoundError) and "://" not in path and not os.path.exists(path):
        text = _what_is_there_instead(path)
    elif is_unread(error):
        cause = "Its device or file server failed, or it is gone there"
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            cause = "Not the file, but this process or machine has reached a limit: `ulimit -a` and `free -h` show them"
        text = f"{place} cannot be read: {message}. {cause}"
    elif "://" in path and (isinstance(error, OSError) or not isinstance(error, _OF_CONTENT)):
        text = f"{place} cannot be read: {message}. Check the address, your access to it and the network."
    else:
        text = (
            f"{place} cannot be opened: its metadata is damaged, or asks for something unknown here. "
            f"The library says: {message}"
        )
    return SourceError(text, path=path, dataset=dataset)


def check_readable(path: str) -> None:
    """Raise SourceError unless `path` exists and this user may read it."""
    try:
        if os.path.isdir(path):
            os.scandir(path).close()  # opened but not listed: it may hold a million chunks
        else:
            os.close(open_file(path))
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(_what_is_there_instead(path), path=path) from None
    except ValueError as error:  # a byte that is zero
        raise SourceError(f"'{path}' cannot be read: {error}.", path=path) from None
    except OSError as error:
        raise _damaged(path, None, error) from None


def _what_is_there_instead(path: str) -> str:
    """The message about a file that does not exist: what else is at that path, or similar names in its folder."""
    try:
        parent = os.path.dirname(os.path.abspath(path))
    except FileNotFoundError:
        return f"there is no file '{path}': the working folder is gone (removed, or made anew). Type: cd \"$PWD\""
    if os.path.islink(path):
        return f"'{path}' is a symbolic link to '{os.readlink(path)}', which does not exist. Pass another path."
    folder, name = os.path.split(os.path.normpath(path))
    file = next((above for above in _above(path) if os.path.isfile(above)), None)
    if file is not None:  # FILE/NAME was typed for FILE:/NAME
        array = f"{file}:{os.path.normpath(path)[len(file) :]}"
        return f"there is no file '{path}': '{file}' is a file, not a folder. Pass '{array}' if you mean an array in it."
    if n_files := len(glob.glob(path)):
        return (
            f"'{path}' is a pattern, which fits {counted(n_files, 'file')}. Pass one path, or a list of them for an array of "
            f"each. For one array in all of them: shardload.concat('{path}', AXIS) in the place of the path, in Python; in a "
            "shell `shardload join` makes one file of them, without a copy of the values."
        )
    if folder and not os.path.isdir(folder):
        return f"there is no file '{path}', nor a folder '{folder}'. Pass a path that this machine sees."
    if leftovers := whole_beside(path):
        return f"there is no file '{path}'.{leftovers}"
    similar = difflib.get_close_matches(name, os.listdir(folder or "."), n=3)
    names = ", ".join(repr(os.path.join(folder, entry)) for entry in similar)
    return f"there is no file '{path}' (in the folder '{parent}'). Near it: {names or 'nothing'}."


def _above(path: str) -> Iterator[str]:
    """The folders that `path` names, the innermost first."""
    return map(str, Path(os.path.normpath(path)).parents[:-1])


def unclaimed(path: str, formats: Sequence[str]) -> SourceError:
    """The error about a file that no format claims, with the formats that can be loaded."""
    refuse_leftover(path)
    return SourceError(f"{_what_it_is(path)} Formats that can be loaded here: {', '.join(formats)}.", path=path)


def _what_it_is(path: str) -> str:
    """The message about what a file is that no format claims."""
    if "://" in path:
        advice = "Open it with zarr-python and pass the array, with allow_external=True"
        if "reference" in path.lower().split("://")[0].split("::"):
            advice = "Pass the file of references itself"
        return f"'{path}' is a URL of an unknown kind: those of S3, Google, Azure and HTTP can be loaded. {advice}."
    if os.path.isdir(path):
        inside = [n for n in sorted(os.listdir(path)) if n.endswith((".h5", ".hdf5", ".nc", ".nc4", ".zarr"))]
        hint = f" In it: {some([repr(os.path.join(path, n)) for n in inside])}." if inside else _store_around(path)
        return f"'{path}' is a folder, but not a Zarr store: it has no zarr.json, .zarray or .zgroup.{hint}"
    with os.fdopen(open_file(path), "rb") as file:
        head = file.read(512)
    if not head:
        return f"'{path}' is empty (0 bytes): its writer was interrupted, or wrote elsewhere."
    if description := known_by_head(head):
        return f"'{path}' {description}"
    return f"'{path}' is of an unknown format: it starts with {head[:8]!r}.{_store_around(path)}"


def known_by_head(head: bytes) -> str:
    r"""What a file is that begins so, and what to do with it, in words that follow its name; empty if that is not known.

    >>> known_by_head(b"CDF\x01")
    'is a netCDF-3 classic file, which cannot be loaded. Convert it: `nccopy -k nc4 in.nc out.nc`.'
    """
    for offset, mark, kind, fix in _OTHER_KINDS:
        if head[offset:].startswith(mark):
            return f"is {kind}, which cannot be loaded. {fix}"
    return ""


def _store_around(path: str) -> str:
    """What to pass for a file or folder inside a Zarr store (its metadata, a chunk); empty if it is in none."""
    store = next((above for above in _above(path) if any(os.path.exists(os.path.join(above, mark)) for mark in ROOTS)), None)
    return "" if store is None else f" It is a part of the Zarr store '{store}': pass that path."


MOST_LISTED = 1000  # arrays to look at, to say which one the caller could mean; of one more, that there are others


def only_array(path: str, infos: Sequence[ArrayInfo]) -> ArrayInfo:
    """The single array that the caller can mean without a name: not refused, and no coordinate. An error if there is none, or
    there may be several.
    """
    infos, has_more = infos[:MOST_LISTED], len(infos) > MOST_LISTED
    arrays = [info for info in infos if info.refused is None and not info.is_coordinate]
    if len(arrays) == 1 and not has_more:
        return arrays[0]
    if arrays:
        arrays.sort(key=nbytes_of, reverse=True)
        n, which = f"{len(arrays)}", "largest first"
        if has_more:
            n, which = f"more than {n}", f"of the first {len(infos)}, largest first"
        texts = some([_text_of(info) for info in arrays], "many" * has_more)
        name = arrays[0].dataset
        argument = f"dataset='{name}'" if isinstance(path, Concatenation) else f"'{path}:{name}'"
        raise ConfigError(f"'{path}' holds {n} arrays; name one, as in {argument} ({which}): {texts}.")
    refused = [f"{_text_of(i)}: {i.refused}" if i.refused else f"{_text_of(i)}: a coordinate" for i in infos]
    content = f"It holds {some(refused)}. A coordinate can be loaded by its name." if refused else "It holds none at all."
    raise SourceError(f"'{path}' holds no array that can be loaded without being named. {content}", path=path)


def no_such_array(path: str, name: str, infos: Sequence[ArrayInfo], group_attrs: Iterable[str] | None) -> ConfigError:
    """The error about a name that no array has. A group may have it: `infos` then has arrays in it, or `group_attrs` are the
    names of its attributes.
    """
    infos, more = infos[:MOST_LISTED], "many" * (len(infos) > MOST_LISTED)
    below = [info for info in infos if info.dataset.startswith(name.rstrip("/") + "/") and info.dataset != name]
    if below:
        texts = some([_text_of(info) for info in below], more)
        return ConfigError(f"'{name}' in '{path}' is a group, not an array ('{name.rstrip('/')}/*' are all in it): {texts}.")
    text = f"'{path}' holds no array '{name}'"
    if group_attrs is not None:
        text = f"'{name}' in '{path}' is a group without arrays"
        if names := some([f"'{printable(key)}'" for key in group_attrs]):
            text += f". It has attributes ({names}): see shardload.open('{path}:{name}').attrs"
    by_name = {info.dataset: info for info in infos}
    near = some([_text_of(by_name[other]) for other in _nearest(name, list(by_name))], more)
    return ConfigError(f"{text}. Arrays in the file (nearest first): {near or 'none'}.")


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """Full names of arrays or groups, those most similar to `name` first.

    >>> _nearest("velocity", ["/gas/density", "/gas/Velocities"])
    ['/gas/Velocities', '/gas/density']
    """

    def similarity(other: str) -> float:
        pairs = (other, name), (other.rpartition("/")[2], name.rpartition("/")[2])
        return max(difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio() for a, b in pairs)

    return sorted(names, key=similarity, reverse=True)


def no_arrays_below(path: str, group: str, infos: Sequence[ArrayInfo]) -> ConfigError:
    """The error about a pattern that stands for no array. `infos` has what the file holds."""
    name = group or "/"
    if inside := [f"{_text_of(info)}: {info.refused}" for info in infos if info.dataset.startswith(f"{group}/")]:
        return ConfigError(f"'{path}' holds no array that can be loaded below '{name}'. It holds there {some(inside)}.")
    if any(info.dataset == group for info in infos):
        return ConfigError(f"'{group}' in '{path}' is an array, not a group. Leave out '/*'.")
    groups = _nearest(name, sorted({info.dataset.rpartition("/")[0] for info in infos}))
    near = some([f"'{other}/*'" for other in groups])
    return ConfigError(
        f"'{path}' holds no arrays below '{name}' (links below it are not followed). Groups in it (nearest first): "
        f"{near or 'none'}."
    )


def _text_of(info: ArrayInfo) -> str:
    return f"'{printable(info.dataset)}' {info.shape} {info.dtype}"


def holds_numbers(info: ArrayInfo) -> bool:
    """True if the type of an array can be loaded, or is not known. If it is refused, it is for another reason."""
    if info.dtype == "unknown":
        return True
    try:
        return refusal(np.dtype(info.dtype)) is None
    except (TypeError, ValueError):  # a name of ours, or the file's own, for a type that NumPy does not have
        return False


def check_loadable(info: ArrayInfo) -> ArrayInfo:
    """Return `info`; SourceError if the array is refused."""
    if info.refused is None:
        return info
    raise SourceError(
        f"{info} cannot be loaded: it holds {info.refused}.{_read_otherwise(info)}", path=info.path, dataset=info.dataset
    )


def _read_otherwise(info: ArrayInfo) -> str:
    """What to type for an array whose elements are no numbers; empty for one that is refused for another reason."""
    is_unread = info.dtype in ("time", NOTHING) or info.dtype.endswith("-bit number")  # by h5py, too
    if holds_numbers(info) or is_unread:
        return ""
    if info.format.startswith("Zarr"):
        code = f"zarr.open_array({info.path!r}, path={info.dataset.strip('/')!r}, mode='r')[...]"
    else:
        code = f"h5py.File({info.path!r})[{info.dataset!r}][()]"
    return f" shardload loads numbers only. Read this array by {code}; shardload.scatter takes the numbers in it."
