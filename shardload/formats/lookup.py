"""Which array does the caller mean, and how is it opened?

1. The first format that claims the file gets it (`registry`). An open object goes to the format of its library.
2. `find_array` finds the array from metadata alone. It runs on one rank, which tells the others.
3. `open_source` opens that array on every reading rank; `open_file` opens a file once, for several of its arrays.
4. Untrusted files (`Access.untrusted`) are opened by helper processes, which answer the same questions: see `untrusted`.

If the caller can fix it by passing something else, the error is a `ConfigError`. If the file is wrong, it is a `SourceError`,
whatever the library below raised. `diagnosis` has the messages.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardload.errors import ConfigError, SourceError, is_unread
from shardload.formats import registry
from shardload.formats.access import STRICT, Access
from shardload.formats.base import (
    ArrayInfo,
    Format,
    OpenFile,
    Source,
    chunks_met,
    nbytes_of,
    read_by_chunks,
    read_chunks,
    read_plain_chunks,
    refusal,
)
from shardload.formats.changes import complete_append
from shardload.formats.diagnosis import (
    as_source_error,
    candidates,
    check_readable,
    no_arrays_below,
    no_such_array,
    only_array,
    unclaimed,
)
from shardload.formats.labelling import SMALL_NBYTES, complete
from shardload.formats.labels import MIXED, Coordinate, Labels, Note
from shardload.formats.leftovers import refuse_leftover
from shardload.formats.untrusted.source import UntrustedSource, find, find_labels, list_all, list_below
from shardload.planning.blocks import count_runs
from shardload.planning.rates import START_SECONDS, one_reader_seconds
from shardload.planning.region import Region
from shardload.planning.tuning import Tuning, default_tuning
from shardload.system.interruption import let_interruption_pass
from shardload.system.scratch import scratch_of_its_own

__all__ = [
    "Finder",
    "Found",
    "Labeller",
    "Look",
    "absolute",
    "check_loadable",
    "file_of",
    "find_array",
    "find_untrusted",
    "format_of",
    "labelled",
    "labelled_below",
    "list_arrays",
    "list_labelled",
    "open_file",
    "open_source",
    "read_labels",
    "read_small",
    "split_path",
]

State = tuple[int, ...] | None

_NO_NUMBERS = ("string", "object", "opaque", "reference", "vlen", "compound")
_WORTH_BATCHES = 8  # chunks of a small array from which they are read in batches, not by the format's library
_MOST_OPEN = 16  # files that a `Finder` has open at a time
_NO_VARIABLE = "nothing: it is a netCDF dimension without a variable"
_ALL = 1 << 40  # arrays
_MOST_LISTED = 1000  # arrays to look at, to say which one the caller could mean


# Memory of so many bytes; None if the caller has none.
Room = Callable[[int], np.ndarray[Any, np.dtype[np.uint8]] | None]


def _no_room(nbytes: int) -> None:
    return None


def split_path(path: str) -> tuple[str, str | None]:
    """Cut ``"file.h5:/group/rho"`` into the path and the name of the array in it.

    ``~`` at the beginning is the user's home. A path that exists is kept whole. ``:`` separates if the path before it exists.
    ``:/`` always separates (except in ``"s3://"``), so that an error about a file that does not exist names the file alone.

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


def absolute(path: str | os.PathLike[str]) -> str:
    """A path that means the same in every working folder, with the name of an array in it, if it has one.

    >>> absolute("s3://bucket/store.zarr"), absolute("/data/a.h5:/rho"), absolute("a.h5") == os.path.join(os.getcwd(), "a.h5")
    ('s3://bucket/store.zarr', '/data/a.h5:/rho', True)
    """
    text = os.path.expanduser(_without_scheme(os.fsdecode(path)))
    return text if "://" in text or os.path.isabs(text) else os.path.join(os.getcwd(), text)  # which may be gone


def file_of(path: str) -> str:
    """The file of a path: equal for ``"data.h5:/a"``, ``"./data.h5"`` and ``"data.h5"`` with the name of another array.

    >>> file_of("/data/no-such.h5:/a") == file_of("/data/../data/no-such.h5:/b")
    True
    """
    return _place_of(split_path(path)[0])


def _place_of(path: str) -> str:
    """A path without the name of an array, in one spelling."""
    return path if "://" in path else os.path.abspath(path)


def list_arrays(path: str, access: Access = STRICT) -> list[ArrayInfo]:
    """Every array in the file or store at `path`, loadable or not, from metadata alone.

    Collective: no. Links to other files are not followed, but their names can be given to `find_array`.

    Raises
    ------
    SourceError
        If there is no such file, no format claims it, or it is damaged.
    """
    path = _without_scheme(path)
    if access.untrusted is not None:
        with as_source_error(path):
            return list_all(path, access)
    file_format = format_of(path)
    with as_source_error(path):
        return file_format.list_arrays(path, access)


def labelled_below(infos: Sequence[ArrayInfo], path: str, access: Access, most: int, group: str) -> list[ArrayInfo]:
    """The arrays of a file that are below a group (empty: the root); if links lead to it, what `list_labelled` has there."""
    below = [info for info in infos if info.dataset.startswith(f"{group}/")]
    return below or (list_labelled(path, access, most, group) if group else [])


def list_labelled(path: str, access: Access, most: int, linked: str = "") -> list[ArrayInfo]:
    """What `list_arrays` says, with the labels of every array that can be loaded, if there are at most `most` arrays.

    With `linked`, the arrays below this group, to which links lead (`Format.list_linked`); none if there is no such group.

    Collective: no. Raises what `list_arrays` raises, and SourceError if a link has no target or leads outside.
    """
    path = _without_scheme(path)
    if access.untrusted is not None:
        with as_source_error(path):
            return list_all(path, access, most, linked)
    if linked:
        file_format = format_of(path)
        with as_source_error(path):
            infos = file_format.list_linked(path, linked, access)
    else:
        infos = list_arrays(path, access)
    if len(infos) > most:
        return infos
    return labelled(infos, path, access)


def labelled(infos: Iterable[ArrayInfo], path: str, access: Access) -> list[ArrayInfo]:
    """Arrays of a file with their labels, from one open of the file."""
    with scratch_of_its_own(), Labeller(access) as labeller:
        return [_labelled(labeller, path, info) for info in infos]


def _labelled(labeller: Labeller, path: str, info: ArrayInfo) -> ArrayInfo:
    """An array with its labels. One that cannot be loaded may be there for its attributes alone (CF's grid mapping)."""
    try:
        return info if info.dtype.startswith("unknown") else labeller.label(path, info)
    except SourceError:
        if info.refused is None:
            raise
        return info


def find_array(
    path_or_object: Any,
    dataset: str | None = None,
    access: Access = STRICT,
    needs_numbers: bool = False,
    is_counted: bool = False,
) -> ArrayInfo:
    """Find the array that the caller means, from metadata alone.

    Collective: no. One rank runs it and tells the others.

    Parameters
    ----------
    path_or_object : str, os.PathLike, or an open array
        A path (``"file.h5"``, ``"file.h5:/group/rho"``), or an open `h5py.Dataset`, `zarr.Array` or NumPy array.
    dataset : str, optional
        Name of the array, with or without the leading ``/``. Without it the file must hold exactly one array that can
        be loaded and is not a coordinate.
    access : Access
        What the caller allows.
    needs_numbers : bool
        True if the caller asks for what only numbers have, such as decoding.
    is_counted : bool
        True to say how many bytes are stored (`Source.nbytes_stored`) of an array with a name.

    Returns
    -------
    ArrayInfo
        Its metadata, with `refused` None.

    Raises
    ------
    ConfigError
        If no array has this name, a group has it, or several arrays could be meant: the error lists the names. Or if an open
        array is passed with `untrusted`, or numbers are needed and the array has none.
    SourceError
        If the file cannot be opened, or the array or its type cannot be loaded.
    """
    if access.untrusted is not None:
        return find_untrusted(path_or_object, dataset, access, needs_numbers=needs_numbers)[0]
    path = _as_path(path_or_object)
    if path is None:
        return check_loadable(_info_of_object(path_or_object, dataset, access), needs_numbers)
    if dataset is None:
        path, dataset = split_path(path)
    refuse_leftover(path)
    file_format = format_of(path)
    if dataset is None:
        infos, has_more = _sketch(file_format, path, access)
        if has_more and len(candidates(infos)) < 2:
            with as_source_error(path):
                infos, has_more = file_format.sketch_arrays(path, access, _ALL), False
        return only_array(path, infos, has_more)
    name = _full_name(dataset)
    try:
        with as_source_error(path, name):
            source = file_format.open_path(path, name, access)
    except KeyError:
        raise no_such_array(path, name, *_sketch(file_format, path, access, name)) from None
    with closing(source), as_source_error(path, name):
        info = replace(source.info, nbytes_stored=source.nbytes_stored()) if is_counted else source.info
    return check_loadable(info, needs_numbers)


def _sketch(file_format: Format, path: str, access: Access, like: str = "") -> tuple[list[ArrayInfo], bool]:
    """Some of the arrays in a file, and True if there are more."""
    with as_source_error(path):
        infos = file_format.sketch_arrays(path, access, _MOST_LISTED, like)
    return infos[:_MOST_LISTED], len(infos) > _MOST_LISTED


class Labeller:
    """Adds labels to what was found: names of axes, all attributes, coordinates. A context manager; a file is opened once.

    Collective: no. One rank uses it, and tells the others.

    Parameters
    ----------
    access : Access
        What the caller allows.
    small_nbytes : int
        The most bytes of values of a coordinate.
    file : callable, optional
        Gives a file by its path, if somebody has it open already.
    names : collection of str, optional
        For a selection by names (`Labels.is_brief`): the only coordinates to read. Attributes are not read then.
    of_groups : bool
        Whether the attributes of an array's group are asked for, too.
    """

    def __init__(
        self,
        access: Access = STRICT,
        small_nbytes: int = SMALL_NBYTES,
        file: Callable[[str], OpenFile] | None = None,
        names: Collection[str] | None = None,
        of_groups: bool = False,
    ) -> None:
        self._access, self._small_nbytes, self._given, self._names = access, small_nbytes, file, names
        self._of_groups = of_groups
        self._path, self._file = "", ExitStack()
        self._opened: OpenFile | None = None

    def __enter__(self) -> Labeller:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def label(self, path_or_object: Any, info: ArrayInfo, source: Source | None = None) -> ArrayInfo:
        """The same `info`, with labels. `source` is the array, if it is open in this process.

        Raises
        ------
        SourceError
            If the array cannot be opened any more.
        """
        path = _as_path(path_or_object)
        if self._access.untrusted is not None:
            with as_source_error(info.path, info.dataset):
                return find_labels(info, self._access, self._small_nbytes)
        if path is None:
            with as_source_error(info.path, info.dataset):
                source = _format_of_object(path_or_object).open_object(path_or_object, self._access)
            return self._complete(info, source, self._beside(info.path))
        file = self._open(split_path(path)[0])
        with _naming_what_is_gone(info.path, info.dataset):
            if source is not None:
                return self._complete(info, source, file.open)
            with closing(file.open(info.dataset)) as opened:
                return self._complete(info, opened, file.open)

    def _complete(self, info: ArrayInfo, source: Source, open_other: Callable[[str], Source]) -> ArrayInfo:
        read_in = source.opened_in()
        try:
            labels = source.labels() if self._names is None else source.axes(self._names)
            if self._names is not None and not labels.coords.keys() >= set(self._names):  # attributes may name more
                labels = source.labels()
            own = info.dataset.rpartition("/")[2]
            if labels.dims == (own,):  # the coordinate of an axis is its own coordinate
                labels = replace(labels, coords={**labels.coords, own: Coordinate(info.dataset)})
            if self._names is None:
                labels = complete(labels, open_other, self._small_nbytes, self._of_group(source))
            else:
                named = {name: one for name, one in labels.coords.items() if name in self._names}
                labels = complete(replace(labels, attrs={}, coords=named, is_brief=True), open_other, self._small_nbytes)
        except (LookupError, OSError, RuntimeError, TypeError, ValueError) as error:  # damaged names; the values may be fine
            if is_unread(error):
                raise
            noted = {"attributes": Note(f"cannot be read ({error})")}
            labels = Labels((None,) * len(info.shape), {**info.attributes, **noted})
        if source.state() != read_in:  # these may be of two versions, and no values belong to them
            read_in = MIXED
        return replace(info, labels=replace(labels, read_in=read_in))

    def _of_group(self, source: Source) -> Mapping[str, Any] | None:
        """The attributes of the array's group; a note if they are damaged: then the array's own may be fine."""
        if not self._of_groups:
            return None
        try:
            return source.group_attrs()
        except (LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            if is_unread(error):
                raise
            return {"attributes": Note("cannot be read")}

    def _open(self, path: str) -> OpenFile:
        if self._given is not None:
            with as_source_error(path):
                return self._given(path)
        if self._opened is None or path != self._path:
            self._file.close()
            file_format = format_of(path)
            with as_source_error(path):
                self._opened = self._file.enter_context(file_format.open_file(path, self._access))
            self._path = path
        return self._opened

    def _beside(self, path: str) -> Callable[[str], Source]:
        """Opens other arrays of the file that an open array is in, by their names; KeyError if it is in no file."""

        def open_other(name: str) -> Source:
            if not os.path.exists(path):
                raise KeyError(name)
            return self._open(path).open(name)

        return open_other


def read_labels(path_or_object: Any, info: ArrayInfo, access: Access = STRICT, small_nbytes: int = SMALL_NBYTES) -> Labels:
    """The names of the axes, the attributes and coordinates of an array that was found; of a single array, by this process.

    Collective: no.

    Raises
    ------
    SourceError
        If the array cannot be opened any more.
    """
    with scratch_of_its_own(), Labeller(access, small_nbytes, of_groups=True) as labeller:
        found = labeller.label(path_or_object, info).labels
    return found if isinstance(found, Labels) else Labels((None,) * len(info.shape), info.attributes)


def open_source(path_or_object: Any, dataset: str, access: Access = STRICT, planned: ArrayInfo | None = None) -> Source:
    """Open the array that `find_array` found.

    Collective: no. Each reading rank opens and closes its own source.

    Parameters
    ----------
    path_or_object : str, os.PathLike, or an open array
        As given to `find_array`.
    dataset : str
        The name that `find_array` returned; ignored for an open array.
    access : Access
        What the caller allows.
    planned : ArrayInfo, optional
        What `find_array` has found, maybe on another rank.

    Raises
    ------
    SourceError
        If it cannot be opened here: deleted, not visible from this machine, damaged, or of an unknown encoding.
    """
    if access.untrusted is not None:
        return _open_untrusted(path_or_object, dataset, access)
    path = _as_path(path_or_object)
    if path is None:
        return _checked(_format_of_object(path_or_object).open_object(path_or_object, access))
    path, name = split_path(path)[0], _full_name(dataset)
    file_format = format_of(path)
    with _naming_what_is_gone(path, name):
        if planned is not None:
            return _checked(file_format.open_planned(path, planned, access))
        return _checked(file_format.open_path(path, name, access))


def open_file(path_or_object: Any, access: Access = STRICT) -> OpenFile:
    """Open a file once, for several of its arrays. `OpenFile.open` gives the same sources as `open_source`.

    Collective: no. Close it after use (a ``with`` statement does): that also closes the sources that it opened.

    Parameters
    ----------
    path_or_object, access
        As given to `open_source`. For an open array, every name opens that array. If the file is untrusted, each array has its
        own helper processes.

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
    """An open file whose arrays raise the errors of `open_source`. If `file` is None, each array opens the file by itself."""

    def __init__(self, path_or_object: Any, access: Access, file: OpenFile | None) -> None:
        self._handle, self._access, self._file = path_or_object, access, file
        self._held = ExitStack()
        if file is not None:
            self._held.callback(file.close)

    def open(self, dataset: str) -> Source:
        return self._opened(dataset)

    def open_planned(self, info: ArrayInfo) -> Source:
        return self._opened(info.dataset, info)

    def open_any(self, dataset: str) -> Source:
        return self._opened(dataset, is_any=True)

    def _opened(self, dataset: str, planned: ArrayInfo | None = None, is_any: bool = False) -> Source:
        if self._file is None:
            source = open_source(self._handle, dataset, self._access)
        else:
            name = _full_name(dataset)
            with _naming_what_is_gone(self._handle, name):
                source = self._file.open(name) if planned is None else self._file.open_planned(planned)
                source = source if is_any else _checked(source)
        self._held.callback(source.close)
        return source

    def groups(self) -> Mapping[str, Mapping[str, Any]]:
        if self._file is None:
            return {}
        with as_source_error(str(self._handle)):
            return self._file.groups()

    def unread(self) -> Sequence[str]:
        if self._file is None:
            return ()
        with as_source_error(str(self._handle)):
            return self._file.unread()

    def links(self) -> Mapping[str, str]:
        if self._file is None:
            return {}
        with as_source_error(str(self._handle)):
            return self._file.links()

    def state(self) -> State:
        return None if self._file is None else self._file.state()

    def close(self) -> None:
        self._held.close()


def _open_untrusted(path_or_object: Any, dataset: str, access: Access) -> Source:
    path, name = split_path(_untrusted_place(path_or_object, dataset)[0])[0], _full_name(dataset)
    with as_source_error(path, name):
        return UntrustedSource(path, name, access)


@contextmanager
def _naming_what_is_gone(path: str, name: str) -> Iterator[None]:
    """Turn every error into a SourceError while an array is opened that was found before; a KeyError means that it is gone."""
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
    """Return `source`; if its array is refused, close it and raise SourceError."""
    try:
        check_loadable(source.info)
    except SourceError:
        source.close()
        raise
    return source


def find_untrusted(
    path_or_object: Any, dataset: str | None, access: Access, *, values: bool = False, needs_numbers: bool = False
) -> tuple[ArrayInfo, bytes | memoryview | None]:
    """Do `find_array` and, with `values`, then `read_small`, in one helper process."""
    path, file, name = _untrusted_place(path_or_object, dataset)
    with as_source_error(file, name):
        return find(path, file, dataset, access, values=values, needs_numbers=needs_numbers)


def read_small(
    path_or_object: Any, info: ArrayInfo, access: Access = STRICT, tuning: Tuning | None = None
) -> memoryview | None:
    """All values of an array that `find_array` found, if it is small: in C order and native byte order.

    Collective: no. One rank runs it, so that the others need not open the file.

    Returns
    -------
    memoryview or None
        Of bytes. None if the array is large, empty or already open, or if its chunks (which are decoded whole) are large. Also
        None if it cannot be read, has missing chunks, or changes meanwhile; the normal load then reports that.
    """
    if _as_path(path_or_object) is None or not _is_small(info, tuning or default_tuning()):
        return None
    try:
        source = open_source(path_or_object, info.dataset, access)
        try:
            # Compared as text, because a NaN in the attributes is not equal to itself.
            return _values_of(source) if source.info.to_json() == info.to_json() else None
        finally:
            source.close()
    except Exception as error:
        let_interruption_pass(error)
        return None


def _is_small(info: ArrayInfo, tuning: Tuning, region: Region | None = None, most_seconds: float = START_SECONDS) -> bool:
    """True if the array, or a region of it, is small, and so are the chunks that are decoded for it, in so much time."""
    wanted = Region.whole(info.shape) if region is None else region
    nbytes, unit = nbytes_of(info, wanted.shape), info.shards or info.chunks
    if not 0 < nbytes <= tuning.small_nbytes or nbytes_of(info, unit or ()) > tuning.small_chunk_nbytes:
        return False
    if nbytes <= tuning.tiny_nbytes and wanted.shape == info.shape:
        return True
    if info.chunks is None:
        return one_reader_seconds(nbytes, 0, info.codec, count_runs(info.shape, wanted.shape)) <= most_seconds
    n_chunks = math.prod(map(len, chunks_met(wanted, info.chunks)))
    decoded = nbytes if wanted.shape == info.shape else n_chunks * nbytes_of(info, info.chunks)
    if decoded > tuning.small_nbytes:  # perhaps at once
        return False
    return one_reader_seconds(decoded, n_chunks, info.codec) <= most_seconds


def _values_of(source: Source, region: Region | None = None, room: Room = _no_room) -> memoryview | None:
    """All values of an open array, or those of a region; None if chunks are missing, or the file changes meanwhile.

    Raises what reading raises.
    """
    before, info = source.opened_in(), source.info
    whole = Region.whole(info.shape)
    wanted = whole if region is None else region
    given = room(nbytes_of(info, wanted.shape))
    values = np.empty(wanted.shape, source.dtype) if given is None else given.view(source.dtype).reshape(wanted.shape)
    if wanted != whole:
        source.expect(wanted)
    is_whole = _read(source, wanted, values) and source.state() == before
    return values.reshape(-1).view(np.uint8).data if is_whole else None


def _read(source: Source, region: Region, out: np.ndarray[Any, Any]) -> bool:
    """Read a region in the way that is fastest for few bytes. False if chunks of it are missing."""
    info = source.info
    has_many = info.chunks is not None and math.prod(map(len, chunks_met(region, info.chunks))) >= _WORTH_BATCHES
    is_part = region.shape != info.shape
    reader = source.chunk_reader() if has_many or is_part else None
    if reader is not None and info.chunks is not None:
        # Chunks that are not encoded, and would have to be copied, go through HDF5 as fast: a batch needs a second buffer.
        read = read_plain_chunks if info.codec == "none" else read_chunks
        if has_many and read(reader, info.chunks, region, out):
            return True
        if is_part:  # before HDF5 decodes any chunk, it is asked about all chunks of the array
            return not read_by_chunks(reader, info.chunks, region, out)
    source.read_into(region, out)
    return not source.missing(region)


class Found(NamedTuple):
    """An array that was found, and values of it if these are small: all, or those of `region`, in C order."""

    info: ArrayInfo
    values: bytes | memoryview | None = None
    region: Region | None = None


# What is to be loaded of an array that was found, given its open source if there is one: its metadata, perhaps with labels, and
# the region (None: nothing is known, so no values are read).
Look = Callable[[ArrayInfo, Source | None], tuple[ArrayInfo, Region | None]]


def _look_at_all(info: ArrayInfo, _: Source | None) -> tuple[ArrayInfo, Region | None]:
    return info, Region.whole(info.shape)


class Finder:
    """Finds many arrays, and reads the small ones of them. Each file is opened once. A context manager.

    Collective: no. One rank uses it, and tells the others.

    Parameters
    ----------
    access : Access
        What the caller allows.
    tuning : Tuning, optional
        Which arrays are small; None to read no values.
    most_nbytes : int, optional
        Cap on the values of all small arrays together, below `Tuning.small_total_nbytes`.
    keeps_states : bool
        True if the state of each file is kept from when it was opened, to see if it changed (`state_of`, `states`).
    room : callable, optional
        Gives memory for the values of an array; by default they are in new memory.
    most_seconds : float
        How long reading the values of an array may take.
    """

    def __init__(
        self,
        access: Access,
        tuning: Tuning | None = None,
        most_nbytes: int | None = None,
        keeps_states: bool = False,
        room: Room = _no_room,
        most_seconds: float = START_SECONDS,
    ) -> None:
        self._access, self._tuning, self._room, self._most_seconds = access, tuning, room, most_seconds
        self._keeps_states = keeps_states and tuning is not None
        self._states: dict[str, State] = {}
        cap = 0 if tuning is None else tuning.small_total_nbytes
        self._left_nbytes = cap if most_nbytes is None else min(cap, most_nbytes)
        self._files: dict[str, OpenFile] = {}
        self._places: dict[str, str] = {}  # of each path as written, because looking it up asks the file system

    def __enter__(self) -> Finder:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def state_of(self, path_or_object: Any) -> State:
        """The state of a file when it was opened; None if it was not kept."""
        path = _as_path(path_or_object) if self._keeps_states else None
        return None if path is None else self._states.get(_place_of(split_path(path)[0]))

    def states(self) -> Iterator[tuple[str, State, State]]:
        """Of each file that was opened: its place, and its state then and now."""
        for place, before in self._states.items():
            with as_source_error(place):
                yield place, before, self.file(place).state()

    def find(self, path_or_object: Any, dataset: str | None, needs_numbers: bool = False, look: Look = _look_at_all) -> Found:
        """The array's metadata, as from `find_array`, and its values if what `look` wants of it is small."""
        path = _as_path(path_or_object)
        if path is not None and dataset is None:
            path, dataset = split_path(path)
        if path is None or self._access.untrusted is not None:
            if self._tuning is None or path is None:
                info = find_array(path_or_object if path is None else path, dataset, self._access, needs_numbers)
                return Found(look(info, None)[0])
            info, values = find_untrusted(path, dataset, self._access, values=True, needs_numbers=needs_numbers)
            return Found(look(info, None)[0], values if values is not None and self._takes(len(values)) else None)
        if dataset is None:
            found = self._find_only(path, look)
            if found is not None:
                return found
            info = find_array(path_or_object, None, self._access, needs_numbers)
            return self._looked_at(path, info, look)
        name = _full_name(dataset)
        try:
            with as_source_error(path, name):
                source = self.file(path).open(name)
        except KeyError:
            raise no_such_array(path, name, *_sketch(format_of(path), path, self._access, name)) from None
        try:
            return self._found(check_loadable(source.info, needs_numbers), source, look)
        finally:
            source.close()

    def _find_only(self, path: str, look: Look) -> Found | None:
        """What `find` returns, if the file has one array and it can be loaded: then it is opened once."""
        try:
            name = self.file(path).only_name()
            source = None if name is None else self.file(path).open(name)
        except Exception as error:  # `find_array` says what is wrong
            let_interruption_pass(error)
            return None
        if source is None:
            return None
        try:
            return self._found(source.info, source, look) if candidates([source.info]) else None
        finally:
            source.close()

    def find_below(self, path_or_object: Any, group: str, with_dimensions: bool = False) -> tuple[list[Found], list[ArrayInfo]]:
        """All arrays below a group (empty: the root) that can be loaded, and those that hold no numbers. In the file's order.

        Links to the group are followed, those below it are not. A netCDF dimension without a variable holds no numbers, unless
        `with_dimensions`.

        Raises
        ------
        ConfigError
            If there is no such array, with the nearest groups.
        SourceError
            If one of them holds numbers, but is refused for another reason: it would be left out of the tree unseen.
        """
        path = _as_path(path_or_object)
        if path is None:
            raise ConfigError(
                f"'*' stands for the arrays of a file, but the {type(path_or_object).__name__} that was handed in is one "
                "array. Pass the path of the file"
            )
        refuse_leftover(path)
        linked: list[ArrayInfo] = []
        if self._access.untrusted is not None:
            with as_source_error(path):
                infos, linked = list_below(_without_scheme(path), self._access, group)
        else:
            file_format = format_of(path)
            with as_source_error(path):
                infos = file_format.sketch_arrays(path, self._access)
        below = [info for info in infos if info.dataset.startswith(f"{group}/")] or linked
        if group and not below and self._access.untrusted is None:
            with as_source_error(path):
                below = file_format.list_linked(path, group, self._access, in_full=False)
        if not with_dimensions:
            below = [replace(info, refused=_NO_VARIABLE) if info.is_dimension else info for info in below]
        left_out = [info for info in below if info.refused is not None and not _holds_numbers(info)]
        found = [check_loadable(info) for info in below if info.refused is None or _holds_numbers(info)]
        if not found:
            raise no_arrays_below(path, group, infos)
        return [self._looked_at(path, info, _look_at_all) for info in found], left_out

    def _looked_at(self, path: str, info: ArrayInfo, look: Look) -> Found:
        """An array that was found without being opened here. If values of it may be small, it is opened."""
        is_large = (
            look is _look_at_all and self._tuning is not None and not _is_small(info, self._tuning, None, self._most_seconds)
        )
        if self._tuning is None or self._access.untrusted is not None or is_large:
            return Found(look(info, None)[0])
        try:
            source = self.file(path).open(info.dataset)
        except Exception as error:  # the normal load reports it
            let_interruption_pass(error)
            return Found(look(info, None)[0])
        try:
            # Opened once more, so it may be another one. Compared as text, because a NaN is not equal to itself.
            is_same = source.info.to_json() == info.to_json()
            return self._found(info, source, look) if is_same else Found(look(info, None)[0])
        finally:
            source.close()

    def _found(self, info: ArrayInfo, source: Source, look: Look) -> Found:
        info, region = look(info, source)
        if region is None:
            return Found(info)
        region = None if region.shape == info.shape else region
        return Found(info, self._values(source, region), region)

    def _values(self, source: Source, region: Region | None) -> memoryview | None:
        if self._tuning is None or not _is_small(source.info, self._tuning, region, self._most_seconds):
            return None
        if not self._takes(nbytes_of(source.info, None if region is None else region.shape)):
            return None
        try:
            return _values_of(source, region, self._room)
        except Exception as error:
            let_interruption_pass(error)
            return None

    def _takes(self, nbytes: int) -> bool:
        """True if so many bytes more may be sent with the metadata."""
        takes = nbytes <= self._left_nbytes
        self._left_nbytes -= nbytes * takes
        return takes

    def nbytes_stored(self, path_or_object: Any, info: ArrayInfo, source: Source | None) -> int | None:
        """Bytes on disk of an array that was found (`source`, if it is open here); None if they are not known."""
        path = _as_path(path_or_object)
        if source is not None or self._access.untrusted is not None:
            return info.nbytes_stored if source is None else source.nbytes_stored()
        if path is None:
            return _format_of_object(path_or_object).open_object(path_or_object, self._access).nbytes_stored()
        path = split_path(path)[0]
        with _naming_what_is_gone(path, info.dataset), closing(self.file(path).open(info.dataset)) as opened:
            return opened.nbytes_stored()

    def file(self, path: str) -> OpenFile:
        """A file that is opened here once."""
        if path not in self._places:
            self._places[path] = _place_of(path)
        key = self._places[path]
        file = self._files.get(key)
        if file is None:
            refuse_leftover(path)
            file_format = format_of(path)
            while len(self._files) >= _MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            file = self._files[key] = file_format.open_file(path, self._access)
            if self._keeps_states and key not in self._states:
                self._states[key] = file.state()
        return file


def _holds_numbers(info: ArrayInfo) -> bool:
    """True if the type of an array could be loaded, or is not known, so that it was refused for another reason."""
    if info.dtype == "unknown":
        return True
    try:
        return refusal(np.dtype(info.dtype)) is None and not str(info.refused).startswith("nothing:")
    except (TypeError, ValueError):  # a name of ours, or the file's own, for a type that NumPy does not have
        return False


def _as_path(path_or_object: Any) -> str | None:
    """The path, with a leading ``~`` expanded as in a shell; None for an open array."""
    if isinstance(path_or_object, str | os.PathLike):
        return os.path.expanduser(_without_scheme(os.fsdecode(path_or_object)))
    return None


def _without_scheme(path: str) -> str:
    """The path of a URL of a file or folder on this machine; anything else unchanged.

    >>> _without_scheme("file:///data/store.zarr"), _without_scheme("s3://bucket/store.zarr")
    ('/data/store.zarr', 's3://bucket/store.zarr')
    """
    scheme, found, rest = path.partition("://")
    return rest if found and scheme.lower() in ("file", "local") else path


def _untrusted_place(path_or_object: Any, dataset: str | None) -> tuple[str, str, str | None]:
    """The path as passed, the file in it, and the array's name. ConfigError for an array that is open in this process."""
    path = _as_path(path_or_object)
    if path is None:
        raise ConfigError(
            f"untrusted=True opens the file in another process, but this one has the {type(path_or_object).__name__} that was "
            "handed in. Pass the path of the file, or leave out untrusted=True"
        )
    whole, file, name = (path, path, dataset) if dataset is not None else (path, *split_path(path))
    refuse_leftover(file)
    return whole, file, name


def _full_name(dataset: str) -> str:
    """``"rho"``, ``"/rho"`` and ``"/rho/"`` are the same array."""
    return "/" + dataset.strip("/")


def format_of(path: str) -> Format:
    """The format that claims the file. If none does, SourceError says what the file is instead."""
    if "://" in path:
        found, failed = registry.claiming(lambda file_format: file_format.claims_url(path), plugins_first=True)
    else:
        check_readable(path)
        with _naming_what_is_unread(path):
            found, failed = registry.claiming(lambda file_format: file_format.claims_path(path))
    if found is None and "://" not in path and complete_append(path):
        return format_of(path)
    if found is None:
        with _naming_what_is_unread(path):
            raise unclaimed(path, registry.names(), failed)
    return found


@contextmanager
def _naming_what_is_unread(path: str) -> Iterator[None]:
    """Turn the system's errors into SourceErrors. Others are not the file's."""
    try:
        yield
    except OSError:
        with as_source_error(path):
            raise


def _format_of_object(obj: Any) -> Format:
    """The format of the library that `obj` comes from."""
    found, failed = registry.claiming(lambda file_format: file_format.claims_object(obj))
    if found is None:
        more = f" Installed, but not to be used: {'; '.join(failed)}." if failed else ""
        raise ConfigError(
            f"nothing can be loaded from an object of type {type(obj).__module__}.{type(obj).__qualname__}. Pass a "
            f"path, or an open h5py.Dataset, zarr.Array or numpy.ndarray.{more}"
        )
    return found


def _info_of_object(obj: Any, dataset: str | None, access: Access) -> ArrayInfo:
    """The metadata of an open array. ConfigError if `dataset` is given and is not its name."""
    info = _format_of_object(obj).open_object(obj, access).info
    if dataset is not None and _full_name(dataset) != info.dataset:
        raise ConfigError(
            f"the array handed in is {info}, but dataset='{dataset}' names another. Leave it out, or pass the path."
        )
    return info


def check_loadable(info: ArrayInfo, needs_numbers: bool = False) -> ArrayInfo:
    """Return `info`; SourceError if the array is refused."""
    if needs_numbers and info.refused is not None and info.dtype in _NO_NUMBERS:
        raise ConfigError(
            f"decode needs numbers, but {info} holds {info.refused}, which cannot be loaded without decode= "
            "either. Leave out this array"
        )
    if info.refused is not None:
        raise SourceError(
            f"{info} cannot be loaded: it holds {info.refused}.{_read_otherwise(info)}",
            path=info.path,
            dataset=info.dataset,
        )
    return info


def _read_otherwise(info: ArrayInfo) -> str:
    """What to type for an array of elements that are no numbers; empty for one that is refused for another reason."""
    is_unread = info.dtype in ("time", "unknown type") or info.dtype.endswith("-bit number")  # by h5py, too
    if _holds_numbers(info) or is_unread or str(info.refused).startswith("nothing:"):
        return ""
    if info.format.startswith("Zarr"):
        how = f"zarr.open_array({info.path!r}, path={info.dataset.strip('/')!r}, mode='r')[...]"
    elif info.format in ("HDF5", "netCDF4"):
        how = f"h5py.File({info.path!r})[{info.dataset!r}][()]"
    else:
        return ""
    return f" shardload loads numbers only. Read this array by {how}; shardload.scatter takes the numbers in it."
