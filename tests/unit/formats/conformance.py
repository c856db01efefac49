"""Which promises does a format make, and how is each of them tested?

1. The test passes a function that writes arrays of many types and shapes. Every value is its own flat index, so
   that a misplaced value shows where it came from.
2. Each promise has one function here, called for each file or array. If it raises, the error is kept with the promise's name,
   and the next promise is tried.
3. A wrong format must not pass by luck. Buffers are filled with two different patterns before a read, and lie between guard
   bytes that must not change. Regions begin and end on and beside the edges of chunks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardload.errors import ShardloadError, SourceError
from shardload.formats.contract.array import ArrayInfo, native_dtype
from shardload.formats.contract.format import Format, Source, open_alone
from shardload.planning.region import Region
from shardload.system.scratch import ThreadScratch
from tests.unit.files import box_of, flat

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(">i2", ">i4", ">i8", ">u2", ">u4", ">u8", ">f2", ">f4", ">f8", ">c8", ">c16"),
)
# Square shapes find swapped axes, which other shapes would refuse. Arrays without elements or without axes must load too.
SHAPES = ((), (11,), (6, 6), (5, 7), (5, 5, 5), (3, 5, 7), (2, 3, 5, 7), (0,), (4, 0, 3))

_MOST_BROKEN = 3  # failures to show for one promise
_GUARD_NBYTES = 64
_FILLS = (0xA5, 0x5A)
_N_THREADS, _N_ROUNDS = 4, 12
_FEW = 12  # regions for checks of what is read another way

# Files of other kinds, which no format may claim.
_FOREIGN: dict[str, bytes] = {
    "an empty file": b"",
    "a file of zeros": bytes(4096),
    "a text": b"time, density\n0.0, 1.0\n" * 64,
    "an HDF5 file's first bytes": b"\x89HDF\r\n\x1a\n" + bytes(2048),
    "a .npy file's first bytes": b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', ",
    "a zip file's first bytes": b"PK\x03\x04" + bytes(256),
}

Array = np.ndarray[Any, Any]
Write = Callable[[str, dict[str, Array]], None]
WriteMissing = Callable[[str], tuple[Array, Collection[tuple[int, ...]]]]


class ConformanceError(AssertionError):
    """A format breaks promises. The text names each of them."""


def check_format(
    file_format: Format,
    write: Write,
    *,
    folder: str | os.PathLike[str],
    suffix: str = "",
    dtypes: Sequence[str] = DTYPES,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    write_missing: WriteMissing | None = None,
) -> None:
    """Raise `ConformanceError` unless a format keeps every promise of `Format` and `Source`.

    Parameters
    ----------
    file_format : Format
        The format to test.
    write : callable
        ``write(path, arrays)`` writes a file (or a folder) at `path` with these arrays, and replaces an existing one. The keys
        are names such as ``"a"`` and ``"group/b"``.
    folder : str or PathLike
        Folder for the files.
    suffix : str
        Suffix of the file names.
    dtypes, shapes : sequence
        What the format can hold. Default: all types that JAX has, in both byte orders.
    write_missing : callable, optional
        For formats that can leave chunks out. ``write_missing(path)`` writes a file with one array that has missing chunks. It
        returns the array's values, with the fill value in missing chunks, and the indices of those chunks.
    """
    findings = Findings(f"the format {file_format.name}")
    files = _Files(file_format, write, Path(folder), suffix)
    arrays = {f"t{k}": flat((5, 7), dtype, first=1) for k, dtype in enumerate(dtypes)}
    arrays |= {f"group/s{k}": flat(shape, dtypes[-1] if k % 2 else dtypes[0], first=1) for k, shape in enumerate(shapes)}
    path, names = files.write(arrays)
    with findings.promise("lists every array of a file, as it is"):
        _check_listing(file_format, path, names, arrays)
    with findings.promise("raises KeyError(name) for a name that is not there"):
        _check_other_names(file_format, path, names)
    with findings.promise("opens what it lists"), file_format.open_file(path) as file:
        for name, dataset in names.items():
            _check_source(findings, partial(file.open, dataset), arrays[name])
    with findings.promise("opens an array just so if it is given its description, as each rank of a load is"):
        _check_planned(file_format, path, names, arrays)
    with findings.promise("claims its own files, whatever they are called, no other files, nor objects"):
        _check_claims(file_format, files, path)
    if not findings.broken:  # otherwise these checks would fail for the same reasons
        with findings.promise("has a state that changes with the file"):
            _check_change(files, arrays["t0"].dtype)
        with findings.promise("gives back what it opened"):
            _check_descriptors(files)
        with findings.promise("says so where a file was cut"):
            _check_cut(files)
        if write_missing is not None:
            with findings.promise("names the chunks that are missing"):
                _check_missing(files, write_missing)
    findings.raise_all()


def check_source(open_source: Callable[[], Source], expected: Array, *, is_handed_in: bool = False) -> None:
    """Raise `ConformanceError` unless the source that `open_source` opens gives exactly `expected`.

    `open_source` opens the array again each time. `is_handed_in`: the array is open already, and `close` leaves it open.
    """
    findings = Findings("the source")
    _check_source(findings, open_source, expected, is_handed_in)
    findings.raise_all()


def _check_source(findings: Findings, open_source: Callable[[], Source], expected: Array, is_handed_in: bool = False) -> None:
    for promise, check in _OF_A_SOURCE.items():
        with findings.promise(promise), contextlib.closing(open_source()) as source:
            check(source, expected)
    with findings.promise("gives nothing after it was closed"):
        _check_closing(open_source, expected, is_handed_in)
    with findings.promise("is read from any thread, and by several at once, each with a source of its own"):
        _check_threads(open_source, expected)


# --- what was found


class Findings:
    """The broken promises of `what`, with their failures."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self.broken: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def promise(self, promise: str) -> Iterator[None]:
        """Test a promise inside this context: an error means that it is broken, and is kept."""
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, ConformanceError) else f"{type(error).__name__}: "
            self.broken.setdefault(promise, []).append(f"{kind}{error}")

    def raise_all(self) -> None:
        """Raise `ConformanceError` if any promise is broken."""
        lines = [f"{self._subject} breaks {len(self.broken)} of its promises:"]
        for promise, texts in self.broken.items():
            more = f" (and {len(texts) - _MOST_BROKEN} more)" if len(texts) > _MOST_BROKEN else ""
            lines += [f"- It {promise}. No:{more}", *(f"    {text}" for text in texts[:_MOST_BROKEN])]
        if self.broken:
            raise ConformanceError("\n".join(lines))


def expect(is_so: bool, text: str) -> None:
    """The promise is broken, as the text says, unless `is_so`."""
    if not is_so:
        raise ConformanceError(text)


class _Files:
    """Writes arrays into new files of the format."""

    def __init__(self, file_format: Format, write: Write, folder: Path, suffix: str) -> None:
        self.format, self._write = file_format, write
        self._folder, self._suffix, self._numbers = folder, suffix, itertools.count()

    def path(self) -> str:
        """The path of a file that does not exist yet."""
        while (path := self._folder / f"file{next(self._numbers)}{self._suffix}").exists():
            pass
        return str(path)

    def write(self, arrays: dict[str, Array], path: str | None = None) -> tuple[str, dict[str, str]]:
        """Write one file. Returns its path, and the full name in it of each array."""
        path = path or self.path()
        self._write(path, arrays)
        return path, {name: f"/{name}" for name in arrays}

    def open(self, path: str, dataset: str) -> contextlib.closing[Source]:
        """Open an array of a file, for a ``with`` statement."""
        return contextlib.closing(open_alone(self.format.open_file(path), dataset))


def _list(file_format: Format, path: str) -> list[ArrayInfo]:
    with file_format.open_file(path) as file:
        return file.list_arrays()


def _fields(file_format: Format, path: str) -> list[ArrayInfo]:
    """The listed arrays, without the coordinates that a library writes by itself."""
    return [info for info in _list(file_format, path) if not info.is_coordinate]


def _copy(path: str, target: str) -> str:
    shutil.copytree(path, target) if os.path.isdir(path) else shutil.copy(path, target)
    return target


# --- promises of a source


def _check_info(source: Source, expected: Array) -> None:
    native = native_dtype(expected.dtype)
    for _ in range(2):
        _check_described(source.info, expected)
        is_native = source.dtype == native and source.dtype.isnative
        expect(is_native, f"dtype is {source.dtype!r} of {source.info}, expected {native!r}")
        source.read_into(Region.whole(expected.shape), np.empty(expected.shape, native))


def _check_described(info: ArrayInfo, expected: Array) -> None:
    native = native_dtype(expected.dtype)
    expect(info.refused is None, f"{info} is refused: it holds {info.refused}")
    expect(info.shape == expected.shape, f"shape of {info} is {info.shape}, expected {expected.shape}")
    expect(info.dtype == native.name, f"dtype of {info} is {info.dtype!r}, expected {native.name!r}, NumPy's name")
    expect(info.dataset.startswith("/"), f"the name {info.dataset!r} does not begin with '/'")
    for name, cells in (("chunks", info.chunks), ("shards", info.shards)):
        fits = cells is None or (len(cells) == len(info.shape) and all(type(n) is int and n > 0 for n in cells))
        expect(fits, f"{name} of {info} are {cells}, expected None or a positive length for each of {len(info.shape)} axes")
    try:
        copy = _through_json(info)
    except (TypeError, ValueError) as error:
        raise ConformanceError(f"what is known of {info} cannot be sent to another rank: {error}") from None
    expect(json.dumps(copy.to_dict()) == json.dumps(info.to_dict()), f"what is known of {info} is another after JSON")


def _through_json(info: ArrayInfo) -> ArrayInfo:
    return ArrayInfo.from_dict(json.loads(json.dumps(info.to_dict())))


def _regions(shape: tuple[int, ...], chunks: tuple[int, ...] | None = None, most: int | None = None) -> list[Region]:
    """The whole array, its ends, single elements, planes, regions on and beside the edges of chunks, and a few random ones."""
    return list(itertools.islice(_make_regions(shape, chunks), most))


def _make_regions(shape: tuple[int, ...], chunks: tuple[int, ...] | None) -> Iterator[Region]:
    yield Region.whole(shape)
    if 0 in shape:
        return
    yield Region(tuple(n - 1 for n in shape), shape)
    yield Region((0,) * len(shape), (1,) * len(shape))
    if not shape:
        return
    cells = chunks or [max(1, n // 2) for n in shape]
    for axis, (n, cell) in enumerate(zip(shape, cells, strict=True)):
        edges = sorted({0, 1, cell - 1, cell, cell + 1, 2 * cell, n - 1, n} & set(range(n + 1)))
        for k, (a, b) in enumerate([*itertools.pairwise(edges), *zip(edges, edges[2:], strict=False)]):
            bounds = [(0, m) if k % 2 else (m // 3, m // 3 + 1) for m in shape]
            bounds[axis] = (a, b)
            yield Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
        nothing = [(0, m) for m in shape]
        nothing[axis] = (n // 2, n // 2)
        yield Region(tuple(a for a, _ in nothing), tuple(b for _, b in nothing))
    chance = np.random.default_rng(len(shape))
    for _ in range(8):
        ends = [sorted(chance.integers(0, n + 1, 2).tolist()) for n in shape]
        yield Region(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def _check_values(source: Source, expected: Array) -> None:
    for region in _regions(expected.shape, source.info.chunks):
        for fill in _FILLS:
            out = _read(source, region, fill)
            _compare(source.info, region, out, expected)
            out.reshape(-1).view(np.uint8)[:] = 0x77  # the buffer is the caller's: the next read must not see it


def _read(source: Source, region: Region, fill: int = _FILLS[0]) -> Array:
    """Call `read_into` on a buffer full of `fill`, between guard bytes that it must not change."""
    nbytes = region.size * source.dtype.itemsize
    memory = np.full(nbytes + 2 * _GUARD_NBYTES, fill, np.uint8)
    out = memory[_GUARD_NBYTES : _GUARD_NBYTES + nbytes].view(source.dtype).reshape(region.shape)
    source.read_into(region, out)
    is_whole = bool(np.all(memory[:_GUARD_NBYTES] == fill) and np.all(memory[_GUARD_NBYTES + nbytes :] == fill))
    expect(is_whole, f"the read of {region} of {source.info} wrote outside of the buffer")
    return out


def _compare(info: ArrayInfo, region: Region, found: Array, expected: Array) -> None:
    """Compare bit by bit: equal NaNs are the same, and -0.0 is not 0.0."""
    native: Any = native_dtype(expected.dtype)
    index: Any = (*region.slices(), ...)
    right = expected[index].astype(native, order="C")
    expect(found.shape == right.shape, f"{region} of {info} has shape {found.shape}, expected {right.shape}")
    if found.tobytes() == right.tobytes():
        return
    bits = [np.frombuffer(values.tobytes(), f"V{right.itemsize}") for values in (found, right)]
    differing = np.flatnonzero(bits[0] != bits[1])
    first = tuple(int(k) for k in np.unravel_index(differing[0], right.shape))
    element, value = tuple(a + k for a, k in zip(region.start, first, strict=True)), found[first]
    hint, places = "", np.argwhere(expected.astype(native) == value)
    if any(value.tobytes() == bytes([fill]) * right.itemsize for fill in _FILLS):
        hint = " (nothing was written there)"
    elif len(places):
        hint = f" (that value belongs at {tuple(places[0].tolist())})"
    raise ConformanceError(
        f"{region} of {info} has {len(differing)} wrong values of {right.size}: at {element} is {value}, expected "
        f"{right[first]}{hint}"
    )


def _check_refusals(source: Source, expected: Array) -> None:
    shape, dtype, info = expected.shape, source.dtype, source.info
    beyond = tuple(n + 1 for n in shape)
    for region in [Region(shape, beyond), Region((0,) * len(shape), beyond)] if shape else [Region((0,), (1,))]:
        out = np.full(region.shape, 77).astype(dtype)
        _expect_value_error(partial(source.read_into, region, out), f"the region {region} outside of {info}, {shape}")
    if 0 in shape:
        return
    whole, locked = Region.whole(shape), np.empty(shape, dtype)
    locked.flags.writeable = False
    mistyped = np.empty(shape, "u2" if dtype.itemsize != 2 else "u4")
    buffers = {"of another type": mistyped, "with an axis more": np.empty((*shape, 2), dtype), "locked": locked}
    if shape:
        buffers["that is one element short"] = np.empty((shape[0] - 1, *shape[1:]), dtype)
    for flaw, buffer in buffers.items():
        _expect_value_error(partial(source.read_into, whole, buffer), f"a buffer {flaw} for {whole} of {info}")
    if max(shape, default=0) > 1:
        strided = np.full((*shape[:-1], 2 * shape[-1] + 1), 77).astype(dtype)[..., :-1:2]
        with contextlib.suppress(ValueError):  # a ValueError is right, and so are right values
            source.read_into(whole, strided)
            _compare(info, whole, strided, expected)


def _expect_value_error(call: Callable[[], None], refused: str) -> None:
    try:
        call()
    except ValueError:
        return
    except Exception as error:
        raise ConformanceError(f"{type(error).__name__} instead of ValueError for {refused}: {error}") from None
    raise ConformanceError(f"no error for {refused}: call `check_request` first")


def _check_expected(source: Source, expected: Array) -> None:
    """Told that the middle of the array alone will be read, the source still gives all of it."""
    shape = expected.shape
    if 0 in shape:
        return
    middle = Region(tuple(n // 3 for n in shape), tuple(max(n // 3 + 1, 2 * n // 3) for n in shape))
    source.expect(middle)
    for region in (middle, *_regions(shape, source.info.chunks, _FEW)):
        _compare(source.info, region, _read(source, region), expected)
    _check_written(source, expected)
    _check_chunks(source, expected)


def _check_other_ways(source: Source, expected: Array) -> None:
    for region in _regions(expected.shape, source.info.chunks, _FEW):
        plain, view = np.asarray(source.plain(region)), source.view(region)
        expect(native_dtype(plain.dtype) == source.dtype, f"plain({region}) of {source.info} is {plain.dtype}")
        _compare(source.info, region, plain.astype(source.dtype), expected)
        if view is not None:
            _compare(source.info, region, view.copy(order="C"), expected)


def _check_written(source: Source, expected: Array) -> None:
    """No chunk is missing here, except that a format may leave out chunks that are equal to their fill value."""
    for region in _regions(expected.shape, source.info.chunks):
        for index in source.read_into(region, np.empty(region.shape, source.dtype)):
            values = expected[_cell(source.info, index).slices()] if source.info.chunks else expected
            same = values.size == 0 or bool((values == values.reshape(-1)[0]).all())
            expect(same, f"the read of {region} of {source.info} names the chunk {index} as missing, which was written")


def _cell(info: ArrayInfo, index: Sequence[int]) -> Region:
    chunks = info.chunks or ()
    start = tuple(k * c for k, c in zip(index, chunks, strict=True))
    return Region(start, tuple(min(a + c, n) for a, c, n in zip(start, chunks, info.shape, strict=True)))


def _check_chunks(source: Source, expected: Array, missing: Collection[tuple[int, ...]] | None = None) -> None:
    """As a load does it: each thread has memory that it uses again, and passes its target in several shapes.

    `missing`: the chunks that are not stored, if that is known.
    """
    reader, info = source.chunk_reader(), source.info
    if reader is None:
        return
    expect(info.chunks is not None, f"{info} has a chunk_reader and no chunks")
    chunks = info.chunks or ()
    counts = [-(-n // c) for n, c in zip(info.shape, chunks, strict=True)]

    def check(box: Sequence[range]) -> None:
        sizes, indices = tuple(map(len, box)), [*itertools.product(*box)]
        nbytes = math.prod((*sizes, *chunks)) * source.dtype.itemsize
        room = partial(ThreadScratch().bytes, "encoded")
        room(2 * nbytes)  # now it gives the same memory each time
        for cut, is_plain in itertools.product([(len(indices),), sizes, *[()] * (len(indices) == 1)], (False, True)):
            out = np.full(nbytes, _FILLS[0], np.uint8).view(source.dtype).reshape((*cut, *chunks))
            if not is_plain:
                encoded = reader.fetch(box, room)
                reader.decode(encoded, out)
                given = {index for index, data in zip(indices, encoded.data, strict=True) if data is None}
                right = given if missing is None else set(missing) & set(indices)
                expect(given == right, f"fetch({box}) of {info} gives None for {sorted(given)}, expected {sorted(right)}")
            elif not reader.read_plain(box, out):
                continue
            for values, index in zip(out.reshape((-1, *chunks)), indices, strict=True):
                cell = _cell(info, index)
                inside: Any = (*(slice(0, n) for n in cell.shape), ...)
                _compare(info, cell, values[inside].copy(order="C"), expected)

    boxes = [box_of(index) for index in np.ndindex(*counts)] * 2
    if boxes:
        boxes.append(tuple(range(min(2, n)) for n in counts))
    with ThreadPoolExecutor(_N_THREADS) as pool:
        list(pool.map(check, boxes))


def _check_state(source: Source, expected: Array) -> None:
    first, second, before = source.state(), source.state(), source.opened_in
    expect(first == second, f"state() of {source.info} is {first}, then {second}, and nothing has changed")
    expect(before == first, f"opened_in of {source.info} is {before}, its state() {first}, and nothing has changed")
    fits = first is None or (isinstance(first, tuple) and all(type(n) is int for n in first))
    expect(fits, f"state() of {source.info} is {first!r}, expected a tuple of int, or None")


_OF_A_SOURCE: dict[str, Callable[[Source, Array], None]] = {
    "says what the array is, before and after a read": _check_info,
    "delivers each value of each region, in native byte order, and keeps nothing of the caller's buffer": _check_values,
    "refuses a region outside of the array, and a buffer that does not fit": _check_refusals,
    "delivers the same by plain(), and by view(), or None": _check_other_ways,
    "names no chunk as missing that was written": _check_written,
    "delivers the same chunk by chunk, in several threads": _check_chunks,
    "delivers all of the array, also after it was told that a part will be read": _check_expected,
    "has a state that stays while nothing changes": _check_state,
}


def _check_closing(open_source: Callable[[], Source], expected: Array, is_handed_in: bool) -> None:
    source, whole = open_source(), Region.whole(expected.shape)
    out = np.empty(expected.shape, native_dtype(expected.dtype))
    with contextlib.closing(source):
        source.read_into(whole, out)
    source.close()
    source.state()
    if expected.size == 0 or is_handed_in:
        return
    try:
        source.read_into(whole, out)
    except Exception:
        return
    raise ConformanceError(f"{source.info} is read after close(), without an error")


def _check_threads(open_source: Callable[[], Source], expected: Array) -> None:
    regions = _regions(expected.shape, most=8)
    with contextlib.ExitStack() as opened:
        sources = [opened.enter_context(contextlib.closing(open_source())) for _ in range(_N_THREADS)]

        def work(k: int) -> None:
            for n in range(_N_ROUNDS):
                region = regions[(n + k) % len(regions)]
                _compare(sources[k].info, region, _read(sources[k], region), expected)

        for source in sources:
            _read(source, regions[0])  # in this thread first
        with ThreadPoolExecutor(_N_THREADS) as pool:
            list(pool.map(work, range(_N_THREADS)))


# --- promises of a format


def _check_listing(file_format: Format, path: str, names: Mapping[str, str], arrays: Mapping[str, Array]) -> None:
    infos = _list(file_format, path)
    listed = {info.dataset: info for info in infos}
    fields = sorted(info.dataset for info in infos if not info.is_coordinate)
    expect(fields == sorted(names.values()), f"'{path}' holds {sorted(names.values())}, and {fields} are listed")
    for name, dataset in names.items():
        expect(listed[dataset].path == path, f"the path of '{dataset}' is {listed[dataset].path!r}, expected {path!r}")
        _check_described(listed[dataset], arrays[name])
    second_listing = [json.dumps(info.to_dict()) for info in _list(file_format, path)]
    expect(second_listing == [json.dumps(info.to_dict()) for info in infos], f"'{path}' is listed another way the second time")
    with file_format.open_file(path) as file:
        sketched = file.list_arrays(most=1, like=next(iter(names.values())))
    expect(len(sketched) == min(2, len(infos)), f"{len(sketched)} arrays of '{path}' are listed with most=1, of {len(infos)}")


def _check_planned(file_format: Format, path: str, names: Mapping[str, str], arrays: Mapping[str, Array]) -> None:
    planned = {info.dataset: _through_json(info) for info in _list(file_format, path)}
    with file_format.open_file(path) as file:
        for name, dataset in names.items():
            with contextlib.closing(file.open(dataset, planned[dataset])) as source:
                _check_described(source.info, arrays[name])
                whole = Region.whole(arrays[name].shape)
                _compare(source.info, whole, _read(source, whole), arrays[name])
                _check_chunks(source, arrays[name])


def _check_other_names(file_format: Format, path: str, names: Mapping[str, str]) -> None:
    for name in {"/no such array", "/t0/below", "/group"} - set(names.values()):
        try:
            open_alone(file_format.open_file(path), name).close()
        except KeyError as error:
            expect(error.args == (name,), f"KeyError{error.args} for '{name}' in '{path}', expected KeyError({name!r})")
        else:
            raise ConformanceError(f"'{name}' in '{path}' can be opened, and was never written")


def _check_claims(file_format: Format, files: _Files, own_path: str) -> None:
    expect(file_format.claims_path(own_path), f"'{own_path}' is not claimed")
    renamed = _copy(own_path, f"{files.path()}.bin")
    expect(file_format.claims_path(renamed), f"'{own_path}' is not claimed under the name '{renamed}'")
    head = b"" if os.path.isdir(own_path) else Path(own_path).read_bytes()[:4]
    for kind, content in _FOREIGN.items():
        if not head or content[:4] != head:
            Path(path := files.path()).write_bytes(content)
            expect(not file_format.claims_path(path), f"{kind} is claimed")
    os.mkdir(empty := files.path())
    expect(not file_format.claims_path(empty), "an empty folder is claimed")
    expect(not file_format.claims_path(files.path()), "a path where nothing is is claimed")
    odd: Any
    for odd in (None, 3, "text", {}):
        expect(not file_format.claims_object(odd), f"the object {odd!r} is claimed")


def _check_change(files: _Files, dtype: np.dtype[Any]) -> None:
    path, states = files.path(), []
    for shape in ((5, 7), (50, 70)):
        values = flat(shape, dtype, first=1)
        _, names = files.write({"a": values}, path)
        with files.open(path, names["a"]) as source:
            states.append(source.state())
            _compare(source.info, Region.whole(shape), _read(source, Region.whole(shape)), values)
    expect(None not in states, f"state() of '{path}' is None: nobody would notice that the file changes")
    expect(states[0] != states[1], f"state() of '{path}' is {states[0]} before and after it was written anew")


def _check_descriptors(files: _Files) -> None:
    path, names = files.write({"a": flat((24, 30, 7), first=1)})

    def count() -> int:
        files.format.claims_path(path)
        with files.open(path, names["a"]) as source:
            _read(source, Region.whole(source.info.shape))
        with contextlib.suppress(KeyError):
            files.open(path, "/no such array")
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    _, before, *after = [count() for _ in range(6)]  # libraries may open files that they keep for good
    expect(after[-1] <= before, f"{after[-1] - before} descriptors stay open after four times opening and closing '{path}'")


def _check_cut(files: _Files) -> None:
    values = flat((24, 30, 7), first=1)
    whole, names = files.write({"a": values})
    parts = [whole] if os.path.isfile(whole) else sorted(str(path) for path in Path(whole).rglob("*") if path.is_file())
    for part in parts[:8]:
        size = os.path.getsize(part)
        for nbytes in sorted({0, 1, size // 3, size // 2, size - 1} & set(range(size))):
            cut = _copy(whole, files.path())
            os.truncate(cut + part.removeprefix(whole), nbytes)
            _check_damaged(files, cut, names["a"], values, f"'{part}' cut to {nbytes} of {size} bytes")


def _check_damaged(files: _Files, cut: str, name: str, values: Array, damage: str) -> None:
    """Right values are fine, and so are errors that become a SourceError."""
    try:
        if files.format.claims_path(cut):
            with files.open(cut, name) as source:
                whole = Region.whole(source.info.shape)
                _compare(source.info, whole, _read(source, whole), values)
    except ConformanceError as error:
        raise ConformanceError(f"{damage}: {error}, without an error") from None
    except BaseException as error:
        text = f"{damage}: {type(error).__name__}: {error}"
        is_sound = isinstance(error, KeyError) and error.args == (name,)
        expect(not is_sound, f"{text}, which says that the file is sound and has no such array")
        expect(not isinstance(error, MemoryError | RecursionError), f"{text}, so damage takes all memory")
        expect(isinstance(error, Exception), f"{text}, which ends the program")
        is_other = isinstance(error, ShardloadError) and not isinstance(error, SourceError)
        expect(not is_other, f"{text}, instead of SourceError")


def _check_missing(files: _Files, write_missing: WriteMissing) -> None:
    path = files.path()
    values, indices = write_missing(path)
    (info,) = _fields(files.format, path)
    with files.open(path, info.dataset) as source:
        for region in _regions(info.shape, info.chunks):
            _compare(info, region, _read(source, region), values)
            meeting = {index for index in indices if region.size and (not index or _cell(info, index).intersect(region))}
            reported = set(map(tuple, source.read_into(region, np.empty(region.shape, source.dtype))))
            expect(reported == meeting, f"missing in {region} of {info} is {sorted(reported)}, expected {sorted(meeting)}")
        _check_chunks(source, values, indices)
