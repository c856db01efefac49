"""What is loaded from a store, and how: cells, and the ways beside shardload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cases.cells import OURS, spec_text

STORE_RANKS = 4
STORE_SPECS = ("-,a,b", "a")
SMALL = "hdf5-gzip-8"  # chunks of 8^3 in an array of three quarters of the size: 110,592 of 2 KiB
STORE_LAYOUTS = ("hdf5-gzip-planes", "hdf5-gzip-cubes", "zarr-zstd-cubes", "zarr-sharded", SMALL)
STREAM, STREAM_LAYOUT = "stream", "zstd-40"

# In the order of the table's columns. Each opens the array in every process, and reads there what its device needs.
STORE_PEERS = {
    "h5netcdf": "xarray with h5netcdf over s3fs, blocks of 4 MiB that are kept",
    "virtualizarr": "zarr-python through VirtualiZarr's references, which were made before, over obstore, concurrency 64",
    "tensorstore": "TensorStore's zarr3 over its s3",
    "zarr-obstore": "zarr-python over obstore, concurrency 64",
    "zarr-fsspec": "zarr-python over s3fs, concurrency 64",
}
FETCH = "fetch"  # all stored bytes once, in pieces of 8 MiB, thrown away
DECODE = "decode"  # the floor of local loads: each chunk decoded once from the page cache, one copy
STORE_WAYS = (OURS, *STORE_PEERS, FETCH, DECODE)
STREAM_WAYS = ("stream-local", "stream-store")
ROUNDS = 6  # of the latency, in the floor


@dataclass(frozen=True)
class StoreCell:
    """A row of the table: a layout and a sharding."""

    layout: str
    spec: str

    @property
    def label(self) -> str:
        return f"{self.layout}, {spec_text(self.spec)}"

    def has_way(self, way: str) -> bool:
        """Does this way read such a file?"""
        if way == "virtualizarr" and self.layout == SMALL:
            return False  # 70 s for 216 MiB (measured once): a request for each chunk
        if way in ("h5netcdf", "virtualizarr"):
            return self.layout.startswith("hdf5")
        return way not in STORE_PEERS or self.layout.startswith("zarr")


def store_cells(layouts: Sequence[str] = STORE_LAYOUTS, specs: Sequence[str] = STORE_SPECS) -> list[StoreCell]:
    """All of these layouts and shardings."""
    return [StoreCell(layout, spec) for layout in layouts for spec in specs]


# Of a layout: at least so many times as fast as a way, in each sharding.
STORE_MUSTS = (
    ("hdf5-gzip-planes", "h5netcdf", 5.0),
    ("hdf5-gzip-planes", "virtualizarr", 1.5),
    ("zarr-zstd-cubes", "tensorstore", 1.2),
    ("zarr-zstd-cubes", "zarr-obstore", 1.3),
    ("zarr-sharded", "tensorstore", 1.2),
    ("zarr-sharded", "zarr-obstore", 1.2),
    (SMALL, "h5netcdf", 10.0),
)
FLOOR_AT_MOST = 1.25
STREAM_AT_LEAST = 0.9
