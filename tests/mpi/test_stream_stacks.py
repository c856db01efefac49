"""Is a stack of arrays the one that NumPy makes, on each device of any mesh?"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError
from tests.mpi.support import backwards, check, on_root, padded, same_error

N_STEPS, N_LEVELS, LAT, LON = 29, 3, 6, 7
BATCH = 12


@pytest.fixture(scope="module")
def path(comm: Any, tmp_path_factory: Any) -> str:
    """Arrays of values that occur once in all of the file."""

    def make() -> str:
        name = tmp_path_factory.mktemp("stacks") / "a.h5"
        with h5py.File(name, "w") as file:
            for key, values in arrays().items():
                file.create_dataset(key, data=values, chunks=(5, *(min(n, 4) for n in values.shape[1:])))
            file["level"] = np.arange(N_LEVELS)
            file["level"].make_scale("level")
            file["u"].dims[1].attach_scale(file["level"])
        return str(name)

    return str(on_root(comm, make))


def arrays() -> dict[str, Any]:
    u = np.arange(N_STEPS * N_LEVELS * LAT * LON, dtype="f4").reshape(N_STEPS, N_LEVELS, LAT, LON)
    return {"u": u, "t": u[:, 0] + 1_000_000, "q": u[:, 1] + 2_000_000}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_new_axis(comm: Any, path: str, prefetch: int) -> None:
    """Wrong if the parts of one shard were put beside those of another, or padding between the arrays; or if a scale were that
    of another one.
    """
    mesh, spec, data = backwards(), P("a", None, None, None, "b"), arrays()
    ds = shardload.stream(
        path,
        mesh,
        spec,
        dataset=["t", "q", "t"],
        stack="channel",
        scale=[(1.0, 2.0), None, None],
        batch=BATCH,
        window=(-1, 0),
        shuffle=3,
        pad=-1,
        prefetch=prefetch,
    )
    with iter(ds) as it:
        for batch in it:
            samples = [data[name][it.index[:, None] + np.array((-1, 0))] for name in ("t", "q", "t")]
            samples[0] = (samples[0] - 1) / 2
            check(batch, padded(np.stack(samples, axis=2), mesh, spec, -1), mesh, spec)


def test_an_axis_that_they_have(comm: Any, path: str) -> None:
    """The last levels before the first one: two arrays of different length along it, beside one that is in no stack."""
    mesh, spec, data = backwards(), P("a", None, "b"), arrays()
    names = {"x": ["u", "u"], "y": "t"}
    select = {"x": [{"level": slice(1, 3)}, {"level": slice(0, 1)}], "y": None}
    stack = {"x": "level", "y": None}
    ds = shardload.stream(path, mesh, spec, dataset=names, stack=stack, select=select, batch=BATCH, pad=-1)
    with iter(ds) as it:
        for batch in it:
            check(batch["x"], padded(data["u"][it.index][:, [1, 2, 0]], mesh, spec, -1), mesh, spec)
            check(batch["y"], padded(data["t"][it.index], mesh, spec, -1), mesh, spec)


def test_single_steps(comm: Any, path: str) -> None:
    """Wrong if the new axis were not the first one of a step, as where there are samples."""
    mesh, spec, data = backwards(), P(None, None, "b"), arrays()
    ds = shardload.stream(path, mesh, spec, dataset=["q", "t"], stack="channel", pad=-1)
    check(ds[7], padded(np.stack([data["q"][7], data["t"][7]]), mesh, spec, -1), mesh, spec)


def test_arrays_that_only_padding_makes_alike(comm: Any, path: str) -> None:
    """Wrong if they were put into one array, in which one has padding where the other has values."""
    select = [np.s_[:, :, :1], np.s_[:, :, :2]]
    options: dict[str, Any] = {"stack": "channel", "select": select, "batch": BATCH, "pad": -1}
    spec = P(None, None, None, ("a", "b"))
    says = "are not alike", f"steps of {{1: {LAT}, 2: 2}} and {{1: {LAT}, 2: 1}}"
    same_error(comm, lambda: shardload.stream(path, backwards(), spec, dataset=["t", "q"], **options), ConfigError, *says)
