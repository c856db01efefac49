"""What is compared? A cell is one layout of the file, one sharding, one number of ranks.

Pure: the standard library only, so that peers in other environments can import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LAYOUTS = (
    "hdf5-contiguous",
    "hdf5-gzip-cubes",
    "hdf5-gzip-planes",
    "hdf5-blosc-planes",
    "zarr-zstd-cubes",
    "zarr-zstd-planes",
    "zarr-sharded",
)
# Cubes of 16^3 and 32^3: so many chunks that what is done for each of them counts.
SMALL_CHUNK_EDGES = (16, 32)
SMALL_CHUNK_LAYOUTS = tuple(
    f"{kind}-{edge}" for edge in SMALL_CHUNK_EDGES for kind in ("hdf5-gzip", "zarr-zstd", "zarr-sharded")
)
# Many arrays, and small ones: what is done once for a call, and once for an array. Each with its sharding.
MANY = {"series-of-40": "-,a,b", "many-tiny": "a,b", "real-field": "a", "one-kib": "a,b"}
MANY_WAYS = ("shardload", "shardload-loop", "slice", "scatter")
# "-" is an axis that is not cut: "-,a,b" is P(None, "a", "b").
SPECS = ("a", "a,b", "-,a,b", "-,-,a")
RANKS = (2, 4, 8)

OURS = "shardload"
FLOOR = "floor"
# In the order of the table's columns.
PEERS = {
    "slice": "every process slices the file in the callback (h5py, zarr-python)",
    "scatter": "rank 0 reads, comm.scatter (pickle)",
    "jax-power": "rank 0 reads, a message per device (jax-power's scatter_array)",
    "tensorstore": "TensorStore per device (Zarr only)",
    "heat": "Heat load_hdf5 / load_zarr (one axis cut; no JAX)",
    "parallel-hdf5": "collective parallel HDF5 (HDF5 only; no JAX)",
}
MODES = tuple(f"{OURS}-{readers}" for readers in ("root", "parallel", "direct"))
WAYS = (OURS, *PEERS, FLOOR)


@dataclass(frozen=True, order=True)
class Cell:
    """One row of the table."""

    layout: str
    spec: str
    ranks: int

    @property
    def has_chunks(self) -> bool:
        return self.layout != "hdf5-contiguous"

    @property
    def label(self) -> str:
        return f"{self.layout}, {spec_text(self.spec)}, {self.ranks} ranks"

    def has_way(self, way: str) -> bool:
        """Does this way exist for this file and sharding?"""
        if way == "tensorstore":
            return self.layout.startswith("zarr")
        if way == "parallel-hdf5":
            return self.layout.startswith("hdf5")
        if way == "heat":
            return len(cut_axes(self.spec)) == 1
        return True


@dataclass(frozen=True)
class Must:
    """The goal for a cell: at least so many times as fast as these ways."""

    cell: Cell
    at_least: tuple[tuple[str, float], ...]


MUSTS = (
    Must(Cell("hdf5-gzip-planes", "-,a,b", 8), (("slice", 8.0), ("scatter", 8.0), ("parallel-hdf5", 4.0))),
    Must(Cell("hdf5-gzip-cubes", "-,a,b", 4), (("slice", 1.4), ("scatter", 8.0))),
    Must(Cell("hdf5-contiguous", "a,b", 4), (("slice", 1.0),)),
    Must(Cell("zarr-zstd-planes", "-,a,b", 8), (("slice", 4.0), ("tensorstore", 4.0))),
    Must(Cell("zarr-zstd-cubes", "a,b", 4), (("tensorstore", 1.0),)),
    Must(Cell("zarr-sharded", "-,a,b", 4), (("tensorstore", 1.0),)),
)
SERIES_AT_LEAST = 4.0  # times slicing
FIELD_AT_LEAST = 1.0  # times slicing
TINY_AT_MOST_SECONDS = 1.0
KIB_AT_MOST_SECONDS = 0.005
SMALL_CHUNKS_AT_LEAST = 1.3  # of the best peer, in cells with small chunks
BEST_PEER_AT_LEAST = 0.95  # of every other cell
FLOOR_AT_MOST = 1.3  # of every cell with chunks


def all_cells(
    layouts: Sequence[str] = LAYOUTS, specs: Sequence[str] = SPECS, ranks: Sequence[int] = RANKS, *, only_must: bool = False
) -> list[Cell]:
    """The wanted cells, those of one number of ranks together."""
    musts = {must.cell for must in MUSTS}
    cells = [Cell(layout, spec, n) for n in ranks for layout in layouts for spec in specs]
    return [cell for cell in cells if not only_must or cell in musts]


def small_chunk_cells(layouts: Sequence[str] = SMALL_CHUNK_LAYOUTS, ranks: Sequence[int] = (1, 4)) -> list[Cell]:
    """Pencils from files with small chunks: on one process, and on four."""
    return [Cell(layout, "-,a,b", n) for n in ranks for layout in layouts]


def chunk_edge(layout: str) -> int | None:
    """Elements along each axis of a chunk, if the layout's name says it.

    >>> chunk_edge("zarr-sharded-16"), chunk_edge("zarr-zstd-cubes")
    (16, None)
    """
    last = layout.rpartition("-")[2]
    return int(last) if last.isdigit() else None


def cut_axes(spec: str) -> list[int]:
    """Array axes that the spec cuts.

    >>> cut_axes("-,a,b"), cut_axes("a")
    ([1, 2], [0])
    """
    return [axis for axis, name in enumerate(spec.split(",")) if name != "-"]


def mesh_shape(spec: str, n: int) -> tuple[int, ...]:
    """All ranks cut the one axis of a slab; two axes are cut as square as possible, rows <= columns.

    >>> mesh_shape("-,a,b", 8), mesh_shape("-,-,a", 8)
    ((2, 4), (8,))
    """
    if len(cut_axes(spec)) == 1:
        return (n,)
    rows = max(d for d in range(1, int(n**0.5) + 1) if n % d == 0)
    return (rows, n // rows)


def box(shape: Sequence[int], spec: str, n: int, rank: int) -> tuple[slice, ...]:
    """What rank `rank` of `n` holds, device i being on rank i: for peers that have no JAX to ask.

    >>> box((8, 8), "a,b", 4, 3)
    (slice(4, 8, None), slice(4, 8, None))
    """
    cuts = mesh_shape(spec, n)
    place = [rank // (n // cuts[0]), rank % (n // cuts[0])]
    bounds = [slice(0, size) for size in shape]
    for which, axis in enumerate(cut_axes(spec)):
        step = shape[axis] // cuts[which]
        bounds[axis] = slice(place[which] * step, (place[which] + 1) * step)
    return tuple(bounds)


def spec_text(spec: str) -> str:
    """As it is written in Python.

    >>> spec_text("-,a,b")
    'P(None, "a", "b")'
    """
    names = ["None" if name == "-" else f'"{name}"' for name in spec.split(",")]
    return f"P({', '.join(names)})"
