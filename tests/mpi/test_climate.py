"""The climate file of the examples: means and centres of decoded, padded, sharded variables, against xarray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import xarray as xr
from jax.sharding import PartitionSpec as P

import shardload
from examples import climate as example
from tests.mpi.support import mesh_of, on_root, share

pytestmark = [pytest.mark.any_library, pytest.mark.any_number]


def test_means_and_centres_are_those_of_xarray(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if packed numbers, fill values or padding were part of a mean, or latitudes went with other rows."""
    path = str(shared_tmp_path / "climate.nc")
    on_root(comm, lambda: example.write_example(path, (2, 37, 74)))
    for (mesh,) in share((mesh_of(), mesh_of(jax.devices()[::-1]))):
        x, plan = example.load(path, ["t2m", "tp"], mesh)
        wrapped = shardload.to_xarray(x, plan)
        assert isinstance(wrapped, xr.Dataset) and wrapped["tp"].attrs["units"] == "mm"
        for name in ("t2m", "tp"):
            assert x[name].sharding.spec == P(None, "a", "b") and x[name].dtype == np.float32
            lat, lon = (np.nan_to_num(wrapped[dim].values.astype("f4")) for dim in ("lat", "lon"))
            found = [float(value) for value in example.mean_and_centre(x[name], lat, lon)]
            np.testing.assert_allclose(found, example.by_xarray(path, name), rtol=1e-4, atol=1e-3)
    assert 270 < example.by_xarray(path, "t2m")[0] < 300 and abs(example.by_xarray(path, "tp")[2] - 120) < 1
