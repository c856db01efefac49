"""Does it work here, and is it faster than other ways to load? What ``mpiexec -n 4 python -m shardload demo`` runs.

1. Climate data (netCDF, from the PyPI package iris-sample-data), loaded as slabs, pencils and blocks.
2. A SIZE^3 field in a gzip HDF5 file and in a zstd Zarr store, chunked by planes, loaded as pencils for a 3-D FFT. The FFT
   (``examples/pencil_fft.py``) is compared with `numpy.fft.fftn`.
3. The same load in the two ways that tutorials show, timed in the same manner.

Each shard of each load is compared, on its rank, with what h5py or zarr-python reads there. All numbers that are printed were
measured in this run.
"""

from __future__ import annotations

import io
import math
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import h5py
import jax
import numpy as np
import zarr
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from zarr.codecs import ZstdCodec
from zarr.storage import LocalStore, WrapperStore

import shardload
from shardload.comm.objects import ObjectRanks
from shardload.errors import ConfigError, ShardloadError
from shardload.system.terminal import Column, OutputError, fit_table, own_stdout, say_error, tell, width_of, wrap

__all__ = ["run"]

_REPEATS = 3
_LOADS = ("array", "shape", "layout", "shard", "readers", "seconds", "chunk reads", "max error")
_COMPARISON = ("file", "how", "seconds", "x shardload", "chunk reads")
_NUMBERS = ("seconds", "x shardload", "chunk reads", "max error")
_PLAIN = ("shape", "layout", "readers")  # shown without their title
_FFT_TOLERANCE = 1e-5  # relative to the largest mode; a float32 FFT is accurate to about 1e-7 times the log of its length
_SLABS, _PENCILS, _BLOCKS = P(("a", "b")), P(None, "a", "b"), P("a", "b")
_FIELDS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("hybrid_height.nc", "air_potential_temperature", (_SLABS, _PENCILS)),
    ("hybrid_height.nc", "surface_altitude", (_BLOCKS,)),
    ("E1_north_america.nc", "air_temperature", (_SLABS, _PENCILS)),
)

# Columns that stay side by side if not all fit.
_NARROW = (
    ("array", "shard", "seconds", "chunk reads", "max error"),
    ("array", "seconds", "chunk reads", "max error"),
    ("file", "how", "seconds", "x shardload"),
    ("array", "seconds"),
    ("how", "seconds", "x shardload"),
)

Index = tuple[slice, ...]


@dataclass
class _Table:
    """A table of text, as wide as the terminal allows."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        self.rows.append(cells)

    def lines(self, width: int) -> list[str]:
        columns = [Column(name, is_number=name in _NUMBERS, lead="" if name in _PLAIN else None) for name in self.headings]
        narrow = [titles for titles in _NARROW if titles[0] in self.headings and set(titles) <= set(self.headings)]
        return ["", *wrap(self.title, width), *fit_table(columns, self.rows, width, narrow, rule=True)]


@dataclass
class _Demo:
    """What all steps share, and their results."""

    ranks: ObjectRanks
    out: IO[str]
    pencil_fft: ModuleType
    mesh: Mesh
    loads: _Table
    n_loads: int = 0
    failures: list[str] = field(default_factory=list)

    def say(self, what: str | _Table) -> None:
        if self.ranks.rank == 0:
            width = width_of(self.out)
            lines = (
                [line for part in what.split("\n") for line in wrap(part, width, "", "  ")]
                if isinstance(what, str)
                else what.lines(width)
            )
            tell("\n".join(lines), self.out)

    def median_seconds(self, load: Callable[[], jax.Array]) -> tuple[jax.Array, float]:
        """Time `load` as stated below the table. Returns its last array and the median seconds."""
        seconds = []
        for _ in range(1 + _REPEATS):
            self.ranks.allgather(None)  # a barrier
            start = time.perf_counter()
            x = jax.block_until_ready(load())
            seconds.append(max(self.ranks.allgather(time.perf_counter() - start)))
        return x, statistics.median(seconds[1:])

    def verify(self, name: str, x: jax.Array, stored: _Stored) -> float:
        """Compare each shard with the file, on the shard's rank. Returns the largest difference on any rank."""
        wrong, n_elements, worst = [], 0, 0.0
        with stored.opened() as array:
            for shard in x.addressable_shards:
                expected, found = _expected(array, shard.index, shard.data.shape), np.asarray(shard.data)
                if found.dtype != expected.dtype or not np.array_equal(found, expected, equal_nan=True):
                    wrong.append(f"{name}: {shard.device} of rank {self.ranks.rank} differs from the file in {shard.index}")
                n_elements += found.size if shard.replica_id == 0 else 0
                worst = max(worst, float(np.nanmax(np.abs(found - expected), initial=0)))
        per_rank = self.ranks.allgather((wrong, n_elements, worst))
        self.failures += [message for messages, _, _ in per_rank for message in messages]
        if sum(n for _, n, _ in per_rank) != x.size:
            n_found = sum(n for _, n, _ in per_rank)
            self.failures.append(f"{name}: the shards have {n_found} elements together, expected {x.size}")
        return max(float(error) for _, _, error in per_rank)


def run(size: int = 256) -> int:
    """Run the demo on all processes of this job.

    Collective: yes, all processes of the job.

    Parameters
    ----------
    size : int
        Elements along each axis of the FFT field, rounded up to a multiple of the mesh axes.

    Returns
    -------
    int
        Exit code: 0 if every load was exact and the FFT correct, else 1.
    """
    with own_stdout() as out:
        shardload.initialize()
        ranks = ObjectRanks()
        try:
            with _all_end_together(ranks):
                return _run(ranks, out, size)
        except ShardloadError as error:
            if ranks.rank == 0:
                say_error(str(error))
            return 1


def _run(ranks: ObjectRanks, out: IO[str], size: int) -> int:
    pencil_fft = _pencil_fft()
    demo = _Demo(ranks, out, pencil_fft, pencil_fft.square_mesh(), _Table("Loaded by shardload", _LOADS))
    axes = ", ".join(f"{name}={n}" for name, n in demo.mesh.shape.items())
    demo.say(f"ranks: {ranks.size}, mesh: {axes}, jax: {jax.__version__}\n")
    _load_climate(demo)
    with _shared_folder(ranks) as folder:
        comparison = _load_and_transform(demo, folder, size)
    return _conclude(demo, comparison)


def _conclude(demo: _Demo, comparison: _Table) -> int:
    demo.say(demo.loads)
    demo.say(comparison)
    demo.say(
        f"\nseconds: slowest rank, median of {_REPEATS} runs after one warm-up run, file in the page cache\n"
        "chunk reads: chunks decoded by all ranks together / chunks in the array\n"
        "max error: for a load, absolute; for an FFT, relative to the largest mode of numpy.fft.fftn in float64\n"
    )
    result = ["FAILED", *demo.failures] if demo.failures else [f"all {demo.n_loads} loads verified element by element"]
    demo.say("\n".join(result))
    return 1 if demo.failures else 0


def _load_climate(demo: _Demo) -> None:
    try:
        import iris_sample_data
    except ImportError:
        fix = "pip install 'shardload[demo]'"
        raise ConfigError(f"the demo loads fields of iris-sample-data, which is not installed. Type: {fix}") from None
    for file, dataset, specs in _FIELDS:
        for spec in specs:
            _load_verified(demo, _Stored(Path(iris_sample_data.path, file), dataset), spec)


def _load_verified(demo: _Demo, stored: _Stored, spec: Any) -> tuple[jax.Array, float, str]:
    """Load, time and compare with the file; adds a row to the table."""
    title = f"{stored.path.name}:/{stored.dataset}"
    plans: list[shardload.Plan] = []
    demo.say(f"loading {title} as {_spec_text(spec)}")

    def load() -> jax.Array:
        plans.append(shardload.plan(str(stored.path), demo.mesh, spec, dataset=stored.dataset, pad=0))
        return plans[-1].execute()

    x, seconds = demo.median_seconds(load)
    error = demo.verify(f"{title} as {_spec_text(spec)}", x, stored)
    demo.n_loads += 1
    plan: Any = plans[-1]  # of the last run
    decoded = _per_chunk(plan.report.chunks_decoded, stored)
    shape = [f"{n}+{m - n}" if m > n else str(n) for n, m in zip(plan.shape, plan.shape_global, strict=True)]
    layout, shard = f"{plan.decomposition} {_spec_text(spec)}", _shape_text(plan.shard_shape)
    row = (title, _shape_text(shape), layout, shard, plan.readers, f"{seconds:.3f}", decoded)
    demo.loads.add_row(*row, f"{error:g}")
    return x, seconds, decoded


def _load_and_transform(demo: _Demo, folder: Path, size: int) -> _Table:
    """Write the field, load it from both formats, do the FFT, time the other ways to load; returns the comparison."""
    step = math.lcm(*demo.mesh.devices.shape)
    n = -(-size // step) * step
    if demo.ranks.rank == 0:
        _write_field(folder, n, demo.say)
    demo.ranks.wait()
    reference: Any = None
    table = _Table(f"The same load, {n}^3 float32 as {_spec_text(_PENCILS)}", _COMPARISON)
    for file in ("field.h5", "field.zarr"):
        stored = _Stored(folder / file, "density")
        x, seconds, decoded = _load_verified(demo, stored, _PENCILS)
        table.add_row(file, "shardload", f"{seconds:.3f}", "1.0", decoded)
        if reference is None and demo.ranks.rank == 0:
            with stored.opened() as array:
                reference = np.fft.fftn(array[...].astype(np.float64))
        demo.ranks.wait()
        _check_fft(demo, file, demo.pencil_fft.fft3d(x), reference)
        for how, peer in (("rank 0 reads, comm.scatter", _rank0_scatters), ("every process slices", _everyone_slices)):
            demo.say(f"the same load for comparison: {how}")
            y, peer_seconds, decoded = peer(demo, stored, x.sharding)
            demo.verify(f"{file}, {how}", y, stored)
            table.add_row(file, how, f"{peer_seconds:.3f}", f"{peer_seconds / seconds:.1f}", decoded)
    return table


def _write_field(folder: Path, n: int, say: Callable[[str], None]) -> None:
    """Write long waves plus noise, plane by plane, into an HDF5 file and a Zarr store with the same values."""
    rng = np.random.default_rng(0)
    turn = 2 * np.pi * np.arange(n) / n
    waves = [np.cos(turn[:, None] + 2 * turn), np.sin(3 * turn[:, None] - turn)]
    with h5py.File(folder / "field.h5", "w") as h5:
        layout: Any = {"shape": (n, n, n), "chunks": (1, n, n), "dtype": "float32"}
        to_hdf5 = h5.create_dataset("density", **layout, compression="gzip", compression_opts=4, shuffle=True)
        group = zarr.create_group(str(folder / "field.zarr"), zarr_format=3)
        to_zarr = group.create_array("density", **layout, compressors=ZstdCodec(level=3))
        for i in range(n):
            if i % -(-n // 4) == 0:
                say(f"writing {n}^3 float32 ({4 * n**3 / 2**20:.0f} MiB) as HDF5 and as Zarr: plane {i} of {n}")
            smooth = waves[0] * np.cos(turn[i]) + waves[1] * np.sin(2 * turn[i])
            to_hdf5[i] = to_zarr[i] = (smooth + 0.1 * rng.standard_normal((n, n))).astype(np.float32)


def _check_fft(demo: _Demo, file: str, modes: jax.Array, reference: Any) -> None:
    """Gather the modes on rank 0 and compare them there; adds a row to the table."""
    everything = demo.ranks.gather([(shard.index, np.asarray(shard.data)) for shard in modes.addressable_shards])
    error = 0.0
    if everything is not None:
        found = np.full(modes.shape, np.nan, modes.dtype)
        for index, values in (part for parts in everything for part in parts):
            found[index] = values
        error = float(np.max(np.abs(found - reference)) / np.max(np.abs(reference)))
    demo.ranks.wait()
    error = demo.ranks.allgather(error)[0]
    if not error <= _FFT_TOLERANCE:  # also when it is NaN
        demo.failures.append(f"the FFT of {file} differs from numpy.fft.fftn by {error:g} of the largest mode")
    shard = _shape_text(modes.sharding.shard_shape(modes.shape))
    demo.loads.add_row(f"  its FFT ({modes.dtype})", _shape_text(modes.shape), "", shard, "", "", "", f"{error:.1e}")


def _rank0_scatters(demo: _Demo, stored: _Stored, sharding: Any) -> tuple[jax.Array, float, str]:
    """Rank 0 reads the whole array and scatters a list of pieces, which mpi4py pickles."""
    mine = list(sharding.addressable_devices_indices_map(stored.shape).values())
    wanted = demo.ranks.allgather(mine)

    def load(fetched: list[object] | None) -> jax.Array:
        pieces = None
        if demo.ranks.rank == 0:
            with stored.opened(fetched) as array:
                values = array[...]
            pieces = [[values[index] for index in indices] for indices in wanted]
        of_index = dict(zip(map(str, mine), demo.ranks.scatter(pieces), strict=True))
        return jax.make_array_from_callback(stored.shape, sharding, lambda index: of_index[str(index)])

    return _timed_and_counted(demo, stored, load)


def _everyone_slices(demo: _Demo, stored: _Stored, sharding: Any) -> tuple[jax.Array, float, str]:
    """Every process opens the file, slices it in JAX's callback, once per device, and closes it."""

    def load(fetched: list[object] | None) -> jax.Array:
        with stored.opened(fetched) as array:
            return jax.make_array_from_callback(stored.shape, sharding, lambda index: array[index])

    return _timed_and_counted(demo, stored, load)


def _timed_and_counted(
    demo: _Demo, stored: _Stored, load: Callable[[list[object] | None], jax.Array]
) -> tuple[jax.Array, float, str]:
    """The median seconds of a way to load, and the chunks that all ranks fetched in its first run, which is not timed."""
    fetched: list[object] = []
    runs = iter([fetched])
    x, seconds = demo.median_seconds(lambda: load(next(runs, None)))
    return x, seconds, _per_chunk(sum(demo.ranks.allgather(len(fetched))), stored)


class _Stored:
    """An array in a file, read by its format's own library. Open only during a read.

    HDF5 caches decoded chunks while a dataset is open (1 MiB of them, since HDF5 2.0 8 MiB). The next run, or the next way to
    load, would get chunks from that cache.
    """

    def __init__(self, path: Path, dataset: str) -> None:
        self.path, self.dataset = path, dataset
        with self.opened() as array:
            self.shape: tuple[int, ...] = tuple(array.shape)
            chunks = array.chunks
        self.n_chunks = math.prod(-(-n // c) for n, c in zip(self.shape, chunks, strict=True)) if chunks else 0

    @contextmanager
    def opened(self, fetched: list[object] | None = None) -> Iterator[Any]:
        """The array. `fetched` gets one item for each chunk that the library reads from the file, to decode it."""
        if self.path.suffix == ".zarr":
            store = LocalStore(self.path, read_only=True)
            counting = None if fetched is None else _CountingStore(store, fetched)
            yield zarr.open_group(counting or store, mode="r")[self.dataset]
        elif fetched is None:
            with h5py.File(self.path) as h5:
                yield h5[self.dataset]
        else:
            with _CountingFile(self.path) as file, h5py.File(file, "r") as h5:
                chunks = h5[self.dataset].id
                file.places = {chunks.get_chunk_info(i).byte_offset for i in range(chunks.get_num_chunks())}
                file.fetched = fetched
                yield h5[self.dataset]


class _CountingFile(io.FileIO):
    """A file for HDF5 that records each read of a stored chunk: HDF5 decodes each chunk that it reads."""

    places: Collection[int] = ()
    fetched: list[object]

    def readinto(self, buffer: Any) -> int:
        if (at := self.tell()) in self.places:
            self.fetched.append(at)
        return super().readinto(buffer)


class _CountingStore(WrapperStore[LocalStore]):
    """A store for zarr-python that records each read of a chunk: zarr-python decodes each chunk that it reads."""

    def __init__(self, store: LocalStore, fetched: list[object]) -> None:
        super().__init__(store)
        self.fetched = fetched

    def _with_store(self, store: LocalStore) -> _CountingStore:
        return _CountingStore(store, self.fetched)

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        if "/c/" in key:  # density/c/0/0/0
            self.fetched.append(key)
        return await super().get(key, *args, **kwargs)


def _expected(array: Any, index: Index, shape: tuple[int, ...]) -> Any:
    """The values that a shard must hold: the file's, and zeros in the padding."""
    expected = np.zeros(shape, array.dtype.newbyteorder("="))
    inside = tuple(slice(*part.indices(n)) for part, n in zip(index, array.shape, strict=True))
    expected[tuple(slice(0, part.stop - part.start) for part in inside)] = array[inside]
    return expected


def _per_chunk(n_decoded: int, stored: _Stored) -> str:
    return f"{n_decoded / stored.n_chunks:.2f}" if stored.n_chunks else "no chunks"


def _shape_text(shape: Sequence[object]) -> str:
    return " x ".join(map(str, shape))


def _spec_text(spec: Any) -> str:
    names = ("-" if part is None else part if isinstance(part, str) else "+".join(part) for part in spec)
    return f"P({', '.join(names)})"


def _pencil_fft() -> ModuleType:
    """The example, from the installed package or from the checkout."""
    package = Path(__file__).parents[1]
    paths = [folder / "examples" / "pencil_fft.py" for folder in (package, package.parent)]
    spec = next((spec_from_file_location("pencil_fft", path) for path in paths if path.is_file()), None)
    if spec is None or spec.loader is None:
        raise ConfigError(f"pencil_fft.py is missing: neither {paths[0]} nor {paths[1]} exists. Install shardload again.")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _shared_folder(ranks: ObjectRanks) -> Iterator[Path]:
    """A temporary folder that all ranks see. It is removed however the demo ends."""
    folder = Path(ranks.allgather(tempfile.mkdtemp(prefix="shardload-demo-") if ranks.rank == 0 else "")[0])
    try:
        blind = [rank for rank, sees in enumerate(ranks.allgather(folder.is_dir())) if not sees]
        if blind:
            raise ConfigError(f"ranks {blind} do not see {folder}. Set TMPDIR to a folder that all nodes share.")
        yield folder
        ranks.wait()  # before it is removed, no rank may still be reading
    finally:  # rank 0, which writes, removes it; a rank that failed alone, and is about to end rank 0, does so after 2 s
        began = time.monotonic()
        while folder.exists() and (waited := time.monotonic() - began) < 4:
            shutil.rmtree(folder, ignore_errors=True) if ranks.rank == 0 or waited > 2 else time.sleep(0.01)


@contextmanager
def _all_end_together(ranks: ObjectRanks) -> Iterator[None]:
    """End all ranks when one fails by itself, is interrupted or is terminated: the others would wait for ever."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # SystemExit, so that the folder is removed
    try:
        yield
    except ShardloadError:  # raised on all ranks alike
        raise
    except (OutputError, BrokenPipeError) as error:  # on rank 0, which prints
        if ranks.size == 1:
            raise
        if isinstance(error, OutputError):
            say_error(str(error))
        ranks.abort()
    except BaseException as error:
        if isinstance(error, Exception):  # not Ctrl-C, and not SIGTERM
            traceback.print_exc()
        ranks.abort()
        raise
