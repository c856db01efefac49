"""How is an error kept on this rank until the ranks agree? Other ranks may wait for this one, so it is not raised at once.

Ctrl-C is no error of the call, and neither is another exception that is no `Exception`: it ends the call where it comes.
"""

from __future__ import annotations

from shardload.errors import StallError
from shardload.system.garbage import let_go


class FirstError:
    """Keeps the first error of this rank. A context manager: it keeps what is raised inside.

    A stall passes, because after it the ranks cannot agree any more; so does Ctrl-C.

    Attributes
    ----------
    error : Exception or None
        The error.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __bool__(self) -> bool:
        return self.error is not None

    def keep(self, error: BaseException) -> None:
        """Keep an error, if it is the first. Can be called in any thread."""
        let_go(error)
        self.error = self.error or error

    def take(self) -> BaseException | None:
        """Return the error, and keep it no longer."""
        error, self.error = self.error, None
        return error

    def __enter__(self) -> FirstError:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, StallError):
            return False
        self.keep(error)
        return True
