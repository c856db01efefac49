"""What of a test does `make test` take, which each change goes through, and what does it leave to `make test-all`?

See THOROUGH and EACH_VALUE in tests/conftest.py.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import hypothesis

__all__ = ["IS_QUICK", "examples", "quick_ones", "some_of", "thorough"]

IS_QUICK = bool(os.environ.get("TESTS_QUICK"))


def thorough(values: Iterable[Any], these: Container[Any]) -> list[Any]:
    """Values for ``parametrize``, of which `make test` leaves `these` to `make test-all`."""
    return [_thorough(value) if value in these else value for value in values]


def examples(n: int, **settings: Any) -> hypothesis.settings:
    """So many examples, in `make test` a fourth."""
    import hypothesis  # not on ranks: see `_load_profile` in tests/conftest.py

    return hypothesis.settings(max_examples=-(-n // 4) if IS_QUICK else n, **settings)


def quick_ones(values: Iterable[Any], *these: Any) -> list[Any]:
    """Values for ``parametrize``, of which `make test` takes these. Tuples are for several parameters.

    >>> [getattr(value, "values", value) for value in quick_ones([("a", 1), ("b", 2), ("c", 3)], ("c", 3))]
    [('a', 1), ('b', 2), ('c', 3)]
    """
    values = list(values)
    assert these and all(one in values for one in these), "no such value"
    return [one if one in these else _thorough(*one) if isinstance(one, tuple) else _thorough(one) for one in values]


def _thorough(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.thorough)


def some_of(cases: Iterable[Any], one_of: int = 7) -> list[Any]:
    """What a test tries in a loop; in `make test` one of so many, the first among them. A number that has no divisor in common
    with the length of a shorter loop inside meets all of that."""
    return list(cases)[:: one_of if IS_QUICK else 1]
