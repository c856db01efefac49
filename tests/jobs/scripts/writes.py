"""A save over an old file, or an append, in which one rank is killed, or hangs: ``writes.py FOLDER save|append PHASE``."""

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
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.engine.read_back import ReadBack
from shardload.storage.changes import GrowingFile
from tests.mpi.support import put

# The rank that is killed (-1: the last), before which call, for which time, of those with a word among their arguments.
PHASES: dict[str, dict[str, tuple[int, Any, str, int, str]]] = {
    "save": {
        "put": (-1, os, "pwrite", 1, ""),
        "finish": (0, os, "ftruncate", 1, ""),
        "read back": (-1, ReadBack, "_compare_stored", 1, ""),
        "commit": (0, os, "rename", 1, ""),
        "hang": (-1, os, "pwrite", 1, ""),
    },
    "append": {
        "put": (-1, os, "pwrite", 1, ""),
        "read back": (-1, ReadBack, "_compare_stored", 1, ""),
        "first new chunk": (0, os, "rename", 2, ""),
        "metadata": (0, os, "rename", 1, "zarr.json"),
        "second metadata": (0, os, "rename", 2, "zarr.json"),
        "consolidated": (0, os, "rename", 3, "zarr.json"),
        # What rank 0 syncs: the new end; then the mark, changes, and the head.
        "changes": (0, GrowingFile, "sync", 3, ""),
    },
}


def kill() -> None:
    """End this rank as the system would."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """A file system that never answers."""
    threading.Event().wait()


def end_at(phase: tuple[int, Any, str, int, str], end: Any) -> None:
    """Have a rank end when it comes to a call."""
    victim, holder, name, which, words = phase
    call, n = getattr(holder, name), [0]

    def called(*args: Any, **more: Any) -> Any:
        n[0] += words in " ".join(map(str, args))
        if n[0] == which:
            end()
        return call(*args, **more)

    if jax.process_index() == victim % jax.process_count():
        setattr(holder, name, called)


def main(folder: Path, what: str, phase: str) -> None:
    """Save or append, and say what came of it."""
    shardload.initialize()
    n = jax.process_count()
    mesh = Mesh(np.array(jax.devices()), "a")

    if what in ("append", "replace"):
        values = np.arange(9 * 4 * n * 5, dtype="float32").reshape(9, 4 * n, 5)
        file = next(name for name in ("run.zarr", "run.h5") if (folder / name).exists())
        end_at(PHASES["append"][phase], kill)
        first, at = (5, None) if what == "append" else (3, 3.0)  # rows 3 and 4 become other ones
        rho = values[first:] + 1000 * (what == "replace")
        shardload.append(folder / file, {"rho": put(rho, mesh, P(None, "a")), "time": np.arange(float(first), 9.0)}, at=at)
        return
    x = put(np.arange(8 * n * 6 * 5, dtype="float32").reshape(8 * n, 6, 5), mesh, P("a"))
    how: dict[str, Any] = {"compression": "gzip", "chunks": (2, 6, 5)}
    shardload.save(folder / "out.h5", {"old": x}, **how)
    end_at(PHASES[what][phase], hang if phase == "hang" else kill)
    try:
        shardload.save(folder / "out.h5", {"new": 2 * x}, mode="w", timeout=2.0 if phase == "hang" else 60.0, **how)
    except shardload.ShardloadError as error:
        print(json.dumps({"rank": jax.process_index(), "type": type(error).__name__, "text": str(error)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
