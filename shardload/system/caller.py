"""Where in the user's own code was this package called?

A warning should name that line. The number of calls in between is different for `load`, `Plan.execute`, `scatter` and the
command line, and changes whenever a function is split: a number passed down through all of them would be wrong one day,
unnoticed. So the call stack is searched for the first call from outside the package. (`warnings.warn` does the same with
``skip_file_prefixes``, from Python 3.12 on.)
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_changing = threading.RLock()


@contextlib.contextmanager
def warnings_caught(**options: Any) -> Iterator[None]:
    """`warnings.catch_warnings`, by one thread at a time: the filters are the process's, and two threads that change them and
    put them back in turn leave them changed.
    """
    with _changing, warnings.catch_warnings(**options):
        yield


def warn_once(text: str, kind: type[Warning], rank: int) -> None:
    """Warn at the user's line, once in the job. Every rank calls this.

    Only rank 0 shows the warning. But if the user turned warnings into errors, every rank must raise it.

    The line is that of the first call from outside the package. If there is none, as in a thread of the package itself, it is
    that of the outermost call. Context managers of the package are called by Python's `contextlib`, which does not count.
    """
    package, level = (os.path.dirname(os.path.dirname(__file__)) + os.sep, contextlib.__file__), 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    with contextlib.nullcontext() if rank == 0 else warnings_caught(record=True):
        warnings.warn(text, kind, stacklevel=level)
