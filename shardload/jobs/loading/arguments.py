"""What did the caller pass, for one array or for a tree of them, and which arrays are meant?

1. `Arguments.of` joins the trees of paths and names, and gives each array its own options (`trees`, `request.targets_of`).
2. `Arguments.find` finds the arrays in their files. It runs on one rank, which opens each file once.
3. `Arguments.make` plans them, on every rank, from the text that `find` returned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardload.errors import ConfigError
from shardload.formats.base import ArrayInfo, Source
from shardload.formats.labelling import SMALL_NBYTES, Labeller
from shardload.formats.lookup import Finder, Found
from shardload.formats.memory import MemorySource
from shardload.jobs.consistency import State, check_unchanged
from shardload.jobs.loading.array_load import ArrayLoad
from shardload.jobs.loading.planner import read_in_turn, staging_together
from shardload.jobs.loading.request import (
    Call,
    Memo,
    Planned,
    Request,
    Target,
    for_each_kind,
    plan_file,
    plan_memory,
    positions_of,
    targets_of,
)
from shardload.jobs.loading.trees import (
    ArrayTree,
    Place,
    Where,
    in_array,
    is_one,
    is_one_spec,
    naming_errors,
    node_of,
    text_of,
    where_text,
)
from shardload.options import AUTO, OPTIONS, OWN
from shardload.planning.rates import most_alone_seconds
from shardload.planning.region import Region
from shardload.planning.selection import Selection, is_by_name, named_coordinates, needs_coordinates, select_axes
from shardload.system.interruption import let_interruption_pass
from shardload.transfer.messages import sendable

_SEARCHED_NBYTES = 1 << 24  # of a coordinate in which a selection is searched

__all__ = ["Arguments", "ToScatter", "ToVerify", "describe_path"]

_SHARE_OF_STAGING = 4  # values that are sent with the metadata: as read, as sent, as received, and as much again in MPI


class Arguments:
    """The arguments of one call about files, on this rank: for one array or for a tree of arrays.

    Parameters
    ----------
    tree : ArrayTree
        The arrays. If the file had to say which arrays there are, `make` replaces it by a tree of them.
    targets : list of Target
        One for each place of the tree.
    error : ConfigError, optional
        What is wrong with the trees.

    Attributes
    ----------
    left_out : list of ArrayInfo
        Arrays that are no part of the tree, although a pattern stands for them: they hold no numbers.
    """

    def __init__(self, tree: ArrayTree, targets: list[Target], error: ConfigError | None = None) -> None:
        self.tree, self.targets, self.error = tree, targets, error
        self.left_out: list[ArrayInfo] = []
        self._given: tuple[Any, Any, dict[str, Any]] | None = None
        self._what: Callable[[Place], dict[str, str]] = _what_of_path

    @classmethod
    def of(
        cls,
        kind: str,
        path: Any,
        mesh: Any,
        spec: Any,
        options: dict[str, Any],
        dataset: Any,
        what: Callable[[Place], dict[str, str]] | None = None,
    ) -> Self:
        """The arguments as the caller passed them. If trees do not match, `error` says so."""
        what = what or _what_of_path
        try:
            tree = ArrayTree.join(path, dataset)
            made = cls(tree, targets_of(tree, mesh, spec, options, what))
        except ConfigError as error:
            return cls(ArrayTree.join(kind, None), [], error)
        made._given, made._what = (mesh, spec, options), what
        return made

    def result(self, values: Sequence[Any]) -> Any:
        """Values for the arrays, in the structure that the caller asked for."""
        return self.tree.build(values)

    def find(self, calls: list[Call], values: bool = True) -> list[bytes | memoryview]:
        """The metadata of all arrays, and the values of small ones if `readers` is "auto", as parts of one message.

        Runs on one rank.

        With names of axes and coordinates if a selection may name them.
        """
        options, tuning = calls[0].options, calls[0].tuning
        if calls[0].is_alone:  # there is no other rank that would have to open the file
            tuning = replace(tuning, small_nbytes=min(tuning.small_nbytes, tuning.tiny_nbytes))
        most_nbytes = options.staging_nbytes // _SHARE_OF_STAGING
        is_many = not self.tree.is_single
        if not is_many and not calls[0].is_alone:
            tuning = tuning.for_one()
        caps = {name: min(getattr(tuning, name), most_nbytes) for name in ("small_nbytes", "small_chunk_nbytes")}
        tuning = replace(tuning, **caps)
        is_read, group = values and options.readers == AUTO, calls[0].group
        more: dict[str, Any] = {}
        if group is not None and not is_many:  # for one array: room for the last part of the message
            found = group.machine
            more = {"room": group.room, "most_seconds": most_alone_seconds(group.size, found.ranks_per_node, found.n_cores)}
        with Finder(options.access, tuning if is_read else None, most_nbytes, is_many, **more) as finder:
            return self._find_all(calls, finder)

    @property
    def _select(self) -> Any:
        """The option as the caller passed it."""
        return None if self._given is None else self._given[2].get("select")

    def _find_all(self, calls: list[Call], finder: Finder) -> list[bytes | memoryview]:
        options, found, sent = calls[0].options, list[Any](), _Values()
        selections = [call.options.select for call in calls]
        is_labelled = any(map(is_by_name, [*selections, self._select]))
        names = named_coordinates([*selections, self._select])
        room = _SEARCHED_NBYTES if any(map(needs_coordinates, selections)) else SMALL_NBYTES
        with Labeller(options.access, room, finder.file, names) as labeller:
            states: list[State] = []  # of the only array, before its values are read

            def complete(path: Any, info: ArrayInfo, source: Source | None = None) -> ArrayInfo:
                if source is not None and self.tree.is_single:
                    states.append(source.opened_in())
                if options.machine.has_limits and info.nbytes_stored is None:  # how much is read from disk
                    info = replace(info, nbytes_stored=finder.nbytes_stored(path, info, source))
                return labeller.label(path, info, source) if is_labelled else info

            for place, target, call in zip(self.tree.places, self.targets, calls, strict=True):
                state = partial(_last, states) if self.tree.is_single else partial(finder.state_of, place.path)
                with naming_errors(target.where):
                    if not place.is_pattern:
                        look = partial(_look, partial(complete, place.path), call.options.select)
                        one = finder.find(place.path, place.dataset, bool(call.options.decode), look)
                        found.append(sent.add(one, state))
                        continue
                    below, left_out = finder.find_below(place.path, place.group)
                found.append(
                    {
                        "all": [sent.add(one._replace(info=complete(place.path, one.info)), state) for one in below],
                        "left_out": [info.to_dict() for info in left_out],
                    }
                )
            for path, before, now in finder.states():  # else the small arrays could be of different versions of the file
                check_unchanged(f"'{path}'", before, now, path, "")
        return sent.join(found)

    def make(self, request: Request, calls: list[Call], told: bytes) -> list[ArrayLoad]:
        """Plan all arrays from their metadata. Runs on every rank."""
        found, values = _Values.split(told)
        if self.tree.has_patterns:
            calls, found = self._grow(request, calls, found)
        if self.tree.is_single:
            return [_plan_found(calls[0], self.tree.places[0].path, found[0], values)]
        if is_by_name(self._select):
            self._refuse_ambiguous([ArrayInfo.from_dict(one[0]) for one in found])
        tuning = calls[0].tuning.for_many(len(calls))
        calls, planned = for_each_kind(calls, lambda call: call.but(tuning=tuning)), Planned()
        loads: list[ArrayLoad] = []
        for k, (call, target, place, one) in enumerate(zip(calls, self.targets, self.tree.places, found, strict=True)):
            try:
                loads.append(_plan_found(call, place.path, one, values, target.where, planned))
            except Exception as error:
                let_interruption_pass(error)
                named = in_array(target.where, error)
                if isinstance(named, ConfigError):
                    self._explain(named, k, [ArrayInfo.from_dict(other[0]) for other in found])
                if named is error:
                    raise
                raise named from error
        return _share_staging(calls[0], _in_turn(calls[0], loads)) if len(loads) > 1 else loads

    def _grow(self, request: Request, calls: list[Call], found: list[Any]) -> tuple[list[Call], list[Any]]:
        """Replace the patterns by the arrays that were found."""
        patterns = {k: one for k, one in enumerate(found) if isinstance(one, dict)}
        flat = {k: [(ArrayInfo.from_dict(one[0]), one) for one in of["all"]] for k, of in patterns.items()}
        self.left_out = [ArrayInfo.from_dict(one) for of in patterns.values() for one in of["left_out"]]
        grown = self.tree.grow({k: [info.dataset for info, _ in pairs] for k, pairs in flat.items()})
        by_name = {(id(self.tree.places[k]), info.dataset): (info, one) for k, pairs in flat.items() for info, one in pairs}
        kept = {id(place): k for k, place in enumerate(self.tree.places)}
        mesh, spec, options = self._given or (None, None, {})
        targets = targets_of(grown, mesh, spec, options, self._what)
        memo, new_calls, new_found = Memo(), [], []
        for k, place in enumerate(grown.places):
            if id(place) in kept:
                new_calls.append(calls[kept[id(place)]])
                new_found.append(found[kept[id(place)]])
                continue
            info, one = by_name[id(place.pattern), place.dataset]
            if not info.shape:  # it has no axis that could be cut, and the spec is that of the other arrays
                targets[k] = replace(targets[k], **_whole(targets[k]))
            new_calls.append(request.call_of(targets[k], memo))
            new_found.append(one)
        self.tree, self.targets = grown, targets
        return new_calls, new_found

    def _refuse_ambiguous(self, infos: list[ArrayInfo]) -> None:
        """Raise ConfigError if a dict of positions means one thing by the names of arrays, and another by those of axes."""
        for where, select, places in self.tree.dicts_as_trees(self._select):
            meant = [(_selected(infos[k], select), _selected(infos[k], self.targets[k].options["select"])) for k in places]
            if all(by_axes is not None for by_axes, _ in meant) and any(by_axes != by_arrays for by_axes, by_arrays in meant):
                keys = ", ".join(map(repr, select))
                key, one = next(iter(select.items()))
                raise ConfigError(
                    f"select{text_of(where)} is {select!r}: {keys} are keys of the arrays there, and names of their axes too. "
                    f"If each array is to have its own selection, pass tuples: {{{key!r}: ({one!r},), ...}}. If the axes are "
                    f"meant, pass the dict for each array: {{{key!r}: {select!r}, ...}}"
                )

    def _explain(self, error: ConfigError, k: int, infos: list[ArrayInfo]) -> None:
        """Add to the error about the k-th array, which cannot be planned, what it shares with others.

        That is a spec which fits an array of another shape, or a dict of selections that was taken for one by names of axes.
        """
        target, info = self.targets[k], infos[k]
        if str(info) not in str(error):
            error.args = (str(error).replace(f"{target.where}:", f"{target.where}, {info}:", 1),)
        if is_by_name(target.options.get("select")) and "select names the axis" in str(error):
            error.args = (f"{error}. The selection counts for several arrays: pass a tree of selections, with one for each",)
            return
        is_too_long = "entries, but" in str(error)  # elsewhere the spec may be right, and padding be all that is missing
        same = [j for j, one in enumerate(self.targets) if one.spec is target.spec and infos[j].shape != info.shape]
        same = [j for j in same if _fits(self.targets[j], infos[j], is_too_long)]
        if same and "P(" in str(error):
            other, where = infos[same[0]], self.targets[same[0]].where
            error.args = (
                f"{error}. Its shape is {info.shape}, and it shares its spec with {where}, {other}, whose shape is "
                f"{other.shape}: pass a tree of specs, with one for each",
            )


def _in_turn(call: Call, loads: list[ArrayLoad]) -> list[ArrayLoad]:
    """The same loads; each of many small arrays is read by one rank."""
    kinds = read_in_turn(call.ask(), [one.kind for one in loads]) if call.group is not None and call.group.size > 1 else []
    return (
        [one if kind is one.kind else replace(one, kind=kind) for one, kind in zip(loads, kinds, strict=True)]
        if kinds
        else loads
    )


def _share_staging(call: Call, loads: list[ArrayLoad]) -> list[ArrayLoad]:
    """The same loads under one staging cap, which is that of the array that needs most.

    Raises
    ------
    ConfigError
        If they do not fit under it together.
    """

    def most_nbytes() -> int:
        return call.ask().ranks.staging_room_nbytes if call.options.staging == AUTO else 0

    staging = max(one.options.staging_nbytes for one in loads)
    staging = staging_together(list({id(one.layout): one.layout for one in loads}.values()), staging, most_nbytes)
    return [one if one.options.staging_nbytes == staging else one.with_staging(staging) for one in loads]


def _fits(target: Target, info: ArrayInfo, with_padding: bool) -> bool:
    """True if the mesh and spec of an array can cut it, as it is or padded."""
    is_sharding = isinstance(target.mesh, NamedSharding)
    spec = PartitionSpec(*(target.mesh.spec if is_sharding else target.spec or ()))
    if len(spec) > len(info.shape):
        return False
    try:
        NamedSharding(target.mesh.mesh if is_sharding else target.mesh, spec).shard_shape(info.shape)
    except (ValueError, TypeError):
        return with_padding
    return True


def _whole(target: Target) -> dict[str, Any]:
    """The mesh and spec that replicate an array."""
    if isinstance(target.mesh, NamedSharding):
        kind = target.mesh.memory_kind
        return {"mesh": NamedSharding(target.mesh.mesh, PartitionSpec(), memory_kind=kind), "spec": None}
    return {"spec": PartitionSpec()}


class _Values:
    """Metadata as text, and the values of small arrays after it as they are, in one message."""

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []
        self._n = 0
        self._stated: set[str] = set()

    def add(self, found: Found, state: Callable[[], State]) -> list[Any]:
        """What the text says of an array: its metadata, and where its values begin (None: they are not sent).

        With the first values of each file, also the state of the file in which they were read; and the region of which they
        are, if that is not all of the array.
        """
        info, values, region = found
        if values is None:
            return [info.to_dict(), None, None, None]
        start, self._n = self._n, self._n + len(values)
        self._parts.append(values)
        is_first = info.path not in self._stated
        self._stated.add(info.path)
        part = None if region is None else [region.start, region.stop]
        return [info.to_dict(), start, state() if is_first else None, part]

    def join(self, found: list[Any]) -> list[bytes | memoryview]:
        """The message, in parts."""
        text = json.dumps(found).encode()
        return [len(text).to_bytes(8, "little"), text, *self._parts]

    @staticmethod
    def split(told: bytes) -> tuple[list[Any], memoryview]:
        """What was found, and the bytes of all values."""
        whole = memoryview(told)
        end = 8 + int.from_bytes(whole[:8], "little")
        return json.loads(bytes(whole[8:end])), whole[end:]


def _what_of_path(place: Place) -> dict[str, str]:
    return {"path": describe_path(place.path)}


def _last(states: list[State]) -> State:
    return states[-1] if states else None


def _selected(info: ArrayInfo, select: Any) -> Selection | None:
    """What a selection means for an array; None if it means nothing."""
    try:
        if is_by_name(select):
            select = positions_of(select, info)
        return select_axes(select, info.shape)
    except (ValueError, IndexError):
        return None


def _look(
    complete: Callable[[ArrayInfo, Source | None], ArrayInfo], select: Any, info: ArrayInfo, source: Source | None
) -> tuple[ArrayInfo, Region | None]:
    """What `find` wants of an array: its metadata, and the region of a selection; None if it means nothing (`make` says so)."""
    info = complete(info, source)
    selection = _selected(info, select)
    return info, None if selection is None else selection.region


def _plan_found(
    call: Call, path: Any, found: list[Any], values: memoryview, where: str = "", planned: Planned | None = None
) -> ArrayLoad:
    told, start, state, part = found
    info = ArrayInfo.from_dict(told)
    if start is None:
        return plan_file(call, info, path, None, where, planned)
    region = Region.whole(info.shape) if part is None else Region(*map(tuple, part))
    array = np.frombuffer(values, dtype=info.dtype, count=region.size, offset=start).reshape(region.shape)
    source = MemorySource(array, info, None if state is None else tuple(state), region.start)
    return plan_file(call, info, source, path, where, planned)


class ToVerify(Arguments):
    """The arguments of a call that compares arrays with their files."""

    x: Any = None

    @classmethod
    def of_arrays(cls, x: Any, path: Any, dataset: Any, options: dict[str, Any], seed: Any) -> ToVerify:
        """The arguments as the caller passed them; `error` says what is wrong with them."""
        leaves = jax.tree_util.tree_flatten_with_path(x)[0]
        error = next(filter(None, (_without_values(f"x{text_of(where)}", one) for where, one in leaves or [((), x)])), None)
        if error is None:
            try:
                OPTIONS["how"].check(options["verify"])  # as which it is checked below, where its name would be the other one
            except ConfigError as wrong:
                error = wrong
        if error is None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0):
            error = ConfigError(f"seed is {seed!r}; expected an integer, 0 or more")
        told = (
            "nothing"
            if error
            else "; ".join(f"{text_of(where)} an array of shape {one.shape}, {one.dtype}".strip() for where, one in leaves)
        )

        def what(place: Place) -> dict[str, str]:
            return {"path": describe_path(place.path), "x": told, "seed": str(seed)}

        if error is None:
            with suppress(ConfigError):  # `of` raises it, too
                tree = ArrayTree.join(path, dataset)
                try:
                    tree.spread("x", x)
                except ConfigError as unlike:
                    error = unlike
        mesh = None if error else jax.tree_util.tree_map(_sharding_of, x)
        made = cls.of("verify", path, mesh, None, options, dataset, what)
        made.error = error or made.error
        made.x = x
        return made

    def arrays(self) -> list[Any]:
        """The caller's arrays, in the order of the tree."""
        if self.tree.is_single:
            return [self.x]
        found = self.tree.spread("x", self.x)
        n = len(jax.tree_util.tree_leaves(self.x))
        if n != len(found):
            raise ConfigError(
                f"x has {n} arrays, but dataset and path name {len(found)}. Pass one array for each name, in a tree with the "
                "same keys"
            )
        return found

    def make(self, request: Request, calls: list[Call], told: bytes) -> list[ArrayLoad]:
        """Plan the loads that would give these arrays."""
        loads = super().make(request, calls, told)
        for x, load in zip(self.arrays(), loads, strict=True):
            if (load.plan.shape_global, load.plan.dtype) != (x.shape, x.dtype):
                error = ConfigError(
                    f"x has shape {x.shape} and is {x.dtype}, but a load of {load.info} with these arguments has shape "
                    f"{load.plan.shape_global} and is {load.plan.dtype}. Pass the same select=, dtype=, decode=, pad= and "
                    "halo= as to the load"
                )
                raise in_array(load.where, error)
        return loads


class ToScatter:
    """The arguments of a call that gives every process its shards of arrays which one rank has.

    Only that rank knows the tree of arrays; it sends its outline with the metadata. Dicts, lists and tuples are nodes. A list
    or tuple outside of a dict is one array, as NumPy makes it, unless `spec` is a tree.

    Parameters
    ----------
    array : array_like, tree or callable
        On the root: the arrays, or a function that returns them.
    mesh, spec, options
        As the caller passed them.
    root : object
        The rank that has the arrays, not checked yet.
    """

    def __init__(self, array: Any, mesh: Any, spec: Any, options: dict[str, Any], root: Any) -> None:
        self._array, self._given, self._root = array, (mesh, spec, options), root
        self._has_tree = not (is_one(mesh) and is_one_spec(spec)) or any(
            not (option.is_one or is_one)(options[option.name]) for option in OWN if option.name in options
        )
        self.targets = [Target(mesh, spec, self._what(), options, is_pattern=self._has_tree)]
        self._sources: list[MemorySource] | None = None
        self._tree = ArrayTree.join("", None)

    def _what(self, _: Any = None) -> dict[str, str]:
        return {"path": f"scatter from rank {self._root!r}"}

    def result(self, values: Sequence[Any]) -> Any:
        """Values for the arrays, in the structure of the root's tree."""
        return self._tree.build(values)

    def find(self, calls: list[Call]) -> bytes:
        """Make the arrays, and describe them as text. Runs on the root."""
        array = self._array() if callable(self._array) else self._array
        leaves: list[tuple[str, Any]] = []
        outline = _outline_of(array, self._has_tree, (), leaves)
        if not leaves:
            raise ConfigError(f"array is {array!r}, a tree without an array: there is nothing to scatter")
        self._sources, told = [], []
        for where, value in leaves:
            with naming_errors(where):
                source = MemorySource(self._one_array(value))
            self._sources.append(source)
            view = source.view(Region.whole(source.info.shape))
            told.append([source.info.to_json(), view is not None and sendable(view), str(source.dtype)])
        return json.dumps([outline, told]).encode()

    def _one_array(self, value: Any) -> np.ndarray[Any, Any]:
        """What the root has, as NumPy makes an array of it."""
        if value is None:
            raise ConfigError(
                f"array is None on rank {self._root}, the root. Pass the array there, or root= the rank that has it"
            )
        try:
            return value if isinstance(value, np.ma.MaskedArray) else np.asarray(value)  # `MemorySource` looks at the mask
        except jax.errors.TracerArrayConversionError:
            raise ConfigError(
                f"array is traced on rank {self._root}: it has no values yet. Call scatter outside of jax.jit; inside, "
                "jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) shards an array"
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"array is a {type(value).__name__} on rank {self._root}, of which NumPy makes no array: {error} A list is one "
                "array by itself; to scatter several, pass a dict of arrays, or a list of specs"
            ) from None

    def make(self, request: Request, calls: list[Call], text: bytes) -> list[ArrayLoad]:
        """Plan the scatter of all arrays. Runs on every rank."""
        outline, told = json.loads(bytes(text))
        mesh, spec, options = self._given
        self._tree = ArrayTree(_tree_of(outline))
        self.targets = targets_of(self._tree, mesh, spec, options, self._what)
        memo, loads = Memo(), []
        for k, (target, (info, can_be_viewed, dtype)) in enumerate(zip(self.targets, told, strict=True)):
            with naming_errors(target.where):
                call = calls[0] if self._tree.is_single else request.call_of(target, memo)
                wanted = call.options.dtype
                # Not `in (None, ...)`: NumPy takes None for float64 where it compares types.
                as_it_is = can_be_viewed and (wanted is None or wanted == np.dtype(dtype))
                source = None if self._sources is None else self._sources[k]
                made = plan_memory(call, ArrayInfo.from_json(info), source, int(self._root), as_it_is)
                loads.append(replace(made, where=target.where))
        return _share_staging(calls[0], loads) if len(loads) > 1 else loads


def _outline_of(value: Any, has_tree: bool, where: Where, leaves: list[tuple[str, Any]]) -> Any:
    """The structure of a tree in JSON's types; its arrays are appended to `leaves`, each with its place."""
    is_node = isinstance(value, dict) or (
        isinstance(value, (list, tuple)) and (has_tree if not where else any(map(_has_array, value)))
    )
    children = None if isinstance(value, np.ndarray) or hasattr(value, "__array__") else node_of(value)
    # Another node of JAX's, also a named tuple: NumPy would make one array of it, of its parts or of the object.
    is_other = children is not None and type(value) not in (dict, list, tuple) and _has_array(value)
    if not (is_node or is_other):
        leaves.append((where_text(where), value))
        return len(leaves) - 1
    if children is None or type(value) not in (dict, list, tuple):
        raise ConfigError(f"array{text_of(where)} is a {type(value).__name__}; scatter takes trees of dict, list and tuple")
    if isinstance(value, dict) and not all(type(key) in (str, int) for key in value):
        raise ConfigError(f"array{text_of(where)} has keys such as {next(iter(value))!r}; scatter takes text and integers")
    found = [_outline_of(child, has_tree, (*where, key), leaves) for key, child in children]
    if isinstance(value, dict):
        return {"dict": [[key.key, one] for (key, _), one in zip(children, found, strict=True)]}
    return {type(value).__name__: found}


def _has_array(value: Any) -> bool:
    return any(hasattr(leaf, "__array__") for leaf in jax.tree_util.tree_leaves(value))


def _tree_of(outline: Any) -> Any:
    """The inverse of `_outline_of`, with places as leaves."""
    if isinstance(outline, int):
        return Place("", None)
    ((kind, children),) = outline.items()
    if kind == "dict":
        return {key: _tree_of(child) for key, child in children}
    made = [_tree_of(child) for child in children]
    return made if kind == "list" else tuple(made)


def _without_values(name: str, x: Any) -> ConfigError | None:
    """What is wrong with something that is no array, or has no values that could be compared; None if nothing is."""
    if not isinstance(x, jax.Array):
        return ConfigError(f"{name} is a {type(x).__name__}; expected a jax.Array")
    if isinstance(x, jax.core.Tracer):
        return ConfigError(f"{name} is traced: it has no values yet. Call verify outside of jax.jit")
    if x.is_deleted():
        return ConfigError(f"{name} was deleted (donated to a jitted function?), so it has no values. Verify it before that")
    return None


def _sharding_of(x: Any) -> Any:
    """Its sharding; for an array on a single device, the same as a NamedSharding over a mesh of one device."""
    if not isinstance(x, jax.Array):
        return None
    if isinstance(x.sharding, jax.sharding.SingleDeviceSharding):
        return NamedSharding(Mesh(np.array(list(x.sharding.device_set)), ("device",)), PartitionSpec())
    return x.sharding


def describe_path(path: Any) -> str:
    """A path or an open array as ranks compare it, and as messages name it."""
    if isinstance(path, (str, os.PathLike)):
        return repr(os.path.expanduser(os.fspath(path)))
    # An open array: its name in the file is enough, because the file's name may differ from rank to rank.
    kind = "NumPy array" if isinstance(path, np.ndarray) else type(path).__name__
    return f"an open {kind} named {getattr(path, 'name', None)!r}"
