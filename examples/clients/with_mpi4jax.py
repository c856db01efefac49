"""Load, and give each process's own piece to mpi4jax, which knows ranks and no shardings.

::

    mpiexec -n 4 python examples/clients/with_mpi4jax.py clients.h5      # docs/clients.md says what is in it
"""

import sys

import h5py
import jax
import mpi4jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload

file = sys.argv[1]
shardload.initialize()
# what docs/clients.md shows
mesh = Mesh(np.array(jax.devices()), "x")  # one device a process: slab i is rank i's
x = shardload.load(file, mesh, P("x"), dataset="density")
mine = x.addressable_data(0)  # the slab of this rank, on its device
total = jax.jit(lambda slab: mpi4jax.allreduce(slab.sum(), op=MPI.SUM, comm=MPI.COMM_WORLD))(mine)
# check the result
with h5py.File(file) as opened:
    values = opened["density"][...]
rank, n = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
np.testing.assert_array_equal(mine, np.split(values, n)[rank])
np.testing.assert_allclose(float(total), values.sum(dtype="f8"), rtol=1e-4)
if rank == 0:
    print(f"OK: {n} slabs {mine.shape}, the sum of all is {float(total):.6g}, jax {jax.__version__}")
