"""Train a small emulator of weather on samples that are cut over devices; stop it when you like, go on with other ranks.

::

    mpiexec -n 4 python examples/train_emulator.py run          # makes files in the folder `run`, and trains
    mpiexec -n 2 python examples/train_emulator.py run          # goes on from the last checkpoint

The files are yearly netCDF of packed 16-bit integers. From a field at two steps the network predicts the next one. Samples are
cut along latitude, and batches of them over the other devices; XLA exchanges what a convolution needs across a cut. The order
of samples follows from files and seed, not from ranks. A checkpoint is one file, which `shardload.save` gives its name when it
is whole: a job may be killed at any time. Needs equinox, optax and netCDF4 beside shardload.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import h5py
import jax
import jax.numpy as jnp
import netCDF4
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload

YEARS, DAYS, LAT, LON = (2001, 2002, 2003), 120, 24, 48
OPTIMISER = optax.adam(3e-3)


def write_year(path: Path, year: int) -> None:
    """Waves that travel east, faster towards the equator; nothing if they are there."""
    if path.exists():
        return
    time = np.arange(DAYS) + DAYS * (year - YEARS[0])
    lat, lon = np.linspace(90, -90, LAT), np.arange(LON) * 360 / LON
    with netCDF4.Dataset(path.with_suffix(".part"), "w") as file:
        for name, values, units in (("time", time, "days since 2001-01-01"), ("lat", lat, ""), ("lon", lon, "")):
            file.createDimension(name, None if name == "time" else len(values))
            file.createVariable(name, "f8", (name,))[:] = values
            file[name].units = units
        speed = 0.3 * np.cos(np.radians(lat))[:, None]
        waves = sum(np.cos(k * (np.radians(lon) - speed * time[:, None, None]) + k**2) for k in (1, 2, 3))
        t2m = file.createVariable("t2m", "i2", ("time", "lat", "lon"), zlib=True, chunksizes=(10, LAT // 2, LON))
        t2m.scale_factor, t2m.add_offset = 0.01, 280.0
        t2m[:] = 280 + 20 * np.cos(np.radians(lat))[:, None] * waves / 3
    path.with_suffix(".part").rename(path)


class Emulator(eqx.Module):
    """Three convolutions that add a tendency to the last field."""

    layers: list[eqx.nn.Conv2d]

    def __init__(self, key: jax.Array, width: int = 16) -> None:
        sizes, keys = (2, width, width, 1), jax.random.split(key, 3)
        # Zeros beyond the poles; along longitude `__call__` goes around.
        self.layers = [eqx.nn.Conv2d(*sizes[k : k + 2], 3, padding=((1, 1), (0, 0)), key=keys[k]) for k in range(3)]

    def __call__(self, x: jax.Array) -> jax.Array:
        """From the field at two steps, (2, lat, lon), to that at the next, (lat, lon)."""
        y = x
        for k, layer in enumerate(self.layers):
            y = layer(jnp.pad(jax.nn.gelu(y) if k else y, ((0, 0), (0, 0), (1, 1)), mode="wrap"))
        return x[1] + y[0]


@jax.jit
def train_step(model: Emulator, state: Any, x: jax.Array, y: jax.Array) -> tuple[Emulator, Any, jax.Array]:
    """The model and the state of the optimiser after a batch, and the loss before it."""

    def loss_of(model: Emulator) -> jax.Array:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(model)
    change, state = OPTIMISER.update(gradient, state)
    return eqx.apply_updates(model, change), state, loss


def main() -> None:
    """Train, from the last checkpoint on if there is one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200, help="steps of training, with those of earlier jobs")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    options = parser.parse_args()

    shardload.initialize()
    if jax.process_index() == 0:
        options.folder.mkdir(exist_ok=True)
        for year in YEARS:
            write_year(options.folder / f"{year}.nc", year)
    MPI.COMM_WORLD.Barrier()

    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2 if jax.device_count() % 2 == 0 else 1), ("data", "lat"))
    everywhere = NamedSharding(mesh, P())
    model = jax.jit(Emulator, out_shardings=everywhere)(jax.random.key(0))
    state = jax.jit(OPTIMISER.init, out_shardings=everywhere)(model)
    # In the checkpoint each array has the name of its place: "[0].layers[1].weight".
    names = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), (model, state))

    ds = shardload.stream(
        shardload.concat(f"{options.folder}/*.nc", along="time"),
        mesh,
        P("data", None, "lat"),  # samples, window, latitude
        dataset={"x": "t2m", "y": "t2m"},
        along="time",
        window={"x": (-1, 0), "y": 1},  # two steps in, the next one to be predicted
        batch=8,
        shuffle=1,
        epochs=None,  # without end
        decode=True,
        dtype="float32",
        scale=(280.0, 15.0),  # mean and standard deviation
    )
    checkpoint, n = options.folder / "checkpoint.h5", 0
    with iter(ds) as batches:
        if checkpoint.exists():
            with h5py.File(checkpoint) as file:
                n = int(file.attrs["step"])
                batches.set_state(json.loads(file.attrs["stream"]))
            model, state = shardload.load(checkpoint, mesh, P(), dataset=names)
        while n < options.steps:
            n, batch = n + 1, next(batches)
            model, state, loss = train_step(model, state, **batch)
            if jax.process_index() == 0:
                print(f"step {n}: loss {float(loss):.9g}, samples {batches.index.tolist()}", flush=True)
            if n % options.every == 0:
                arrays = dict(zip(*map(jax.tree.leaves, (names, (model, state))), strict=True))
                attrs = {"/": {"step": n, "stream": json.dumps(batches.get_state())}}
                shardload.save(checkpoint, arrays, mode="w", attrs=attrs)
                if jax.process_index() == 0:
                    print(f"checkpoint after step {n}", flush=True)


if __name__ == "__main__":
    main()
