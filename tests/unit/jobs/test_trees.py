"""Do names and options that come as trees reach the array that is meant?"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardload.errors import ConfigError, PeerError, SourceError
from shardload.jobs.trees import ArrayTree, Place, in_array, is_one_spec, is_tree_of_selections
from shardload.options import OPTIONS, PER_LOADED_ARRAY
from shardload.planning.selection import near

Pair = namedtuple("Pair", "left right")


def said(tree: ArrayTree) -> list[tuple[str, Any, Any]]:
    return [(w, p.path, p.dataset) for w, p in zip(tree.where, tree.places, strict=True)]


@pytest.mark.parametrize(
    ("path", "dataset", "expected"),
    [
        (["a", "b"], "x", [("a", "x"), ("b", "x")]),
        (["a", "b"], ["x", "y"], [("a", "x"), ("b", "y")]),
        ({"p": "a", "q": "b"}, {"q": ["x", "y"], "p": "z"}, [("a", "z"), ("b", "x"), ("b", "y")]),
        ({"p": ["a", "b"], "q": "c"}, {"p": "x", "q": ["y", "z"]}, [("a", "x"), ("b", "x"), ("c", "y"), ("c", "z")]),
        (["a:/x", "a:/y"], None, [("a:/x", None), ("a:/y", None)]),
    ],
)
def test_paths_and_names_are_joined(path: Any, dataset: Any, expected: list[tuple[Any, Any]]) -> None:
    """Wrong if a path were used for another name, where one tree ends before the other does."""
    assert [pair for _, *pair in map(list, said(ArrayTree.join(path, dataset)))] == [list(pair) for pair in expected]


def test_trees_of_paths_and_names_that_do_not_match() -> None:
    with pytest.raises(
        ConfigError, match=r"path\['g'\] does not match dataset\['g'\]: path has no \['y'\]; only path has \['z'\]"
    ):
        ArrayTree.join({"g": {"x": "a", "z": "b"}}, {"g": {"x": "1", "y": "2"}})
    for empty in ({}, [], {"g": {}}):
        with pytest.raises(ConfigError, match="a tree without a name"):
            ArrayTree.join("a.h5", empty)
    with pytest.raises(ValueError, match="sorting pytree dictionary keys"):  # of which a call makes a ConfigError
        ArrayTree.join("a.h5", {1: "x", "a": "y"})


NAMES = {"pos": "x", "gas": {"rho": "y", "temperature": "z"}, "id": "w"}  # JAX's order: gas, id, pos


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"pos": 1, "gaz": 2}, r"pad does not match the arrays: pad has no \['gas'\], \['id'\]; only pad has \['gaz'\]"),
        ([1, 2, 3], r"pad has no \['gas'\], \['id'\], \['pos'\]; only pad has \[0\], \[1\], \[2\]"),
        ({"pos": [1, 2], "gas": 1, "id": 1}, r"pad\['pos'\] is \[1, 2\], a tree, but there is one array at that place"),
    ],
)
def test_a_tree_of_values_that_does_not_match(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ArrayTree.join("a.h5", NAMES).spread("pad", value)


def test_what_is_one_value() -> None:
    """Wrong if a spec, a slice or a tuple of slices were taken apart, or a tree of them taken for one."""
    for one in (P("a"), P(), ("a", None), (("a", "b"), None), (), None):
        assert is_one_spec(one), one
    for tree in ((P("a"), P("b")), [P("a")], {"x": P()}, [None, P()]):
        assert not is_one_spec(tree), tree
    select = OPTIONS["select"]
    assert select.is_one is not None and select in PER_LOADED_ARRAY
    for one in (0, slice(3), ..., (0, slice(2, 4)), (..., 1), None, np.int64(3)):
        assert select.is_one(one), one
    for tree in ({"x": 0}, [0, 1], ((0,), (slice(3),))):
        assert not select.is_one(tree), tree
    assert [option.name for option in PER_LOADED_ARRAY][:4] == ["select", "dtype", "decode", "pad"]


def test_names_with_slashes_and_defaults() -> None:
    """Wrong if a name with a slash were no group, one of two values for a name were lost, or a default went elsewhere."""
    tree = ArrayTree.of_names(["/rho", "/g/vel", "/g/h/id"])  # JAX's order: g/h/id, g/vel, rho
    assert [place.dataset for place in tree.places] == ["/g/h/id", "/g/vel", "/rho"]
    for same in ({"g/vel": 1, "rho": 2}, {"g": {"vel": 1}, "/rho": 2}, MappingProxyType({"g": {"vel": 1}, "rho": 2})):
        assert tree.spread("chunks", same, lambda value: not isinstance(value, Mapping), default=0) == [0, 1, 2]
    assert tree.spread("chunks", {"g": 1, "rho": None}, default=0) == [1, 1, None]
    assert tree.spread("select", {"g/vel": 1, "g/h/id": 2, "rho": 3}, is_tree=is_tree_of_selections) == [2, 1, 3]
    assert ArrayTree.join("a.h5", {"g/vel": "g/vel"}).spread("dtype", {"g/vel": "f4"}) == ["f4"], "a key that has the slash"
    for wrong in ({"g/vel": 1, "g/vel/": 2, "rho": 3}, {"g": 1, "g/vel": 2}, {"g/vel": 2, "g": 1}):
        with pytest.raises(ConfigError, match=r"dtype: '.*' is there twice, or is in an array"):
            tree.spread("dtype", wrong)
    with pytest.raises(ConfigError, match=r"dtype\['g'\] does not match the arrays\['g'\]: dtype has no \['h'\]"):
        tree.spread("dtype", {"g/vel": 1, "rho": 3})
    with pytest.raises(ConfigError, match=r"only chunks has \['x'\]"):
        tree.spread("chunks", {"x": 1}, default=0)
    with pytest.raises(ConfigError, match=r"^'rho/x' is there twice, or is in an array"):
        ArrayTree.of_names(["/rho", "/rho/x"])


def test_a_selection_by_names_of_axes_or_a_tree_of_selections() -> None:
    """Wrong if a dict that names axes were taken apart further down, or a misspelt tree for names."""
    tree = ArrayTree.join("a.h5", {"g": {"lat": "x", "lon": "y"}, "time": "z"})  # JAX's order: g.lat, g.lon, time
    spread = lambda select: tree.spread("select", select, OPTIONS["select"].is_one, is_tree=is_tree_of_selections)  # noqa: E731
    by_name = {"lat": 0, "lon": 1}
    assert spread(by_name) == [by_name] * 3, "the root has other keys, so it names axes, also below ['g']"
    assert spread({"g": by_name, "time": 2}) == [0, 1, 2]
    assert spread({"g": {"lat": (0,), "lon": by_name}, "time": None}) == [(0,), by_name, None]
    near_one = {"lat": near(1), "lon": 1}
    assert spread({"g": near_one, "time": 2}) == [near_one, near_one, 2], "a coordinate needs the name of an axis"
    for wrong in ({"g": by_name, "tiem": 2}, {"g": (0,)}, {"g": [0, 1], "t": 0}):
        with pytest.raises(ConfigError, match=r"select does not match the arrays: select has no \['"):
            spread(wrong)


def test_patterns() -> None:
    """Wrong if groups were flattened, or the arrays put where another pattern was."""
    tree = ArrayTree.join({"p": "a.h5", "q": "b.h5:/g/*"}, {"p": "*", "q": None})
    assert tree.has_patterns and [place.group for place in tree.places] == ["", "/g"]
    grown = tree.grow({0: {"/x": "a", "/h/y": "b", "/h/k/z": "c"}, 1: {"/g/x": "d", "/g/h/x": "e"}})
    assert [place.array for place in grown.places] == ["c", "b", "a", "e", "d"]
    assert grown.build(range(5)) == {"p": {"h": {"k": {"z": 0}, "y": 1}, "x": 2}, "q": {"h": {"x": 3}, "x": 4}}
    assert [(place.path, place.dataset) for place in grown.places][3] == ("b.h5", "/g/h/x")
    assert grown.spread("pad", {"p": {"x": 1, "h": 2}, "q": 3}) == [2, 2, 1, 3, 3]
    with pytest.raises(ConfigError, match="'x/y' is there twice, or is in an array"):
        ArrayTree.join("a", "*").grow({0: dict.fromkeys(["/x", "/x/y"])})


def test_what_is_a_pattern() -> None:
    for path, dataset in (
        ("a.h5", "*"),
        ("a.h5", "/g/*"),
        ("a.h5:/*", None),
        (Path("a.h5:/g/*"), None),
        ("s3://b/c:/g/*", None),
    ):
        assert ArrayTree.join(path, dataset).has_patterns, (path, dataset)
    for path, dataset in (("a.h5", "g*"), ("*.h5", None), ("s3://b/*", None), ("a.h5", None), (np.zeros(3), None)):
        assert not ArrayTree.join(path, dataset).has_patterns, (path, dataset)
    assert Place.of("a.h5:/g/*", None).path == "a.h5"


def test_an_error_names_its_array() -> None:
    """Wrong if the type, the file or the chunk were lost, or the place were said twice."""
    error = SourceError("chunk 3 of '/x' in 'a.h5'", path="a.h5", dataset="/x", chunk=(3,))
    named = in_array("array ['x']", in_array("array ['x']", error, "'/x'"), "'/x'")
    assert named is error and str(error) == "array ['x']: chunk 3 of '/x' in 'a.h5'" and error.chunk == (3,)
    memory = in_array("array [1]", MemoryError("no room"), "'/y' in 'a.h5'")
    assert type(memory) is PeerError and str(memory) == "array [1], '/y' in 'a.h5': MemoryError: no room"
    assert isinstance(memory.__cause__, MemoryError)
    alone = MemoryError("no room")
    assert in_array("", alone) is alone
