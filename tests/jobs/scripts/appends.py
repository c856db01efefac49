"""An append to a store or a file, in which one rank is killed: ``appends.py FOLDER PHASE``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload.engine.read_back import ReadBack
from shardload.formats.zarr.growth import GrowthSink
from shardload.storage.changes import GrowingFile
from shardload.storage.new_folder import AddedFolder


def kill_before(holder: Any, name: str, which: int, words: str = "") -> None:
    """End this process as the system would, when it comes to a call for the given time (of those with a word among them)."""
    call, n = getattr(holder, name), [0]

    def called(*args: Any, **more: Any) -> Any:
        n[0] += words in " ".join(map(str, args))
        if n[0] == which:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **more)

    setattr(holder, name, called)


def main(folder: Path, phase: str) -> None:
    """Append, and be killed."""
    shardload.initialize()
    n, rank = jax.process_count(), jax.process_index()
    values = np.arange(9 * 4 * n * 5, dtype="float32").reshape(9, 4 * n, 5)
    x = jax.make_array_from_callback(
        (4, 4 * n, 5), NamedSharding(Mesh(np.array(jax.devices()), "a"), P(None, "a")), lambda index: values[5:][index]
    )
    phases: dict[str, tuple[int, Any, str, int, str]] = {
        "put": (n - 1, os, "pwrite", 1, ""),
        "read back": (n - 1, ReadBack, "_compare_stored", 1, ""),
        "commit": (0, GrowthSink, "commit", 1, ""),
        "first new chunk": (0, os, "replace", 2, ""),
        "edge": (0, AddedFolder, "replace", 1, ""),
        "metadata": (0, os, "replace", 1, "zarr.json"),
        "second metadata": (0, os, "replace", 2, "zarr.json"),
        "consolidated": (0, os, "replace", 3, "zarr.json"),
        "end": (0, GrowthSink, "abandon", 1, ""),
    }
    file = next(name for name in ("run.zarr", "run.h5") if (folder / name).exists())
    # What rank 0 syncs: the new end; then the mark, changes, and the head.
    phases["changes"] = (0, GrowingFile, "sync", 3, "")
    victim, holder, name, which, words = phases[phase]
    if rank == victim:
        kill_before(holder, name, which, words)
    shardload.append(folder / file, {"rho": x, "time": np.arange(5.0, 9.0)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
