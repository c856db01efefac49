"""Which files are read? The same field in every layout, written once and kept.

The field is a sum of waves with noise on top, rounded to steps of 2**-14: it compresses to about half with gzip and
shuffle and to two thirds with zstd, as simulation output does. Every value is noisy, so a piece from a wrong place is
found.

`reference.npy` has the plain values: each layout is written from it, read back with its own library and compared with
it, and what any way loads is compared with it too.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import iris_sample_data
import numpy as np
import zarr

from benchmarks.cases.cells import LAYOUTS, chunk_edge

RECIPE = 1  # counted up when what is written changes
NAME = "x"
REFERENCE = "reference.npy"
FIELD = ("E1_north_america.nc", "air_temperature")
STEPS_PER_UNIT = 1 << 14
NOISE = 1 << 10


@dataclass(frozen=True)
class File:
    """One written layout."""

    layout: str
    path: Path
    dataset: str
    reference: Path

    @property
    def paths(self) -> list[Path]:
        """Every file on disk that holds it."""
        return [self.path] if self.path.is_file() else sorted(p for p in self.path.rglob("*") if p.is_file())

    @property
    def stored_nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.load(self.reference, mmap_mode="r").shape)

    @property
    def nbytes(self) -> int:
        """Of the array, decoded."""
        return int(np.load(self.reference, mmap_mode="r").nbytes)

    def request(self) -> dict[str, str]:
        """For a job."""
        return {"path": str(self.path), "dataset": self.dataset, "reference": str(self.reference)}


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / "shardload-benchmarks"


def cube(size: int) -> int:
    """Chunks of 64^3, smaller for small arrays."""
    return min(64, max(4, size // 4))


def check_size(size: int) -> None:
    """ValueError if not every layout can be written: whole chunks, and halves of them for two ranks."""
    if size < 1 or size % (2 * cube(size)):
        raise ValueError(f"size is {size}; expected a multiple of {2 * cube(size)}, such as 64, 128, 256 or 512")


def shard(size: int) -> int:
    """Zarr shards of 256^3, smaller for small arrays; whole chunks."""
    return cube(size) * max(1, min(256, size // 2) // cube(size))


def plane(size: int, i: int) -> np.ndarray[Any, Any]:
    """Plane `i` of the field, shape (size, size), float32."""
    wave = np.sin(np.linspace(0, 8 * np.pi, size))
    noise = np.random.default_rng([RECIPE, i]).integers(0, NOISE, (size, size)) / (4 * NOISE)
    field = wave[i] + wave[:, None] * wave[None, :] + noise
    return (np.round(field * STEPS_PER_UNIT) / STEPS_PER_UNIT).astype(np.float32)


def reference_of(folder: Path, size: int, say: Callable[[str], None] = lambda _: None) -> Path:
    """The plain values, size^3; written if they are missing."""
    folder = folder / f"{size}-recipe-{RECIPE}"
    folder.mkdir(parents=True, exist_ok=True)
    reference = folder / REFERENCE
    if not reference.exists():
        say(f"writing {reference.name}, {size}^3")
        _write_reference(reference, size)
    return reference


def make(
    folder: Path, size: int, layouts: Sequence[str] = LAYOUTS, say: Callable[[str], None] = lambda _: None
) -> dict[str, File]:
    """Write what is missing under `folder`; return all by name."""
    check_size(size)
    reference = reference_of(folder, size, say)
    folder, files = reference.parent, {}
    for layout in layouts:
        suffix = ".zarr" if layout.startswith("zarr") else ".h5"
        file = File(layout, folder / f"{layout}{suffix}", NAME if suffix == ".h5" else "", reference)
        done = folder / f"{layout}.json"  # written last: a layout without it is not whole
        if not done.exists():
            say(f"writing {file.path.name}")
            _write(file, size)
            _check(file)
            done.write_text(json.dumps({"stored_nbytes": file.stored_nbytes}))
        files[layout] = file
    return files


def field(folder: Path) -> File:
    """A real field: 240 years of air temperature, from the package iris-sample-data."""
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(iris_sample_data.path) / FIELD[0]
    reference = folder / "field.npy"
    if not reference.exists():
        part = reference.with_suffix(".part")
        with h5py.File(path) as opened, part.open("wb") as file:
            np.save(file, opened[FIELD[1]][()])
        part.rename(reference)
    return File("hdf5-field", path, FIELD[1], reference)


def many(folder: Path, n_series: int = 40, n_tiny: int = 1000) -> dict[str, dict[str, Any]]:
    """Files of many arrays, and of one small one, by the names in `cells.MANY`: what a job needs to load all of them.

    A series of float32 arrays of 6 MiB in gzip planes, tiny ones of 4 KiB, the real field, and one of 1 KiB.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = np.stack([plane(128, i) for i in range(96)])

    def series(file: h5py.File) -> None:
        for k in range(n_series):
            file.create_dataset(f"v{k:02d}", data=base + np.float32(k), chunks=(1, 128, 128), compression="gzip", shuffle=True)

    def tiny(file: h5py.File) -> None:
        for k in range(n_tiny):
            file[f"g{k % 10}/v{k:04d}"] = np.arange(1024, dtype=np.float32).reshape(32, 32) + np.float32(k)

    def kib(file: h5py.File) -> None:
        file["x"] = np.arange(256, dtype=np.float32).reshape(16, 16)

    found: dict[str, dict[str, Any]] = {}
    writers = {"series-of-40": (series, n_series), "many-tiny": (tiny, n_tiny), "one-kib": (kib, 1)}
    for name, (write, n) in writers.items():
        path = folder / f"{name}-{n}-recipe-{RECIPE}.h5"
        if not path.exists():
            part = path.with_suffix(".part")
            with h5py.File(part, "w") as file:
                write(file)
            part.rename(path)
        found[name] = {"path": str(path)}
    found["real-field"] = {"path": str(Path(iris_sample_data.path) / FIELD[0]), "names": [FIELD[1]]}
    found["series-of-40"]["names"] = [f"v{k:02d}" for k in range(n_series)]
    found["many-tiny"]["names"] = [f"g{k % 10}/v{k:04d}" for k in range(n_tiny)]
    found["one-kib"]["names"] = ["x"]
    return found


def _write_reference(path: Path, size: int) -> None:
    part = path.with_suffix(".part")
    out = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=(size, size, size))
    for i in range(size):
        out[i] = plane(size, i)
    out.flush()
    part.rename(path)


def _write(file: File, size: int) -> None:
    values = np.load(file.reference, mmap_mode="r")
    _, kind, *_ = file.layout.split("-")
    if file.layout.startswith("zarr"):
        chunks = written = (1, size, size)
        if not file.layout.endswith("planes"):
            chunks, written = (chunk_edge(file.layout) or cube(size),) * 3, (cube(size),) * 3
        shards = (shard(size),) * 3 if kind == "sharded" else None
        compressor = zarr.codecs.ZstdCodec()
        array = zarr.create_array(
            file.path,
            shape=values.shape,
            dtype=values.dtype,
            chunks=chunks,
            shards=shards,
            compressors=compressor,
            overwrite=True,
        )
        for box in boxes(values.shape, shards or written):
            array[box] = values[box]
        return
    filters: dict[str, Any] = {}
    if kind == "gzip":
        filters = {"compression": "gzip", "shuffle": True}
    elif kind == "blosc":
        filters = dict(hdf5plugin.Blosc(cname="lz4", clevel=5, shuffle=hdf5plugin.Blosc.SHUFFLE))
    if kind != "contiguous":
        filters["chunks"] = (1, size, size) if file.layout.endswith("planes") else (chunk_edge(file.layout) or cube(size),) * 3
    with h5py.File(file.path, "w") as opened:
        data = opened.create_dataset(file.dataset, values.shape, values.dtype, **filters)
        for box in boxes(values.shape, filters.get("chunks", (1, size, size))):
            data[box] = values[box]


def _check(file: File) -> None:
    """Read it back with its own library."""
    values = np.load(file.reference, mmap_mode="r")
    slabs = boxes(values.shape, (min(64, len(values)), *values.shape[1:]))
    if file.layout.startswith("zarr"):
        array = zarr.open_array(file.path, mode="r")
        same = all(np.array_equal(array[box], values[box]) for box in slabs)
    else:
        with h5py.File(file.path) as opened:
            same = all(np.array_equal(opened[file.dataset][box], values[box]) for box in slabs)
    if not same:
        raise ValueError(f"{file.path} does not hold what was written to it")


def boxes(shape: Sequence[int], chunks: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Each chunk's place in the array, in C order."""
    for place in product(*(range(math.ceil(n / c)) for n, c in zip(shape, chunks, strict=True))):
        yield tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(place, chunks, shape, strict=True))
