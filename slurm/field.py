"""Write a small example file, unless it exists: a plane wave, in compressed planes.

::

    python slurm/field.py field.h5

One process runs this before the job's step, so it needs neither MPI nor JAX. The wave has modes (1, 2, 3): its transform is
half the number of elements at that mode and at the opposite one, and 0 elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np

SHAPE = (64, 96, 160)
MODES = (1, 2, 3)


def main(path: Path) -> None:
    """Write the field."""
    if path.exists():
        return
    i, j, k = np.ogrid[tuple(slice(n) for n in SHAPE)]
    phase = MODES[0] * i / SHAPE[0] + MODES[1] * j / SHAPE[1] + MODES[2] * k / SHAPE[2]
    part = path.with_name(f"{path.name}.part")  # a job that ends in between leaves no file that looks whole
    with h5py.File(part, "w") as file:
        values = np.cos(2 * np.pi * phase).astype(np.float32)
        file.create_dataset("density", data=values, chunks=(1, *SHAPE[1:]), compression="gzip", shuffle=True)
    part.replace(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python slurm/field.py FILE")
    main(Path(sys.argv[1]))
