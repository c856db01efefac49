"""How is what was begun undone, if it cannot be ended? By a ``with`` statement, whatever went wrong: Ctrl-C, too."""

from __future__ import annotations

from collections.abc import Callable


class Undo:
    """Calls a function if its ``with`` statement is left by an exception, which goes on.

    Parameters
    ----------
    function : callable
        Undoes what was begun.

    Examples
    --------
    >>> from contextlib import suppress
    >>> with suppress(KeyError), Undo(lambda: print("undone")):
    ...     raise KeyError("file")
    undone
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._function()
