"""Is this `make test`, which each change goes through, or `make test-all`?"""

from __future__ import annotations

import os

__all__ = ["is_quick"]


def is_quick() -> bool:
    """Whether tests marked as thorough are left out, and loops in tests take the combinations that differ in kind."""
    return bool(os.environ.get("TESTS_QUICK"))
