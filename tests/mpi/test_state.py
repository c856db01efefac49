"""Does the state of a program come back as it was saved, with its structure, shardings and numbers?"""

from __future__ import annotations

import dataclasses
import enum
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import hdf5plugin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, MissingChunksWarning, PeerError, SourceError
from tests.mpi.support import check, mesh_of, on_root, put, raised, ramp, same_error, unit
from tests.unit.files import write_hdf5

pytestmark = pytest.mark.any_library


class Adam(NamedTuple):
    count: Any
    mu: Any
    nothing: Any = None


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass
class Run:
    time: float
    fields: Any
    opt: Any

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        key = jax.tree_util.GetAttrKey
        return [(key(name), getattr(self, name)) for name in ("time", "fields", "opt")], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Run:
        return cls(*children)


def state_of(scale: int = 1) -> Run:
    mesh, n = mesh_of(), 2 * unit()
    rho, vel = ramp((n, n + 1), "float32") * scale, -ramp((n, 3), "int32") * scale
    return Run(
        0.1 * scale,
        {"rho": put(rho, mesh, P("a")), "gas/vel": put(vel, mesh, P(None))},
        (Adam(jnp.asarray(7 * scale, "int32"), [put(rho + 1, mesh, P("b"))]), (), {"steps": 2**40 * scale, "done": scale == 1}),
    )


@pytest.mark.parametrize("name", ["state.h5", "state.zarr"])
def test_a_state_comes_back(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if a leaf came from another array, had another sharding, or a number were rounded. Or if a number of JAX
    (`jnp.asarray(7)`) were bound to a device: a jitted function takes it with arrays over a mesh only if it is not.
    """
    path, state, mesh = shared_tmp_path / name, state_of(), mesh_of()
    shardload.save(path, state)

    def names() -> None:
        with h5py.File(path) as file:
            found = list[str]()
            file.visit(found.append)
            arrays = {name for name in found if isinstance(file[name], h5py.Dataset)}
            assert arrays == {
                *("time", "fields/rho", "fields/gas/vel", "opt/0/count", "opt/0/mu/0", "opt/2/steps", "opt/2/done")
            }
            assert float(file["time"][()]) == 0.1 and int(file["opt/2/steps"][()]) == 2**40

    if path.suffix == ".h5":
        on_root(comm, names)
    other = state_of(3)
    abstract = jax.tree_util.tree_map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x, other
    )
    for like in (other, abstract):
        found = shardload.load(path, like=like)
        check_alike(found, state)
        for mine, wanted in zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(state), strict=True):
            assert like is abstract or getattr(mine, "committed", None) == getattr(wanted, "committed", None)
        check(found.fields["rho"], ramp((2 * unit(), 2 * unit() + 1), "float32"), mesh, P("a"))


def check_alike(found: Any, state: Any) -> None:
    """Raise unless two states have the same structure, types, shardings and values."""
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(state)
    for mine, wanted in zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(state), strict=True):
        assert type(mine) is type(wanted)
        assert getattr(mine, "dtype", None) == getattr(wanted, "dtype", None)
        if isinstance(getattr(wanted, "sharding", None), NamedSharding):
            assert mine.sharding == wanted.sharding
        np.testing.assert_array_equal(
            np.asarray(mine.addressable_data(0)) if isinstance(mine, jax.Array) else mine,
            np.asarray(wanted.addressable_data(0)) if isinstance(wanted, jax.Array) else wanted,
        )


@pytest.mark.parametrize("name", ["state.h5", "state.zarr"])
def test_states_of_other_kinds(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if None were refused in a dict, or at the top of a state, but not in a NamedTuple or a list further down; if keys
    that are numbers, as Flax has them for layers, were refused below a name, or put in the order of their digits; or if a state
    that was saved, with an array as FITS and GRIB have them, were refused as one of another type.
    """
    w = put(ramp((unit(), 2), "float32"), mesh_of(), P("a"))
    states = [
        {"w": w, "ema": None},
        Adam(w, {"bias": None, "kernel": w}),
        [w, None, {"opt": {"mu": None}, "nu": (None, 3)}],
        {"layers": {2: w, 10: np.arange(3)}, "lists": [{0: 1.5}]},
        {"x": ramp((4, 3), ">f8"), "n": np.array(7, ">i4"), "little": ramp((3,), "<i2")},
    ]
    for k, state in enumerate(states):
        path = shared_tmp_path / f"{k}-{name}"
        shardload.save(path, state)
        check_alike(shardload.load(path, like=state), state)
    if name == "state.h5":

        def names() -> None:
            with h5py.File(shared_tmp_path / "2-state.h5") as file:
                assert set(file) == {"0", "2"}
                assert file["2/nu/1"][()] == 3

        on_root(comm, names)
    nothing = shared_tmp_path / f"nothing-{name}"
    same_error(comm, lambda: shardload.save(nothing, {"w": None}), ConfigError, "no arrays to save", "None")
    text = {"title": "run 7"}
    same_error(comm, lambda: shardload.save(nothing, text), ConfigError, "'/title' is a str", "attrs={'/': {'title'")


class Field(enum.StrEnum):
    """Keys as a solver has them."""

    DENSITY = "rho"


def test_keys_that_are_members_of_an_enumeration(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if `save` named an array by the member, and `load` by its value."""
    path, rho = shared_tmp_path / "enum.h5", put(ramp((2 * unit(), 2), "float32"), mesh_of(), P("a"))
    shardload.save(path, {Field.DENSITY: rho})
    check(
        shardload.load(path, like={Field.DENSITY: rho})[Field.DENSITY],
        np.asarray(ramp(rho.shape, "float32")),
        mesh_of(),
        P("a"),
    )
    check(shardload.load(path, mesh_of(), P("a"), dataset="rho"), np.asarray(ramp(rho.shape, "float32")), mesh_of(), P("a"))


def test_a_state_that_is_not_in_the_file(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "state.h5"
    state = state_of()
    shardload.save(path, state)

    def refused(like: Any, *words: str, **how: Any) -> None:
        same_error(comm, lambda: shardload.load(path, **{"like": like} | how), ConfigError, *words)

    refused({"time": 1.0, "step": 3}, "holds no array '/step'", "/opt/0/count")
    refused({"opt": {"2": {"steps": np.zeros(3)}}}, "'/opt/2/steps'", "int64 ()", "float64 (3,)")
    refused(Run(0.0, {"rho": jnp.zeros(3, "float32")}, None), "'/fields/rho'", "(3,)")
    n = len(jax.devices())
    square = put(ramp((n, n), "float32"), mesh_of(), P())
    refused({"fields": {"rho": square}}, f"'/fields/rho' in '{path}' is float32", f"and in `like` float32 {n, n}")
    refused({"opt": {"0": {"count": square}}}, f"'/opt/0/count' in '{path}' is int32 ()", f"and in `like` float32 {n, n}")
    if len(jax.devices()) > 1:  # a state that was loaded with padding: files have none
        padded = shardload.scatter(np.zeros(n + 1, "f4"), mesh_of(), P(("a", "b")), pad=0)
        shardload.save(shared_tmp_path / "padded.h5", {"x": padded})
        load = partial(shardload.load, shared_tmp_path / "padded.h5", like={"x": padded})
        same_error(comm, load, ConfigError, f"axis 0 of '/x' in '{shared_tmp_path}/padded.h5' has {n + 1}", "Pass pad=np.nan")
        assert load(pad=0)["x"].shape == (2 * n,)
        without = {"x": jax.ShapeDtypeStruct((n + 1,), "f4", sharding=padded.sharding)}
        same_error(comm, partial(load, like=without, pad=0), ConfigError, f"float32 ({2 * n},) with its padding, and in `like`")
    refused({"fields": {"rho": 0.0}}, "'/fields/rho'", "in `like` float ()")  # not what NumPy says of it
    # Wrong if the options counted for some leaves, and the others came as they are stored, without a word.
    rho = put(ramp((2 * unit(), 2 * unit() + 1), "float32"), mesh_of(), P("a"))
    for option, value in (("select", slice(None, None, -1)), ("select", 0), ("decode", True)):
        refused({"fields": {"rho": rho}, "time": 0.0}, f"{option} is {value!r}", "'/time'", **{option: value})
    refused({"time": 0.0}, "leave out mesh", mesh=mesh_of())
    refused((), "a tree with leaves")
    refused({"time": 0.0, "opt": {"0": {"count": 0}}, "opt/0": {"count": 0}}, "'opt/0/count' is there twice")


def test_a_number_is_not_changed_by_what_like_has_in_its_place(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if 0.1 came as 0, 7 as True, or an integer of 64 bits as its lower half, because `like` has such a kind."""
    path = shared_tmp_path / "numbers.h5"

    numbers = {"rate": 0.1, "steps": np.int64(2**40 + 7), "phase": 1 + 2j, "flag": np.int8(7), "none": np.nan, "whole": 3.0}
    on_root(comm, lambda: write_hdf5(path, numbers))
    like = {"rate": 0.0, "steps": 0, "phase": 0j, "flag": 0, "none": 0.0, "whole": 0}
    found = shardload.load(path, like=like)
    assert {name: type(value) for name, value in found.items()} == {name: type(value) for name, value in like.items()}
    assert (found["rate"], found["steps"], found["phase"], found["flag"], found["whole"]) == (0.1, 2**40 + 7, 1 + 2j, 7, 3)
    assert np.isnan(found["none"])
    others = {
        "rate": (0, np.float32(0), jnp.zeros((), "float32"), "text"),
        "steps": (True, np.int32(0), jnp.zeros((), "int32"), jax.ShapeDtypeStruct((), "int32")),
        "phase": (0.0, jnp.zeros((), "float32")),
        "flag": (False,),
        "none": (0, False),
    }
    for name, leaves in others.items():
        for leaf in leaves:
            same_error(comm, lambda: shardload.load(path, like={name: leaf}), ConfigError, f"'/{name}'", "in `like`")  # noqa: B023


@pytest.mark.parametrize("name", ["state.h5", "state.zarr"])
def test_a_chunk_is_missing(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if the zeros of an array that rank 0 reads for all came without a word, as no other load gives them."""
    path, like = shared_tmp_path / name, {"x": np.arange(1, 7.0), "y": np.ones(6)}
    shardload.save(path, like, chunks=(2,), compression="gzip")

    def lose_a_chunk() -> None:
        if path.suffix == ".zarr":
            (path / "x/c/1").unlink()
            return
        with h5py.File(path, "r+") as file:
            del file["x"]
            x = file.create_dataset("x", (6,), "f8", chunks=(2,))
            x[:2], x[4:] = like["x"][:2], like["x"][4:]

    on_root(comm, lose_a_chunk)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for how in ("error", "warn"):
            error = raised(lambda: shardload.load(path, like=like, missing=how))  # noqa: B023
            assert type(error) is {"error": SourceError, "warn": MissingChunksWarning}[how], error
            assert "1 of 3 chunks is not stored in '/x'" in str(error) and "(1,)" in str(error)
        found = shardload.load(path, like=like, missing="fill")
    np.testing.assert_array_equal(found["x"], [1, 2, 0, 0, 5, 6])


def test_an_array_was_never_written(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the place of a chunk were looked for where there are none: in an array in one piece, or a single number."""
    path = shared_tmp_path / "state.h5"

    def write() -> None:
        with h5py.File(path, "w") as file:
            for name, shape in (("x", (3, 2)), ("n", ()), ("nothing", (0, 2))):
                file.create_dataset(name, shape, "f8")

    on_root(comm, write)
    for name, shape in (("x", (3, 2)), ("n", ())):
        like = {name: np.ones(shape)}
        same_error(comm, lambda: shardload.load(path, like=like, missing="error"), SourceError, f"'/{name}'", "never written")  # noqa: B023
    assert shardload.load(path, like={"nothing": np.ones((0, 2))}, missing="error")["nothing"].shape == (0, 2)


def test_a_filter_that_is_not_allowed(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if `like` were a way around `allow_filters`."""
    path, like = shared_tmp_path / "state.h5", {"x": np.arange(4.0)}
    on_root(comm, lambda: write_hdf5(path, {"x": np.arange(4.0)}, **hdf5plugin.Bitshuffle()))
    same_error(comm, lambda: shardload.load(path, like=like), SourceError, "allow_filters='bitshuffle'")
    found = shardload.load(path, like=like, allow_filters="bitshuffle")
    np.testing.assert_array_equal(found["x"], like["x"], strict=True)


class Twins:
    """A node of a tree with two children of one name."""

    def __init__(self, *children: Any) -> None:
        self.children = children


jax.tree_util.register_pytree_with_keys(
    Twins,
    lambda twins: (list(zip(map(jax.tree_util.DictKey, (1, "1")), twins.children, strict=True)), None),
    lambda _, children: Twins(*children),
)


def test_two_arrays_of_one_name(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the second one were saved alone, without a word; or if a pattern were Python's error."""
    path, twins = shared_tmp_path / "state.h5", Twins(np.arange(2), np.arange(3))
    same_error(comm, lambda: shardload.save(path, {"a": twins}), ConfigError, "'a/1' is there twice")
    same_error(comm, lambda: shardload.save(path, twins), ConfigError, "'1' is there twice")
    star = {"a": {"*": put(ramp((unit(),), "float32"), mesh_of(), P("a"))}}
    same_error(comm, lambda: shardload.load(path, like=star), ConfigError, "called '/a/*', which stands for all arrays")


@pytest.mark.mpi(min_size=2)
def test_ranks_that_pass_other_states(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if some ranks returned, and others raised: the first would wait for them in the next call."""
    path, x, rank = shared_tmp_path / "state.h5", ramp((unit(), 3), "float32"), comm.rank
    shardload.save(path, {"x": put(x, mesh_of(), P("a")), "n": np.arange(3), "step": 0})
    same_error(comm, lambda: shardload.load(path, like={"n": np.zeros(3 + rank, int)}), PeerError, f"({3 + 1},)", "'/n'")
    same_error(comm, lambda: shardload.load(path, like={"step": True if rank else 0}), PeerError, "'/step' bool")
    sharding = NamedSharding(mesh_of(), P("a"))
    like = {"x": jax.ShapeDtypeStruct(x.shape, "int32" if rank else "float32", sharding=sharding)}
    same_error(comm, lambda: shardload.load(path, like=like), PeerError, "'/x' int32")


@pytest.mark.parametrize("name", ["state.h5", "state.zarr"])
def test_the_path_of_a_group(comm: Any, shared_tmp_path: Path, name: str) -> None:
    """Wrong if the group were passed over: of an array in it, the one of that name in the root came."""
    path = shared_tmp_path / name
    shardload.save(path, {"w": np.zeros(3), "params": {"w": np.ones(3)}})
    for w in (np.zeros(3), put(np.zeros(3, "float32"), mesh_of(), P())):
        load = partial(shardload.load, f"{path}:/params", like={"w": w})
        same_error(comm, load, ConfigError, f"path is '{path}:/params'", "'/params'")
