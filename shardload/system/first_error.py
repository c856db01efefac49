"""What went wrong on this rank? The first error is kept until the ranks agree, because others may wait for this rank."""

from __future__ import annotations

from shardload.errors import StallError
from shardload.system.garbage import let_go
from shardload.system.interruption import let_interruption_pass


class FirstError:
    """Keeps the first error of this rank. A context manager: it keeps what is raised inside.

    A stall passes, because after it the ranks cannot agree any more; so does what a signal handler raises.

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
        let_interruption_pass(error)
        let_go(error)
        self.error = self.error or error

    def take(self) -> BaseException | None:
        """The error, which is not kept any longer."""
        error, self.error = self.error, None
        return error

    def __enter__(self) -> FirstError:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, StallError):
            return False
        self.keep(error)
        return True
