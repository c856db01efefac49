"""Does it work here, and is it faster than the usual way to load? ``make demo``, or ``mpiexec -n 4 python examples/demo.py``.

1. Climate data (netCDF, from the PyPI package iris-sample-data), loaded as slabs, pencils and blocks.
2. A SIZE^3 field, saved to a gzip HDF5 file and to a zstd Zarr store, chunked by planes, and loaded as pencils for a 3-D FFT.
   The FFT (``pencil_fft.py``) is saved, and compared with `numpy.fft.fftn`.
3. The same load in the way that tutorials show, timed in the same manner.

What each load gives is compared with the file, element by element, by `shardload.verify`. All numbers that are printed were
measured in this run. ``--size 128`` takes another field. It needs ``pip install 'shardload[mpich,demo]'``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import iris_sample_data
import jax
import numpy as np
import pencil_fft
import zarr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload.comm.group import Group, group_of
from shardload.errors import ConfigError, VerifyError
from shardload.system.terminal import Column, fit_table, width_of, wrap

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
    Column("layout"),
    Column("shard"),
    Column("readers"),
    Column("chunk reads", is_number=True),
)


class _Demo:
    """What all steps share, and the rows of the table that is printed at the end."""

    def __init__(self, group: Group, mesh: Mesh) -> None:
        self.group, self.mesh = group, mesh
        self.rows: list[tuple[str, ...]] = []

    def say(self, text: str) -> None:
        if self.group.rank == 0:
            print("\n".join(line for part in text.split("\n") for line in wrap(part, width_of(sys.stdout), "", "  ")))

    def timed(self, load: Callable[[], jax.Array]) -> tuple[jax.Array, str]:
        """Time `load` as stated below the table. Returns its last array and the median seconds."""
        seconds = []
        for _ in range(1 + _REPEATS):
            self.group.agree(None)  # a barrier
            start = time.perf_counter()
            x = jax.block_until_ready(load())
            seconds.append(self.group.gather_int(round(1e6 * (time.perf_counter() - start))).max() / 1e6)
        return x, f"{statistics.median(seconds[1:]):.3f}"

    def load(self, path: Path, dataset: str, spec: Any) -> jax.Array:
        """Load, time and compare with the file; adds a row to the table."""
        title = f"{path.name}:/{dataset}"
        self.say(f"loading {title} as {_spec_text(spec)}")
        plan: Any = None

        def load() -> jax.Array:
            nonlocal plan
            plan = shardload.plan(str(path), self.mesh, spec, dataset=dataset, pad=0)
            x: jax.Array = plan.execute()
            return x

        x, seconds = self.timed(load)
        shardload.verify(x, path, dataset=dataset, pad=0)
        layout, shard = f"{plan.decomposition} {_spec_text(spec)}", " x ".join(map(str, plan.shard_shape))
        n_chunks = math.prod(-(-n // c) for n, c in zip(plan.shape, plan.chunks or plan.shape, strict=True))
        reads = f"{plan.report.chunks_decoded / n_chunks:.2f}"
        self.rows.append((title, seconds, layout, shard, str(plan.readers), reads))
        return x


def run(size: int = 256) -> None:
    """Run the demo on all processes of this job.

    Collective: yes, all processes of the job.

    Parameters
    ----------
    size : int
        Elements along each axis of the FFT field, rounded up to a multiple of the mesh axes.

    Raises
    ------
    VerifyError
        If a load was not exact, or the FFT not correct.
    """
    shardload.initialize()
    demo = _Demo(group_of(), pencil_fft.square_mesh())
    axes = ", ".join(f"{name}={n}" for name, n in demo.mesh.shape.items())
    demo.say(f"ranks: {demo.group.size}, mesh: {axes}, jax: {jax.__version__}\n")
    for file, dataset, specs in _FIELDS:
        for spec in specs:
            demo.load(Path(iris_sample_data.path, file), dataset, spec)
    with _shared_folder(demo.group) as folder:
        _save_load_and_transform(demo, folder, size)
    if demo.group.rank == 0:
        print("\n".join(["", *fit_table(_COLUMNS, demo.rows, width_of(sys.stdout))]))
    demo.say(
        f"\nseconds: slowest rank, median of {_REPEATS} runs after one warm-up run, file in the page cache\n"
        "chunk reads: chunks decoded by all ranks together / chunks in the array\n\n"
        f"all {sum(bool(row[-1]) for row in demo.rows)} loads verified element by element"
    )


def _save_load_and_transform(demo: _Demo, folder: Path, size: int) -> None:
    """Save the field, load it from both formats, do the FFT, and time the usual way to load."""
    step = math.lcm(*demo.mesh.devices.shape)
    n = -(-size // step) * step
    density = _field(n, demo.mesh)
    for file, compression in (("field.h5", "gzip:4+shuffle"), ("field.zarr", "zstd:3")):
        path, modes_path = folder / file, folder / f"{file}-modes.h5"
        demo.say(f"saving {n}^3 float32 ({4 * n**3 / 2**20:.0f} MiB) as {file}")
        shardload.save(path, {"density": density}, shape=density.shape, chunks=(1, n, n), compression=compression)
        shardload.verify(density, path, dataset="density")
        x = demo.load(path, "density", _PENCILS)
        shardload.save(modes_path, {"modes": pencil_fft.fft3d(x)}, shape=x.shape)
        error = float(demo.group.tell(partial(_fft_error, path, modes_path), 0))
        if not error <= _FFT_TOLERANCE:  # also when it is NaN
            raise VerifyError(f"the FFT of {file} differs from numpy.fft.fftn by {error:g} of the largest mode")
        demo.rows.append((f"  its FFT, within {error:.1e} of NumPy's", *[""] * 5))
        demo.say("the same load for comparison: every process slices")
        y, seconds = demo.timed(lambda path=path, x=x: _slice(path, x.sharding))  # type: ignore[misc]
        shardload.verify(y, path, dataset="density")
        demo.rows.append(("  every process slices", seconds, *[""] * 4))


def _field(n: int, mesh: Mesh) -> jax.Array:
    """Long waves plus noise."""

    def values(index: Any) -> Any:
        i, j, k = np.ogrid[tuple(slice(*part.indices(n)) for part in index)]
        turn = 2 * np.pi / n
        waves = np.cos(turn * (j + 2 * k)) * np.cos(turn * i) + np.sin(turn * (3 * j - k)) * np.sin(2 * turn * i)
        noise = np.random.default_rng([i[0, 0, 0], j[0, 0, 0], k[0, 0, 0]]).standard_normal(waves.shape)
        return (waves + 0.1 * noise).astype(np.float32)

    return jax.make_array_from_callback((n, n, n), NamedSharding(mesh, _PENCILS), values)


def _fft_error(path: Path, modes_path: Path) -> str:
    """The largest error of the saved modes, relative to the largest mode; a text, which all ranks can be told."""
    with _opened(path, "density") as array, _opened(modes_path, "modes") as modes:
        reference = np.fft.fftn(array[...].astype(np.float64))
        return str(np.max(np.abs(modes[...] - reference)) / np.max(np.abs(reference)))


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


def _spec_text(spec: Any) -> str:
    names = ("-" if part is None else part if isinstance(part, str) else "+".join(part) for part in spec)
    return f"P({', '.join(names)})"


@contextmanager
def _shared_folder(group: Group) -> Iterator[Path]:
    """A temporary folder that all ranks see, which rank 0 removes."""
    with tempfile.TemporaryDirectory(prefix="shardload-demo-") as own:
        folder = Path(group.tell(lambda: own, 0))
        blind = np.flatnonzero(group.gather_int(folder.is_dir()) == 0).tolist()
        if blind:
            raise ConfigError(f"ranks {blind} do not see {folder}. Set TMPDIR to a folder that all nodes share.")
        yield folder
        group.agree(None)  # before it is removed, no rank may still be reading


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, help="elements along each axis of the FFT field")
    run(parser.parse_args().size)
