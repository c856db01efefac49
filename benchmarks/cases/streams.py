"""Which streams are compared? Files of steps, and cells: a file, a mesh, an order of the samples, a step of the program.

The field is a sum of waves with noise on top, which is a hash of each element's flat index: values of any region can be made
again from its place alone, and a value from a wrong place is found. It compresses to about two thirds with zstd.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

NAME, DIMS = "t2m", ("time", "level", "lat", "lon")
MAP = (13, 64, 128)  # levels, latitudes, longitudes of a step: 416 KiB
N_STEPS = 2000
RANKS = 4
WINDOW = (-1, 0, 1)
SEED = 1
RECIPE = 1  # counted up when what is written changes
Array = np.ndarray[Any, Any]

# Format, codec, chunks.
STREAM_LAYOUTS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "zstd-40": ("zarr", "zstd", (40, *MAP)),
    "zstd-40-cut": ("zarr", "zstd", (40, 13, 32, 64)),
    "zstd-1": ("zarr", "zstd", (1, *MAP)),
    "blosc-40": ("zarr", "blosc", (40, *MAP)),
    "gzip-40": ("hdf5", "gzip", (40, *MAP)),
}
MESHES = {"data=4": {"data": 4, "lat": 1, "lon": 1}, "lat=2,lon=2": {"data": 1, "lat": 2, "lon": 2}}
MESHES["data=2,lat=2"] = {"data": 2, "lat": 2, "lon": 1}

# In the order of the table's columns.
STREAM_PEERS = {
    "slice": "every process slices its part of each sample (zarr-python, h5py), in a thread that is two batches ahead",
    "grain": "Grain: MapDataset of samples, each process reads its part in 4 threads",
    "grain-blocks": "Grain: MapDataset of blocks of a chunk, cut into samples, shuffled in a window of a tenth of the data",
    "tensorstore": "TensorStore with a cache_pool of 128 MiB in each process, reads of two batches ahead",
    "xbatcher": "xbatcher over xarray, in a thread that is two batches ahead",
    "mosaic": "mosaicml-streaming: MDS shards of whole samples (written before), each process cuts out its part",
}
MEMORY = "memory"  # batches that are on the devices before the clock starts
STREAM_WAYS = ("shardload", *STREAM_PEERS, MEMORY)


@dataclass(frozen=True)
class StreamCell:
    """A row of the table.

    Attributes
    ----------
    name : str
        For people, and for ``--cells``.
    layout, mesh : str
        Keys of `STREAM_LAYOUTS` and `MESHES`.
    shuffled, has_window : bool
        The order of the samples; whether a sample is three steps.
    step_ms : float
        What the program does with a batch: it sleeps so long. -1: it does a convolution. -2: it sleeps twice as long as
        decoding a batch takes on all cores.
    batch : int
        Samples.
    ways : tuple of str
        What is compared.
    is_timed_first : bool
        Whether the time to the first batch is measured too: cold, and resumed.
    """

    name: str
    layout: str
    mesh: str = "lat=2,lon=2"
    shuffled: bool = True
    has_window: bool = False
    step_ms: float = 0
    batch: int = 8
    ways: tuple[str, ...] = field(default=("shardload", *STREAM_PEERS))
    is_timed_first: bool = False

    def request(self) -> dict[str, Any]:
        """For a job."""
        return {key: value for key, value in asdict(self).items() if key != "ways"}


_FEW = ("shardload", "grain-blocks", "tensorstore", MEMORY)
_FAST = ("shardload", "slice", "grain-blocks", "tensorstore")
_OURS = ("shardload", MEMORY)
STREAM_CELLS = (
    StreamCell("tiles, in sequence", "zstd-40", shuffled=False, is_timed_first=True),
    StreamCell("tiles, shuffled", "zstd-40", is_timed_first=True),
    StreamCell("tiles, shuffled, window", "zstd-40", has_window=True),
    StreamCell("tiles, blosc, in sequence", "blosc-40", shuffled=False, ways=_FAST),
    StreamCell("tiles, HDF5 gzip, in sequence", "gzip-40", shuffled=False, ways=("shardload", "slice")),
    StreamCell("tiles, chunks cut as tiles, in sequence", "zstd-40-cut", shuffled=False, ways=_FAST),
    StreamCell("tiles, chunks cut as tiles, shuffled", "zstd-40-cut", ways=_FAST),
    StreamCell("data only, chunks of one step, in sequence", "zstd-1", "data=4", shuffled=False),
    StreamCell("data only, chunks of one step, shuffled", "zstd-1", "data=4"),
    StreamCell("data and lat, shuffled, 20 ms", "zstd-40", "data=2,lat=2", step_ms=20, ways=_FEW),
    StreamCell("tiles, in sequence, 20 ms", "zstd-40", shuffled=False, step_ms=20, ways=_FEW),
    StreamCell("tiles, shuffled, 100 ms", "zstd-40", step_ms=100, ways=_FEW),
    StreamCell("tiles, shuffled, convolution", "zstd-40", step_ms=-1, ways=_FEW),
    StreamCell("tiles, in sequence, twice the decoding", "zstd-40", shuffled=False, step_ms=-2, ways=_OURS),
    StreamCell("tiles, shuffled, twice the decoding", "zstd-40", step_ms=-2, ways=_OURS),
    # The same samples in batches of 8 and of 1 (416 KiB): what a batch costs beside its values.
    StreamCell("batches of 8", "zstd-40-cut", shuffled=False, ways=("shardload",)),
    StreamCell("batches of 1", "zstd-40-cut", shuffled=False, batch=1, ways=("shardload",)),
)


@dataclass(frozen=True)
class StreamFile:
    """One written layout."""

    layout: str
    path: Path
    n_steps: int

    @property
    def is_zarr(self) -> bool:
        return STREAM_LAYOUTS[self.layout][0] == "zarr"

    @property
    def chunks(self) -> tuple[int, ...]:
        return STREAM_LAYOUTS[self.layout][2]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n_steps, *MAP)

    @property
    def n_chunks(self) -> int:
        return math.prod(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True))

    @property
    def paths(self) -> list[Path]:
        """Every file on disk that holds it."""
        return [self.path] if self.path.is_file() else sorted(p for p in self.path.rglob("*") if p.is_file())

    def request(self) -> dict[str, Any]:
        """For a job."""
        return {"layout": self.layout, "path": str(self.path), "n_steps": self.n_steps}

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> StreamFile:
        """What `request` has told."""
        return cls(request["layout"], Path(request["path"]), request["n_steps"])


def values_at(steps: Array, rest: Sequence[slice]) -> Array:
    """The values of some steps in a region of the other axes."""
    waves = [np.round(np.sin(np.arange(n) * 0.13) * (1 << 14)).astype(np.int64) for n in (1 << 16, *MAP)]
    at = [np.asarray(steps), *(np.arange(n)[cut] for n, cut in zip(MAP, rest, strict=True))]
    time, level, lat, lon = np.ix_(*at)
    flat = ((time * MAP[0] + level) * MAP[1] + lat) * MAP[2] + lon
    noise = (flat.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    noise = ((noise ^ (noise >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(54)
    smooth = waves[0][time] + waves[1][level] + ((waves[2][lat] * waves[3][lon]) >> 14)
    return ((smooth + (noise.astype(np.int64) << 2)) / (1 << 14)).astype(np.float32)


def make_stream_files(
    folder: Path, n_steps: int, layouts: Sequence[str], say: Callable[[str], None] = lambda _: None
) -> dict[str, StreamFile]:
    """Write what is missing under `folder`; return all by name."""
    folder = folder / f"streams-{n_steps}-recipe-{RECIPE}"
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: StreamFile(name, folder / f"{name}{_SUFFIXES[STREAM_LAYOUTS[name][0]]}", n_steps) for name in layouts}
    done = {name: folder / f"{name}.json" for name in files}  # written last: a layout without it is not whole
    missing = [file for name, file in files.items() if not done[name].exists()]
    if missing:
        say(f"writing {', '.join(file.path.name for file in missing)}, {n_steps:,} steps")
        _write(missing, n_steps)
    for file in missing:
        done[file.layout].write_text(json.dumps({"stored_nbytes": sum(path.stat().st_size for path in file.paths)}))
    return files


_SUFFIXES = {"zarr": ".zarr", "hdf5": ".h5"}


def _write(files: Sequence[StreamFile], n_steps: int) -> None:
    whole = tuple(slice(None) for _ in MAP)
    with ExitStack() as opened:
        arrays = [_new_array(file, opened) for file in files]
        for first in range(0, n_steps, 40):
            steps = np.arange(first, min(first + 40, n_steps))
            values = values_at(steps, whole)
            for array in arrays:
                array[first : first + len(steps)] = values


def _new_array(file: StreamFile, opened: ExitStack) -> Any:
    import h5py
    import zarr

    _, codec, chunks = STREAM_LAYOUTS[file.layout]
    if not file.is_zarr:
        to = opened.enter_context(h5py.File(file.path, "w"))
        how = {"chunks": chunks, "compression": codec, "compression_opts": 1, "shuffle": True}
        return to.create_dataset(NAME, file.shape, "f4", **how)
    compressor = zarr.codecs.ZstdCodec() if codec == "zstd" else zarr.codecs.BloscCodec()
    group = zarr.create_group(file.path, overwrite=True)
    return group.create_array(NAME, shape=file.shape, dtype="f4", chunks=chunks, compressors=compressor, dimension_names=DIMS)
