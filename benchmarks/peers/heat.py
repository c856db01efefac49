"""Heat: `load_hdf5` and `load_zarr`, split along one axis, into a DNDarray (PyTorch; no JAX)."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from mpi4py import MPI

from benchmarks.cases.cells import cut_axes
from benchmarks.remote import serve

# Heat imports torchvision for a data set of pictures; its wheels need CUDA, and nothing here needs it.
vision = MagicMock()
vision.datasets.MNIST = object
sys.modules["torchvision"] = vision
sys.modules["torchvision.transforms"] = vision.transforms

import heat  # noqa: E402  (after the stand-in)

comm = MPI.COMM_WORLD


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Load; compare outside the timing."""
    file = request["file"]
    (split,) = cut_axes(request["spec"])
    comm.Barrier()
    start = time.perf_counter()
    if Path(file["path"]).is_dir():
        array = heat.load_zarr(file["path"], split=split)
    else:
        array = heat.load_hdf5(file["path"], file["dataset"], dtype=heat.float32, split=split)
    end = time.perf_counter()
    if request.get("verify"):
        _, shape, mine = array.comm.chunk(array.gshape, split)
        values = np.load(file["reference"], mmap_mode="r")[mine]
        if tuple(array.larray.shape) != tuple(shape) or not np.array_equal(array.larray.numpy(), values):
            raise ValueError(f"Heat loaded other values than the file has at {mine}")
    return {"start": start, "end": end}


if __name__ == "__main__":
    import torch

    serve(handle, comm.rank, {"heat": heat.__version__, "torch": torch.__version__})
