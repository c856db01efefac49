"""Load initial conditions for JaxPM, displace particles, and compare each shard with one device that has it all.

::

    mpiexec -n 4 python examples/clients/with_jaxpm.py clients.h5      # docs/clients.md says what is in it
"""

import sys

import h5py
import jax
import jax.numpy as jnp
import jax_cosmo
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxpm.pm import lpt

import shardload

file = sys.argv[1]
shardload.initialize()
# what docs/clients.md shows
b = 2 if jax.device_count() % 2 == 0 else 1
mesh = jax.make_mesh((jax.device_count() // b, b), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))
x = shardload.load(file, mesh, P("x", "y"), dataset="density")
dx, p, f = lpt(jax_cosmo.Planck15(), x, a=0.1, halo_size=8, sharding=x.sharding)
# check the result
with h5py.File(file) as opened:
    values = opened["density"][...]
expected = np.asarray(lpt(jax_cosmo.Planck15(), jnp.asarray(values), a=0.1)[0])
for shard in dx.addressable_shards:
    np.testing.assert_allclose(shard.data, expected[shard.index], atol=1e-4 * np.abs(expected).max())
if jax.process_index() == 0:
    print(f"OK: displacements {dx.shape} as {dx.sharding.spec} on {mesh.size} devices, jax {jax.__version__}")
