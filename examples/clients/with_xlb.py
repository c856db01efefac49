"""Load populations for XLB on its own sharding, take density and velocity, and compare each shard with NumPy.

::

    mpiexec -n 4 python examples/clients/with_xlb.py clients.h5      # docs/clients.md says what is in it
"""

import sys

import h5py
import jax
import numpy as np
import xlb
from xlb.compute_backend import ComputeBackend
from xlb.grid import grid_factory
from xlb.operator.macroscopic import Macroscopic
from xlb.precision_policy import PrecisionPolicy

import shardload

file = sys.argv[1]
shardload.initialize()
# what docs/clients.md shows
velocities = xlb.velocity_set.D3Q19(PrecisionPolicy.FP32FP32, ComputeBackend.JAX)
xlb.init(velocities, ComputeBackend.JAX, PrecisionPolicy.FP32FP32)
grid = grid_factory((32, 32, 32))
f = shardload.load(file, grid.sharding, dataset="f")  # (19, 32, 32, 32): populations first, as XLB has them
rho, u = Macroscopic()(f)
# check the result
with h5py.File(file) as opened:
    values = opened["f"][...]
expected = values.sum(axis=0, keepdims=True)
for shard in rho.addressable_shards:
    np.testing.assert_allclose(shard.data, expected[shard.index], rtol=1e-5)
if jax.process_index() == 0:
    print(f"OK: rho {rho.shape} as {rho.sharding.spec} on {grid.nDevices} devices, jax {jax.__version__}")
