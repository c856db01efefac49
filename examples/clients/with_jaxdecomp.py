"""Load for jaxDecomp, transform, and compare each shard with NumPy.

::

    mpiexec -n 4 python examples/clients/with_jaxdecomp.py clients.h5      # docs/clients.md says what is in it
"""

import sys

import h5py
import jax
import jaxdecomp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardload

file = sys.argv[1]
shardload.initialize()
# what docs/clients.md shows
b = 2 if jax.device_count() % 2 == 0 else 1
mesh = jax.make_mesh((jax.device_count() // b, b), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))
x = shardload.load(file, mesh, P("x", "y"), dataset="density")
modes = jaxdecomp.fft.pfft3d(x)  # mode (i, j, k) is modes[j, k, i]
back = jaxdecomp.fft.pifft3d(modes)
# check the result
with h5py.File(file) as opened:
    values = opened["density"][...]
expected = np.fft.fftn(values).transpose(1, 2, 0)
for shard in modes.addressable_shards:
    np.testing.assert_allclose(shard.data, expected[shard.index], atol=1e-5 * np.abs(expected).max())
for shard in back.addressable_shards:
    np.testing.assert_allclose(shard.data, values[shard.index], atol=1e-5)
if jax.process_index() == 0:
    print(f"OK: {modes.shape} modes as {modes.sharding.spec} on {mesh.size} devices, jax {jax.__version__}")
