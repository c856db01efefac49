"""Which tests and parameters does a stage of ``make test`` take, and does ``make test-all`` leave nothing out?"""

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

@pytest.mark.parametrize("a", "xyzuvw")
def test_one(a): ...

@pytest.mark.any_library
def test_any_library(): ...

@pytest.mark.any_version
@pytest.mark.mpi(min_size=2)
def test_any_version(): ...

@pytest.mark.any_version
@pytest.mark.mpi(min_size=3)
def test_three_ranks(): ...

@pytest.mark.few_ranks
@pytest.mark.parametrize("a", "xyz")
def test_few_ranks(a): ...

@pytest.mark.thorough
def test_thorough(): ...
"""
NAMES = ("test_three", "test_two", "test_one", "test_any_library", "test_any_version", "test_three_ranks", "test_few_ranks")


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> list[pytest.Function]:
    """Of `TEST`, as if it were one of tests/mpi."""
    monkeypatch.setattr(conftest, "TESTS", tmp_path)
    for name in ("TESTS_SHARE", "TESTS_SHARE_OF_ONE", "TESTS_TURN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mpi").mkdir()
    (tmp_path / "mpi" / "test_it.py").write_text(TEST)
    module = pytest.Module.from_parent(request.session, path=tmp_path / "mpi" / "test_it.py")
    return [item for item in module.collect() if isinstance(item, pytest.Function)]


def values_of(items: list[pytest.Function], name: str) -> list[tuple[str, ...]]:
    """What the test has that is called so, in the share of this stage."""
    ours = conftest._shared_to_us([*items])
    return [tuple(item.callspec.id.split("-")) for item in items if item in ours and item.originalname == name]


def test_parameters_are_shared_out_by_their_values(items: list[pytest.Function], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a combination were in two shares or in none, or a share lacked a value."""
    for name, sizes in (("test_three", [3, 4, 1, 2]), ("test_two", [3, 6])):
        monkeypatch.delenv("TESTS_SHARE", raising=False)
        every, shares = values_of(items, name), []
        assert len(every) == len({*every}) == math.prod(sizes)
        for k in range(4):
            monkeypatch.setenv("TESTS_SHARE", f"{k}/4")
            shares.append(values_of(items, name))
            assert all(len({*values}) > n // 2 for values, n in zip(zip(*shares[k], strict=True), sizes, strict=True))
            monkeypatch.setenv("TESTS_SHARE", f"{k}/8")
            assert {*values_of(items, name)} <= {*shares[k]}
            monkeypatch.setenv("TESTS_SHARE", f"{k}/1000")
            assert len(values_of(items, name)) == 1, "the nearest one, if none is in the share"
        assert sorted(itertools.chain(*shares)) == sorted(every)
    assert [value for (value,) in values_of(items, "test_one")] == [*"xyzuvw"], "this has a share of its own"
    monkeypatch.setenv("TESTS_SHARE_OF_ONE", "1/2")
    assert len(values_of(items, "test_one")) == 3
    assert len(values_of(items, "test_few_ranks")) == 3, "4 ranks have none of these"


def test_each_test_has_its_turn_in_one_stage(items: list[pytest.Function], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a test were in none of the stages beside 4 ranks, or in one that cannot have it."""
    turns: dict[str, set[str]] = {name: set() for name in NAMES}
    for stage in ("openmpi", "oldest", "one"):
        for item in items:
            if item.originalname in turns and conftest._is_its_turn(item, stage):
                turns[item.originalname].add(stage)
    assert all(conftest._is_its_turn(item, "") for item in items), "4 ranks, and `make test-all`"
    assert all(len(turns[name]) == 1 for name in NAMES), turns
    assert "openmpi" not in turns["test_any_library"]
    assert turns["test_any_version"] == turns["test_three_ranks"] == {"openmpi"}
    assert turns["test_few_ranks"] == {"oldest"}, "which has two ranks"


def test_what_is_thorough_is_left_to_all_tests(
    items: list[pytest.Function], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Wrong if `make test-all`, or a run by hand, left it out too."""
    one = items[-1]
    monkeypatch.setattr(conftest, "IS_QUICK", False)
    assert one.originalname == "test_thorough" and conftest._elsewhere(one, request.config) is None
    monkeypatch.setattr(conftest, "IS_QUICK", True)
    assert "make test-all" in (conftest._elsewhere(one, request.config) or "")


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
