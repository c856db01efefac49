"""Save on all ranks, then again with a disk that is full on the last node; say what happened, in a line of JSON for each rank.

``saves.py FOLDER``: an empty folder that all nodes see.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import shardload
from shardload.comm.group import group_of
from shardload.engine import read_back
from tests.mpi.support import cube, mesh_of, put, ramp
from tests.slurm.scripts.loads import permuted

writers: set[int] = set()
right = read_back.ReadBack.__init__


def read(self: Any, sink: Any, ticket: Any, notes: Any, writer: int, reader: int) -> None:
    writers.add(writer)
    right(self, sink, ticket, notes, writer, reader)


read_back.ReadBack.__init__ = read  # type: ignore[method-assign]


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def main(folder: Path) -> None:
    shardload.initialize()
    group, values = group_of(), ramp(cube())
    arrays = {}
    for k, (mesh, spec) in enumerate([(mesh_of(), P("a", "b")), (mesh_of(permuted(jax.devices())), P(None, "b", "a"))]):
        arrays[f"g{k}/x"] = put(values, mesh, spec)
    chunks = tuple(-(-n // 3) for n in values.shape)  # of shards of several nodes each
    reports = [
        shardload.save(folder / "gzip.h5", arrays, chunks=chunks, compression="gzip"),
        shardload.save(folder / "plain.h5", arrays),
        shardload.save(folder / "x.zarr", arrays, chunks=chunks, shards=tuple(2 * n for n in chunks), compression="zstd"),
    ]
    error = ""
    node = sorted(set(group.machine.leaders)).index(group.machine.leaders[group.rank])
    if node == group.machine.n_nodes - 1:
        os.pwrite = full  # type: ignore[assignment]
    try:
        shardload.save(folder / "gzip.h5", arrays, mode="w", chunks=chunks, compression="gzip")
    except shardload.SourceError as found:
        error = str(found)
    said = {"rank": group.rank, "node": node, "writers": sorted(writers), "error": error}
    said["sent"] = [report.nbytes_sent for report in reports]
    print(json.dumps({**said, "read back": [report.n_read_back for report in reports]}), flush=True)


if __name__ == "__main__":
    np.seterr(all="raise")
    main(Path(sys.argv[1]))
