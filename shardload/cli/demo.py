"""Does it work here, and is it faster than the usual way to load? What ``mpiexec -n 4 python -m shardload demo`` runs.

1. Climate data (netCDF, from the PyPI package iris-sample-data), loaded as slabs, pencils and blocks.
2. A SIZE^3 field, saved to a gzip HDF5 file and to a zstd Zarr store, chunked by planes, and loaded as pencils for a 3-D FFT.
   The FFT (``examples/pencil_fft.py``) is saved, and compared with `numpy.fft.fftn`.
3. The same load in the way that tutorials show, timed in the same manner.

Each shard of each load is compared, on its rank, with what h5py or zarr-python reads there. All numbers that are printed were
measured in this run.
"""

from __future__ import annotations

import math
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload.comm.group import Group, group_of
from shardload.comm.mpi import end_job
from shardload.errors import ConfigError, ShardloadError
from shardload.system.terminal import Column, OutputError, fit_table, own_stdout, say_error, tell, width_of, wrap

_REPEATS = 3
_FFT_TOLERANCE = 1e-5  # relative to the largest mode; a float32 FFT is accurate to about 1e-7 times the log of its length
_SLABS, _PENCILS, _BLOCKS = P(("a", "b")), P(None, "a", "b"), P("a", "b")
_FIELDS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("hybrid_height.nc", "air_potential_temperature", (_SLABS, _PENCILS)),
    ("hybrid_height.nc", "surface_altitude", (_BLOCKS,)),
    ("E1_north_america.nc", "air_temperature", (_SLABS, _PENCILS)),
)
_COLUMNS = (
    Column("array"),
    Column("seconds", is_number=True),
    Column("max error", is_number=True),
    Column("layout", lead=""),
    Column("shard"),
    Column("readers", lead=""),
    Column("chunk reads", is_number=True),
)


@dataclass
class _Demo:
    """What all steps share, and their results."""

    group: Group
    out: IO[str]
    mesh: Mesh
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        if self.group.rank == 0:
            width = width_of(self.out)
            tell("\n".join(line for part in text.split("\n") for line in wrap(part, width, "", "  ")), self.out)

    def largest(self, value: float) -> float:
        """The largest of the values of all ranks."""
        return float(self.group.gather_ints(np.array([value]).view(np.int64).tolist()).view(np.float64).max())

    def timed(self, load: Callable[[], jax.Array]) -> tuple[jax.Array, float]:
        """Time `load` as stated below the table. Returns its last array and the median seconds."""
        seconds = []
        for _ in range(1 + _REPEATS):
            self.group.agree(None)  # a barrier
            start = time.perf_counter()
            x = jax.block_until_ready(load())
            seconds.append(self.largest(time.perf_counter() - start))
        return x, statistics.median(seconds[1:])

    def verify(self, title: str, x: jax.Array, path: Path, dataset: str) -> float:
        """Compare each shard with the file, on the shard's rank. Returns the largest difference on any rank."""
        wrong, n_elements, worst = "", 0, 0.0
        with _opened(path, dataset) as array:
            for shard in x.addressable_shards:
                expected, values = _expected(array, shard.index, shard.data.shape), np.asarray(shard.data)
                if values.dtype != expected.dtype or not np.array_equal(values, expected, equal_nan=True):
                    wrong = f"{title}: {shard.device} of rank {self.group.rank} differs from the file in {shard.index}"
                n_elements += values.size if shard.replica_id == 0 else 0
                worst = max(worst, float(np.nanmax(np.abs(values - expected), initial=0)))
        self.failures += [text for text in self.group.gather_text(wrong) if text]
        if (n := self.group.sum_ints([n_elements])[0]) != x.size:
            self.failures.append(f"{title}: the shards have {n} elements together, expected {x.size}")
        return self.largest(worst)

    def load(self, path: Path, dataset: str, spec: Any) -> jax.Array:
        """Load, time and compare with the file; adds a row to the table."""
        title = f"{path.name}:/{dataset}"
        plans: list[shardload.Plan] = []
        self.say(f"loading {title} as {_spec_text(spec)}")

        def load() -> jax.Array:
            plans.append(shardload.plan(str(path), self.mesh, spec, dataset=dataset, pad=0))
            return plans[-1].execute()

        x, seconds = self.timed(load)
        plan: Any = plans[-1]  # of the last run
        layout, shard = f"{plan.decomposition} {_spec_text(spec)}", " x ".join(map(str, plan.shard_shape))
        n_chunks = math.prod(-(-n // c) for n, c in zip(plan.shape, plan.chunks or plan.shape, strict=True))
        row = (title, f"{seconds:.3f}", f"{self.verify(title, x, path, dataset):g}", layout, shard, str(plan.readers))
        self.rows.append((*row, f"{plan.report.chunks_decoded / n_chunks:.2f}"))
        return x


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
        group = group_of()
        try:
            with _all_end_together(group):
                return _run(group, out, size)
        except ShardloadError as error:
            if group.rank == 0:
                say_error(str(error))
            return 1


def _run(group: Group, out: IO[str], size: int) -> int:
    pencil_fft = _pencil_fft()
    demo = _Demo(group, out, pencil_fft.square_mesh())
    axes = ", ".join(f"{name}={n}" for name, n in demo.mesh.shape.items())
    demo.say(f"ranks: {group.size}, mesh: {axes}, jax: {jax.__version__}\n")
    try:
        import iris_sample_data
    except ImportError:
        fix = "pip install 'shardload[demo]'"
        raise ConfigError(f"the demo loads fields of iris-sample-data, which is not installed. Type: {fix}") from None
    for file, dataset, specs in _FIELDS:
        for spec in specs:
            demo.load(Path(iris_sample_data.path, file), dataset, spec)
    with _shared_folder(group) as folder:
        _save_load_and_transform(demo, folder, size, pencil_fft)
    if group.rank == 0:
        tell("\n".join(["", *fit_table(_COLUMNS, demo.rows, width_of(out))]), out)
    demo.say(
        f"\nseconds: slowest rank, median of {_REPEATS} runs after one warm-up run, file in the page cache\n"
        "max error: for a load, absolute; for an FFT, relative to the largest mode of numpy.fft.fftn in float64\n"
        "chunk reads: chunks decoded by all ranks together / chunks in the array\n"
    )
    n_loads = sum(bool(row[-1]) for row in demo.rows)
    demo.say("\n".join(["FAILED", *demo.failures]) if demo.failures else f"all {n_loads} loads verified element by element")
    return 1 if demo.failures else 0


def _save_load_and_transform(demo: _Demo, folder: Path, size: int, pencil_fft: ModuleType) -> None:
    """Save the field, load it from both formats, do the FFT, and time the usual way to load."""
    step = math.lcm(*demo.mesh.devices.shape)
    n = -(-size // step) * step
    density = _field(n, demo.mesh)
    for file, compression in (("field.h5", "gzip:4+shuffle"), ("field.zarr", "zstd:3")):
        path, modes_path = folder / file, folder / f"{file}-modes.h5"
        demo.say(f"saving {n}^3 float32 ({4 * n**3 / 2**20:.0f} MiB) as {file}")
        shardload.save(path, {"density": density}, shape=density.shape, chunks=(1, n, n), compression=compression)
        demo.verify(f"{file} as saved", density, path, "density")
        x = demo.load(path, "density", _PENCILS)
        shardload.save(modes_path, {"modes": pencil_fft.fft3d(x)}, shape=x.shape)
        error = demo.largest(_fft_error(path, modes_path) if demo.group.rank == 0 else 0.0)
        if not error <= _FFT_TOLERANCE:  # also when it is NaN
            demo.failures.append(f"the FFT of {file} differs from numpy.fft.fftn by {error:g} of the largest mode")
        demo.rows.append(("  its FFT", "", f"{error:.1e}", "", "", "", ""))
        demo.say("the same load for comparison: every process slices")
        y, seconds = demo.timed(lambda path=path, x=x: _slice(path, x.sharding))  # type: ignore[misc]
        demo.verify(f"{file}, every process slices", y, path, "density")
        demo.rows.append(("  every process slices", f"{seconds:.3f}", "", "", "", "", ""))


def _field(n: int, mesh: Mesh) -> jax.Array:
    """Long waves plus noise."""

    def values(index: Any) -> Any:
        i, j, k = np.ogrid[tuple(slice(*part.indices(n)) for part in index)]
        turn = 2 * np.pi / n
        waves = np.cos(turn * (j + 2 * k)) * np.cos(turn * i) + np.sin(turn * (3 * j - k)) * np.sin(2 * turn * i)
        noise = np.random.default_rng([i[0, 0, 0], j[0, 0, 0], k[0, 0, 0]]).standard_normal(waves.shape)
        return (waves + 0.1 * noise).astype(np.float32)

    return jax.make_array_from_callback((n, n, n), NamedSharding(mesh, _PENCILS), values)


def _fft_error(path: Path, modes_path: Path) -> float:
    """The largest error of the saved modes, relative to the largest mode."""
    with _opened(path, "density") as array, _opened(modes_path, "modes") as modes:
        reference = np.fft.fftn(array[...].astype(np.float64))
        return float(np.max(np.abs(modes[...] - reference)) / np.max(np.abs(reference)))


def _slice(path: Path, sharding: Any) -> jax.Array:
    """Every process opens the file, slices it in JAX's callback, once per device, and closes it."""
    with _opened(path, "density") as array:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


@contextmanager
def _opened(path: Path, dataset: str) -> Iterator[Any]:
    """An array in a file, read by its format's own library: anew each time, because HDF5 keeps decoded chunks."""
    if path.suffix == ".zarr":
        yield zarr.open_group(path, mode="r")[dataset]
    else:
        with h5py.File(path) as file:
            yield file[dataset]


def _expected(array: Any, index: tuple[slice, ...], shape: Sequence[int]) -> Any:
    """The values that a shard must hold: the file's, and zeros in the padding."""
    expected = np.zeros(shape, array.dtype.newbyteorder("="))
    inside = tuple(slice(*part.indices(n)) for part, n in zip(index, array.shape, strict=True))
    expected[tuple(slice(0, part.stop - part.start) for part in inside)] = array[inside]
    return expected


def _spec_text(spec: Any) -> str:
    names = ("-" if part is None else part if isinstance(part, str) else "+".join(part) for part in spec)
    return f"P({', '.join(names)})"


def _pencil_fft() -> ModuleType:
    """The example, from the installed package or from the checkout."""
    package = Path(__file__).parents[1]
    path = next(path for path in (package, package.parent) if (path / "examples" / "pencil_fft.py").is_file())
    spec: Any = spec_from_file_location("pencil_fft", path / "examples" / "pencil_fft.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _shared_folder(group: Group) -> Iterator[Path]:
    """A temporary folder that all ranks see. It is removed however the demo ends."""
    folder = Path(group.tell(lambda: tempfile.mkdtemp(prefix="shardload-demo-"), 0))
    try:
        blind = group.gather_int(folder.is_dir())
        if not blind.all():
            ranks = np.flatnonzero(blind == 0).tolist()
            raise ConfigError(f"ranks {ranks} do not see {folder}. Set TMPDIR to a folder that all nodes share.")
        yield folder
        group.agree(None)  # before it is removed, no rank may still be reading
    finally:  # rank 0, which writes, removes it; a rank that failed alone, and is about to end rank 0, does so after 2 s
        began = time.monotonic()
        while folder.exists() and (waited := time.monotonic() - began) < 4:
            shutil.rmtree(folder, ignore_errors=True) if group.rank == 0 or waited > 2 else time.sleep(0.01)


@contextmanager
def _all_end_together(group: Group) -> Iterator[None]:
    """End all ranks when one fails by itself, is interrupted or is terminated: the others would wait for ever."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # SystemExit, so that the folder is removed
    try:
        yield
    except ShardloadError:  # raised on all ranks alike
        raise
    except BaseException as error:
        if group.size == 1:
            raise
        if isinstance(error, OutputError):
            say_error(str(error))
        elif isinstance(error, Exception) and not isinstance(error, BrokenPipeError):  # nor Ctrl-C, nor SIGTERM
            traceback.print_exc()
        end_job(0.0)
        raise
