"""Do the stages of ``make test`` leave nothing out between them?"""

from __future__ import annotations

import itertools

import pytest

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
