"""How long should a waiting rank sleep before it looks again? Longer, the longer nothing has happened.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DOUBLINGS = 30


@dataclass(frozen=True)
class Backoff:
    """Sleeps that grow with the number of looks in a row that found nothing.

    Attributes
    ----------
    n_awake : int
        Number of looks before the first sleep.
    first_seconds, longest_seconds : float
        Length of the first sleep, and of the longest.
    n_before_doubling : int
        Number of sleeps of one length before the length doubles.

    Examples
    --------
    >>> backoff = Backoff(1, 0.25, 1.0, 2)
    >>> [backoff.seconds(n) for n in range(1, 8)]
    [0.0, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0]
    """

    n_awake: int
    first_seconds: float
    longest_seconds: float
    n_before_doubling: int

    def seconds(self, n_idle: int) -> float:
        """How long to sleep after look number `n_idle`, counted from 1; 0: do not sleep yet."""
        n_slept = n_idle - self.n_awake - 1
        if n_slept < 0:
            return 0.0
        doublings = min(_MOST_DOUBLINGS, n_slept // self.n_before_doubling)
        return min(self.longest_seconds, self.first_seconds * 2.0**doublings)
