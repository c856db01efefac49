"""Is every shard on eight devices, of a process of their own, the one that JAX asked for? See `eight_devices`."""

from __future__ import annotations

import pytest

from tests.unit.eight_devices import CHECKS, outcome


@pytest.mark.parametrize("name", CHECKS)
def test_on_eight_devices(name: str) -> None:
    assert not outcome(name), outcome(name)
