"""Is the first error of a rank kept until the ranks agree, and a stall never?"""

from __future__ import annotations

import pytest

from shardload.errors import SourceError, StallError
from shardload.system.interruption import FirstError


def test_the_first_error_is_kept_until_it_is_taken() -> None:
    """Wrong if a later error hid its cause, or an error were told twice."""
    errors = FirstError()
    for text in ("first", "second"):
        with errors:
            raise SourceError(text)
    assert errors and str(errors.take()) == "first"
    assert not errors and errors.take() is None


@pytest.mark.parametrize("kind", [StallError, KeyboardInterrupt])
def test_what_ends_a_call_passes(kind: type[BaseException]) -> None:
    """Wrong if a rank went on to agree with ranks that do not answer, or after Ctrl-C."""
    errors = FirstError()
    with pytest.raises(kind), errors:
        raise kind("now")
    assert not errors
