"""Which arrays does a call mean, if names and options come as trees?

A tree is what `jax.tree_util` takes for one: dicts, lists, tuples, None and registered classes. Its leaves are single values.

1. `ArrayTree.join` joins the tree of paths with the tree of names. Each leaf is then one `Place`: an array, or a pattern
   (``"group/*"``) that stands for all arrays below a group.
2. `ArrayTree.spread` gives every place its value of an option. An option is a single value, or a prefix tree: a tree that ends
   early, whose leaf then counts for everything below it, as in `jit`'s ``in_shardings``. In its dicts, names with slashes are
   the same as dicts in dicts, and what a dict does not name has the default. This holds for every call, `load` and `save`.
3. `ArrayTree.grow` replaces patterns by nested dicts of the arrays that were found, with a key for each group.
4. `ArrayTree.build` gives results the structure of the tree.

Nodes are matched by their keys, not by their type: a list of two goes with a tuple of two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardload.comm.shared_errors import as_shardload
from shardload.errors import ConfigError, ShardloadError, StallError
from shardload.formats.contract.array import some
from shardload.options import is_plain_tuple
from shardload.planning.selection import Between, Near

# The keys that lead from the root of a tree to a leaf.
Where = tuple[Any, ...]
NEEDED: Any = object()  # in place of a default: there is none


@dataclass(frozen=True, eq=False)
class Place:
    """A leaf of a tree of names: the path, and the name in that file (None: the file's only array).

    `is_pattern` is True if it stands for all arrays below a group. `array` is one that was found for such a pattern.
    """

    path: Any
    dataset: Any
    is_pattern: bool = False
    array: Any = None

    @classmethod
    def of(cls, path: Any, dataset: Any) -> Place:
        """The place of a path and a name. A pattern may also be a part of the path: ``"data.h5:/group/*"``."""
        if dataset is None and isinstance(path, (str, os.PathLike)):
            text = os.fspath(path)
            head, colon, name = text.rpartition(":") if isinstance(text, str) else ("", "", "")
            if colon and head and is_pattern(name) and not name.startswith("//"):
                return cls(head, name, True)
        return cls(path, dataset, is_pattern(dataset))

    @property
    def group(self) -> str:
        """The group of a pattern, with a leading ``/`` and without one at its end: ``"/PartType1"``; empty for the root."""
        name = str(self.dataset).removesuffix("*").strip("/")
        return f"/{name}" if name else ""


def is_pattern(name: Any) -> bool:
    """True for the name of all arrays below a group."""
    return isinstance(name, str) and (name == "*" or name.endswith("/*"))


def text_of(where: Where) -> str:
    """Keys as Python would follow them: ``['gas'][0]``."""
    return jax.tree_util.keystr(where)


def where_text(where: Where) -> str:
    """The array at a place of a tree, for messages: ``array ['gas']``, ``array [3]`` of a list; empty for the root."""
    return f"array {text_of(where)}" if where else ""


def in_array(where: str, error: BaseException, name: str = "") -> BaseException:
    """The error with the array of a tree in front of its text, so that the caller knows which one failed.

    Parameters
    ----------
    where : str
        From `where_text`. Empty: the error is returned as it is.
    error : BaseException
        The text of a ShardloadError is changed in place; for another exception the `PeerError` that stands for it is made.
    name : str
        The array's name in its file, which is added if the text does not have it.
    """
    if not where:
        return error
    named_error: ShardloadError = as_shardload(error, None)
    if named_error is not error:
        named_error.__cause__ = error
    text = str(named_error)
    if not text.startswith(where):
        named_error.args = (f"{where}: {text}" if name in text else f"{where}, {name}: {text}",)
    return named_error


def keys_text(where: str) -> str:
    """The keys alone of what `where_text` returns."""
    return where.removeprefix("array ")


@contextmanager
def naming_errors(where: str, name: str = "") -> Iterator[None]:
    """Let errors that are raised inside name an array, as `in_array` does."""
    try:
        yield
    except StallError:
        raise
    except Exception as error:
        raise in_array(where, error, name)  # noqa: B904 - it has its cause


def is_one(value: Any) -> bool:
    """True if an option's value is a single one and no tree, for most options."""
    return value is None or _node(value) is None


def is_one_spec(value: Any) -> bool:
    """The same for `spec`. One spec is a tuple of names of mesh axes, too, ``("a", None)``, and a dict by names of axes. It has
    a text, which is no spec: a dict without one is a tree of specs.

    >>> is_one_spec(("a", None)), is_one_spec({"lat": "a", "lon": None}), is_one_spec({"rho": ("a", None)})
    (True, True, False)
    """
    if is_plain_tuple(value):
        return all(map(is_entry, value))
    entries = value.values() if isinstance(value, Mapping) else ()
    return is_one(value) or (all(map(is_entry, entries)) and any(isinstance(entry, str) for entry in entries))


def is_tree_of_specs(value: Mapping[Any, Any], keys: Sequence[Any]) -> bool:
    """True if a dict is a tree of specs and no spec by names of axes, where the arrays have these keys.

    >>> by_names = {"lat": ("a", "b")}
    >>> is_tree_of_specs(by_names, [jax.tree_util.DictKey("rho")]), is_tree_of_specs(by_names, [jax.tree_util.DictKey("lat")])
    (False, True)
    """
    return _has_keys(value, keys) or not all(map(is_entry, value.values()))


def _has_keys(value: Mapping[Any, Any], keys: Sequence[Any]) -> bool:
    """True if a dict has the keys that the arrays have."""
    return set(map(jax.tree_util.DictKey, value)) == set(keys)


def is_entry(entry: Any) -> bool:
    """True for what a spec has for an axis."""
    return entry is None or isinstance(entry, str) or (isinstance(entry, tuple) and all(isinstance(n, str) for n in entry))


def rebuilt(tree: Any, children: Sequence[Any]) -> Any:
    """A node of the kind of `tree` with other children, in the order of `node_of`."""
    node = _node(tree)
    return tree if node is None else jax.tree_util.tree_unflatten(node[1], list(children))


def node_of(tree: Any) -> list[tuple[Any, Any]] | None:
    """The children of a node, each with its key; None for a leaf."""
    node = _node(tree)
    return None if node is None else node[0]


def key_text(key: Any) -> str:
    """A key of `jax.tree_util` as a part of a name: without brackets, dots and quotes."""
    return str(next((getattr(key, name) for name in ("name", "key", "idx") if hasattr(key, name)), key)).strip("/")


Node = tuple[list[tuple[Any, Any]], Any]


def _node(tree: Any) -> Node | None:
    """The children of a node, each with its key, and the node's structure; None for a leaf."""
    if tree is None or isinstance(tree, (str, int, float, os.PathLike, Place, PartitionSpec)):
        return None
    children, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda part: part is not tree)
    if len(children) == 1 and not children[0][0]:
        return None
    return [(keys[0], child) for keys, child in children], structure


class ArrayTree:
    """The arrays of one call, with the structure that its result will have.

    Parameters
    ----------
    outline : pytree of Place
        The structure.

    Attributes
    ----------
    places : list of Place
        Its leaves, in JAX's order (dicts by sorted key).
    where : list of str
        For each place, the text of `where_text`.
    """

    def __init__(self, outline: Any) -> None:
        self._outline = outline
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(outline, is_leaf=lambda part: isinstance(part, Place))
        self.where = [where_text(keys) for keys, _ in leaves]
        self.places: list[Place] = [place for _, place in leaves]

    @classmethod
    def join(cls, path: Any, dataset: Any) -> ArrayTree:
        """The tree of a tree of paths and a tree of names: where one ends, its leaf counts for all that the other has below.

        Raises
        ------
        ConfigError
            If the two have other keys at the same place, or there is no name in them.
        """
        try:
            tree = cls(_join(path, dataset, ()))
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:  # keys that cannot be sorted
            raise ConfigError(
                f"dataset or path is a tree that JAX cannot read: {error} The keys of a dict must be of one type"
            ) from None
        if not tree.places:
            raise ConfigError(
                f"dataset is {dataset!r}, a tree without a name: there is nothing to load. Pass a name, a dict or list of "
                "names, or '*' for all arrays of the file"
            )
        return tree

    @classmethod
    def of_names(cls, names: Iterable[str]) -> ArrayTree:
        """The arrays with these full names, in a dict for each group. ConfigError if one is an array and a group."""
        return cls(_nested("", ((name.strip("/").split("/"), Place("", name)) for name in names)))

    @property
    def is_single(self) -> bool:
        """True if the call is about one array, which is not in a tree."""
        return isinstance(self._outline, Place) and not self._outline.is_pattern

    @property
    def has_patterns(self) -> bool:
        """True if only the file says which arrays there are."""
        return any(place.is_pattern for place in self.places)

    def spread(
        self,
        name: str,
        value: Any,
        is_one: Callable[[Any], bool] = is_one,
        is_tree: Callable[[Mapping[Any, Any], Sequence[Any]], bool] | None = None,
        default: Any = NEEDED,
    ) -> list[Any]:
        """The value of an option for each place. For a pattern it may still be a tree.

        Parameters
        ----------
        name : str
            The option, for messages.
        value : object
            A single value, or a prefix tree of values. Its dicts may have names with slashes in place of dicts in dicts.
        is_one : callable
            True for a single value.
        is_tree : callable, optional
            For options of which a single value may be a dict, as a selection by names of axes: tells a tree from such a dict,
            which counts for all arrays below its place. It gets the dict, and the keys that the arrays have there.
        default : object, optional
            The value of arrays that a dict does not name. Without one, it has to name all.

        Raises
        ------
        ConfigError
            If the tree of values does not match. It says at which keys.
        """
        if isinstance(self._outline, Place) or is_one(value):
            return [value] * len(self.places)

        def walk(outline: Any, value: Any, where: Where) -> Iterator[Any]:
            """The values of the places of an outline, to which these keys lead."""
            is_dict = is_tree is not None and isinstance(value, Mapping)
            if isinstance(outline, Place):
                if not (outline.is_pattern or is_one(value) or is_dict or _node(value) is None):
                    text = f"{name}{text_of(where)} is {repr(value)[:77]}, a tree"
                    raise ConfigError(f"{text}, but there is one array at that place. Pass one value")
                yield value
                return
            children = node_of(outline) or []
            keys = [key for key, _ in children]
            if isinstance(value, Mapping) and not is_one(value):
                value = _with_groups(value, keys, f"{name}{text_of(where)}")
            is_leaf = is_one(value) or (is_tree is not None and is_dict and not is_tree(value, keys))
            of_value = None if is_leaf else node_of(dict(value) if isinstance(value, Mapping) else value)
            if of_value is None:
                yield from [value] * len(jax.tree_util.tree_leaves(outline))
                return
            tree_name = "dataset" if name == "x" else "the arrays"
            needed = default if isinstance(value, Mapping) else NEEDED
            values = _matching(name, of_value, children, where, tree_name, needed)
            for (key, child), part in zip(children, values, strict=True):
                yield from walk(child, part, (*where, key))

        return list(walk(self._outline, value, ()))

    def grow(self, found: Mapping[int, Mapping[str, Any]]) -> ArrayTree:
        """The tree with a nested dict in the place of each pattern.

        Parameters
        ----------
        found : mapping of int to mapping of str
            For the number of each place that is a pattern: what is known of the arrays below it, by their full names.

        Raises
        ------
        ConfigError
            If a name is that of an array and of a group.
        """
        leaves: list[Any] = list(self.places)
        for k, arrays in found.items():
            pattern = self.places[k]
            names = ((name.removeprefix(pattern.group).strip("/").split("/"), name) for name in arrays)
            places = ((keys, Place(pattern.path, name, array=arrays[name])) for keys, name in names)
            leaves[k] = _nested(f"{pattern.dataset!r} of '{pattern.path}': ", places)
        return ArrayTree(self.build(leaves))

    def build(self, values: Sequence[Any]) -> Any:
        """The values, one for each place, in the structure of the tree."""
        return jax.tree_util.tree_unflatten(self._structure, list(values))


def _join(path: Any, dataset: Any, where: Where) -> Any:
    of_path, of_dataset = _node(path), _node(dataset)
    structure: Any
    if of_dataset is not None:
        children, structure = of_dataset
        paths = [path] * len(children) if of_path is None else _matching("path", of_path[0], children, where, "dataset")
        joined = [_join(child_path, child, (*where, key)) for child_path, (key, child) in zip(paths, children, strict=True)]
    elif of_path is not None:
        children, structure = of_path
        joined = [_join(child, dataset, (*where, key)) for key, child in children]
    else:
        return Place.of(path, dataset)
    return jax.tree_util.tree_unflatten(structure, joined)


def _with_groups(value: Mapping[Any, Any], keys: Sequence[Any], name: str) -> Mapping[Any, Any]:
    """The same dict with a dict for each group, if it has names with slashes for keys."""
    if not any(isinstance(key, str) and "/" in key and jax.tree_util.DictKey(key) not in keys for key in value):
        return value
    pairs = ((key.strip("/").split("/") if isinstance(key, str) else [key], part) for key, part in value.items())
    return _nested(f"{name}: ", pairs)


def _nested(where: str, pairs: Iterable[tuple[list[Any], Any]]) -> dict[Any, Any]:
    """Nested dicts of values, each with the keys that lead to it. ConfigError (after `where`) if two have one place."""
    root: dict[Any, Any] = {}
    for (*groups, last), value in pairs:
        group_dict: Any = root
        for group in groups:
            group_dict = group_dict.setdefault(group, {}) if isinstance(group_dict, dict) else group_dict
        if not isinstance(group_dict, dict) or last in group_dict:
            name = "/".join(map(str, (*groups, last)))
            raise ConfigError(
                f"{where}'{name}' is there twice, or is in an array, and an array holds no other. Give each a name of its own"
            )
        group_dict[last] = dict(value) if isinstance(value, Mapping) else value
    return root


def is_tree_of_selections(value: Mapping[Any, Any], keys: Sequence[Any]) -> bool:
    """True if a dict is a tree of selections and no selection by names of axes, where the arrays have these keys.

    It is a tree if it has the arrays' keys, or if a dict, list or tuple is among its values, which no single axis takes.
    """
    if any(isinstance(part, (Near, Between)) for part in value.values()):  # these need the name of an axis
        return False
    return _has_keys(value, keys) or any(isinstance(part, (Mapping, list, tuple)) for part in value.values())


def _matching(
    name: str,
    values: list[tuple[Any, Any]],
    children: list[tuple[Any, Any]],
    where: Where,
    tree_name: str,
    default: Any = NEEDED,
) -> list[Any]:
    """The values in the order of the keys of `children`. ConfigError if the keys differ."""
    by_key = dict(values)
    keys_in_order = [key for key, _ in children]
    if not by_key.keys() <= set(keys_in_order) or (default is NEEDED and len(by_key) < len(keys_in_order)):
        missing = [str(key) for key in keys_in_order if key not in by_key and default is NEEDED]
        extra = [str(key) for key in by_key if key not in set(keys_in_order)]
        parts = ((f"{name} has no", missing), (f"only {name} has", extra))
        difference = "; ".join(f"{text} {some(keys)}" for text, keys in parts if keys)
        in_no_stack = f", with None for {some(missing)}, in no stack" if name == "stack" and missing else ""
        raise ConfigError(
            f"{name}{text_of(where)} does not match {tree_name}{text_of(where)}: {difference}. Pass "
            f"{'a tree' if name == 'x' else 'one value for all, or a tree'} with the same keys{in_no_stack}"
        )
    return [by_key.get(key, default) for key in keys_in_order]
