"""A 3-D FFT of an array that no process holds as a whole: three 1-D FFTs on pencils, with two all-to-alls between them.

::

    mpiexec -n 4 python examples/pencil_fft.py                      # a plane wave, whose transform is known
    mpiexec -n 4 python examples/pencil_fft.py data.h5:/density     # your own field
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python examples/pencil_fft.py      # without MPI: eight simulated devices

An FFT along an axis needs that axis whole on one device, so the array is redistributed until each axis has been whole
once. On a mesh of ``pa x pb`` devices with axes ``"a"`` and ``"b"``, for an array of shape ``(n0, n1, n2)``:

====  ==========================================  ===================  =======================
step  what happens                                sharding             shard on each device
====  ==========================================  ===================  =======================
0     as loaded: pencils along axis 0             ``P(None, a, b)``    ``(n0, n1/pa, n2/pb)``
1     FFT axis 0                                  ``P(None, a, b)``    ``(n0, n1/pa, n2/pb)``
2     all-to-all over "a": axis 1 becomes whole   ``P(a, None, b)``    ``(n0/pa, n1, n2/pb)``
3     FFT axis 1                                  ``P(a, None, b)``    ``(n0/pa, n1, n2/pb)``
4     all-to-all over "b": axis 2 becomes whole   ``P(a, b, None)``    ``(n0/pa, n1/pb, n2)``
5     FFT axis 2                                  ``P(a, b, None)``    ``(n0/pa, n1/pb, n2)``
====  ==========================================  ===================  =======================

The order of the axes stays: element ``(i, j, k)`` of the result is mode ``(i, j, k)`` of ``numpy.fft.fftn``. n0 must be
a multiple of pa, n1 of pa and of pb, n2 of pb. If they are not, transform a part of the field (``select=``) or use
another mesh. Do not pad: padding changes the transform.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

if hasattr(jax, "shard_map"):
    shard_map: Any = jax.shard_map
else:  # JAX before 0.6
    from jax.experimental.shard_map import shard_map


def fft3d(x: jax.Array) -> jax.Array:
    """The discrete Fourier transform of a 3-D array along all axes, as `numpy.fft.fftn` defines it.

    Collective: yes, among all processes of the array's mesh.

    Parameters
    ----------
    x : jax.Array, shape (n0, n1, n2)
        Real or complex, with a `NamedSharding` of spec ``P(None, a, b)``, where a and b name mesh axes of any size.

    Returns
    -------
    jax.Array, shape (n0, n1, n2)
        Complex, of the same precision, with spec ``P(a, b, None)`` on the same mesh.

    Raises
    ------
    ValueError
        If the array is not sharded so, or its axes do not divide.
    """
    mesh, a, b = _pencil_axes(x)
    modes: jax.Array = _transform(mesh, a, b)(x)
    return modes


@functools.cache  # one compiled function per mesh, however often fft3d is called
def _transform(mesh: Mesh, a: str, b: str) -> Any:
    def one_device(shard: jax.Array) -> jax.Array:  # runs on each device, on its own shard
        shard = jnp.fft.fft(shard, axis=0)
        shard = jax.lax.all_to_all(shard, a, split_axis=0, concat_axis=1, tiled=True)
        shard = jnp.fft.fft(shard, axis=1)
        shard = jax.lax.all_to_all(shard, b, split_axis=1, concat_axis=2, tiled=True)
        return jnp.fft.fft(shard, axis=2)

    return jax.jit(shard_map(one_device, mesh=mesh, in_specs=P(None, a, b), out_specs=P(a, b, None)))


def _pencil_axes(x: jax.Array) -> tuple[Mesh, str, str]:
    """The mesh of `x` and the names of the two mesh axes that cut it."""
    sharding: Any = x.sharding
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    if x.ndim != 3 or len(spec) != 3 or spec[0] is not None or not all(isinstance(name, str) for name in spec[1:]):
        raise ValueError(
            f"fft3d takes a 3-D array sharded P(None, 'a', 'b') over two mesh axes; this one has {x.ndim} axes and "
            f"{sharding}. Load it with that spec, or move it there with jax.device_put."
        )
    mesh, a, b = sharding.mesh, spec[1], spec[2]
    pa, pb = mesh.shape[a], mesh.shape[b]
    for axis, size in ((0, pa), (1, math.lcm(pa, pb)), (2, pb)):
        if x.shape[axis] % size:
            raise ValueError(
                f"axis {axis} has {x.shape[axis]} elements, but on a mesh of {a}={pa}, {b}={pb} this FFT needs a "
                f"multiple of {size} there. Select a part that has one, or take another mesh."
            )
    return mesh, a, b


def square_mesh(names: tuple[str, str] = ("a", "b")) -> Mesh:
    """A mesh of all devices, as close to square as their number allows: 4 = 2 x 2, 6 = 3 x 2, 7 = 7 x 1."""
    n = len(jax.devices())
    pb = max(k for k in range(1, math.isqrt(n) + 1) if n % k == 0)
    return Mesh(np.array(jax.devices()).reshape(n // pb, pb), names)


def plane_wave(mesh: Mesh, modes: tuple[int, int, int] = (1, 2, 3)) -> jax.Array:
    """``cos(2 pi m.x)`` on a grid that the mesh divides: its transform is N/2 at modes m and -m, 0 elsewhere."""
    pa, pb = mesh.devices.shape
    shape = (8 * pa, 8 * math.lcm(pa, pb), 8 * pb)

    def values(index: Any) -> Any:
        axes = np.ogrid[tuple(slice(*part.indices(n)) for part, n in zip(index, shape, strict=True))]
        phase = sum(m * i / n for m, i, n in zip(modes, axes, shape, strict=True))
        return np.cos(2 * np.pi * np.asarray(phase)).astype(np.float32)

    return jax.make_array_from_callback(shape, NamedSharding(mesh, P(None, *mesh.axis_names)), values)


@jax.jit
def _summary(x: jax.Array, modes: jax.Array) -> tuple[jax.Array, ...]:
    """Sum of squares before and after (Parseval: after = N x before), then the strongest mode but the mean."""
    power = jnp.abs(modes) ** 2
    fluctuations = power.at[0, 0, 0].set(0)
    i = jnp.argmax(fluctuations.max(axis=(1, 2)))  # axis by axis: a flat index would not fit int32 in a large array
    j = jnp.argmax(fluctuations[i].max(axis=1))
    k = jnp.argmax(fluctuations[i, j])
    return jnp.sum(jnp.abs(x) ** 2), jnp.sum(power) / x.size, jnp.sqrt(fluctuations[i, j, k]), jnp.stack([i, j, k])


def main() -> None:
    """Load (or make) a field as pencils, transform it, and say on rank 0 what came out."""
    import shardload

    shardload.initialize()
    mesh = square_mesh()
    x = shardload.load(sys.argv[1], mesh, P(None, "a", "b")) if len(sys.argv) > 1 else plane_wave(mesh)
    modes = fft3d(x)
    before, after, height, strongest = (np.asarray(v).tolist() for v in _summary(x, modes))
    if jax.process_index() == 0:
        print(f"field  {x.shape} {x.dtype}, shard {x.sharding.shard_shape(x.shape)} on each of {mesh.size} devices")
        print(f"modes  {modes.shape} {modes.dtype}, shard {modes.sharding.shard_shape(modes.shape)}")
        print(f"strongest mode (the mean aside) {tuple(strongest)}: {height:.6g}")
        print(f"Parseval: sum of squares {before:.6g} before, {after:.6g} after")


if __name__ == "__main__":
    main()
