"""Which promises does a format make, and how is each of them tested?

1. The format's author passes a function that writes arrays of many types and shapes. Every value is its own flat index, so
   that a misplaced value shows where it came from.
2. Each promise has one function here, called for each file or array. If it raises, the error is kept with the promise's name,
   and the next promise is tried.
3. A wrong format must not pass by luck. Buffers are filled with two different patterns before a read, and lie between guard
   bytes that must not change. Regions begin and end on and beside the edges of chunks.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from shardload.errors import ShardloadError
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.chunk_reader import fresh
from shardload.formats.contract.dtypes import native_dtype
from shardload.formats.contract.format import Format, Source
from shardload.planning.region import Region

__all__ = ["DTYPES", "SHAPES", "ConformanceError", "check_format", "check_source"]

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(">i2", ">i4", ">i8", ">u2", ">u4", ">u8", ">f2", ">f4", ">f8", ">c8", ">c16"),
)
# Square shapes find swapped axes, which other shapes would refuse. Arrays without elements or without axes must load too.
SHAPES = ((), (11,), (6, 6), (5, 7), (5, 5, 5), (3, 5, 7), (2, 3, 5, 7), (0,), (4, 0, 3))

_MOST_BROKEN = 3  # failures to show for one promise
_GUARD_NBYTES = 64
_N_THREADS, _N_ROUNDS = 4, 12
_FORBIDDEN = ("jax", "jaxlib", "mpi4py")
_PRIMES = {"bool": 2, "int8": 113, "uint8": 251, "float16": 2039}

# Files of other kinds, which no format may claim.
_FOREIGN: dict[str, bytes] = {
    "an empty file": b"",
    "a file of zeros": bytes(4096),
    "a text": b"time, density\n0.0, 1.0\n" * 64,
    "random bytes": np.random.default_rng(1).bytes(4096),
    "an HDF5 file's first bytes": b"\x89HDF\r\n\x1a\n" + bytes(2048),
    "a .npy file's first bytes": b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', ",
    "a netCDF-3 file's first bytes": b"CDF\x01" + bytes(256),
    "a TIFF file's first bytes": b"II*\x00" + bytes(256),
    "a gzip file's first bytes": b"\x1f\x8b\x08" + bytes(256),
}

Array = np.ndarray[Any, Any]
Write = Callable[[str, dict[str, Array]], None]


class ConformanceError(AssertionError):
    """A format breaks promises. The text names each of them."""


class _BrokenError(Exception):
    """One promise is broken."""


def check_format(
    file_format: Format,
    write: Write,
    *,
    folder: str | os.PathLike[str],
    suffix: str = "",
    several: bool = True,
    dtypes: Sequence[str] = DTYPES,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    write_missing: Callable[[str], tuple[Array, Collection[tuple[int, ...]]]] | None = None,
) -> None:
    """Raise `ConformanceError` unless a format keeps every promise of `shardload.formats.Format` and `Source`.

    Collective: no.

    Parameters
    ----------
    file_format : Format
        The format to test. It need not be installed.
    write : callable
        ``write(path, arrays)`` writes a file (or a folder) at `path` with these arrays, and replaces an existing one. The keys
        are names such as ``"a"`` and ``"group/b"``. If possible, use another library than the format reads with.
    folder : str or PathLike
        Folder for the files. It must exist, and is not emptied.
    suffix : str
        Suffix of the file names: ``".npy"``.
    several : bool
        True if a file can hold several arrays. If False, each array gets a file of its own, and may have any name in it.
    dtypes : sequence of str
        Types that the format can hold, by NumPy's names. Default: all that JAX has, in both byte orders.
    shapes : sequence of tuple of int
        Shapes that the format can hold. Leave out those that it cannot, such as ``()``.
    write_missing : callable, optional
        For formats that can leave chunks out. ``write_missing(path)`` writes a file with one array that has missing chunks. It
        returns the array's values, with the fill value in missing chunks, and the indices of those chunks.

    Raises
    ------
    ConformanceError
        It names each broken promise, with the array, the region, and the values found and expected.

    Examples
    --------
    >>> def write(path, arrays):
    ...     with h5py.File(path, "w") as file:
    ...         for name, values in arrays.items():
    ...             file[name] = values
    >>> import h5py, tempfile
    >>> from shardload.formats.hdf5.source import FORMAT
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     check_format(FORMAT, write, folder=folder, dtypes=["float32"], shapes=[(6, 6)])
    """
    found = _Findings(f"the format {file_format.name}")
    files = _Files(write, Path(folder), suffix, several)
    arrays = {**{f"t{k}": ramp((5, 7), dtype) for k, dtype in enumerate(dtypes)}}
    arrays |= {f"group/s{k}": ramp(shape, dtypes[-1] if k % 2 else dtypes[0]) for k, shape in enumerate(shapes)}
    written = files.write_all(arrays)
    with found.promise("imports neither JAX nor MPI"), _importing_nothing_of(_FORBIDDEN, file_format):
        for path, held in written.items():
            _check_listing(found, file_format, path, held)
    _check_claims(found, file_format, files, next(iter(written)))
    for path, held in written.items():
        for name, dataset in _names_of(file_format, path, held).items():
            opens = _opener(file_format, path, dataset)
            with found.promise("opens what it lists"):
                opens().close()
                check_source(opens, held[name], _found=found)
    if not found:  # otherwise the other checks would fail for the same reasons
        _check_files(found, file_format, files, arrays, write_missing)
    found.raise_all()


def check_source(
    open_source: Callable[[], Source], expected: Array, *, is_handed_in: bool = False, _found: _Findings | None = None
) -> None:
    """Raise `ConformanceError` unless the source that `open_source` opens gives exactly `expected`.

    Collective: no.

    Parameters
    ----------
    open_source : callable
        Opens the array again each time.
    expected : ndarray
        Its values, in any byte order. If all values differ, a message can say where a wrong value belongs.
    is_handed_in : bool
        True if the caller passes in an open array, which `close` leaves open.

    Raises
    ------
    ConformanceError
        As `check_format`.
    """
    found = _Findings("the source") if _found is None else _found
    for promise, check in _OF_A_SOURCE.items():
        with found.promise(promise):
            source = open_source()
            try:
                check(source, expected)
            finally:
                source.close()
    with found.promise("gives nothing after it was closed"):
        _check_closing(open_source, expected, is_handed_in)
    with found.promise("is read by several threads, each with a source of its own"):
        _check_threads(open_source, expected)
    if _found is None:
        found.raise_all()


def ramp(shape: tuple[int, ...], dtype: Any = "float32") -> Array:
    """An array whose values are their own flat index plus one (modulo a prime if the type is too small for that)."""
    dtype = np.dtype(dtype)
    index = np.arange(1, 1 + math.prod(shape), dtype="int64").reshape(shape)
    if dtype.kind == "b":
        return np.asarray((index * index // 3) % 2 == 1)
    index = index % _PRIMES.get(native_dtype(dtype).name, 2**62)
    return np.asarray((index - 1j * (index + 0.5) if dtype.kind == "c" else index).astype(dtype))


# --- what was found


class _Findings:
    """The broken promises, with their failures."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._broken: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._broken)

    @contextlib.contextmanager
    def promise(self, promise: str) -> Iterator[None]:
        """Test a promise inside this context: an error means that it is broken, and is kept."""
        try:
            yield
        except _BrokenError as error:
            self._broken.setdefault(promise, []).append(str(error))
        except Exception as error:
            self._broken.setdefault(promise, []).append(f"{type(error).__name__}: {error}")

    def raise_all(self) -> None:
        """Raise `ConformanceError` if any promise is broken."""
        if not self._broken:
            return
        lines = [f"{self._what} breaks {len(self._broken)} of its promises:"]
        for promise, texts in self._broken.items():
            more = f" (and {len(texts) - _MOST_BROKEN} more)" if len(texts) > _MOST_BROKEN else ""
            lines += [f"- It {promise}. No:{more}", *(f"    {text}" for text in texts[:_MOST_BROKEN])]
        raise ConformanceError("\n".join(lines))


def _expect(is_so: bool, text: str) -> None:
    if not is_so:
        raise _BrokenError(text)


class _Files:
    """Writes arrays into new files of the format."""

    def __init__(self, write: Write, folder: Path, suffix: str, several: bool) -> None:
        self._write, self.folder, self.suffix, self._several = write, folder, suffix, several
        self._numbers = itertools.count()

    def path(self) -> str:
        """The path of a file that does not exist yet."""
        while (path := self.folder / f"file{next(self._numbers)}{self.suffix}").exists():
            pass
        return str(path)

    def write(self, arrays: dict[str, Array], path: str | None = None) -> str:
        """Write one file; returns its path."""
        path = path or self.path()
        self._write(path, arrays)
        return path

    def write_all(self, arrays: dict[str, Array]) -> dict[str, dict[str, Array]]:
        """Write as many files as these arrays need; returns the arrays in each file, by path."""
        groups = [arrays] if self._several else [{name: values} for name, values in arrays.items()]
        return {self.write(group): group for group in groups}


def _fields(file_format: Format, path: str) -> list[ArrayInfo]:
    """The listed arrays, without the coordinates that a library writes by itself."""
    return [info for info in file_format.list_arrays(path) if not info.is_coordinate]


def _names_of(file_format: Format, path: str, held: Mapping[str, Array]) -> dict[str, str]:
    """The full name in the file of each array that was written."""
    if len(held) == 1:
        listed = _fields(file_format, path)
        return {name: listed[0].dataset for name in held} if len(listed) == 1 else {name: f"/{name}" for name in held}
    return {name: f"/{name}" for name in held}


def _opener(file_format: Format, path: str, dataset: str) -> Callable[[], Source]:
    return lambda: file_format.open_path(path, dataset)


# --- promises of a source


def _check_info(source: Source, expected: Array) -> None:
    info, native = source.info, native_dtype(expected.dtype)
    _check_described(info, expected)
    _expect(source.dtype == native and source.dtype.isnative, f"dtype is {source.dtype!r} of {info}, expected {native!r}")
    before = info.to_json()
    source.read_into(Region.whole(expected.shape), np.empty(expected.shape, native))
    _expect(source.info.to_json() == before, f"info of {info} was {before}, and is {source.info.to_json()} after a read")
    _expect(source.dtype == native, f"dtype of {info} was {native} and is {source.dtype} after a read")


def _check_described(info: ArrayInfo, expected: Array) -> None:
    native = native_dtype(expected.dtype)
    _expect(info.refused is None, f"{info} is refused: it holds {info.refused}")
    _expect(info.shape == expected.shape, f"shape of {info} is {info.shape}, expected {expected.shape}")
    _expect(info.dtype == native.name, f"dtype of {info} is {info.dtype!r}, expected {native.name!r}, NumPy's name")
    _expect(info.dataset.startswith("/"), f"the name {info.dataset!r} does not begin with '/'")
    for what, cells in (("chunks", info.chunks), ("shards", info.shards)):
        fits = cells is None or (len(cells) == len(info.shape) and all(type(n) is int and n > 0 for n in cells))
        _expect(fits, f"{what} of {info} are {cells}, expected None or a positive length for each of {len(info.shape)} axes")
    try:
        again = ArrayInfo.from_json(info.to_json())
    except (TypeError, ValueError) as error:
        raise _BrokenError(f"what is known of {info} cannot be sent to another rank: {error}") from None
    _expect(again.to_json() == info.to_json(), f"what is known of {info} is another after JSON")


@functools.lru_cache(maxsize=256)
def regions_of(shape: tuple[int, ...], chunks: tuple[int, ...] | None) -> tuple[Region, ...]:
    """The whole array, its ends, single elements, planes, regions on and beside the edges of chunks, and a few random ones."""
    return tuple(_make_regions(shape, chunks))


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
            other = [(0, m) if k % 2 else (m // 3, m // 3 + 1) for m in shape]
            other[axis] = (a, b)
            yield Region(tuple(a for a, _ in other), tuple(b for _, b in other))
        nothing = [(0, m) for m in shape]
        nothing[axis] = (n // 2, n // 2)
        yield Region(tuple(a for a, _ in nothing), tuple(b for _, b in nothing))
    chance = np.random.default_rng(len(shape))
    for _ in range(8):
        ends = [sorted(chance.integers(0, n + 1, 2).tolist()) for n in shape]
        yield Region(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def _check_values(source: Source, expected: Array) -> None:
    for region in regions_of(expected.shape, source.info.chunks):
        for fill in (0xA5, 0x5A):
            _compare(source.info, region, _read(source, region, fill), expected)


def _read(source: Source, region: Region, fill: int = 0xA5) -> Array:
    """Call `read_into` on a buffer full of `fill`, between guard bytes that it must not change."""
    nbytes = region.size * source.dtype.itemsize
    memory = np.full(nbytes + 2 * _GUARD_NBYTES, fill, np.uint8)
    out = memory[_GUARD_NBYTES : _GUARD_NBYTES + nbytes].view(source.dtype).reshape(region.shape)
    source.read_into(region, out)
    guard = bytes([fill]) * _GUARD_NBYTES
    if memory[:_GUARD_NBYTES].tobytes() != guard or memory[_GUARD_NBYTES + nbytes :].tobytes() != guard:
        raise _BrokenError(f"the read of {region} of {source.info} wrote outside of the buffer")
    return out


def _compare(info: ArrayInfo, region: Region, found: Array, expected: Array) -> None:
    """Compare bit by bit: equal NaNs are the same, and -0.0 is not 0.0."""
    native: Any = native_dtype(expected.dtype)
    here: Any = (*region.slices(), ...)
    right = expected[here].astype(native, order="C")
    if found.shape != right.shape:
        raise _BrokenError(f"{region} of {info} has shape {found.shape}, expected {right.shape}")
    if found.tobytes() == right.tobytes():
        return
    wrong = np.frombuffer(found.tobytes(), np.uint8) != np.frombuffer(right.tobytes(), np.uint8)
    elements = wrong.reshape(right.size, right.itemsize).any(axis=1)
    first = tuple(int(k) for k in np.unravel_index(int(elements.argmax()), right.shape)) if right.shape else ()
    at = tuple(a + k for a, k in zip(region.start, first, strict=True))
    raise _BrokenError(
        f"{region} of {info} has {int(elements.sum())} wrong values of {right.size}: at {at} is {found[first]}, expected "
        f"{right[first]}{_hint(found, right, expected.astype(native), found[first])}"
    )


def _hint(found: Array, right: Array, whole: Array, value: Any) -> str:
    """A guess at the cause, in parentheses."""
    if right.itemsize > 1 and right.dtype.kind != "b":
        kind = np.dtype(f"u{right.itemsize // (2 if right.dtype.kind == 'c' else 1)}")
        if found.reshape(-1).view(kind).byteswap().tobytes() == right.tobytes():
            return " (the bytes of every value are in the other order)"
    if found.ndim > 1 and len(set(found.shape)) < found.ndim:
        for order in itertools.permutations(range(found.ndim)):
            turned = found.transpose(order).copy(order="C")
            if turned.shape == right.shape and turned.tobytes() == right.tobytes():
                return f" (it is right with its axes transposed as {order})"
    if right.dtype.kind == "b":
        return ""
    if found.tobytes() in (b"\xa5" * found.nbytes, b"\x5a" * found.nbytes):
        return " (nothing was written into the buffer)"
    if value in (
        np.frombuffer(b"\xa5" * right.itemsize, right.dtype)[0],
        np.frombuffer(b"\x5a" * right.itemsize, right.dtype)[0],
    ):
        return " (the buffer was not filled there)"
    places = np.argwhere(whole == value)
    return f" (that value belongs at {tuple(places[0].tolist())})" if len(places) else ""


def _check_own_memory(source: Source, expected: Array) -> None:
    regions = list(itertools.islice(regions_of(expected.shape, source.info.chunks), 3))
    read = [(region, _read(source, region)) for region in regions]
    for region, out in read:
        _compare(source.info, region, out, expected)
        out.reshape(-1).view(np.uint8)[:] = 0x77
    for region in regions:
        _compare(source.info, region, _read(source, region), expected)


def _check_refusals(source: Source, expected: Array) -> None:
    shape, dtype, info = expected.shape, source.dtype, source.info
    outside = [
        Region(tuple(n for n in shape), tuple(n + 1 for n in shape)),
        Region((0,) * len(shape), tuple(n + 1 for n in shape)),
    ]
    for region in outside if shape else [Region((0,), (1,))]:
        out = np.full(region.shape, 77).astype(dtype)
        _expect_value_error(partial(source.read_into, region, out), f"the region {region} outside of {info}, {shape}")
    if 0 in shape:
        return
    whole = Region.whole(shape)
    other = np.dtype("u2" if dtype.itemsize != 2 else "u4")
    locked = np.empty(shape, dtype)
    locked.flags.writeable = False
    buffers = {"of another type": np.empty(shape, other), "with an axis more": np.empty((*shape, 2), dtype), "locked": locked}
    if shape:
        buffers["that is one element short"] = np.empty((shape[0] - 1, *shape[1:]), dtype)
    for what, buffer in buffers.items():
        _expect_value_error(partial(source.read_into, whole, buffer), f"a buffer {what} for {whole} of {info}")
    if max(shape, default=0) > 1:
        strided = np.full((*shape[:-1], 2 * shape[-1] + 1), 77).astype(dtype)[..., :-1:2]
        with contextlib.suppress(ValueError):  # a ValueError is right, and so are right values
            source.read_into(whole, strided)
            _compare(info, whole, strided, expected)


def _expect_value_error(call: Callable[[], None], what: str) -> None:
    try:
        call()
    except ValueError:
        return
    except Exception as error:
        raise _BrokenError(f"{type(error).__name__} instead of ValueError for {what}: {error}") from None
    raise _BrokenError(f"no error for {what}: call `shardload.formats.check_request` first")


def _check_expected(source: Source, expected: Array) -> None:
    """Told that the middle of the array alone will be read, the source still gives all of it."""
    shape = expected.shape
    middle = Region(tuple(n // 3 for n in shape), tuple(max(n // 3 + 1, 2 * n // 3) for n in shape))
    if 0 in shape:
        return
    source.expect(middle)
    for region in (middle, Region.whole(shape), *itertools.islice(regions_of(shape, source.info.chunks), 12)):
        _compare(source.info, region, _read(source, region), expected)
        _expect_missing(source, region, expected)
    _check_chunks(source, expected)


def _check_plain(source: Source, expected: Array) -> None:
    for region in itertools.islice(regions_of(expected.shape, source.info.chunks), 12):
        found = np.asarray(source.plain(region))
        _expect(native_dtype(found.dtype) == source.dtype, f"plain({region}) of {source.info} is {found.dtype}")
        _compare(source.info, region, found.astype(source.dtype), expected)


def _check_view(source: Source, expected: Array) -> None:
    for region in itertools.islice(regions_of(expected.shape, source.info.chunks), 12):
        found = source.view(region)
        if found is not None:
            _compare(source.info, region, found.copy(order="C"), expected)


def _check_missing(source: Source, expected: Array) -> None:
    """No chunk is missing here, except that a format may leave out chunks that are equal to their fill value."""
    for region in regions_of(expected.shape, source.info.chunks):
        source.read_into(region, np.empty(region.shape, source.dtype))
        _expect_missing(source, region, expected)


def _expect_missing(source: Source, region: Region, expected: Array) -> None:
    for index in source.missing(region):
        values = expected[_cell(source.info, index).slices()] if source.info.chunks else expected
        same = values.size == 0 or bool((values == values.reshape(-1)[0]).all())
        _expect(same, f"missing({region}) of {source.info} names the chunk {index}, which was written")


def _cell(info: ArrayInfo, index: Sequence[int]) -> Region:
    chunks = info.chunks or ()
    start = tuple(k * c for k, c in zip(index, chunks, strict=True))
    return Region(start, tuple(min(a + c, n) for a, c, n in zip(start, chunks, info.shape, strict=True)))


def _check_chunks(source: Source, expected: Array) -> None:
    reader, info = source.chunk_reader(), source.info
    if reader is None:
        return
    _expect(info.chunks is not None, f"{info} has a chunk_reader and no chunks")
    chunks = info.chunks or ()
    indices = list(itertools.product(*(range(-(-n // c)) for n, c in zip(info.shape, chunks, strict=True))))

    def one(index: tuple[int, ...]) -> None:
        out = np.full(math.prod(chunks) * source.dtype.itemsize, 0xA5, np.uint8).view(source.dtype).reshape(chunks)
        reader.decode(reader.fetch(index, fresh), out)
        cell = _cell(info, index)
        inside: Any = (*(slice(0, n) for n in cell.shape), ...)
        part = out[inside].copy(order="C")
        _compare(info, cell, part, expected)

    with ThreadPoolExecutor(_N_THREADS) as pool:
        list(pool.map(one, indices * 2))


def _check_state(source: Source, expected: Array) -> None:
    first, second = source.state(), source.state()
    _expect(first == second, f"state() of {source.info} is {first}, then {second}, and nothing has changed")
    before = source.opened_in()
    _expect(before == first, f"opened_in() of {source.info} is {before}, its state() {first}, and nothing has changed")
    fits = first is None or (isinstance(first, tuple) and all(type(n) is int for n in first))
    _expect(fits, f"state() of {source.info} is {first!r}, expected a tuple of int, or None")


def _check_other_thread(source: Source, expected: Array) -> None:
    """Reads come from one thread at a time, but not always from the same thread."""
    with ThreadPoolExecutor(1) as pool:  # beside this thread: one that follows another may get its number
        for region in itertools.islice(regions_of(expected.shape, source.info.chunks), 4):
            for found in (_read(source, region), pool.submit(_read, source, region).result()):
                _compare(source.info, region, found, expected)


_OF_A_SOURCE: dict[str, Callable[[Source, Array], None]] = {
    "says what the array is, before and after a read": _check_info,
    "delivers each value of each region, in native byte order": _check_values,
    "keeps to the caller's buffer, and keeps nothing of it": _check_own_memory,
    "refuses a region outside of the array, and a buffer that does not fit": _check_refusals,
    "delivers the same by plain()": _check_plain,
    "delivers the same by view(), or None": _check_view,
    "names no chunk as missing that was written": _check_missing,
    "delivers the same chunk by chunk, in several threads": _check_chunks,
    "delivers all of the array, also after it was told that a part will be read": _check_expected,
    "has a state that stays while nothing changes": _check_state,
    "is read from any thread, one at a time": _check_other_thread,
}


def _check_closing(open_source: Callable[[], Source], expected: Array, is_handed_in: bool) -> None:
    source, whole = open_source(), Region.whole(expected.shape)
    with contextlib.closing(source):
        source.read_into(whole, np.empty(expected.shape, source.dtype))
    source.close()
    source.state()
    if expected.size == 0 or is_handed_in:
        return
    try:
        source.read_into(whole, np.empty(expected.shape, native_dtype(expected.dtype)))
    except Exception:
        return
    raise _BrokenError(f"{source.info} is read after close(), without an error")


def _check_threads(open_source: Callable[[], Source], expected: Array) -> None:
    regions = list(itertools.islice(regions_of(expected.shape, None), 8))
    start = threading.Barrier(_N_THREADS)
    interval = sys.getswitchinterval()
    with contextlib.ExitStack() as opened:
        sources = [opened.enter_context(contextlib.closing(open_source())) for _ in range(_N_THREADS)]

        def work(k: int) -> None:
            start.wait(60)
            for n in range(_N_ROUNDS):
                region = regions[(n + k) % len(regions)]
                _compare(sources[k].info, region, _read(sources[k], region), expected)

        opened.callback(sys.setswitchinterval, interval)
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(_N_THREADS) as pool:
            list(pool.map(work, range(_N_THREADS)))


# --- promises of a format


def _check_listing(found: _Findings, file_format: Format, path: str, held: Mapping[str, Array]) -> None:
    with found.promise("lists every array of a file, as it is"):
        infos = file_format.list_arrays(path)
        names = _names_of(file_format, path, held)
        listed = {info.dataset: info for info in infos}
        fields = sorted(info.dataset for info in infos if not info.is_coordinate)
        _expect(fields == sorted(names.values()), f"'{path}' holds {sorted(names.values())}, and {fields} are listed")
        for name, dataset in names.items():
            _expect(
                listed[dataset].path == path, f"the path of {listed[dataset]} is {listed[dataset].path!r}, expected {path!r}"
            )
            _check_described(listed[dataset], held[name])
        again = [info.to_json() for info in file_format.list_arrays(path)]
        _expect(again == [info.to_json() for info in infos], f"'{path}' is listed another way the second time")
        few = file_format.sketch_arrays(path, most=1, like=next(iter(names.values())))
        _expect(len(few) == min(2, len(infos)), f"{len(few)} arrays of '{path}' are listed with most=1, of {len(infos)}")
    with found.promise("raises KeyError(name) for a name that is not there"):
        for name in ("/no such array", "/t0/below", "/group"):
            if name in names.values():
                continue
            try:
                file_format.open_path(path, name).close()
            except KeyError as error:
                _expect(error.args == (name,), f"KeyError{error.args} for '{name}' in '{path}', expected KeyError({name!r})")
            except Exception as error:
                raise _BrokenError(f"{type(error).__name__} for the name '{name}' in '{path}': {error}") from None
            else:
                raise _BrokenError(f"'{name}' in '{path}' can be opened, and was never written")


def _check_claims(found: _Findings, file_format: Format, files: _Files, own: str) -> None:
    """A format claims files by content: its own under any name, and no other file under its suffix."""
    with found.promise("claims its own files, whatever they are called"):
        _expect(file_format.claims_path(own), f"'{own}' is not claimed")
        renamed = str(files.folder / "renamed.bin")
        shutil.copytree(own, renamed, dirs_exist_ok=True) if os.path.isdir(own) else shutil.copy(own, renamed)
        _expect(file_format.claims_path(renamed), f"'{own}' is not claimed under the name '{renamed}'")
        shutil.rmtree(renamed) if os.path.isdir(renamed) else os.unlink(renamed)
    with found.promise("claims no other files, nor objects"):
        head = b"" if os.path.isdir(own) else Path(own).read_bytes()[:4]
        for what, content in _FOREIGN.items():
            if head and content[:4] == head:
                continue
            path = files.path()
            Path(path).write_bytes(content)
            _expect(not file_format.claims_path(path), f"{what} is claimed")
        os.mkdir(empty := files.path())
        _expect(not file_format.claims_path(empty), "an empty folder is claimed")
        _expect(not file_format.claims_path(files.path()), "a path where nothing is is claimed")
        odd: Any
        for odd in (None, 3, "text", {}):
            _expect(not file_format.claims_object(odd), f"the object {odd!r} is claimed")


def _check_files(
    found: _Findings,
    file_format: Format,
    files: _Files,
    arrays: dict[str, Array],
    write_missing: Callable[[str], tuple[Array, Collection[tuple[int, ...]]]] | None,
) -> None:
    large = {"a": ramp((24, 30, 7), "float32")}
    with found.promise("has a state that changes with the file"):
        _check_change(file_format, files, arrays)
    with found.promise("gives back what it opened"):
        _check_descriptors(file_format, files.write(large))
    with found.promise("opens one file for several of its arrays"):
        for path, held in files.write_all({"a": ramp((5, 7)), "group/b": ramp((3, 4), "int32")}).items():
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(file_format.open_file(path))
                names = _names_of(file_format, path, held)
                sources = {name: stack.enter_context(contextlib.closing(file.open(names[name]))) for name in names}
                for name, source in [*sources.items()] * 2:
                    _check_values(source, held[name])
    with found.promise("says so where a file was cut"):
        _check_cut(file_format, files, large)
    if write_missing is not None:
        with found.promise("names the chunks that are missing"):
            _check_what_is_missing(file_format, files.path(), write_missing)


def _check_change(file_format: Format, files: _Files, arrays: dict[str, Array]) -> None:
    path = files.path()
    states = []
    for shape in ((5, 7), (50, 70)):
        values = ramp(shape, next(iter(arrays.values())).dtype)
        files.write({"a": values}, path)
        (dataset,) = _names_of(file_format, path, {"a": values}).values()
        source = file_format.open_path(path, dataset)
        try:
            states.append(source.state())
            _compare(source.info, Region.whole(shape), _read(source, Region.whole(shape)), values)
        finally:
            source.close()
    _expect(None not in states, f"state() of '{dataset}' in '{path}' is None: nobody would notice that the file changes")
    _expect(states[0] != states[1], f"state() of '{dataset}' in '{path}' is {states[0]} before and after it was written anew")


def _check_descriptors(file_format: Format, path: str) -> None:
    def once() -> int:
        file_format.claims_path(path)
        (info,) = _fields(file_format, path)
        source = file_format.open_path(path, info.dataset)
        _read(source, Region.whole(info.shape))
        source.close()
        with contextlib.suppress(KeyError):
            file_format.open_path(path, "/no such array")
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    once()  # libraries may open files that they keep for good
    before = once()
    after = [once() for _ in range(4)][-1]
    _expect(after <= before, f"{after - before} descriptors stay open after four times opening and closing '{path}'")


def _check_cut(file_format: Format, files: _Files, arrays: dict[str, Array]) -> None:
    (values,) = arrays.values()
    whole = files.write(arrays)
    names = [whole] if os.path.isfile(whole) else sorted(str(path) for path in Path(whole).rglob("*") if path.is_file())
    (dataset,) = _names_of(file_format, whole, arrays).values()
    for name in names[:8]:
        size = os.path.getsize(name)
        for nbytes in sorted({0, 1, size // 3, size // 2, size - 1} & set(range(size))):
            cut = files.path()
            shutil.copytree(whole, cut) if os.path.isdir(whole) else shutil.copy(whole, cut)
            os.truncate(cut + name.removeprefix(whole), nbytes)
            what = f"'{name}' cut to {nbytes} of {size} bytes"
            try:
                if not file_format.claims_path(cut):
                    continue
            except Exception as error:
                raise _BrokenError(f"claims_path raises {type(error).__name__} for {what}: {error}") from None
            with _damage(what, dataset):
                source = file_format.open_path(cut, dataset)
                try:
                    out = _read(source, Region.whole(source.info.shape))
                    _compare(source.info, Region.whole(source.info.shape), out, values)
                finally:
                    source.close()


@contextlib.contextmanager
def _damage(what: str, dataset: str) -> Iterator[None]:
    """Read a damaged file inside this context: right values, and errors that become a SourceError, are fine."""
    try:
        yield
    except _BrokenError as error:
        raise _BrokenError(f"{what}: {error}, without an error") from None
    except KeyError as error:
        _expect(
            error.args != (dataset,), f"{what}: KeyError({dataset!r}), which says that the file is sound and has no such array"
        )
    except (MemoryError, RecursionError) as error:
        raise _BrokenError(f"{what}: {type(error).__name__}, so damage takes all memory") from None
    except ShardloadError as error:
        _expect(type(error).__name__ == "SourceError", f"{what}: {type(error).__name__} instead of SourceError: {error}")
    except Exception:
        return
    except BaseException as error:
        raise _BrokenError(f"{what}: {type(error).__name__}, which ends the program") from None


def _check_what_is_missing(
    file_format: Format, path: str, write_missing: Callable[[str], tuple[Array, Collection[tuple[int, ...]]]]
) -> None:
    values, indices = write_missing(path)
    (info,) = _fields(file_format, path)
    source = file_format.open_path(path, info.dataset)
    try:
        for region in regions_of(info.shape, info.chunks):
            _compare(info, region, _read(source, region), values)
            meeting = {index for index in indices if region.size and (not index or _cell(info, index).intersect(region))}
            told = {tuple(index) for index in source.missing(region)}
            _expect(told == meeting, f"missing({region}) of {info} is {sorted(told)}, expected {sorted(meeting)}")
    finally:
        source.close()


@contextlib.contextmanager
def _importing_nothing_of(names: Collection[str], file_format: Format) -> Iterator[None]:
    """Raise if one of these packages is imported inside this context, or was imported by the format's module."""
    module = sys.modules.get(type(file_format).__module__)
    held = {v.__name__.partition(".")[0] for v in vars(module).values() if isinstance(v, ModuleType)} if module else set()
    _expect(not held & {*names}, f"the module {type(file_format).__module__} imports {', '.join(sorted(held & {*names}))}")
    plain, imported, owner = builtins.__import__, set[str](), threading.get_ident()

    def watch(name: str, *more: Any, **how: Any) -> Any:
        if threading.get_ident() == owner:
            imported.add(name.partition(".")[0])
        return plain(name, *more, **how)

    builtins.__import__ = watch
    try:
        yield
    finally:
        builtins.__import__ = plain
    _expect(not imported & {*names}, f"listing a file imports {', '.join(sorted(imported & {*names}))}")
