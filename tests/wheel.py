"""Does a wheel load a file where nothing else is installed? ``make release-check`` runs this, outside of the clone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload

CLONE = Path(__file__).resolve().parents[1]


def main() -> None:
    if (CLONE / "shardload").samefile(Path(shardload.__file__).parent):
        raise SystemExit(f"this is the clone, not the wheel: {shardload.__file__}")
    jax.config.update("jax_num_cpu_devices", 6)
    values = np.arange(12 * 8 * 5, dtype=np.float32).reshape(12, 8, 5)
    mesh = Mesh(np.array(jax.devices()).reshape(3, 2), ("a", "b"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("rho", data=values, chunks=(5, 3, 5), compression="gzip")
        loaded = shardload.load(path, mesh, P("a", "b"), verify="full")
        shardload.save(Path(folder) / "copy.zarr", {"rho": loaded})
        again = shardload.load(Path(folder) / "copy.zarr", mesh, P(None, "b"))
    if not (np.array_equal(loaded, values) and np.array_equal(again, values)):
        raise SystemExit("the values are not those of the file")
    print(f"shardload {shardload.__version__} from {Path(shardload.__file__).parent}: loaded, saved and loaded again")


if __name__ == "__main__":
    main()
