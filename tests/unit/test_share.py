"""Which tests and parameters does a stage of ``make test`` take, and does ``make test-all`` leave nothing out?"""

from __future__ import annotations

import itertools
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

@pytest.mark.thorough
def test_thorough(): ...
"""
NAMES = ("test_three", "test_two", "test_one", "test_any_library", "test_any_version", "test_three_ranks")


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> list[pytest.Function]:
    """Of `TEST`, as if it were one of tests/mpi."""
    monkeypatch.setattr(conftest, "TESTS", tmp_path)
    for name in ("TESTS_SHARE", "TESTS_TURN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mpi").mkdir()
    (tmp_path / "mpi" / "test_it.py").write_text(TEST)
    module = pytest.Module.from_parent(request.session, path=tmp_path / "mpi" / "test_it.py")
    return [item for item in module.collect() if isinstance(item, pytest.Function)]


def test_parameters_are_shared_out(items: list[pytest.Function], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a combination were in no share, or a test had none in a share."""
    assert conftest._shared_to_us([*items]) == {*items}
    for n in (2, 8, 1000):
        shares = []
        for k in range(n if n < 1000 else 1):
            monkeypatch.setenv("TESTS_SHARE", f"{k}/{n}")
            shares.append(conftest._shared_to_us([*items]))
            assert {item.originalname for item in shares[-1]} == {*NAMES, "test_thorough"}
        for name, few in (("test_three", 2 * n), ("test_two", 2 * n), ("test_one", n)):
            mine = [{item for item in share if item.originalname == name} for share in shares]
            n_all = sum(item.originalname == name for item in items)
            assert len(mine[0]) <= max(1, 3 * n_all // few), "about as many as were asked for"
    monkeypatch.setenv("TESTS_SHARE", "1/2")
    assert len(conftest._shared_to_us([*items])) < len(items)


def test_each_test_has_its_turn_in_one_stage(items: list[pytest.Function], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a test were in none of the stages beside 4 ranks, or in one that cannot have it."""
    turns: dict[str, set[str]] = {name: set() for name in NAMES}
    for stage in ("openmpi", "oldest", "one"):
        for item in items:
            if item.originalname in turns and conftest._is_its_turn(item, stage):
                turns[item.originalname].add(stage)
    assert all(conftest._is_its_turn(item, "") for item in items), "`make test-all`"
    for item in items:
        if item.originalname in turns:
            assert conftest._is_its_turn(item, "four") == (turns[item.originalname] != {"openmpi"}), "on 4 ranks once"
    assert all(len(turns[name]) == 1 for name in NAMES), turns
    assert "openmpi" not in turns["test_any_library"]
    for item in items:
        item.add_marker(pytest.mark.any_number)
        (turn,) = turns.get(item.originalname, {""})
        if turn in ("one", "oldest"):
            stages = {stage for stage in ("openmpi", "oldest", "one", "four") if conftest._is_its_turn(item, stage)}
            assert stages == {turn, "oldest"}, "on 2 ranks instead of 4"
    assert turns["test_any_version"] == turns["test_three_ranks"] == {"openmpi"}


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
"""


def test_each_value_is_met_at_least_once(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Wrong if `make test` left out a value of a parameter, took more than that needs, or always had the same two meet."""
    (tmp_path / "test_it.py").write_text(EACH)
    module = pytest.Module.from_parent(request.session, path=tmp_path / "test_it.py")
    items = [item for item in module.collect() if isinstance(item, pytest.Function)]
    found = [item.callspec.params for item in conftest._each_value_once(items)]
    assert len(found) == 6 and {one["b"] for one in found} == {*range(6)}
    assert len({id(one["a"]) for one in found}) == 3
    assert len({(one["c"], one["where"]) for one in found}) > 2
