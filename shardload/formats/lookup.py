"""Which array does the caller mean, and how is it opened?

1. The first format that claims the file gets it (`registry`). An open object goes to the format of its library.
2. `open_file` opens a file once, for all questions about it and its arrays. `open_source` opens a single array.
3. `find_array` finds the array from metadata alone. It runs on one rank, which tells the others. A `Finder` finds many.
4. Values that are so few that they travel with the metadata are read by the rank that finds them (`is_small`).
5. An untrusted file (`Access.untrusted`) is an `UntrustedFile`, which passes all questions on to a helper process.

If the caller can fix it by passing something else, the error is a `ConfigError`. If the file is wrong, it is a `SourceError`,
whatever the library below raised. `diagnosis` has the messages.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardload.errors import ConfigError, ShardloadError, SourceError
from shardload.formats import registry, untrusted
from shardload.formats.access import STRICT, Access
from shardload.formats.concatenation import Concatenation
from shardload.formats.contract.array import NOTHING, ArrayInfo, nbytes_of
from shardload.formats.contract.chunk_reader import chunks_met
from shardload.formats.contract.format import Format, OpenFile, Source, open_alone
from shardload.formats.diagnosis import (
    MOST_LISTED,
    as_source_error,
    check_loadable,
    check_readable,
    holds_numbers,
    no_arrays_below,
    no_such_array,
    only_array,
    unclaimed,
)
from shardload.formats.memory import MemorySource
from shardload.planning.region import Region, count_runs
from shardload.planning.tuning import Tuning
from shardload.storage.changes import complete_append
from shardload.storage.leftovers import refuse_leftover
from shardload.storage.remote import is_remote, open_remote, without_secrets
from shardload.system.steps import step_done
from shardload.system.thread_pool import call_together
from shardload.system.undo import Undo

State = tuple[int, ...] | None

_HEAD_NBYTES = 1 << 12  # of an object whose name does not tell its format
_MOST_OPEN = 16  # files that a `Finder` has open at a time


def split_path(path: str) -> tuple[str, str | None]:
    """Cut ``"file.h5:/group/rho"`` into the path and the name of the array in it.

    ``~`` at the beginning is the user's home. A path that exists is kept whole. ``:`` separates if the path before it exists.
    ``:/`` always separates (except in ``"s3://"``), so that an error about a file that does not exist names the file alone.

    Examples
    --------
    >>> split_path("no-such-file.h5:/group/rho")
    ('no-such-file.h5', '/group/rho')
    >>> split_path("s3://bucket/store.zarr"), split_path("http://localhost:8000/run.h5:/gas/rho")
    (('s3://bucket/store.zarr', None), ('http://localhost:8000/run.h5', '/gas/rho'))
    """
    path = without_scheme(path)
    scheme, separator, rest = path.partition("://")
    if separator:
        # Not that of a port, or of another URL in it.
        colon = max((match.start() for match in re.finditer(":/(?!/)", rest)), default=0)
        return (f"{scheme}://{rest[:colon]}", rest[colon + 1 :]) if colon else (path, None)
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
    text = os.path.expanduser(without_scheme(os.fsdecode(path)))
    return text if "://" in text or os.path.isabs(text) else os.path.join(os.getcwd(), text)


def file_of(path: str) -> str:
    """The file of a path, in one spelling for ``"data.h5:/a"``, ``"./data.h5"`` and ``"data.h5:/b"``.

    >>> file_of("/data/no-such.h5:/a") == file_of("/data/../data/no-such.h5:/b")
    True
    """
    return _place_of(split_path(path)[0])


def _place_of(path: str) -> str:
    """A path without the name of an array, in one spelling."""
    with suppress(FileNotFoundError):  # the working folder is gone: opening the file raises that
        return path if "://" in path else os.path.abspath(path)
    return path


def list_arrays(path: str, access: Access = STRICT) -> list[ArrayInfo]:
    """Every array in the file or store at `path`, loadable or not, from metadata alone.

    Collective: no. Links to other files are not followed, but their names can be given to `find_array`.

    Raises
    ------
    SourceError
        If there is no such file, no format claims it, or it is damaged.
    """
    with open_file(path, access) as file:
        return file.list_arrays()


def find_array(path_or_object: Any, dataset: str | None = None, access: Access = STRICT) -> ArrayInfo:
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

    Returns
    -------
    ArrayInfo
        Its metadata, with `refused` None.

    Raises
    ------
    ConfigError
        If no array has this name, a group has it, or several arrays could be meant: the error lists the names. Or if an open
        array is passed with `untrusted`.
    SourceError
        If the file cannot be opened, or the array or its type cannot be loaded.
    """
    with Finder(access) as finder:
        return finder.find(path_or_object, dataset).info


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
        The result of `find_array`, maybe of another rank. Without it, a KeyError says that there is no array of that name.

    Raises
    ------
    SourceError
        If it cannot be opened here: deleted, not visible from this machine, damaged, or of an unknown encoding.
    """
    path = as_path(path_or_object)
    if path is None:
        return _checked(open_object(path_or_object, access))
    return _checked(open_alone(open_file(path, access, planned), dataset, planned))


def open_object(array: Any, access: Access = STRICT) -> Source:
    """The source of an open array, of the format of its library. ConfigError if it is none that can be loaded, or a group."""
    kind = type(array)
    if access.untrusted is not None:  # it would have to be open in a helper process
        raise ConfigError(
            f"untrusted=True opens the file in another process, but this one has the {kind.__name__} that was "
            "handed in. Pass the path of the file, or leave out untrusted=True"
        )
    if isinstance(array, np.ndarray):
        return MemorySource(array)
    file_format = registry.claiming(lambda candidate: candidate.claims_object(array))
    if file_format is None:
        raise ConfigError(
            f"nothing can be loaded from an object of type {kind.__module__}.{kind.__qualname__}. Pass a path, or an open "
            "h5py.Dataset, zarr.Array or numpy.ndarray; of a file or group that is open an array in it: group['name']"
        )
    with as_source_error(kind.__name__):
        return file_format.open_object(array, access)


def open_file(path: str | os.PathLike[str], access: Access = STRICT, planned: ArrayInfo | None = None) -> OpenFile:
    """Open a file once, for several of its arrays.

    Collective: no. Close it after use, and what was opened in it before (a ``with`` statement does).

    Parameters
    ----------
    path : str or os.PathLike
        The file. The name of an array in it, if there is one, is ignored.
    access : Access
        What the caller allows.
    planned : ArrayInfo, optional
        An array of it that was found before: it tells the format.

    Raises
    ------
    SourceError
        If there is no such file, no format claims it, or it is damaged.
    """
    return _CheckedFile(split_path(os.fsdecode(path))[0], access, planned)


class _CheckedFile(OpenFile):
    """An open file of any format. Its errors are SourceErrors, but for ``KeyError(dataset)``."""

    def __init__(self, path: str, access: Access, planned: ArrayInfo | None = None) -> None:
        self._path = without_secrets(path)
        if access.untrusted is not None:
            self._file = _open_untrusted(path, access)
            return
        file_format = format_of(path, access, planned)
        with as_source_error(path):
            self._file = file_format.open_file(path, access)

    def list_arrays(self, most: int | None = None, like: str = "", in_full: bool = True) -> list[ArrayInfo]:
        with as_source_error(self._path):
            return self._file.list_arrays(most, like, in_full)

    def expect(self, datasets: Iterable[str]) -> None:
        self._file.expect(datasets)

    def list_linked(self, group: str, in_full: bool = True) -> list[ArrayInfo]:
        with as_source_error(self._path):
            return self._file.list_linked(group, in_full)

    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Source:
        step_done()
        name = _full_name(dataset)
        try:
            with as_source_error(self._path, name):
                source = self._file.open(name, planned)
        except KeyError:
            if planned is None:
                raise
            raise SourceError(
                f"'{self._path}' as seen from here holds no array '{name}', which was found in it before. It changed, or "
                "this machine sees another file under this path. Load from a file system that all ranks share.",
                path=self._path,
                dataset=name,
            ) from None
        return source if planned is None or planned.refused is not None else _checked(source)

    def groups(self) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[str]]:
        with as_source_error(self._path):
            return self._file.groups()

    def links(self) -> Mapping[str, str]:
        with as_source_error(self._path):
            return self._file.links()

    def state(self) -> State:
        return self._file.state()

    def close(self) -> None:
        self._file.close()


def _checked(source: Source) -> Source:
    """Return `source`; if its array is refused, close it and raise SourceError."""
    with Undo(source.close):
        check_loadable(source.info)
    return source


class FoundArray(NamedTuple):
    """An array that was found, and its values (all, or those of `region`) if they are small.

    `read_in` is the state before they were read: of the file, if a `Finder` keeps states, else of the source.
    """

    info: ArrayInfo
    values: np.ndarray[Any, Any] | None = None
    region: Region | None = None
    read_in: State = None


# Says what will be loaded of an array that was found (its open source is passed, if there is one): its metadata, perhaps with
# labels, and the region (None: not known yet, so no values are read).
Look = Callable[[ArrayInfo, Source | None], tuple[ArrayInfo, Region | None]]


def _look_at_all(info: ArrayInfo, _: Source | None) -> tuple[ArrayInfo, Region | None]:
    return info, Region.whole(info.shape)


def answers_slowly(info: ArrayInfo) -> bool:
    """True if each look at an array, or at its values, is a request of its own: in a Zarr store at a URL.

    (The first request for a file of another format brings its first MiB.)
    """
    return is_remote(info.path) and info.format.startswith("Zarr")


class Finder:
    """Finds many arrays, and reads the small ones of them. Each file is opened once. A context manager.

    Collective: no. One rank uses it, and tells the others.

    Parameters
    ----------
    access : Access
        What the caller allows.
    tuning : Tuning, optional
        Which arrays are small; None to read no values.
    keeps_states : bool
        True to keep the state of each file when it was opened, to see if it changed (`states`).
    tells : bool
        True if ranks will read what is found. Then its metadata have what these need not look up (`Source.tell`).
    """

    def __init__(
        self,
        access: Access,
        tuning: Tuning | None = None,
        keeps_states: bool = False,
        tells: bool = False,
    ) -> None:
        self.access, self._tuning, self._tells = access, tuning, tells
        self._keeps_states = keeps_states and tuning is not None
        self._states: dict[str, State] = {}
        self._left_nbytes = 0 if tuning is None else tuning.small_total_nbytes
        self._files: dict[str, _CheckedFile] = {}

    def __enter__(self) -> Finder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    def states(self) -> Iterator[tuple[str, State, State]]:
        """Of each file that was opened: its path, and its state then and now."""
        for place, before in self._states.items():
            with as_source_error(place):
                yield place, before, self.file(place).state()

    def expect(self, places: Iterable[tuple[Any, str | None]]) -> None:
        """Called before several arrays are found, by their paths and names: see `OpenFile.expect`."""
        names = dict[str, list[str]]()
        for path_or_object, dataset in places:
            path = as_path(path_or_object)
            if path is not None and is_remote(path):
                path, inside = split_path(path) if dataset is None else (path, dataset)
                names.setdefault(path, []).extend([] if inside is None else [_full_name(inside)])
        calls = list[Callable[[], None]]()
        for path in list(names)[:_MOST_OPEN]:
            with suppress(ShardloadError):  # `find` says why
                calls.append(partial(self.file(path, is_loaded=True).expect, names[path]))
        call_together(calls, "shardload-open")

    def find(self, path_or_object: Any, dataset: str | None, look: Look = _look_at_all) -> FoundArray:
        """The array's metadata, as from `find_array`, and its values if the region that `look` says is small."""
        path = as_path(path_or_object)
        if path is None:
            info = open_object(path_or_object, self.access).info
            if dataset is not None and _full_name(dataset) != info.dataset:
                raise ConfigError(
                    f"the array handed in is {info}, but dataset='{dataset}' names another. Leave it out, or pass the path."
                )
            return FoundArray(look(check_loadable(info), None)[0])
        if dataset is None:
            path, dataset = split_path(path)
        file = self.file(path, is_loaded=True)
        if dataset is None:
            info = only_array(path, file.list_arrays(MOST_LISTED, in_full=False))
            return self._found_unopened(path, file, info, look)
        name = _full_name(dataset)
        try:
            source = file.open(name)
        except KeyError:
            infos = file.list_arrays(MOST_LISTED, name, in_full=False)
            attrs = None if len(infos) > MOST_LISTED else file.groups()[0].get(name)
            raise no_such_array(path, name, infos, attrs) from None
        with closing(source):
            check_loadable(source.info)
            return self._found_open(path, source, look)

    def find_below(
        self, path_or_object: Any, group: str, with_dimensions: bool = False
    ) -> tuple[list[FoundArray], list[ArrayInfo]]:
        """All arrays below a group (empty: the root) that can be loaded, and those that hold no numbers, in the file's order.

        Links to the group are followed, those below it are not. A netCDF dimension without a variable holds no numbers, unless
        `with_dimensions`.

        Raises
        ------
        ConfigError
            If there is no such array, with the nearest groups.
        SourceError
            If an array of numbers is refused for another reason: it would silently be left out of the tree.
        """
        path = as_path(path_or_object)
        if path is None:
            raise ConfigError(
                f"'*' stands for the arrays of a file, but the {type(path_or_object).__name__} that was handed in is one "
                "array. Pass the path of the file"
            )
        file = self.file(path, is_loaded=True)
        infos = file.list_arrays(in_full=False)
        below = [info for info in infos if info.dataset.startswith(f"{group}/")]
        if group and not below:
            below = file.list_linked(group, in_full=False)
        if not with_dimensions:
            why = "no values: it is a netCDF dimension without a variable"
            below = [replace(info, dtype=NOTHING, refused=why) if info.is_dimension else info for info in below]
        left_out = [info for info in below if info.refused is not None and not holds_numbers(info)]
        arrays = [check_loadable(info) for info in below if info.refused is None or holds_numbers(info)]
        if not arrays:
            raise no_arrays_below(path, group, infos)
        return [self._found_unopened(path, file, info, _look_at_all) for info in arrays], left_out

    def _found_unopened(self, path: str, file: _CheckedFile, info: ArrayInfo, look: Look) -> FoundArray:
        """An array that was found without opening it. It is opened if its values may be small, or ranks must be told of it."""
        whole = Region.whole(info.shape)
        is_large = look is _look_at_all and self._tuning is not None and not is_small(info, self._tuning, whole)
        if (self._tuning is None or is_large) and not (self._tells and is_remote(path)):
            return FoundArray(look(info, None)[0])
        with closing(file.open(info.dataset, info)) as source:
            return self._found_open(path, source, look)

    def _found_open(self, path: str, source: Source, look: Look) -> FoundArray:
        read_in = self._states[_place_of(path)] if self._keeps_states else source.opened_in
        info, region = look(source.info, source)
        if region is None:
            return FoundArray(info)
        values = self._values(source, region)
        if values is None and self._tells:
            with as_source_error(path, info.dataset):
                source.expect(region)
                info = replace(info, parts=source.tell(region))
        return FoundArray(info, values, None if region.shape == info.shape else region, read_in)

    def _values(self, source: Source, region: Region) -> np.ndarray[Any, Any] | None:
        """The values of a region if they are small, and fit into what is left of the cap; None also if they cannot be read,
        chunks are missing, or the file changes meanwhile.
        """
        info, nbytes = source.info, nbytes_of(source.info, region.shape)
        if self._tuning is None or not is_small(info, self._tuning, region) or nbytes > self._left_nbytes:
            return None
        if self._keeps_states and answers_slowly(info):  # one of several: the ranks read them together
            return None
        self._left_nbytes -= nbytes
        try:
            before = source.opened_in
            values = np.empty(region.shape, source.dtype)
            if region.shape != info.shape:
                source.expect(region)
            source.expect_in_order(iter([region]))
            missing = source.read_into(region, values)
            return values if not missing and source.state() == before else None
        except Exception:  # the normal load reports it
            return None

    def file(self, path: str, is_loaded: bool = False) -> _CheckedFile:
        """An open file; the last few stay open. With `is_loaded`, SourceError if it is a temporary of a save."""
        place = _place_of(path)
        file = self._files.get(place)
        if file is None:
            if is_loaded:
                refuse_leftover(path)
            while len(self._files) >= _MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            file = self._files[place] = _CheckedFile(path, self.access)
            if self._keeps_states:
                self._states.setdefault(place, file.state())
        return file


def as_path(path_or_object: Any) -> str | None:
    """The path, with a leading ``~`` expanded as in a shell; None for an open array."""
    if isinstance(path_or_object, str | os.PathLike):
        return os.path.expanduser(without_scheme(os.fsdecode(path_or_object)))
    return None


def without_scheme(path: str) -> str:
    """The path of a URL of a file or folder on this machine; anything else unchanged.

    >>> without_scheme("file:///data/store.zarr"), without_scheme("s3://bucket/store.zarr")
    ('/data/store.zarr', 's3://bucket/store.zarr')
    """
    scheme, separator, rest = path.partition("://")
    return rest if separator and scheme.lower() in ("file", "local") else path


def _full_name(dataset: str) -> str:
    """``"rho"``, ``"/rho"`` and ``"/rho/"`` are the same array."""
    return "/" + dataset.strip("/")


def _open_untrusted(path: str, access: Access) -> OpenFile:
    """A file at which this process does not look: its helper process asks the formats which claims it."""
    if is_remote(path):
        raise ConfigError(
            f"untrusted=True opens a file in another process, which gets no keys and reads no store: download "
            f"'{without_secrets(path)}' and load that, or leave out untrusted=True"
        )
    if isinstance(path, Concatenation):
        raise ConfigError(
            f"untrusted=True opens a file in another process, but this one opened the files of '{path}' when it looked "
            "at them. Load each of them for itself, or leave out untrusted=True"
        )
    return untrusted.UntrustedFile(path, access)


def format_of(path: str, access: Access = STRICT, planned: ArrayInfo | None = None) -> Format:
    """The format that claims the file. If none does, SourceError says what the file is instead.

    `planned`: see `open_file`.
    """
    is_url = "://" in path
    if not is_url:
        check_readable(path)
    try:
        if is_url:
            file_format = _claiming_url(path, access, planned)
        else:
            file_format = registry.claiming(lambda candidate: candidate.claims_path(path))
        if file_format is None and (is_url or not complete_append(path)):
            raise unclaimed(path, [candidate.name for candidate in registry.formats()])
    except (OSError, ImportError):  # what is wrong with the file, or with the installation; not errors of the program
        with as_source_error(path):
            raise
    return file_format or format_of(path)


def import_format(info: ArrayInfo, access: Access) -> None:
    """Import what reads an array that perhaps another rank has found, if this process will read it.

    A thread is a wrong place for that: a library that is imported there while the program ends registers what is to be done at
    the end too late. HDF5 then calls a function of h5py after the interpreter has ended, and the process crashes.
    """
    if access.untrusted is None:
        registry.claiming(lambda candidate: candidate.describes(info))


def _claiming_url(url: str, access: Access, planned: ArrayInfo | None) -> Format | None:
    """`registry.claiming` for a URL. If no format claims its text, its first bytes are fetched."""
    file_format = registry.claiming(lambda candidate: candidate.claims_url(url))
    if file_format is not None or not is_remote(url):
        return file_format
    if planned is not None:
        return registry.claiming(lambda candidate: candidate.describes(planned))
    head = b""
    with suppress(OSError), closing(open_remote(url, access.storage).object()) as stored:  # Zarr raises the error again
        head = stored.read_at_most(0, _HEAD_NBYTES)
    return registry.claiming(lambda candidate: candidate.claims_head(head))


def is_small(info: ArrayInfo, tuning: Tuning, region: Region) -> bool:
    """True if one process reads a region, with all of the chunks (or shards) that it meets, in less time than a load takes to
    start.
    """
    nbytes, unit, chunks = nbytes_of(info, region.shape), info.shards or info.chunks, info.chunks
    if unit is None or chunks is None or nbytes == 0:
        return 0 < nbytes <= tuning.small_nbytes and count_runs(info.shape, region.shape) <= tuning.small_reads
    decoded = math.prod(map(len, chunks_met(region, unit))) * nbytes_of(info, unit)
    n_chunks = math.prod(map(len, chunks_met(region, chunks)))
    return decoded <= min(tuning.small_nbytes, tuning.small_decoded_nbytes) and n_chunks <= tuning.small_reads
