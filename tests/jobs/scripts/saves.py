"""A save over an old file, in which one rank is killed, or hangs: ``saves.py FOLDER PHASE``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload.engine.read_back import ReadBack


def kill(*_: Any, **__: Any) -> Any:
    """End this rank as the system would."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang(*_: Any, **__: Any) -> Any:
    """A file system that never answers."""
    threading.Event().wait()


def main(folder: Path, phase: str) -> None:
    """Save, and say what came of it."""
    shardload.initialize()
    n, rank = jax.process_count(), jax.process_index()
    values = np.arange(8 * n * 6 * 5, dtype="float32").reshape(8 * n, 6, 5)
    x = jax.make_array_from_callback(
        values.shape, NamedSharding(Mesh(np.array(jax.devices()), "a"), P("a")), lambda index: values[index]
    )
    path, timeout = folder / "out.h5", 60.0
    shardload.save(path, {"old": x}, compression="gzip", chunks=(2, 6, 5))
    where = {"put": (n - 1, os, "pwrite"), "finish": (0, os, "ftruncate"), "commit": (0, os, "replace")}
    where |= {"read back": (n - 1, ReadBack, "_compare_stored"), "hang": (n - 1, os, "pwrite"), "sync": (n - 1, os, "fsync")}
    victim, holder, name = where[phase]
    if phase == "hang":
        timeout = 2.0
    if rank == victim:
        setattr(holder, name, hang if phase == "hang" else kill)
    try:
        shardload.save(path, {"new": 2 * x}, mode="w", compression="gzip", chunks=(2, 6, 5), timeout=timeout)
    except shardload.ShardloadError as error:
        print(json.dumps({"rank": rank, "type": type(error).__name__, "text": str(error)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
