"""Which array is meant, and how is it opened?

1. The file goes to the first format that claims it (`registry`), or the open object to the library that it comes from.
2. `find_array` answers which array was meant, from metadata alone: run it on one rank and tell the others.
3. `open_source` opens that array on every rank that reads; `open_file` opens a file once, for several of its arrays.
4. Files that nobody vouches for (`Access.untrusted`) are opened by other processes, which answer the same questions: see
   `untrusted`.

What the caller can mend by writing something else is a `ConfigError`; what is wrong with the file is a `SourceError`,
whatever the library below raised. What they say is in `diagnosis`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats import registry
from shardload.formats.access import STRICT, Access
from shardload.formats.base import ArrayInfo, Format, OpenFile, Source, nbytes_of
from shardload.formats.diagnosis import as_source_error, candidates, check_readable, no_such_array, only_array, unclaimed
from shardload.formats.untrusted.source import UntrustedSource, find, list_all
from shardload.planning.region import Region
from shardload.planning.tuning import Tuning, default_tuning
from shardload.system.interruption import let_interruption_pass

__all__ = ["find_array", "find_small", "format_of", "list_arrays", "open_file", "open_source", "read_small", "split_path"]

_MOST_LISTED = 1000  # arrays that are looked at to say which one could be meant


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


def list_arrays(path: str, access: Access = STRICT) -> list[ArrayInfo]:
    """Every array in the file or store at `path`, loadable or not, from metadata alone.

    Collective: no. A link to another place is not followed, but its name can be given to `find_array`.

    Raises
    ------
    SourceError
        If there is no such file, it is of no format known here, or it is damaged.
    """
    path = _without_scheme(path)
    if access.untrusted is not None:
        with as_source_error(path):
            return list_all(path, access)
    file_format = format_of(path)
    with as_source_error(path):
        return file_format.list_arrays(path, access)


def find_array(path_or_object: Any, dataset: str | None = None, access: Access = STRICT) -> ArrayInfo:
    """The one array that is meant, from metadata alone.

    Collective: no. One rank runs it, and the others are told.

    Parameters
    ----------
    path_or_object : str, os.PathLike, or an open array
        A path (``"file.h5"``, ``"file.h5:/group/rho"``), or an open `h5py.Dataset`, `zarr.Array` or NumPy array.
    dataset : str, optional
        Name of the array, with or without the leading ``/``. Without it the file must hold exactly one array that can
        be loaded and is not a coordinate of another.
    access : Access
        What the caller allows.

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
    if access.untrusted is not None:
        whole, file, name = _untrusted_place(path_or_object, dataset)
        with as_source_error(file, name):
            return find(whole, file, dataset, access)[0]
    path = _as_path(path_or_object)
    if path is None:
        return _loadable(_info_of_object(path_or_object, dataset, access))
    if dataset is None:
        path, dataset = split_path(path)
    file_format = format_of(path)
    if dataset is None:
        infos, has_more = _sketch(file_format, path, access)
        if has_more and len(candidates(infos)) < 2:
            with as_source_error(path):
                infos, has_more = file_format.sketch_arrays(path, access), False
        return only_array(path, infos, has_more)
    name = _full_name(dataset)
    try:
        with as_source_error(path, name):
            source = file_format.open_path(path, name, access)
    except KeyError:
        raise no_such_array(path, name, *_sketch(file_format, path, access, name)) from None
    source.close()
    return _loadable(source.info)


def _sketch(file_format: Format, path: str, access: Access, like: str = "") -> tuple[list[ArrayInfo], bool]:
    """Some of the arrays in a file, and whether there are more."""
    with as_source_error(path):
        infos = file_format.sketch_arrays(path, access, _MOST_LISTED, like)
    return infos[:_MOST_LISTED], len(infos) > _MOST_LISTED


def open_source(path_or_object: Any, dataset: str, access: Access = STRICT) -> Source:
    """Open for reading the array that `find_array` found.

    Collective: no. Each rank that reads opens its own, and closes it.

    Parameters
    ----------
    path_or_object : str, os.PathLike, or an open array
        As given to `find_array`.
    dataset : str
        The name that `find_array` returned; not looked at for an open array.
    access : Access
        What the caller allows.

    Raises
    ------
    SourceError
        If it cannot be opened here: gone, not visible from this machine, damaged, or of an encoding unknown here.
    """
    if access.untrusted is not None:
        return _open_untrusted(path_or_object, dataset, access)
    path = _as_path(path_or_object)
    if path is None:
        return _checked(_format_of_object(path_or_object).open_object(path_or_object, access))
    path, name = split_path(path)[0], _full_name(dataset)
    file_format = format_of(path)
    with _naming_what_is_gone(path, name):
        return _checked(file_format.open_path(path, name, access))


def open_file(path_or_object: Any, access: Access = STRICT) -> OpenFile:
    """Open a file once, for several of its arrays: what `open_source` gives, from one open of the file.

    Collective: no. Close it after use (a ``with`` statement does): that closes what was opened from it, too.

    Parameters
    ----------
    path_or_object, access
        As given to `open_source`. An open array has no others beside it: it is what each name opens. Where helper processes
        open the file, each array has its own.

    Raises
    ------
    SourceError
        If it cannot be opened. `OpenFile.open` raises what `open_source` does.

    Examples
    --------
    >>> with open_file(np.arange(3)) as file:
    ...     file.open("/array").info.shape
    (3,)
    """
    path = _as_path(path_or_object)
    if access.untrusted is not None or path is None:
        if access.untrusted is not None:
            _untrusted_place(path_or_object, None)
        return _Opened(path_or_object, access, None)
    path = split_path(path)[0]
    file_format = format_of(path)
    with as_source_error(path):
        return _Opened(path, access, file_format.open_file(path, access))


class _Opened(OpenFile):
    """What a format has opened, with the errors of `open_source`; None where each array is opened by itself."""

    def __init__(self, path_or_object: Any, access: Access, file: OpenFile | None) -> None:
        self._handle, self._access, self._file = path_or_object, access, file
        self._held = ExitStack()
        if file is not None:
            self._held.callback(file.close)

    def open(self, dataset: str) -> Source:
        if self._file is None:
            source = open_source(self._handle, dataset, self._access)
        else:
            name = _full_name(dataset)
            with _naming_what_is_gone(self._handle, name):
                source = _checked(self._file.open(name))
        self._held.callback(source.close)
        return source

    def close(self) -> None:
        self._held.close()


def _open_untrusted(path_or_object: Any, dataset: str, access: Access) -> Source:
    path, name = split_path(_untrusted_place(path_or_object, dataset)[0])[0], _full_name(dataset)
    with as_source_error(path, name):
        return UntrustedSource(path, name, access)


@contextmanager
def _naming_what_is_gone(path: str, name: str) -> Iterator[None]:
    """For opening what was found before: whatever goes wrong is a SourceError."""
    try:
        with as_source_error(path, name):
            yield
    except KeyError:
        raise SourceError(
            f"'{path}' as seen from here holds no array '{name}', which was found in it before. It changed, or "
            "this machine sees another file under this path. Load from a file system that all ranks share.",
            path=path,
            dataset=name,
        ) from None


def _checked(source: Source) -> Source:
    """The same, or SourceError if it is refused."""
    try:
        _loadable(source.info)
    except SourceError:
        source.close()
        raise
    return source


def find_small(path_or_object: Any, dataset: str | None, access: Access) -> tuple[ArrayInfo, bytes | None]:
    """What `find_array` and then `read_small` give; of a file that is untrusted, from one other process."""
    if access.untrusted is None:
        info = find_array(path_or_object, dataset, access)
        return info, read_small(path_or_object, info, access)
    path, file, name = _untrusted_place(path_or_object, dataset)
    with as_source_error(file, name):
        return find(path, file, dataset, access, values=True)


def read_small(path_or_object: Any, info: ArrayInfo, access: Access = STRICT, tuning: Tuning | None = None) -> bytes | None:
    """All values of an array that `find_array` found, if it is small: C order, native byte order.

    Collective: no. One rank runs it, so that the others need not open the file.

    Returns
    -------
    bytes or None
        None where the array is large, empty or open already, or its chunks are large, which are decoded whole; or it cannot be
        read, or some of it is missing, or it changes meanwhile: whoever reads it then says so.
    """
    tuning = tuning or default_tuning()
    if _as_path(path_or_object) is None or not 0 < nbytes_of(info) <= tuning.small_nbytes:
        return None
    if nbytes_of(info, info.shards or info.chunks or ()) > tuning.small_chunk_nbytes:
        return None
    try:
        source = open_source(path_or_object, info.dataset, access)
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


def _untrusted_place(path_or_object: Any, dataset: str | None) -> tuple[str, str, str | None]:
    """The path, the file in it, and the name; ConfigError for an open array, which this process has opened already."""
    path = _as_path(path_or_object)
    if path is None:
        raise ConfigError(
            f"untrusted=True opens the file in another process, but this one has the {type(path_or_object).__name__} that was "
            "handed in. Pass the path of the file, or leave out untrusted=True"
        )
    return (path, path, dataset) if dataset is not None else (path, *split_path(path))


def _full_name(dataset: str) -> str:
    """``"rho"``, ``"/rho"`` and ``"/rho/"`` are the same array."""
    return "/" + dataset.strip("/")


def format_of(path: str) -> Format:
    """The format that claims the file; SourceError, with what the file is instead, if none does."""
    if "://" in path:
        found, failed = registry.claiming(lambda file_format: file_format.claims_url(path), plugins_first=True)
    else:
        check_readable(path)
        found, failed = registry.claiming(lambda file_format: file_format.claims_path(path))
    if found is None:
        raise unclaimed(path, registry.names(), failed)
    return found


def _format_of_object(obj: Any) -> Format:
    """The format whose library `obj` comes from."""
    found, failed = registry.claiming(lambda file_format: file_format.claims_object(obj))
    if found is None:
        more = f" Installed, but not to be used: {'; '.join(failed)}." if failed else ""
        raise ConfigError(
            f"nothing can be loaded from an object of type {type(obj).__module__}.{type(obj).__qualname__}. Pass a "
            f"path, or an open h5py.Dataset, zarr.Array or numpy.ndarray.{more}"
        )
    return found


def _info_of_object(obj: Any, dataset: str | None, access: Access) -> ArrayInfo:
    """The metadata of an open array; a name beside it must be its own."""
    info = _format_of_object(obj).open_object(obj, access).info
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
