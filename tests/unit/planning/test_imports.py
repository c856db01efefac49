"""Can a load be planned where there is nothing but NumPy: no JAX, no MPI, no library of a file format?"""

from __future__ import annotations

from tests.unit.blocked import run_without

BLOCKED = ("jax", "jaxlib", "mpi4py", "h5py", "zarr", "numcodecs", "deflate", "hdf5plugin", "typer", "rich")

SCRIPT = """
import importlib, pkgutil
import numpy as np
import shardload.planning
names = [module.name for module in pkgutil.iter_modules(shardload.planning.__path__)]
modules = {name: importlib.import_module("shardload.planning." + name) for name in names}
shape, f4 = (128, 128, 128), np.dtype("f4")
layout = modules["schedule"].SourceLayout.cut(modules["selection"].select_axes(None, shape), (1, 128, 128), f4, f4, "gzip")
shards = modules["shards"].plan_shards(shape, [(), (0,), (1,)], np.arange(4).reshape(2, 2))
scheduling, owners = modules["schedule"], modules["schedule"].Owners(4)
schedules = {
    "direct": scheduling.plan_direct(layout, shards, 4, max_nbytes=1 << 20),
    "parallel": scheduling.plan_shared(layout, shards, 4, owners, max_nbytes=1 << 20),
}
costs = {mode: modules["cost"].plan_cost(schedule, layout) for mode, schedule in schedules.items()}
staging = modules["staging"].plan_staging([(schedules["parallel"], layout)], 64 << 20)
print(len(names), modules["cost"].choose_mode(costs, 4)[0], costs["direct"].chunks_decoded, staging.n_slots > 0)
print([name for name in sorted(sys.modules) if name.startswith("shardload.") and not name.startswith("shardload.planning")])
"""


def test_planning_needs_numpy_alone() -> None:
    """Wrong if a module of planning, or the package's `__init__`, imported what is blocked."""
    done = run_without(BLOCKED, SCRIPT, stop='ImportError("blocked: " + name)')
    assert done.returncode == 0, done.stderr
    counted, rooms = done.stdout.splitlines()
    n_modules, mode, decoded, has_slots = counted.split()
    assert int(n_modules) >= 10 and (mode, decoded, has_slots) == ("parallel", "512", "True")
    assert rooms == "['shardload.errors', 'shardload.units']", "below planning are only errors and how bytes are written"
