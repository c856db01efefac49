"""Which files are written, and what is asked? A cell is a layout of the new file, a sharding of the array, a number of ranks.

Pure: the standard library only, so that peers in other environments can import it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from benchmarks.cases.cells import FLOOR, OURS, Cell, box

SAVE_SPECS = ("-,a,b", "a,b")
SAVE_RANKS = (4, 8)
# In the order of the table's columns.
SAVE_PEERS = {
    "gather": "all pieces to rank 0 (comm.Gather), which writes with h5py or zarr-python",
    "parallel-hdf5": "collective parallel HDF5 with the same filter (HDF5 only; no JAX)",
    "zarr-python": "zarr-python in every process, each whole chunks or shards (Zarr only)",
    "tensorstore": "TensorStore in every process, each whole chunks or shards (Zarr only)",
    "orbax": "Orbax's checkpoint of the same array: for the rate alone",
}
SAVE_MODES = {f"{OURS}-unread": "shardload without reading back (verify='index')"}
SAVE_WAYS = (OURS, *SAVE_MODES, *SAVE_PEERS, FLOOR)
NAME = "x"  # of the array in a file
GZIP_LEVEL = 4  # h5py's, and HDF5's own
SLOW_SECONDS = 5.0  # a peer whose first save takes longer is timed once
VERY_SLOW_SECONDS = 10.0  # ... and of one that takes so long that first save counts
MEMORY_STAGING_NBYTES = 64 << 20  # small compared with the array, so that exceeding it shows
AT_LEAST = {
    ("hdf5-gzip-planes", "gather"): 3.0,
    ("hdf5-gzip-planes", "parallel-hdf5"): 1.5,
    ("hdf5-contiguous", "gather"): 1.5,
    ("hdf5-contiguous", "parallel-hdf5"): 1.0,
    ("zarr-zstd-cubes", "tensorstore"): 1.0,
    ("zarr-sharded", "tensorstore"): 1.0,
}
FLOOR_AT_MOST = 1.4  # of every cell with chunks
STAGING_NBYTES = 256 << 20  # what a save takes by default
ALLOWANCE_NBYTES = 64 << 20  # beyond it


@dataclass(frozen=True)
class SaveLayout:
    """How the new file is laid out.

    Attributes
    ----------
    name : str
        One of `SAVE_LAYOUTS`.
    chunks, shards : tuple of int or None
        Elements of each along each axis.
    codec : str or None
        ``"gzip"`` or ``"zstd"``.
    """

    name: str
    chunks: tuple[int, ...] | None
    shards: tuple[int, ...] | None
    codec: str | None

    @property
    def is_zarr(self) -> bool:
        return self.name.startswith("zarr")

    @property
    def suffix(self) -> str:
        return ".zarr" if self.is_zarr else ".h5"

    def unit(self, shape: Sequence[int]) -> tuple[int, ...]:
        """What one process must write as a whole: a shard file, a chunk, or in a contiguous file a plane."""
        return self.shards or self.chunks or (1, *shape[1:])

    def request(self) -> dict[str, Any]:
        """For a job."""
        return asdict(self)

    @classmethod
    def of(cls, request: dict[str, Any]) -> SaveLayout:
        """The inverse of `request`, after JSON."""
        shapes = {key: None if request[key] is None else tuple(request[key]) for key in ("chunks", "shards")}
        return cls(**{**request, **shapes})


SAVE_LAYOUTS = ("hdf5-gzip-planes", "hdf5-gzip-cubes", "hdf5-contiguous", "zarr-zstd-cubes", "zarr-sharded")


def save_layout(name: str, size: int) -> SaveLayout:
    """A layout for an array of size^3: planes, cubes of 64^3 in shards of 256^3, smaller for small arrays."""
    edge = min(64, max(4, size // 4))
    chunks = None if name == "hdf5-contiguous" else (1, size, size) if name.endswith("planes") else (edge,) * 3
    shards = (edge * max(1, min(256, size // 2) // edge),) * 3 if name == "zarr-sharded" else None
    return SaveLayout(name, chunks, shards, None if chunks is None else "zstd" if name.startswith("zarr") else "gzip")


def has_way(cell: Cell, way: str) -> bool:
    """Does this way exist for this file?"""
    if way in ("zarr-python", "tensorstore"):
        return cell.layout.startswith("zarr")
    if way == "parallel-hdf5":
        return cell.layout.startswith("hdf5")
    if way == "orbax":  # its file is the same in every cell
        return cell.layout == "hdf5-contiguous"
    return True


def save_cells(layouts: Sequence[str], specs: Sequence[str], ranks: Sequence[int]) -> list[Cell]:
    """The wanted cells, those of one number of ranks together."""
    return [Cell(layout, spec, n) for n in ranks for layout in layouts for spec in specs]


def own_box(shape: Sequence[int], unit: Sequence[int], n: int, rank: int) -> tuple[slice, ...]:
    """Whole units for rank `rank` of `n`: the units along each axis are cut so that as many ranks as possible have some.

    >>> own_box((8, 8, 8), (1, 8, 8), 4, 1), own_box((8, 8, 8), (4, 4, 4), 8, 7)
    ((slice(2, 4, None), slice(0, 8, None), slice(0, 8, None)), (slice(4, 8, None), slice(4, 8, None), slice(4, 8, None)))
    """
    grid = [math.ceil(size / step) for size, step in zip(shape, unit, strict=True)]
    ways = [cuts for cuts in product(*(range(1, min(m, n) + 1) for m in grid)) if math.prod(cuts) <= n]
    cuts = max(ways, key=lambda cuts: (math.prod(cuts), *cuts))
    if rank >= math.prod(cuts):
        return tuple(slice(0, 0) for _ in shape)
    place = []
    for step in reversed(cuts):
        place.append(rank % step)
        rank //= step
    bounds = []
    for k, cut, m, size, step in zip(reversed(place), cuts, grid, shape, unit, strict=True):
        bounds.append(slice(min(size, m * k // cut * step), min(size, m * (k + 1) // cut * step)))
    return tuple(bounds)


def is_aligned(shape: Sequence[int], unit: Sequence[int], spec: str, n: int) -> bool:
    """Does every rank's piece consist of whole units?"""
    return all(
        s.start % step == 0 and (s.stop % step == 0 or s.stop == size)
        for rank in range(n)
        for s, step, size in zip(box(shape, spec, n, rank), unit, shape, strict=True)
    )
