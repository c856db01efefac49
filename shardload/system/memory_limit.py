"""How much memory may this process use, and are its addresses limited?

* `keeps_addresses`: is there a limit of addresses? Memory that is kept, even if it has no pages, is then missing elsewhere.
* `limit_nbytes`: the smallest of the limits of the machine, of each control group above this process, and of its addresses,
  whoever uses how much of it now.
"""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

__all__ = ["keeps_addresses", "limit_nbytes"]

_NEVER_OVERCOMMIT = 2
_NO_LIMIT = 1 << 60  # the older interface reports a huge number if there is no limit
_READ_NBYTES = 1 << 14
_MEMINFO, _OVERCOMMIT = "/proc/meminfo", "/proc/sys/vm/overcommit_memory"
_GROUPS, _MOUNTS = "/proc/self/cgroup", "/proc/self/mountinfo"
# Files of a control group with its limits, by version of the interface.
_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}


def keeps_addresses() -> bool:
    """True if the addresses of this process are limited, so that kept memory is missing elsewhere in the process."""
    return _address_limit() < math.inf or _read(_OVERCOMMIT).strip() == str(_NEVER_OVERCOMMIT)


def limit_nbytes(n_processes: int = 1) -> float:
    """Bytes that each of `n_processes` alike on this machine may use at most; infinity if that is unknown.

    They share the machine's memory and the limits of control groups. A limit of addresses is each process's own.
    """
    shared = min([_in_machine(), *(_limit_of(folder, version) for folder, version in _folders(_read(_GROUPS)))])
    return min(shared / max(1, n_processes), _address_limit())


def _address_limit() -> float:
    try:
        import resource
    except ImportError:  # not a Unix
        return math.inf
    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((float(limit) for limit in limits if limit != resource.RLIM_INFINITY), default=math.inf)


def _in_machine() -> float:
    return next(
        (1024.0 * int(line.split()[1]) for line in _read(_MEMINFO).splitlines() if line.startswith("MemTotal")), math.inf
    )


def _limit_of(folder: str, version: int) -> float:
    """The lower of a control group's limits."""
    texts = [_read(f"{folder}/{name}").strip() for name in _LIMITS[version]]
    limit = min((float(text) for text in texts if text.isdigit()), default=math.inf)
    return math.inf if limit >= _NO_LIMIT else limit


@cache
def _folders(groups: str) -> tuple[tuple[str, int], ...]:
    """The control groups that limit the memory of a process with this ``/proc/self/cgroup``, from its own to the outermost."""
    found = []
    for version, root, mount in _mounts():
        path = next((p for number, names, p in _split(groups) if _is_memory(version, number, names)), None)
        if path is None:
            continue
        # In a container the mount may begin below the path in /proc/self/cgroup, or show only that folder.
        inner = os.path.relpath(path, root) if path == root or path.startswith(root.rstrip("/") + "/") else "."
        folder = mount / inner
        folder = folder if folder.is_dir() else mount
        while folder.is_relative_to(mount):
            if (folder / _LIMITS[version][0]).exists():  # missing where no memory is counted, as in the outermost group
                found.append((str(folder), version))
            folder = folder.parent
    return tuple(found)


def _split(groups: str) -> list[tuple[str, list[str], str]]:
    """The number, the controllers and the path of each line."""
    lines = (line.split(":", 2) for line in groups.splitlines())
    return [(line[0], line[1].split(","), line[2]) for line in lines if len(line) == 3]


def _is_memory(version: int, number: str, controllers: list[str]) -> bool:
    return number == "0" if version == 2 else "memory" in controllers


def _mounts() -> list[tuple[int, str, Path]]:
    """The mounts of control groups for memory: version, root within the hierarchy, mount point."""
    found = []
    for line in _read(_MOUNTS).splitlines():
        fields, _, rest = line.partition(" - ")
        kind, *more = rest.split() or [""]
        is_memory = kind == "cgroup" and "memory" in more[-1].split(",")
        if is_memory or kind == "cgroup2":
            found.append((1 if is_memory else 2, fields.split()[3], Path(fields.split()[4])))
    return found


def _read(path: str) -> str:
    """Read a small file of the kernel; empty if it is missing. (Python's own `open` takes twice as long.)"""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return ""
    try:
        return b"".join(iter(lambda: os.read(file, _READ_NBYTES), b"")).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(file)
