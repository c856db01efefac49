"""Where do values arrive, for every kind of mesh? MPI ranks, JAX processes, device ids and mesh places all differ."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, PeerError
from tests.mpi.sources import NAME
from tests.mpi.support import READERS, check, cube, grid_shape, mesh_of, padded, ramp, same_error, share

SPECS = (P("a", "b"), P("b", "a"), P(None, "a"), P(None, None, ("b", "a")))


def shuffled() -> list[Any]:
    """All devices in an order that is neither up nor down (where there are enough), and no involution."""
    order = np.random.default_rng(5).permutation(len(jax.devices()))
    return [jax.devices()[k] for k in np.roll(order, 1)]


def meshes() -> dict[str, Any]:
    """Meshes with axes a and b over all devices."""
    n, devices = len(jax.devices()), jax.devices()
    square = grid_shape(n)
    return {
        "Mesh": mesh_of(),
        "reversed": mesh_of(devices[::-1]),
        "shuffled": mesh_of(shuffled()),
        "column order": Mesh(np.array(devices, dtype=object).reshape(square[::-1]).T, ("a", "b")),
        "b first": Mesh(np.array(devices, dtype=object).reshape(square), ("b", "a")),
        "1 x n": Mesh(np.array(devices, dtype=object).reshape(1, n), ("a", "b")),
        "n x 1": Mesh(np.array(devices, dtype=object).reshape(n, 1), ("a", "b")),
        "make_mesh, explicit": jax.make_mesh(square, ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2),
        "make_mesh, auto": jax.make_mesh(square, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2),
    }


@pytest.mark.parametrize("name", meshes())
def test_mesh(files: dict[str, str], name: str) -> None:
    """Wrong if devices were taken in the order of their ids, or axes in the order of the mesh."""
    mesh, values = meshes()[name], ramp(cube())
    for spec, readers in share(SPECS, ("root", "parallel", "direct")):
        x = shardload.load(files["chunked"], mesh, spec, dataset=NAME, readers=readers, verify="checksum")
        check(x, values, mesh, spec, (spec, readers))
    check(shardload.scatter(values, mesh, P("b", "a")), values, mesh, P("b", "a"))


@pytest.mark.parametrize(
    "spec",
    [
        P("a", "b", "c"),
        P("c", "a", "b"),
        P(("c", "a"), "b"),
        P("b", None, ("c", "a")),
        P(("b", "c", "a")),
        P(None, ("a", "c")),
        P("c"),
    ],
)
def test_three_axes(files: dict[str, str], spec: Any) -> None:
    """Wrong if axes in a group were multiplied in the order of the mesh instead of the order of the spec."""
    for devices, readers in share((None, shuffled()), ("root", "parallel", "direct")):
        mesh = mesh_of(devices, ("a", "b", "c"))
        check(shardload.load(files["gzip_shuffle"], mesh, spec, dataset=NAME, readers=readers), ramp(cube()), mesh, spec)


def test_four_axes_one_of_them_unused(files: dict[str, str]) -> None:
    """Wrong if replicas along an axis in the middle of the mesh were mixed up with shards."""
    devices = np.array(shuffled(), dtype=object)
    mesh = Mesh(devices.reshape(1, *grid_shape(devices.size), 1), ("z", "a", "b", "y"))
    for spec in (P("b"), P(("z", "b"), "y"), P("a", "z", "b")):
        for readers in ("root", "parallel", "direct"):
            check(shardload.load(files["chunked"], mesh, spec, dataset=NAME, readers=readers), ramp(cube()), mesh, spec)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("which", ["first", "last", "all but the first", "every other, backwards"])
def test_fewer_devices_than_processes(comm: Any, files: dict[str, str], which: str) -> None:
    """Wrong if a process that holds nothing stays away, waits for ever, or is sent something."""
    devices = {
        "first": jax.devices()[:1],
        "last": jax.devices()[-1:],
        "all but the first": jax.devices()[1:],
        "every other, backwards": jax.devices()[::-2],
    }[which]
    mesh = mesh_of(devices)
    values = ramp(cube())
    for readers in READERS:
        for spec in (P("a", "b"), P("b"), P()):
            x = shardload.load(files["chunked"], mesh, spec, dataset=NAME, readers=readers, pad=-1, verify="checksum")
            check(x, padded(values, mesh, spec, -1), mesh, spec, (readers, spec))
            assert len(x.addressable_shards) == sum(d.process_index == jax.process_index() for d in devices)
    x = shardload.scatter(values if comm.rank == 0 else None, mesh, P())
    check(x, values, mesh, P())


@pytest.mark.mpi(min_size=2)
def test_ranks_in_another_order_than_processes(comm: Any, files: dict[str, str]) -> None:
    """Wrong if rank k were taken to be process k: in this communicator it is the last but k."""
    backwards = comm.Split(0, key=-comm.rank)
    assert backwards.rank == comm.size - 1 - jax.process_index()
    values = ramp(cube())
    for mesh in (mesh_of(), mesh_of(shuffled())):
        for spec, readers in share(SPECS, READERS):
            x = shardload.load(files["chunked"], mesh, spec, dataset=NAME, readers=readers, comm=backwards, verify="checksum")
            check(x, values, mesh, spec, (spec, readers))
        root = comm.size - 1  # in `backwards`: the process that is rank 0 of COMM_WORLD
        x = shardload.scatter(values if comm.rank == 0 else None, mesh, P("b"), root=root, comm=backwards)
        check(x, values, mesh, P("b"))
    backwards.Free()


@pytest.mark.mpi(min_size=2)
def test_communicator_without_a_process_of_the_mesh(comm: Any, files: dict[str, str]) -> None:
    """Wrong if the ranks left out were sent something, or waited for."""
    some = comm.Split(int(comm.rank == 0), key=comm.rank)
    if comm.rank:
        text = "takes no part in this call"
        same_error(
            some, lambda: shardload.load(files["chunked"], mesh_of(), P("a"), dataset=NAME, comm=some), ConfigError, text
        )
    some.Free()


@pytest.mark.mpi(min_size=2)
def test_half_of_the_job_loads(comm: Any, files: dict[str, str]) -> None:
    """Wrong if a load needs ranks that are not in its communicator: the others are not even called."""
    mine = comm.rank % 2
    half = comm.Split(mine, key=-comm.rank)
    table = comm.allgather((comm.rank, jax.process_index()))
    processes = {process for rank, process in table if rank % 2 == mine}
    mesh = mesh_of([d for d in jax.devices() if d.process_index in processes])
    if mine:
        values = ramp(cube())
        for readers in READERS:
            spec = P(None, None, "b")
            x = shardload.load(files["chunked"], mesh, spec, dataset=NAME, readers=readers, comm=half)
            check(x, values, mesh, spec, readers)
    half.Free()


def test_meshes_that_cannot_be(files: dict[str, str], comm: Any) -> None:
    """Wrong if a mistake in mesh or spec were found by JAX, rank by rank, after reading."""
    load = partial(shardload.load, files["chunked"], dataset=NAME)
    same_error(comm, lambda: load(mesh_of(), P("q")), ConfigError, "P('q')", "'q'", "a=", "b=")
    same_error(comm, lambda: load(mesh_of(), P("a"), staging="lots"), ConfigError, "staging is 'lots'")
    if comm.size > 1:
        own = lambda: load(mesh_of(jax.local_devices()), P())  # noqa: E731
        same_error(comm, own, PeerError, "of one process (jax.devices() has those of all)")
