"""What does `make test` take, which each change goes through, and what only `make test-all`?"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from typing import Any

import pytest

__all__ = ["is_quick", "thorough"]


def is_quick() -> bool:
    """Whether tests marked as thorough are left out, and loops in tests take the combinations that differ in kind."""
    return bool(os.environ.get("TESTS_QUICK"))


def thorough(values: Iterable[Any], these: Container[Any]) -> list[Any]:
    """Values for ``parametrize``, of which `make test` leaves `these` to `make test-all`."""
    return [pytest.param(value, marks=pytest.mark.thorough) if value in these else value for value in values]
