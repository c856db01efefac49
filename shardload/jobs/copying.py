"""How is a file copied into another layout or format, by many ranks, whatever its size? In rounds, without devices.

1. Rank 0 finds the arrays, and what is asked of the new file (`_find`): layout, attributes and names as in the source, unless the
   caller asks for others. It tells the others all but the attributes.
2. All ranks plan the same slabs and rounds (`planning.copying`).
3. In each round a rank reads its slabs, or its piece of one that all ranks read together, by the same engine as a load
   (`_Reading`), and hands the chunks of the target to `writing.write_file`, which encodes and writes them meanwhile.

JAX is not needed, and not imported.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any
from zlib import crc32

import numpy as np

from shardload.comm.group import Group, Invocation, group_of
from shardload.comm.shared_memory import Bell, Segment
from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Access, Limits
from shardload.formats.base import ArrayInfo, OpenFile, Properties, Source, some
from shardload.formats.likeness import KEEP, Asked, attrs_for, spec_like
from shardload.formats.lookup import Finder, find_array, open_file, split_path
from shardload.formats.sink import ArraySpec, Compression, Sink
from shardload.jobs.consistency import State, check_same_file, check_unchanged
from shardload.jobs.progress import progress_of
from shardload.jobs.writing import KEPT_ROUNDS, Values, Written, write_file
from shardload.options import AUTO, CHECKSUM, FULL, INDEX, TIMEOUT, Options
from shardload.planning.blocks import aligned
from shardload.planning.copying import (
    Copied,
    Memory,
    Round,
    Unit,
    least_nbytes,
    plan_array,
    plan_memory,
    plan_rounds,
    run_units,
)
from shardload.planning.grid import Grid
from shardload.planning.region import Region
from shardload.planning.schedule import Schedule, plan_direct, plan_schedules
from shardload.planning.selection import Selection, select_axes
from shardload.planning.shards import Shards
from shardload.planning.source_layout import SourceLayout
from shardload.planning.staging import least_staging, plan_staging
from shardload.planning.strategies import PARALLEL
from shardload.system.interruption import let_interruption_pass
from shardload.transfer.buffers import Piece, Slots
from shardload.transfer.cast import cast_into
from shardload.transfer.exchange import Buffers, exchange
from shardload.transfer.local_pieces import LocalPieces
from shardload.transfer.missing import counter_of
from shardload.transfer.moves import ArrayMove, BlocksToPieces
from shardload.transfer.reader import SourceReader
from shardload.transfer.resources import Resources
from shardload.units import format_nbytes

__all__ = ["CopyPlan", "CopyReport", "CopyRequest", "copy_file"]

_STAGING_NBYTES = 512 << 20
_LEAST_READING_NBYTES = 4 << 20
_PAGE_NBYTES = 4096  # clients of a file system on several nodes may lose each other's bytes in a page
_BLOCKS_IN_CAP = 8
_MOST_OPEN = 64  # sources
_VERIFY, _MODES = (INDEX, CHECKSUM, FULL), ("w-", "w")

Array = np.ndarray[Any, Any]


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
    format, mode : str
        As for `make_sink`.
    staging : int or ``"auto"``
        Bytes of memory of a rank.
    verify : str
        As for `write_file`.
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
    format: str | None = None
    mode: str = "w-"
    staging: int | str = AUTO
    verify: str = "checksum"
    allow_external: bool = False
    allow_filters: tuple[str, ...] = ()
    untrusted: bool = False
    timeout: float | None = TIMEOUT

    @classmethod
    def check(cls, source: str, target: str, **given: Any) -> CopyRequest:
        """The request, with its options checked. ConfigError names what was found and what is expected."""
        checked = Options.check(
            **{name: given[name] for name in ("dtype", "staging", "verify", "allow_external", "allow_filters", "untrusted")}
        )
        if checked.verify not in _VERIFY:
            raise ConfigError(f"verify is {checked.verify!r}; expected one of {', '.join(map(repr, _VERIFY))}")
        if given.get("mode", "w-") not in _MODES:
            raise ConfigError(f"mode is {given['mode']!r}; expected 'w-' (the name must not exist) or 'w' (it is replaced)")
        for name in given.get("dataset", ()):
            if not name.strip("/ "):
                raise ConfigError(f"dataset is {name!r}; expected the name of an array, such as '/rho', or '*'")
        own = {"dtype": None if checked.dtype is None else checked.dtype.name, "staging": checked.staging}
        own |= {"verify": checked.verify, "allow_external": checked.allow_external, "allow_filters": checked.allow_filters}
        own |= {"untrusted": checked.untrusted}
        return cls(source, target, **{**given, **own})

    @property
    def access(self) -> Access:
        """What the caller allows."""
        staging = _STAGING_NBYTES if isinstance(self.staging, str) else self.staging
        limits = Limits(staging, None if self.timeout is None else self.timeout / 4) if self.untrusted else None
        return Access(self.allow_external, frozenset(self.allow_filters), limits)

    def describe(self) -> dict[str, str]:
        """What all ranks must pass alike, as text."""
        return {name: repr(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class _Found:
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
            else [np.asarray(spec.fill_value).dtype.str, np.asarray(spec.fill_value).tobytes().hex()]
        )
        stored = {
            "shape": spec.shape,
            "dtype": spec.dtype.name if spec.dtype.kind == "V" else spec.dtype.str,
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
    def from_dict(cls, found: dict[str, Any]) -> _Found:
        """The inverse, after JSON made lists of tuples."""
        spec, where = dict(found["spec"]), found["where"]
        dtype = np.dtype(spec.pop("dtype"))
        fill, compression = spec.pop("fill_value"), spec.pop("compression")
        if fill is not None:
            fill = np.frombuffer(bytes.fromhex(fill[1]), np.dtype(fill[0]))[0]
        if compression is not None:
            options = {key: tuple(v) if isinstance(v, list) else v for key, v in compression["options"].items()}
            compression = Compression(**{**compression, "options": options})
        made = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.items()}
        selection = Selection(Region(tuple(where["start"]), tuple(where["stop"])), tuple(where["kept"]))
        state = None if found["state"] is None else tuple(found["state"])
        whole = ArraySpec(dtype=dtype, compression=compression, fill_value=fill, **made)
        return cls(ArrayInfo.from_dict(found["info"]), selection, found["name"], whole, state)


@dataclass(frozen=True)
class CopyPlan:
    """What a copy will do, the same on all ranks.

    Attributes
    ----------
    names : tuple of str
        Names of the arrays in the target.
    infos : tuple of ArrayInfo
        They in the source.
    specs : tuple of ArraySpec
        They in the target, as it will be.
    arrays : tuple of Copied
        Slabs.
    memory : Memory
        How a rank uses its staging memory.
    staging_nbytes : int
        The cap.
    n_ranks, n_rounds : int
        Ranks, and rounds of the rank that has most.
    notes : tuple of str
        What is left out.
    """

    names: tuple[str, ...]
    infos: tuple[ArrayInfo, ...]
    specs: tuple[ArraySpec, ...]
    arrays: tuple[Copied, ...]
    memory: Memory
    staging_nbytes: int
    n_ranks: int
    n_rounds: int
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all values in memory."""
        return sum(int(np.prod(one.unit.shape, dtype=object)) * one.unit.itemsize for one in self.arrays)

    def describe(self, target: str) -> list[str]:
        """The plan, for people: lines."""
        n = len(self.names)
        ranks = f"{self.n_ranks} rank{'s' * (self.n_ranks != 1)}"
        lines = [
            f"copy of {n} array{'s' * (n != 1)}, {format_nbytes(self.nbytes)}, to '{target}' on {ranks}, {self.n_rounds} "
            f"round{'s' * (self.n_rounds != 1)}"
        ]
        for name, info, spec, one in zip(self.names, self.infos, self.specs, self.arrays, strict=True):
            way = "all ranks read a slab together" if one.is_together else "each slab is read by one rank"
            if one.slabs.n_cells == 1 and not one.is_together:
                way = "one rank reads it"
            elif one.slabs.n_cells:
                way += f", {one.slabs.n_cells} slabs of {_text(tuple(map(min, one.slabs.cell, one.slabs.shape)))}"
            lines.append(
                f"{name}: {_text(spec.shape)} {spec.dtype}, chunks {_text(info.chunks)} -> {_text(spec.chunks)}; {way}"
            )
            if one.unit.is_decoded and one.factor > 1:
                lines.append(
                    f"  each chunk of the source is decoded {one.factor:.2g} times: slabs with whole chunks of both do not fit. More "
                    "staging= or more ranks make it less"
                )
            elif one.unit.is_decoded:
                lines.append("  each chunk of the source is decoded once")
        memory = self.memory
        lines.append(
            f"memory of a rank: at most {format_nbytes(memory.nbytes)} of {format_nbytes(self.staging_nbytes)}, "
            f"{format_nbytes(memory.round_nbytes)} a round"
        )
        return [*lines, *self.notes]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON's types."""
        arrays = [
            {
                "name": name,
                "source": info.dataset,
                "shape": spec.shape,
                "dtype": str(spec.dtype),
                "chunks_before": info.chunks,
                "chunks": spec.chunks,
                "shards": spec.shards,
                "slab": one.slabs.cell,
                "n_slabs": one.slabs.n_cells,
                "is_together": one.is_together,
                "decoded": one.factor,
            }
            for name, info, spec, one in zip(self.names, self.infos, self.specs, self.arrays, strict=True)
        ]
        sizes = {"nbytes": self.nbytes, "staging_nbytes": self.staging_nbytes, "memory_nbytes": self.memory.nbytes}
        return {"arrays": arrays, **sizes, "n_ranks": self.n_ranks, "n_rounds": self.n_rounds, "notes": self.notes}


def _text(shape: Sequence[int] | None) -> str:
    return "in one piece" if shape is None else " x ".join(map(str, shape)) or "scalar"


@dataclass(frozen=True)
class CopyReport:
    """What a copy did, in the whole job.

    Attributes
    ----------
    plan : CopyPlan
        What was planned.
    written : Written or None
        What was written; None if it was only planned.
    seconds : float
        On this rank.
    n_decoded : int
        Chunks of the source that were decoded.
    notes : tuple of str
        What a reader of the copy should know: what was left out, and chunks that the source does not store.
    """

    plan: CopyPlan
    written: Written | None = None
    seconds: float = 0.0
    n_decoded: int = 0
    notes: tuple[str, ...] = ()


def copy_file(
    request: CopyRequest,
    *,
    comm: Any = None,
    only_plan: bool = False,
    progress: bool | Callable[[int, int], None] | None = None,
) -> CopyReport:
    """Copy arrays of a file into a new file. Collective: yes.

    Parameters
    ----------
    request : CopyRequest
        What is asked for, the same on all ranks.
    comm : mpi4py.MPI.Comm, optional
        The ranks; default: COMM_WORLD, or this process alone.
    only_plan : bool
        True to write nothing.
    progress : bool, callable or None
        As in `load`.

    Raises
    ------
    ConfigError, SourceError, PeerError, VerifyError, StallError
        On all ranks the same. Nothing was saved, and what had the name of the target is as it was.
    """
    group = group_of(comm, request.timeout)
    with group.call(request.timeout) as refusal:
        title = f"copy of '{request.source}'"
        group.watch.begin(title, request.timeout)
        _ = group.machine  # collective the first time, and here every rank is present
        group.settle(Invocation("copy", title, request.describe()), refusal)
        try:
            return _Copy(group, request).run(only_plan, progress)
        finally:
            if not group.watch.is_stalled:
                group.watch.close()


class _Copy:
    """One rank's part in a copy."""

    def __init__(self, group: Group, request: CopyRequest) -> None:
        self._group, self._request = group, request
        self._started = time.perf_counter()

    def run(self, only_plan: bool, progress: Any) -> CopyReport:
        group, request = self._group, self._request
        group.watch.enter("metadata")
        own: list[Sink] = []

        def find() -> str:
            found, groups, notes = _find(request)
            own.append(_make_sink(request, found, groups, group.machine.n_nodes))
            return json.dumps([[one.to_dict() for one in found], notes])

        told, notes = json.loads(group.tell(find, 0))
        group.watch.enter("plan")
        error, planned, found, sink = None, None, [], None
        try:
            found = [_Found.from_dict(one) for one in told]
            sink = own[0] if own else _make_sink(request, found, {}, group.machine.n_nodes)
            planned = _plan(request, found, sink, group, notes)
        except Exception as raised:
            let_interruption_pass(raised)
            error = raised
        group.agree(error)
        if planned is None or sink is None:
            raise ValueError("nothing was planned")
        if only_plan:
            return CopyReport(planned, notes=tuple(notes))
        rounds = plan_rounds(planned.arrays, group.size, planned.memory.round_nbytes)
        reading = _Reading(group, request, found, planned, rounds[group.rank], sum(one.is_together for one in rounds[0]))
        mine = sum(
            sum(item.slab.size * planned.arrays[item.array].unit.itemsize for item in one.items) for one in rounds[group.rank]
        )
        of_all = [one for one in rounds[group.rank] if one.is_together]
        shared = sum(item.slab.size * planned.arrays[item.array].unit.itemsize for one in of_all for item in one.items)
        total = mine - shared + shared // group.size
        with progress_of(progress, f"copy to {request.target}", total, group.rank) as advance, reading:
            written = write_file(
                group,
                sink,
                reading.rounds(),
                verify=request.verify,
                n_threads=planned.memory.n_threads,
                on_progress=advance,
            )
        n_decoded, *missing = group.agree(None, [reading.n_decoded, *reading.n_missing])
        lost = [
            f"{n:,} chunk{'s' * (n != 1)} of {one.info} {'are' if n != 1 else 'is'} not stored; the copy has the fill value there"
            for one, n in zip(found, missing, strict=True)
            if n
        ]
        seconds = time.perf_counter() - self._started
        return CopyReport(planned, written, seconds, n_decoded, (*notes, *lost))


# --- what is asked for


def _make_sink(request: CopyRequest, found: Sequence[_Found], groups: Mapping[str, Any], n_nodes: int) -> Sink:
    saving = import_module("shardload.formats.saving")
    alignment = _PAGE_NBYTES if n_nodes > 1 else 1
    specs = {one.name: one.spec for one in found}
    how = {"format": request.format, "mode": request.mode, "alignment": alignment}
    made: Sink = saving.make_sink(request.target, specs, attrs=groups.get("/", {}), group_attrs=groups, **how)
    return made


def _find(request: CopyRequest) -> tuple[list[_Found], dict[str, Any], list[str]]:
    """On rank 0: the arrays, the attributes of groups, and notes of what is left out."""
    saving = import_module("shardload.formats.saving")
    kind = saving.format_for(request.target, request.format)
    path, inside = split_path(request.source)
    _check_apart(path, request.target)
    names = list(request.dataset) or ([inside] if inside else ["*"])
    if inside and request.dataset:
        raise ConfigError(f"'{request.source}' names an array, and dataset={request.dataset[0]!r} names another. Leave one out")
    notes: list[str] = []
    infos: dict[str, ArrayInfo] = {}
    is_all = not request.dataset and not inside
    with Finder(request.access) as finder:
        for name in names:
            if name == "*" or name.endswith("/*"):
                group = "" if name == "*" else "/" + name[:-2].strip("/")
                below, left_out = finder.find_below(path, group)
                infos |= {info.dataset: info for info, _ in below}
                notes += [f"{one} was left out: it holds {one.refused}" for one in left_out]
            else:
                info = find_array(path, name, request.access)
                infos[info.dataset] = info
    with open_file(path, request.access) as file:
        return _like(request, kind, file, infos, is_all, notes)


def _like(
    request: CopyRequest, kind: str, file: OpenFile, infos: dict[str, ArrayInfo], is_all: bool, notes: list[str]
) -> tuple[list[_Found], dict[str, Any], list[str]]:
    """What is asked of each array."""
    described: dict[str, tuple[ArrayInfo, Properties, State]] = {}
    for name, info in infos.items():
        described[name] = _describe(file, info.dataset, info)
    main = [name for name in described if not _is_beside(name, described)]
    for name in list(described):
        for other in described[name][1].coordinates:
            if other not in described and not is_all:
                try:
                    described[other] = _describe(file, other)
                except (KeyError, OSError, ValueError, RuntimeError, SourceError):
                    continue  # a name that leads nowhere: the array itself is what was asked for
                if described[other][0].refused is not None:
                    notes.append(f"{described[other][0]} was left out: it holds {described[other][0].refused}")
                    del described[other]
    described = {name: one for name, one in described.items() if not one[1].is_dimension}
    main = [name for name in main if name in described] or list(described)
    parts = _parts(request.select, {name: described[name] for name in main})
    asked = _asked(request, {name: described[name][0] for name in main})
    found = []
    for name, (info, properties, state) in described.items():
        selection = _selection(info, properties, parts, request.select if name in main else None)
        spec, more = spec_like(info, properties, selection, kind, _asked_of(asked, info, selection, name in main))
        notes += more
        target = "/data" if name == "/" and not kind.startswith("zarr") else name
        found.append(_Found(info, selection, target, spec, state))
    if not found:
        raise ConfigError(f"'{request.source}' holds no arrays that could be copied")
    _check_asked(request, found, asked, main)
    used = {""} | {name.strip("/")[:k] for name in described for k, c in enumerate(name.strip("/")) if c == "/"}
    groups = {}
    for group, attrs in file.groups().items():
        if group.strip("/") in used:
            kept, _, more = attrs_for(kind, f"group '{group}'", attrs)
            groups[group] = kept
            notes += [f"{what} was left out" for what in more]
    return found, groups, notes


def _describe(file: OpenFile, name: str, expected: ArrayInfo | None = None) -> tuple[ArrayInfo, Properties, State]:
    source = file.open(name)
    try:
        info = source.info if expected is None else expected
        return info, source.properties(), source.state()
    finally:
        source.close()


def _is_beside(name: str, described: Mapping[str, tuple[ArrayInfo, Properties, State]]) -> bool:
    """True for a coordinate of the other arrays, which keeps its own type and layout."""
    return described[name][0].is_coordinate or any(
        name in properties.coordinates for other, (_, properties, _) in described.items() if other != name
    )


def _parts(select: Any, main: Mapping[str, tuple[ArrayInfo, Properties, State]]) -> dict[str, Any]:
    """The selection by names of axes."""
    if select is None:
        return {}
    dims = {dim for _, properties, _ in main.values() for dim in properties.dims if dim}
    if isinstance(select, Mapping):
        for name in select:
            if name not in dims:
                names = some([repr(dim) for dim in sorted(dims)]) or "none"
                raise ConfigError(f"select names the axis {name!r}, which no array has; there are: {names}")
        return dict(select)
    if len(main) > 1:
        names = some(list(main))
        raise ConfigError(
            f"select has positions, and there are {len(main)} arrays: {names}. Name one with dataset=, or select by names of axes, "
            "such as select='time=-1'"
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


def _asked_of(asked: Asked, info: ArrayInfo, selection: Selection, is_main: bool) -> Asked:
    """What is asked of one array: layout only if it has as many axes, compression only if it has chunks."""
    if not is_main:
        return Asked()
    ndim = len(selection.shape)
    chunks, shards, compression = asked.chunks, asked.shards, asked.compression
    if isinstance(chunks, tuple) and len(chunks) != ndim:
        chunks = shards = KEEP
    if isinstance(shards, tuple) and len(shards) != ndim:
        shards = KEEP
    has_chunks = (info.chunks is not None if isinstance(chunks, str) else chunks is not None) and ndim > 0
    if not has_chunks:
        compression = KEEP
    return Asked(asked.dtype, chunks, shards, compression)


def _check_asked(request: CopyRequest, found: Sequence[_Found], asked: Asked, main: Sequence[str]) -> None:
    """ConfigError if something was asked for that no array can have."""
    mine = [one for one in found if one.info.dataset in main]
    for name, sizes in (("chunks", asked.chunks), ("shards", asked.shards)):
        if isinstance(sizes, tuple) and not any(len(one.spec.shape) == len(sizes) for one in mine):
            shapes = some([f"{one.info.dataset} {one.spec.shape}" for one in mine])
            raise ConfigError(
                f"{name} are {sizes}, for {len(sizes)} axes, but no array has so many: {shapes}. Pass one size for each axis"
            )
    is_new = not (isinstance(asked.compression, str) and asked.compression == KEEP)
    wants = is_new and Compression.of(asked.compression) is not None
    if wants and not any(one.spec.chunks is not None for one in mine):
        example = ",".join(str(min(n, 64) or 1) for n in mine[0].spec.shape)
        raise ConfigError(
            f"compression is of chunks, and {mine[0].info} is in one piece. Pass chunks= too, such as chunks='{example}'"
        )


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


# --- the plan


def _plan(request: CopyRequest, found: Sequence[_Found], sink: Sink, group: Group, notes: Sequence[str]) -> CopyPlan:
    machine = group.machine
    page = _PAGE_NBYTES if machine.n_nodes > 1 else 1
    units, specs = [], []
    reading = _LEAST_READING_NBYTES
    largest: tuple[int, _Found | None] = (0, None)
    for one in found:
        name = "/" + one.name.strip("/")
        spec = sink.arrays[name].spec
        layout = _layout(one, None)
        if spec.chunks is None:
            unit, fits = run_units(spec.shape, layout.dtype.itemsize, page)
        else:
            # A file that has chunks at any byte is written by one rank if there are several nodes.
            unit = spec.shards if spec.shards is not None and machine.n_nodes > 1 else spec.chunks
            fits = True
        chunks = layout.chunks if one.info.chunks is not None else _runs(layout)
        units.append(Unit(spec.shape, unit, chunks, one.info.chunks is not None, layout.dtype.itemsize, not fits))
        specs.append(spec)
        reading = max(reading, least_staging(layout))
        if units[-1].unit_nbytes > largest[0]:
            largest = units[-1].unit_nbytes, one
    least = least_nbytes(largest[0], reading)
    staging = max(_STAGING_NBYTES, least) if isinstance(request.staging, str) else request.staging
    if staging < least:
        chunk = "" if largest[1] is None else f", with chunks of {format_nbytes(largest[0])} in '{largest[1].name}'"
        raise ConfigError(
            f"staging is {format_nbytes(staging)}, but this copy needs {format_nbytes(least)}{chunk}. Pass staging='{_mib(least)}MiB', "
            "or smaller chunks="
        )
    memory = plan_memory(staging, largest[0], reading, machine.n_threads)
    arrays = tuple(plan_array(unit, group.size, memory.round_nbytes) for unit in units)
    rounds = plan_rounds(arrays, group.size, memory.round_nbytes)
    names, infos = tuple(one.name for one in found), tuple(one.info for one in found)
    n_rounds = max(len(mine) for mine in rounds)
    return CopyPlan(names, infos, tuple(specs), arrays, memory, staging, group.size, n_rounds, tuple(notes))


def _mib(nbytes: int) -> int:
    return -(-nbytes >> 20)


def _runs(layout: SourceLayout) -> Grid:
    """Stand-ins for the chunks of an array that has none: runs of at most 64 KiB, which are worth a read."""
    shape = layout.chunks.shape
    cell, left = [1] * len(shape), (64 << 10) // layout.file_dtype.itemsize
    for axis in reversed(range(len(shape))):
        cell[axis] = max(1, min(shape[axis], left))
        if cell[axis] < shape[axis]:
            break
        left //= max(1, shape[axis])
    return Grid(shape, tuple(cell), (0,) * len(shape))


def _layout(one: _Found, slab: Region | None) -> SourceLayout:
    """How a slab of the new array, or all of it, lies in the source."""
    selection = one.selection if slab is None else Selection(one.selection.to_file(slab), one.selection.kept)
    file_dtype = np.dtype(one.info.dtype)
    dtype = one.spec.dtype.newbyteorder("=") if one.spec.dtype.kind != "V" else one.spec.dtype
    return SourceLayout.cut(selection, one.info.chunks, file_dtype, dtype, one.info.codec)


# --- reading


@dataclass
class _Own:
    """What this rank reads of one array in one round."""

    array: int
    slab: Region
    layout: SourceLayout
    schedule: Schedule
    pieces: dict[int, Piece] = field(default_factory=dict)


class _Reading:
    """Reads the rounds of one rank. A context manager, which closes what it has opened."""

    def __init__(
        self,
        group: Group,
        request: CopyRequest,
        found: Sequence[_Found],
        planned: CopyPlan,
        rounds: Sequence[Round],
        n_shared: int,
    ) -> None:
        self._group, self._request, self._found, self._planned, self._rounds = group, request, found, planned, rounds
        self._tags = [group.next_tags() for _ in range(n_shared + 1)]  # counted on every rank
        self._segments: Mapping[int, Segment] = group.shared_memory(planned.memory.reading_nbytes) if n_shared else {}
        self._room: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
        self._file: OpenFile | None = None
        self._sources: dict[int, tuple[Source, State]] = {}
        self.n_decoded = 0
        self.n_missing = [0] * len(found)

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        if self._group.watch.is_stalled:
            return  # a thread may hang in a read, and the library would wait for it
        for source, _state in self._sources.values():
            source.close()
        self._sources.clear()
        if self._file is not None:
            self._file.close()

    def rounds(self) -> Iterator[list[Values]]:
        """The chunks of the target, round by round."""
        for number, one in enumerate(self._rounds):
            yield self._read(number, one)
        for array in list(self._sources):
            self._check_unchanged(array)

    def _read(self, number: int, one: Round) -> list[Values]:
        own: list[_Own] = []
        error: Exception | None = None
        buffers: Buffers | None = None
        group, tags = self._group, self._tags[number if one.is_together else -1]
        with ExitStack() as opened:
            moves: list[ArrayMove] = []
            readers: list[SourceReader] = []
            try:
                own = [self._lay_out(item.array, item.slab, one.is_together) for item in one.items]
                self._make_room(number, own)
                staging = plan_staging(
                    [(mine.schedule, mine.layout) for mine in own],
                    self._planned.memory.reading_nbytes,
                    self._planned.memory.n_threads,
                )
                segments = self._segments if one.is_together else {}
                segment = segments.get(group.rank)
                n_slots = staging.n_slots
                shared = None if segment is None else segment.data[: n_slots * aligned(staging.slot_nbytes)]
                bell = Bell() if segment is None else segment.bell
                slots = Slots(n_slots, staging.slot_nbytes, shared)
                buffers = Buffers(slots, Slots(staging.n_pack, staging.pack_nbytes), segments, bell)
                resources = opened.enter_context(Resources(slots, bell, staging.n_threads, staging.batch_nbytes))
                for mine in own:
                    reader = SourceReader(
                        self._source(mine.array),
                        mine.layout,
                        LocalPieces(group.rank, mine.pieces, self._checks),
                        resources,
                        counts=counter_of(mine.schedule, group.rank),
                        convert=cast_into,
                    )
                    readers.append(opened.enter_context(reader))
                    seed, name = crc32(json.dumps([number, mine.array, *tags]).encode()), str(self._found[mine.array].info)
                    flow = BlocksToPieces(mine.schedule)
                    moves.append(ArrayMove(flow, reader, mine.pieces, mine.layout.dtype, None, seed, name))
            except Exception as raised:
                let_interruption_pass(raised)
                error = raised
            if one.is_together:
                group.agree(error)  # a rank that cannot read or receive must say so before anything is sent
            elif error is not None:
                raise error
            if buffers is None:
                raise ValueError("a round without buffers")
            failed, _moved = exchange(group, moves, buffers, tags=tags, checksums=self._checks)
            if failed is not None and not one.is_together:
                raise failed
        if one.is_together:
            group.agree(failed)
        for mine, reader in zip(own, readers, strict=True):
            self.n_decoded += reader.counters.chunks_decoded if mine.layout.has_chunks else 0
            self.n_missing[mine.array] += reader.counters.chunks_missing
        found = [values for mine in own for values in self._values(mine)]
        self._close_some()
        return found

    @property
    def _checks(self) -> bool:
        """True if parts are checksummed on their way."""
        return self._request.verify != INDEX

    def _lay_out(self, array: int, slab: Region, is_together: bool) -> _Own:
        group, planned = self._group, self._planned.arrays[array]
        layout = _layout(self._found[array], slab)
        most = self._planned.memory.reading_nbytes // _BLOCKS_IN_CAP
        if is_together:
            shards = planned.pieces(slab, group.size)
            schedule = plan_schedules(layout, shards, group.size, max_nbytes=most, modes=(PARALLEL,))[PARALLEL]
        else:
            shards = Shards(slab.shape, (1,) * slab.ndim, np.array([[group.rank]], dtype=np.int64))
            schedule = plan_direct(layout, shards, group.size, max_nbytes=most)
        return _Own(array, slab, layout, schedule)

    def _make_room(self, number: int, own: Sequence[_Own]) -> None:
        """Cut the pieces from the memory of a round, which was used three rounds before."""
        wanted = []
        for mine in own:
            shards = mine.schedule.shards
            for shard in shards.shards_of(self._group.rank):
                true = shards.region(shard).intersect(Region.whole(mine.slab.shape))
                if true is not None:
                    wanted.append((mine, shard, true, true.size * mine.layout.dtype.itemsize))
        total = sum(aligned(nbytes) for *_, nbytes in wanted)
        place = number % KEPT_ROUNDS
        while len(self._room) <= place:
            self._room.append(np.empty(0, dtype=np.uint8))
        if self._room[place].nbytes < total:
            self._room[place] = np.empty(0, dtype=np.uint8)
            self._room[place] = np.empty(max(total, self._planned.memory.round_nbytes), dtype=np.uint8)
        at = 0
        for mine, shard, true, nbytes in wanted:
            data = self._room[place][at : at + nbytes].view(mine.layout.dtype).reshape(true.shape)
            mine.pieces[shard] = Piece(true, data)
            at += aligned(nbytes)

    def _values(self, mine: _Own) -> Iterator[Values]:
        """The units of the target that lie in the pieces."""
        name = "/" + self._found[mine.array].name.strip("/")
        planned = self._planned.arrays[mine.array]
        for piece in mine.pieces.values():
            region = piece.region.moved(mine.slab.start)
            for unit in planned.units_in(region):
                back = unit.moved(tuple(-a for a in mine.slab.start))
                yield from self._chunks(name, mine.array, unit, piece.view(back))

    def _chunks(self, name: str, array: int, unit: Region, values: Array) -> Iterator[Values]:
        """The chunks of a unit: several if it is a file of chunks."""
        spec = self._planned.specs[array]
        if spec.chunks is None or self._planned.arrays[array].unit.unit == spec.chunks:
            yield Values(name, unit, values)
            return
        cell = tuple(min(c, n) for c, n in zip(spec.chunks, unit.shape, strict=True))
        inner = Grid(unit.shape, cell, (0,) * unit.ndim)
        for number in range(inner.n_cells):
            region = inner.region(number)
            index: Any = (*region.slices(), ...)
            yield Values(name, region.moved(unit.start), values[index])

    # --- sources

    def _source(self, array: int) -> Source:
        if array not in self._sources:
            one = self._found[array]
            path = split_path(self._request.source)[0]
            if self._file is None:
                self._file = open_file(path, self._request.access)
            source = self._file.open(one.info.dataset)
            found = source.info
            if (found.shape, found.dtype, found.chunks) != (one.info.shape, one.info.dtype, one.info.chunks):
                source.close()
                raise SourceError(
                    f"{found} has shape {found.shape}, {found.dtype}, chunks {found.chunks} here, but rank 0 found "
                    f"{one.info.shape}, {one.info.dtype}, {one.info.chunks}: the file has changed, or this rank sees another file",
                    path=one.info.path,
                    dataset=one.info.dataset,
                )
            self._sources[array] = source, source.state()
            check_same_file(str(one.info), one.state, self._sources[array][1], one.info.path, one.info.dataset)
        return self._sources[array][0]

    def _check_unchanged(self, array: int) -> None:
        source, before = self._sources[array]
        info = self._found[array].info
        check_unchanged(str(info), before, source.state(), info.path, info.dataset)

    def _close_some(self) -> None:
        """Close sources that have been read, if there are many."""
        while len(self._sources) > _MOST_OPEN:
            array = next(iter(self._sources))
            self._check_unchanged(array)
            self._sources.pop(array)[0].close()
