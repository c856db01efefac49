"""How much memory may this process use, and are its addresses limited?

* `keeps_addresses`: is there a limit of addresses? Memory that is kept, even if it has no pages, is then missing elsewhere.
* `limit_nbytes`: the smallest of the limits of the machine, of each control group above this process, and of its addresses,
  whoever uses how much of it now.
"""

from __future__ import annotations

import math
import resource
from contextlib import suppress
from functools import cache
from pathlib import Path

_NEVER_OVERCOMMIT = 2
_MEMINFO, _OVERCOMMIT = "/proc/meminfo", "/proc/sys/vm/overcommit_memory"
_GROUPS = "/proc/self/cgroup"
_ROOTS = {1: "/sys/fs/cgroup/memory", 2: "/sys/fs/cgroup"}
# Files of a control group with its limits, by version of the interface.
_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}


def keeps_addresses() -> bool:
    """True if the addresses of this process are limited, so that kept memory is missing elsewhere in the process."""
    return _address_limit() < math.inf or _read(_OVERCOMMIT).strip() == str(_NEVER_OVERCOMMIT)


def limit_nbytes(n_processes: int = 1) -> float:
    """Bytes that each of `n_processes` alike on this machine may use at most; infinity if that is unknown.

    They share the machine's memory and the limits of control groups. A limit of addresses is each process's own.
    """
    texts = [_read(path).strip() for path in _limits_of(_read(_GROUPS))]
    limits = [float(text) for text in texts if text.isdigit()]  # an old kernel's "none" is huge
    limits += [1024.0 * int(line.split()[1]) for line in _read(_MEMINFO).splitlines() if line.startswith("MemTotal")]
    shared = min(limits, default=math.inf)
    return min(shared / max(1, n_processes), _address_limit())


def _address_limit() -> float:
    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((float(limit) for limit in limits if limit != resource.RLIM_INFINITY), default=math.inf)


@cache
def _limits_of(groups: str) -> tuple[str, ...]:
    """The files with limits of the memory of a process with this ``/proc/self/cgroup``, from its own group to the outermost."""
    paths: list[str] = []
    for line in groups.splitlines():
        number, controllers, path = [*line.split(":", 2), "", "", ""][:3]
        version = 2 if number == "0" else 1 if "memory" in controllers.split(",") else 0
        if not version:
            continue
        root, names = Path(_ROOTS[version]), Path(path).parts[1:]
        # In a container the mount may begin below that path, or show only that folder.
        folders = [root.joinpath(*names[k:]) for k in range(len(names) + 1)]  # the last one is the root
        folder = next((folder for folder in folders if folder.is_dir()), root)
        while folder.is_relative_to(root):
            paths += [str(folder / name) for name in _LIMITS[version] if (folder / name).exists()]
            folder = folder.parent
    return tuple(paths)


def _read(path: str) -> str:
    """A small file of the kernel; empty if it is missing. (With a buffer it takes longer.)"""
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        return file.readall().decode(errors="replace")
    return ""
