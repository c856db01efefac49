"""Do the devices of one process get what NumPy gives? On eight devices, in a process of their own: see `eight_devices`."""

from __future__ import annotations

import pytest

from tests.unit.eight_devices import CHECKS, outcome


@pytest.mark.parametrize("name", [n for n in CHECKS if n.startswith("stream_")])
def test_on_eight_devices(name: str) -> None:
    assert not outcome(name), outcome(name)
