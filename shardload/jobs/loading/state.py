"""How does the state of a program come back as it was saved? Any pytree: dicts, NamedTuples, dataclasses, optimizer states.

Each leaf is an array of the file, by the keys that lead to it (`trees.named_leaves`, by which `save` names them). Leaves with a
NamedSharding are loaded as one tree. What every process holds by itself (numbers, NumPy arrays, arrays on one device) is read
by rank 0, which tells the others.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardload.comm.agreement import Invocation
from shardload.engine.call import begin_call
from shardload.errors import ConfigError
from shardload.formats.access import Access
from shardload.formats.contract.array import some
from shardload.formats.diagnosis import as_source_error
from shardload.formats.lookup import open_file
from shardload.jobs.loading.call import LoadCall
from shardload.jobs.trees import named_leaves
from shardload.options import Options
from shardload.planning.region import Region

Array = np.ndarray[Any, Any]


def load_state(path: Any, like: Any, given: Mapping[str, Any]) -> Any:
    """The tree `like`, with values from a file. `given` are the options of `load`. Collective: yes."""
    named = dict(named_leaves(like))
    if not isinstance(path, (str, os.PathLike)) or not named:
        raise ConfigError(f"load(..., like=) takes the path of one file and a tree with leaves; found {path!r}, {type(like)}")
    shardings = {name: leaf.sharding for name, leaf in named.items() if isinstance(_sharding(leaf), NamedSharding)}
    values: dict[str, Any] = {}
    if shardings:
        names = [*shardings]
        with LoadCall("load", path, [*shardings.values()], None, {**given, "dataset": names}).begin() as call:
            values = dict(zip(names, call.load(), strict=True))
    if others := [name for name in named if name not in shardings]:
        values |= {name: _as(named[name], value) for name, value in _read_all(path, others, given).items()}
    for name, leaf in named.items():
        shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None)
        if np.shape(values[name]) != shape or (dtype is not None and values[name].dtype != dtype):
            raise ConfigError(
                f"'{name}' in '{path}' is {values[name].dtype} {np.shape(values[name])}, and in `like` {dtype} {shape}. Pass a "
                "state of the shapes and types that were saved"
            )
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), [values[name] for name in named])


def _sharding(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None)


def _read_all(path: Any, names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Array]:
    """Whole arrays, which rank 0 reads, on every rank. Collective."""
    options = Options.check(
        **{name: given[name] for name in ("allow_external", "allow_filters", "untrusted", "storage", "timeout")}
    )

    def find() -> bytes:
        return pickle.dumps(_read(path, names, options.access))

    asked = Invocation("load", f"load of {path!r}", {"path": repr(path), "dataset": repr(names)})
    with begin_call(asked, None, comm=given["comm"], timeout=options.timeout, process=jax.process_index) as call:
        return call.plan(find, lambda told: pickle.loads(bytes(told)), lambda _: "")  # of this job's rank 0, never of a file


def _read(path: Any, names: Sequence[str], access: Access) -> dict[str, Array]:
    with open_file(path, access) as file:
        there = {info.dataset for info in file.list_arrays()}
        if lacks := [f"/{name}" for name in names if f"/{name}" not in there]:
            told, has = (some(list(map(repr, sorted(them)))) for them in (lacks, there))
            raise ConfigError(f"'{path}' has no {told}, which `like` has; it has {has}")
        values = {}
        for name in names:
            with as_source_error(str(path), f"/{name}"), closing(file.open(f"/{name}")) as source:
                found = np.asarray(source.plain(Region.whole(source.info.shape))).reshape(source.info.shape)
                values[name] = found.astype(source.dtype.newbyteorder("="), copy=False)
        return values


def _as(leaf: Any, value: Array) -> Any:
    """A value of the kind of a leaf: a number of Python, an array of NumPy, or one on the devices of the leaf."""
    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf)(value.item())
    if isinstance(leaf, (np.ndarray, np.generic)):
        value = value.astype(bool) if leaf.dtype == bool and value.dtype == np.int8 else value  # netCDF has no booleans
        return value if isinstance(leaf, np.ndarray) else value[()]
    return jax.device_put(value, _sharding(leaf))
