"""What is to be copied, and what shall the new file be like? Rank 0 finds out, and tells the others all but the attributes.

Layout, attributes and names of axes are those of the source, unless the caller asks for others. Coordinates keep their types
and layouts; a selection by names of axes applies to them, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any
from zlib import crc32

import numpy as np

from shardload.errors import ConfigError, SourceError, printable
from shardload.formats.access import Access, Limits
from shardload.formats.contract.array import ArrayInfo, Properties, some
from shardload.formats.contract.dtypes import dtype_text
from shardload.formats.contract.format import OpenFile
from shardload.formats.likeness import KEEP, Asked, attrs_for, bounds_of, spec_like
from shardload.formats.lookup import Finder, find_array, open_file, split_path
from shardload.formats.sink import ArraySpec, Compression, Sink, unopened_by_xarray
from shardload.jobs.consistency import State
from shardload.jobs.described import Described, describe_array, found_by_name, take_along
from shardload.options import AUTO, CHECKSUM, FULL, INDEX, TIMEOUT, Options
from shardload.planning.chunk_shapes import growing_chunks
from shardload.planning.region import Region
from shardload.planning.selection import Selection, select_axes
from shardload.planning.source_layout import SourceLayout

__all__ = ["PAGE_NBYTES", "STAGING_NBYTES", "CopyRequest", "Found", "describe", "find", "new_sink"]

STAGING_NBYTES = 512 << 20
PAGE_NBYTES = 4096  # clients of a file system on several nodes may lose each other's bytes in a page
_ALL_AND = "--dataset '*' "
_VERIFY, _MODES = (INDEX, CHECKSUM, FULL), ("w-", "w")


@dataclass(frozen=True)
class CopyRequest:
    """What a caller asks for.

    Attributes
    ----------
    source, target : str
        Paths; the source may name an array (``"in.h5:/rho"``).
    dataset : tuple of str
        Names of arrays, and patterns; none for all arrays of the file.
    select : tuple, mapping or None
        As for a load; by names it applies to every array that has the axis.
    dtype : str or None
        Type of the new arrays; those of coordinates stay.
    chunks, shards : tuple of int, None or ``"keep"``
        Layout of the new arrays that have as many axes.
    compression : object
        As in `Asked`; of the new arrays that have chunks.
    unlimited : tuple of str or int
        Axes that can grow, beside those that can in the source: by name, or by number in the new arrays that are no
        coordinates. Every array that has an axis of that name can grow along it, coordinates too. Arrays in one piece get
        chunks for it.
    format, mode : str
        As for `make_sink`.
    staging : int or ``"auto"``
        Bytes of memory of a rank.
    verify : str
        As for `write_file`.
    resume : bool
        True to go on with what a job that was killed has left. For a target in Zarr without shards.
    timeout : float or None
        Seconds without progress on any rank after which the copy fails.
    """

    source: str
    target: str
    dataset: tuple[str, ...] = ()
    select: Any = None
    dtype: str | None = None
    chunks: tuple[int, ...] | str | None = KEEP
    shards: tuple[int, ...] | str | None = KEEP
    compression: Any = KEEP
    unlimited: tuple[str | int, ...] = ()
    format: str | None = None
    mode: str = "w-"
    staging: int | str = AUTO
    verify: str = "checksum"
    allow_external: bool = False
    allow_filters: tuple[str, ...] = ()
    untrusted: bool = False
    resume: bool = False
    timeout: float | None = TIMEOUT

    @classmethod
    def check(cls, source: str, target: str, **given: Any) -> CopyRequest:
        """The request, with its options checked. ConfigError names what was found and what is expected."""
        if given.get("verify", CHECKSUM) not in _VERIFY:  # said before what other calls would take, too
            raise ConfigError(f"verify is {given['verify']!r}; expected one of {', '.join(map(repr, _VERIFY))}")
        checked = Options.check(
            **{name: given[name] for name in ("dtype", "staging", "verify", "allow_external", "allow_filters", "untrusted")}
        )
        if given.get("mode", "w-") not in _MODES:
            raise ConfigError(f"mode is {given['mode']!r}; expected 'w-' (the name must not exist) or 'w' (it is replaced)")
        for name in given.get("dataset", ()):
            if not name.strip("/ "):
                raise ConfigError(f"dataset is {name!r}; expected the name of an array, such as '/rho', or '*'")
        own: dict[str, Any] = {"dtype": None if checked.dtype is None else checked.dtype.name, "staging": checked.staging}
        own |= {"verify": checked.verify, "allow_external": checked.allow_external, "allow_filters": checked.allow_filters}
        own |= {"untrusted": checked.untrusted}
        return cls(source, os.path.expanduser(target), **{**given, **own})

    @property
    def access(self) -> Access:
        """What the caller allows."""
        staging = STAGING_NBYTES if isinstance(self.staging, str) else self.staging
        limits = Limits(staging, None if self.timeout is None else self.timeout / 4) if self.untrusted else None
        return Access(self.allow_external, frozenset(self.allow_filters), limits)

    def describe(self) -> dict[str, str]:
        """What all ranks must pass alike, as text."""
        return {name: repr(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Found:
    """One array that is copied.

    Attributes
    ----------
    info : ArrayInfo
        In the source.
    selection : Selection
        What of it.
    name : str
        Name in the target.
    spec : ArraySpec
        In the target; on other ranks than 0 without attributes.
    state : State
        Of the source's file, on rank 0.
    """

    info: ArrayInfo
    selection: Selection
    name: str
    spec: ArraySpec
    state: State

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types, without attributes."""
        spec = self.spec
        fill = (
            None
            if spec.fill_value is None
            else [dtype_text(np.asarray(spec.fill_value).dtype), np.asarray(spec.fill_value).tobytes().hex()]
        )
        stored = {
            "shape": spec.shape,
            "dtype": dtype_text(spec.dtype),
            "chunks": spec.chunks,
            "shards": spec.shards,
            "compression": None if spec.compression is None else asdict(spec.compression),
            "checksum": spec.checksum,
            "dims": spec.dims,
            "fill_value": fill,
            "unlimited": spec.unlimited,
        }
        region = self.selection.region
        where = {"start": region.start, "stop": region.stop, "kept": self.selection.kept}
        return {"info": self.info.to_dict(), "where": where, "name": self.name, "spec": stored, "state": self.state}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Found:
        """The inverse, after JSON made lists of tuples."""
        spec, where = dict(found["spec"]), found["where"]
        dtype = np.dtype(spec.pop("dtype"))
        fill, compression = spec.pop("fill_value"), spec.pop("compression")
        if fill is not None:
            fill = np.frombuffer(bytes.fromhex(fill[1]), np.dtype(fill[0]))[0]
        if compression is not None:
            options = {key: tuple(v) if isinstance(v, list) else v for key, v in compression["options"].items()}
            compression = Compression(**{**compression, "options": options})
        made: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.items()}
        selection = Selection(Region(tuple(where["start"]), tuple(where["stop"])), tuple(where["kept"]))
        state = None if found["state"] is None else tuple(found["state"])
        whole = ArraySpec(dtype=dtype, compression=compression, fill_value=fill, **made)
        return cls(ArrayInfo.from_dict(found["info"]), selection, found["name"], whole, state)

    def layout(self, slab: Region | None = None) -> SourceLayout:
        """How a slab of the new array, or all of it, lies in the source."""
        selection = self.selection if slab is None else Selection(self.selection.to_file(slab), self.selection.kept)
        dtype = self.spec.dtype.newbyteorder("=") if self.spec.dtype.kind != "V" else self.spec.dtype
        return SourceLayout.cut(selection, self.info.chunks, np.dtype(self.info.dtype), dtype, self.info.codec)

    @property
    def full_name(self) -> str:
        """Name in `Sink.arrays`."""
        return "/" + self.name.strip("/")


@dataclass(frozen=True)
class Beside:
    """What rank 0 alone knows of the new file.

    Attributes
    ----------
    texts : dict
        Arrays of text, by name.
    groups : dict
        The attributes of the groups.
    """

    texts: dict[str, ArraySpec] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)


def new_sink(request: CopyRequest, found: Sequence[Found], beside: Beside | None, n_nodes: int) -> Sink:
    """The sink of the new file; on other ranks than 0 without what is `beside`."""
    saving = import_module("shardload.formats.saving")
    alignment = PAGE_NBYTES if n_nodes > 1 else 1
    about = {} if beside is None else describe(request, found, beside)
    beside = beside or Beside()
    specs, groups = {one.name: one.spec for one in found} | beside.texts, beside.groups
    how = {"format": request.format, "mode": request.mode, "alignment": alignment, "about": about}
    made: Sink = saving.make_sink(request.target, specs, attrs=groups.get("/", {}), group_attrs=groups, **how)
    return made


def describe(request: CopyRequest, found: Sequence[Found], beside: Beside) -> dict[str, str]:
    """What a job that resumes must have in common with the one that was killed, on rank 0: in words, for messages."""
    saving = import_module("shardload.formats.saving")
    path = split_path(request.source)[0]
    about = {"the source": os.path.realpath(path) if "://" not in path else path}
    about |= {
        f"size and time of the source ('{one.info.dataset}')": repr(None if one.state is None else one.state[:2])
        for one in found
    }
    for one in found:
        if one.info.parts is not None:
            versions = repr(one.info.parts["versions"]).encode()
            about[f"the digest of sizes and times of the parts of '{one.info.dataset}'"] = f"{crc32(versions):08x}"
        told = {key: value for key, value in one.to_dict().items() if key not in ("info", "state")}
        about[f"what is made of '{one.info.dataset}'"] = json.dumps(told)
        attrs = repr([(key, getattr(value, "dtype", type(value)), value) for key, value in one.spec.attrs.items()])
        about[f"the digest of attributes of '{one.name}'"] = f"{crc32(attrs.encode()):08x}"
    about["the digest of attributes of groups"] = f"{crc32(repr(sorted(beside.groups.items(), key=str)).encode()):08x}"
    texts = repr([(name, spec.attrs, spec.dims, np.asarray(spec.texts).tolist()) for name, spec in beside.texts.items()])
    about["the digest of arrays of text"] = f"{crc32(texts.encode()):08x}"
    about["the format"] = saving.format_for(request.target, request.format)
    return about


def find(request: CopyRequest) -> tuple[list[Found], Beside, list[str]]:
    """On rank 0: the arrays, the attributes of groups, and notes of what is left out."""
    saving = import_module("shardload.formats.saving")
    _check_name(request.target, saving.SUFFIXES, request.format)
    kind = saving.format_for(request.target, request.format)
    path, inside = split_path(request.source)
    _check_apart(path, request.target)
    names = list(request.dataset) or ([inside] if inside else ["*"])
    if inside and request.dataset:
        raise ConfigError(f"'{request.source}' names an array, and dataset={request.dataset[0]!r} names another. Leave one out")
    infos: dict[str, ArrayInfo] = {}
    is_all = "*" in names
    links = _links(path, request.access) if is_all else {}
    with Finder(request.access) as finder:
        for name in names:
            if name == "*" or name.endswith("/*"):
                group = "" if name == "*" else "/" + name[:-2].strip("/")
                try:
                    below, left_out = finder.find_below(path, group, with_dimensions=True)
                except ConfigError as error:
                    more = _links_told(links, "")
                    raise ConfigError(f"{error} ({more[0]})") if more else error from None
                infos |= {one.info.dataset: one.info for one in below} | {one.dataset: one for one in left_out}
            else:
                info = find_array(path, name, request.access)
                infos[info.dataset] = info
    copied = {name for name in links if any(f"{one}/".startswith(f"{name}/") for one in infos)}
    notes = _links_told({name: to for name, to in links.items() if name not in copied})
    asked_for = tuple(f"/{name.strip('/*')}" for name in names if name != "*")
    if copied := {name for name in copied if not f"{name}/".startswith(tuple(f"{one}/" for one in asked_for))}:
        told = some([f"'{printable(name)}' (to {printable(links[name])})" for name in sorted(copied)])
        notes.append(f"links became copies of what they lead to: {told}")
    with open_file(path, request.access) as file:
        return _like(request, kind, file, infos, is_all, notes)


def _links(path: str, access: Access) -> dict[str, str]:
    """The links, which a copy of all arrays does not follow."""
    try:
        with open_file(path, access) as file:
            return dict(file.links())
    except SourceError:  # the search for arrays says why
        return {}


def _links_told(links: Mapping[str, str], all_and: str = _ALL_AND) -> list[str]:
    """What is said of links that are not followed."""
    if not links:
        return []
    told = ", ".join(f"'{printable(name)}' (to {printable(to)})" for name, to in links.items())
    name = printable(next(iter(links)).lstrip("/"))
    how = f"{all_and}--dataset '{name}', or '{name}/*' for a group"
    return [f"links were left out: {told}. To copy what they lead to, name it, too: {how}"]


def _like(
    request: CopyRequest, kind: str, file: OpenFile, infos: dict[str, ArrayInfo], is_all: bool, notes: list[str]
) -> tuple[list[Found], Beside, list[str]]:
    """What is asked of each array."""
    described: dict[str, Described] = {}
    for name, info in infos.items():
        try:
            described[name] = describe_array(file, info.dataset, info)
        except SourceError:
            if info.refused is None:
                raise
            notes.append(f"{info} was left out: it holds {info.refused}")
    beside = _beside(described)
    main = [name for name, one in described.items() if one[1].texts is None and name not in beside]
    if not is_all:
        notes += take_along(file, described)
    valueless = {name for name, one in described.items() if one[1].is_dimension}
    described = {name: one for name, one in described.items() if name not in valueless}
    main = [name for name in main if name in described] or [name for name in described if described[name][1].texts is None]
    parts = _parts(request.select, {name: described[name] for name in main})
    asked = _asked(request, {name: described[name][0] for name in main})
    found, texts = [], dict[str, ArraySpec]()
    selections = {
        name: _selection(info, properties, parts, request.select if name in main else None)
        for name, (info, properties, _) in described.items()
    }
    dims = {name: [described[name][1].dims[k] for k in one.kept] for name, one in selections.items()}
    unlimited = _named_axes(request.unlimited, [dims[name] for name in main])
    for name, (info, properties, state) in described.items():
        selection, grows = selections[name], _growing(unlimited, dims[name], name in main)
        wanted = _asked_of(asked, info, selection, name in main, grows)
        is_text = properties.texts is not None
        if name not in main and not is_text and not _can_stay(kind, info, properties, selection, wanted):
            wanted = replace(wanted, compression=asked.compression)
        properties, lost = found_by_name(kind, name, properties, described)
        try:
            spec, more = spec_like(info, properties, selection, kind, wanted)
        except ConfigError as error:
            if not is_text:
                raise
            notes.append(f"{info} was left out: it holds {error}")
            continue
        notes += more + lost
        target = "/data" if name == "/" and not kind.startswith("zarr") else name
        if is_text:
            texts[target] = spec
        else:
            found.append(Found(info, selection, target, spec, state))
    if not found:
        raise ConfigError(f"'{request.source}' holds no arrays that could be copied")
    _check_asked(request, found, asked, main)
    _check_growing(request.unlimited, [dims[name] for name in main], found)
    if kind.startswith("zarr"):  # as of a netCDF file of a run that died: a copy has the rows that are there
        unopened = unopened_by_xarray({one.full_name: one.spec for one in found})
        notes += [f"{what}: xarray opens no group with both" for what, _ in unopened]
    axes = {dim for spec in [*(one.spec for one in found), *texts.values()] for dim in spec.dims or ()}
    for name in sorted(valueless if is_all else ()):
        if name.rpartition("/")[2] not in axes:
            notes.append(f"the dimension '{name}' was left out: no array of the new file has it")
    used = {""} | {name.strip("/")[:k] for name in described for k, c in enumerate(name.strip("/")) if c == "/"}
    groups, refused = {}, import_module("shardload.formats.saving").refused_group
    arrays = [one.full_name for one in found] + list(texts)
    for group, attrs in file.groups().items():
        if group.strip("/") not in used:
            if not is_all:
                continue
            why = refused(kind, group, arrays, axes)
            if why is not None:
                what = f"the attributes of group {group!r}" if attrs else f"the group {group!r}"
                notes.append(f"{what}, {why}, {'were' if attrs else 'was'} left out")
                continue
        kept, _, more = attrs_for(kind, f"group '{group}'", attrs)
        groups[group] = kept
        notes += [f"{what} was left out" for what in more]
    notes += [f"{what} was left out" for what in file.unread()]
    return found, Beside(texts, groups), notes


def without_what_is_refused(
    request: CopyRequest, found: list[Found], about: Beside, error: ConfigError
) -> tuple[list[Found], Beside, list[str]]:
    """What the new file's format can hold, if `error` says that it cannot hold all; and what it cannot, in words. Raises the
    error if that is an array that was named, or none is left.
    """
    named = {f"/{name.strip('/')}" for name in (*request.dataset, split_path(request.source)[1] or "*")}
    notes: list[str] = []

    def is_held(name: str, spec: ArraySpec) -> bool:
        plain = replace(spec, chunks=None, shards=None, compression=None, checksum=False, unlimited=())
        stand_in = ArraySpec((), np.dtype("i1"))
        specs = {name: plain} if spec.texts is None else {name: plain, "/a": stand_in}
        try:
            import_module("shardload.formats.saving").make_sink(request.target, specs, format=request.format, mode=request.mode)
        except ConfigError as why:
            if name in named:
                raise error from None
            notes.append(f"'{name}' was left out: {why}")
            return False
        return True

    kept = [one for one in found if is_held(one.full_name, one.spec)]
    texts = {name: spec for name, spec in about.texts.items() if is_held(name, spec)}
    if not kept or not notes:
        raise error
    return kept, replace(about, texts=texts), notes


def _beside(described: Mapping[str, tuple[ArrayInfo, Properties, State]]) -> set[str]:
    """The coordinates of other arrays, and their bounds: they keep their own type and layout."""
    found = {name for name, (info, *_) in described.items() if info.is_coordinate}
    for name, (_, properties, _) in described.items():
        found |= {*properties.coordinates, *bounds_of(name, properties)} - {name}
    return found


def _parts(select: Any, main: Mapping[str, tuple[ArrayInfo, Properties, State]]) -> dict[str, Any]:
    """The selection by names of axes."""
    if select is None:
        return {}
    dims = {dim for _, properties, _ in main.values() for dim in properties.dims if dim}
    if isinstance(select, Mapping):
        for name in select:
            if name not in dims:
                there = f"there are: {some([repr(dim) for dim in sorted(dims)])}" if dims else "no axis has a name. Select by "
                there += "" if dims else "positions, such as select='0,:'"
                raise ConfigError(f"select names the axis {name!r}, which no array has; {there}")
        return dict(select)
    if len(main) > 1:
        names = some(list(main))
        raise ConfigError(
            f"select has positions, and there are {len(main)} arrays: {names}. Name one with dataset=, or select by names "
            "of axes, such as select='time=-1'"
        )
    ((info, properties, _),) = main.values()
    chosen = _select(info, select, properties.dims)
    by_name: dict[str, Any] = {}
    for axis, dim in enumerate(properties.dims):
        if dim is not None:
            start, stop = chosen.region.start[axis], chosen.region.stop[axis]
            by_name[dim] = slice(start, stop) if axis in chosen.kept else start
    return by_name


def _select(info: ArrayInfo, select: Any, dims: Sequence[str | None]) -> Selection:
    try:
        return select_axes(select, info.shape, dims)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{error} ({info} has shape {info.shape})") from None


def _selection(info: ArrayInfo, properties: Properties, parts: Mapping[str, Any], select: Any) -> Selection:
    if select is not None and not isinstance(select, Mapping):
        return _select(info, select, properties.dims)
    index = tuple(parts.get(dim, slice(None)) if dim is not None else slice(None) for dim in properties.dims)
    return _select(info, index, properties.dims)


def _asked(request: CopyRequest, main: Mapping[str, ArrayInfo]) -> Asked:
    dtype = None
    if request.dtype is not None:
        dtype = np.dtype(request.dtype)
        for info in main.values():
            if np.dtype(info.dtype).kind == "c" and dtype.kind != "c":
                raise ConfigError(f"{info} is {info.dtype}; as {dtype} its imaginary part would be lost. Leave dtype= out")
    return Asked(dtype, request.chunks, request.shards, request.compression)


def _named_axes(unlimited: Sequence[str | int], main: Sequence[Sequence[str | None]]) -> set[str | int]:
    """The axes that can grow: what is asked for, and the names of those that are asked for by number. An axis that has a name
    is one for all arrays, so that coordinates grow with it.
    """
    asked = (dims[n] for n in unlimited if isinstance(n, int) for dims in main if -len(dims) <= n < len(dims))
    return {*unlimited, *filter(None, asked)}


def _growing(unlimited: set[str | int], dims: Sequence[str | None], is_main: bool) -> tuple[int, ...]:
    """Which axes of one new array can grow. Numbers are of those that are no coordinates."""
    numbers = {n % len(dims) for n in unlimited if isinstance(n, int) and -len(dims) <= n < len(dims)} if is_main else set()
    return tuple(k for k, dim in enumerate(dims) if dim in unlimited or k in numbers)


def _check_growing(unlimited: Sequence[str | int], main: Sequence[Sequence[str | None]], found: Sequence[Found]) -> None:
    """ConfigError if something shall be able to grow that no array has."""
    for one in unlimited:
        if isinstance(one, int):
            if not any(-len(dims) <= one < len(dims) for dims in main):
                shapes = some([f"{array.info.dataset} {array.spec.shape}" for array in found])
                raise ConfigError(f"unlimited is axis {one}, which no array of the new file has: {shapes}")
            continue
        names = sorted({repr(dim) for array in found for dim in array.spec.dims or () if dim})
        if repr(one) not in names:
            there = some(names) or "none with a name. Type its number: --unlimited 0"
            raise ConfigError(f"unlimited is {one!r}, an axis that no array of the new file has; there are: {there}")


def _asked_of(asked: Asked, info: ArrayInfo, selection: Selection, is_main: bool, grows: tuple[int, ...]) -> Asked:
    """What is asked of one array: layout only if it has as many axes, compression only if it has chunks."""
    can_get_chunks = info.chunks is None and bool(grows)
    for_growth = growing_chunks(selection.shape, grows[0], np.dtype(info.dtype).itemsize) if can_get_chunks else KEEP
    if not is_main:
        return Asked(chunks=for_growth, unlimited=grows)
    ndim = len(selection.shape)
    chunks, shards, compression = asked.chunks, asked.shards, asked.compression
    if isinstance(chunks, tuple) and len(chunks) != ndim:
        chunks = shards = KEEP
    if isinstance(shards, tuple) and len(shards) != ndim:
        shards = KEEP
    if isinstance(chunks, str):
        chunks = for_growth
    has_chunks = (info.chunks is not None if isinstance(chunks, str) else chunks is not None) and ndim > 0
    if not has_chunks:
        compression = KEEP
    return Asked(asked.dtype, chunks, shards, compression, grows)


def _can_stay(kind: str, info: ArrayInfo, properties: Properties, selection: Selection, wanted: Asked) -> bool:
    """Whether a coordinate can be compressed in the new file as it is in the source. Where it cannot, it takes the compression
    that is asked for: the caller has no other way to say what it shall have.
    """
    if properties.compression is None and not properties.checksum:
        return True
    try:
        spec, _ = spec_like(info, properties, selection, kind, wanted)
        import_module("shardload.formats.saving").make_sink("x", {"x": replace(spec, dims=None, attrs={})}, format=kind)
    except ConfigError:
        return False
    return True


def _check_asked(request: CopyRequest, found: Sequence[Found], asked: Asked, main: Sequence[str]) -> None:
    """ConfigError if something was asked for that no array can have."""
    mine = [one for one in found if one.info.dataset in main]
    for name, sizes in (("chunks", asked.chunks), ("shards", asked.shards)):
        if isinstance(sizes, tuple) and not any(len(one.spec.shape) == len(sizes) for one in mine):
            shapes = some([f"{one.info.dataset} {one.spec.shape}" for one in mine])
            axes = f"{len(sizes)} {'axis' if len(sizes) == 1 else 'axes'}"
            raise ConfigError(
                f"{name} are {sizes}, for {axes}, but no array has so many: {shapes}. Pass one size for each axis"
            )
    is_new = not (isinstance(asked.compression, str) and asked.compression == KEEP)
    wants = is_new and Compression.of(asked.compression) is not None
    in_one_piece = [one for one in mine if one.spec.chunks is None and one.spec.shape]  # one number has nothing to compress
    if wants and in_one_piece and not any(one.spec.chunks is not None for one in mine):
        first = in_one_piece[0]
        example = ",".join(str(min(n, 64) or 1) for n in first.spec.shape)
        raise ConfigError(
            f"compression is of chunks, and {first.info} is in one piece. Pass chunks= too, such as chunks='{example}'"
        )


def _check_name(target: str, suffixes: tuple[str, ...], kind: str | None) -> None:
    """ConfigError if the target is a folder, or names an array, as other commands and the source do."""
    file, colon, name = target.rpartition(":")
    if colon and file.lower().endswith(suffixes) and not name.lower().endswith(suffixes):
        raise ConfigError(f"'{target}' names an array, and arrays keep their names in a copy. Pass '{file}', the file alone")
    if kind is None and os.path.isdir(target) and not target.rstrip("/").lower().endswith(suffixes):
        raise ConfigError(f"'{target}' is a folder. Pass the new file's name in it, such as '{os.path.join(target, 'out.h5')}'")


def _check_apart(source: str, target: str) -> None:
    """ConfigError if one of two paths is the other, or lies in it."""
    if "://" in source or not target:
        return
    if not os.path.lexists(source):
        return  # opening it says so
    first, second = os.path.realpath(source), os.path.realpath(target.rstrip("/") or "/")
    is_same = first == second or (os.path.exists(second) and os.path.samefile(first, second))
    if is_same:
        raise ConfigError(f"'{target}' is the file that is to be copied. Choose another name, and rename it afterwards")
    if second.startswith(first + os.sep) or first.startswith(second + os.sep):
        inner, outer = (target, source) if second.startswith(first) else (source, target)
        raise ConfigError(f"'{inner}' lies in '{outer}': one of them would be part of the other. Choose a name beside it")
