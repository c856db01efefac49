"""Load a field for jax-power, take its power spectrum, and compare with one device that has it all.

::

    mpiexec -n 4 python examples/clients/with_jaxpower.py clients.h5      # docs/clients.md says what is in it
"""

import sys

import h5py
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxpower import BinMesh2SpectrumPoles, MeshAttrs, RealMeshField, compute_mesh2_spectrum, create_sharding_mesh

import shardload

file = sys.argv[1]
shardload.initialize()
# what docs/clients.md shows
with create_sharding_mesh() as mesh:
    x = shardload.load(file, mesh, P("x", "y"), dataset="density")
    attrs = MeshAttrs(meshsize=x.shape, boxsize=1000.0)
    bins = BinMesh2SpectrumPoles(attrs, edges={"step": 0.02}, ells=(0,))
    spectrum = compute_mesh2_spectrum(RealMeshField(x, attrs=attrs), bin=bins)
# check the result
with h5py.File(file) as opened:
    values = opened["density"][...]
attrs = MeshAttrs(meshsize=values.shape, boxsize=1000.0)
bins = BinMesh2SpectrumPoles(attrs, edges={"step": 0.02}, ells=(0,))
expected = compute_mesh2_spectrum(RealMeshField(jnp.asarray(values), attrs=attrs), bin=bins)
found, expected = (np.asarray(one.get(0).value()) for one in (spectrum, expected))
np.testing.assert_allclose(found, expected, rtol=1e-4)
if jax.process_index() == 0:
    print(f"OK: {found.size} bins of P(k), {found[0]:.6g} the first, on {mesh.size} devices, jax {jax.__version__}")
