"""Do the stages of ``make test`` leave nothing out between them?"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from tests import conftest
from tests.mpi.support import share

AXES = ("abc", range(4), "xy")


def test_shares_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a combination were in no share or in two, a share lacked a pair of three, or alone were not all."""
    everything = [*itertools.product(*AXES)]
    monkeypatch.delenv("TESTS_SHARE", raising=False)
    assert share(*AXES) == everything
    shares = []
    for k in range(2):
        monkeypatch.setenv("TESTS_SHARE", f"{k}/2")
        shares.append(share(*AXES))
        assert share(*AXES, first=1) != share(*AXES, first=0) == share(*AXES, first=2)
        for one, other in itertools.combinations(range(3), 2):
            assert {(c[one], c[other]) for c in shares[k]} == {*itertools.product(AXES[one], AXES[other])}
    assert sorted(shares[0] + shares[1]) == sorted(everything)
    assert len(shares[0]) == len(shares[1])


TEST = """
import pytest

@pytest.mark.parametrize("c", "xy")
@pytest.mark.parametrize(("b", "more"), [(k, None) for k in range(4)])
@pytest.mark.parametrize("a", [[], [], []])
def test_three(a, b, more, c): ...

@pytest.mark.parametrize("b", range(6))
@pytest.mark.parametrize("a", "xyz")
def test_two(a, b): ...

@pytest.mark.any_library
@pytest.mark.parametrize("b", range(6))
@pytest.mark.parametrize("a", "xyz")
def test_any_library(a, b): ...

@pytest.mark.by_ranks
@pytest.mark.any_library
@pytest.mark.parametrize("b", range(6))
@pytest.mark.parametrize("a", "xyz")
def test_by_ranks(a, b): ...
"""
STAGES = ("0/4", "1/4", "2/4", "3/4")  # see the Makefile


def test_parameters_are_shared_out_by_their_values(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Wrong if a value were on no stage with several ranks, or a combination of them in no stage or in two."""
    monkeypatch.setattr(conftest, "TESTS", tmp_path)
    (tmp_path / "mpi").mkdir()
    (tmp_path / "mpi" / "test_it.py").write_text(TEST)
    module = pytest.Module.from_parent(request.session, path=tmp_path / "mpi" / "test_it.py")
    items = [item for item in module.collect() if isinstance(item, pytest.Function)]
    names = ("test_three", "test_two", "test_any_library", "test_by_ranks")
    shares: dict[str, list[list[tuple[str, ...]]]] = {name: [] for name in names}
    for stage in STAGES:
        monkeypatch.setenv("TESTS_SHARE", stage)
        shared = conftest._shared_to_us(items)
        ours = [item for item in items if item in shared]
        for name, its in shares.items():
            its.append([tuple(item.callspec.id.split("-")) for item in ours if item.originalname == name])
    for name, sizes in (("test_three", [3, 4, 1, 2]), ("test_two", [3, 6])):
        every = [*itertools.chain(*shares[name])]
        assert len(every) == len({*every}) == math.prod(sizes) and min(map(len, shares[name])) > 3
        monkeypatch.setenv("TESTS_SHARE", "3/8")  # with the oldest versions
        ours = conftest._shared_to_us(items)
        oldest = [tuple(item.callspec.id.split("-")) for item in ours if item.originalname == name]
        assert oldest and {*oldest} <= {*shares[name][3]}
        on_several_ranks = [*shares[name][:2], oldest]
        assert [len({*values}) for values in zip(*itertools.chain(*on_several_ranks), strict=True)] == sizes
        for one in shares[name]:
            assert all(len({*values}) > n // 2 for values, n in zip(zip(*one, strict=True), sizes, strict=True))
    monkeypatch.setenv("TESTS_SHARE", "2/8")  # on one process
    ours = conftest._shared_to_us(items)
    for name in names[:3]:
        found = {tuple(item.callspec.id.split("-")) for item in ours if item.originalname == name}
        assert found and found < {*shares[name][2]}, name
    one, with_open_mpi, other, last = shares["test_any_library"]
    assert sorted(one + other + last) == [*itertools.product("xyz", "012345")] and with_open_mpi == last
    n_by_ranks = [len(one) for one in shares["test_by_ranks"]]
    assert n_by_ranks == [18, 6, 6, 6], "no other stage with this library has as many ranks"


EACH = """
import pytest

@pytest.fixture(params=["here", "there"])
def where(request): ...

@pytest.mark.each_value
@pytest.mark.parametrize("c", [True, False])
@pytest.mark.parametrize(("b", "more"), [(k, None) for k in range(6)])
@pytest.mark.parametrize("a", [[], [], []])
def test_each(a, b, more, c, where): ...

@pytest.mark.each_value
@pytest.mark.parametrize("a", "xyz")
def test_single(a): ...

def test_other(where): ...
"""


def test_each_value_is_met_at_least_once(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Wrong if `make test` left out a value of a parameter, took more than that needs, or always had the same two meet."""
    (tmp_path / "test_it.py").write_text(EACH)
    module = pytest.Module.from_parent(request.session, path=tmp_path / "test_it.py")
    items = [item for item in module.collect() if isinstance(item, pytest.Function)]
    left_out = conftest._beside_the_diagonal(items)
    assert {item.originalname for item in left_out} == {"test_each"}
    found = [item.callspec.params for item in items if item not in left_out and item.originalname == "test_each"]
    assert len(found) == 6 and {one["b"] for one in found} == {*range(6)}
    assert len({id(one["a"]) for one in found}) == 3
    assert len({(one["c"], one["where"]) for one in found}) == 4
