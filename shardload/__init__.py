"""Load HDF5, netCDF4 and Zarr arrays into sharded `jax.Array`s over MPI, each shard proven to be where it belongs.

    import shardload
    shardload.initialize()
    x = shardload.load("data.h5", mesh, P("a", "b"))

Nothing else than what is named here is public, but for `shardload.formats` and `shardload.testing`, for whoever writes a file
format. The rooms, from the call down to the machine:

cli       the commands
testing   the suite that a file format must pass; nothing imports it
api.py    the functions: load, plan, scatter, verify
jobs      one call: from its arguments to its report
arrays    JAX's side: shardings, assembling, verification
transfer  blocks of the file <-> pieces of shards, over MPI
options.py
formats   HDF5, Zarr and what else holds an array
planning  who owns which block, and which part of which shard meets it: integers alone
comm      the ranks: MPI, shared memory, agreement, the watchdog
system    what this machine lends: threads, memory, a terminal

Imports run down this list only. Importing the package itself imports none of them: each name is looked up when it is first
used, so that `shardload --help`, and whoever wants `shardload.planning` alone, need not wait for JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardload.api import load, plan, scatter, verify
    from shardload.arrays.verification import VerifyReport
    from shardload.comm.launch import initialize
    from shardload.errors import (
        ConfigError,
        MissingChunksWarning,
        PeerError,
        ShardloadError,
        SourceError,
        StallError,
        VerifyError,
    )
    from shardload.jobs.plan import Plan
    from shardload.jobs.report import LoadReport

__all__ = [
    "ConfigError",
    "LoadReport",
    "MissingChunksWarning",
    "PeerError",
    "Plan",
    "ShardloadError",
    "SourceError",
    "StallError",
    "VerifyError",
    "VerifyReport",
    "initialize",
    "load",
    "plan",
    "scatter",
    "verify",
]

__version__ = "0.1.0.dev0"

# No module of the package is called like one of these: importing it would put the module in the name's place.
_HOMES = {
    "LoadReport": "jobs.report",
    "Plan": "jobs.plan",
    "VerifyReport": "arrays.verification",
    "initialize": "comm.launch",
    **dict.fromkeys(("load", "plan", "scatter", "verify"), "api"),
    **dict.fromkeys((name for name in __all__ if name.endswith(("Error", "Warning"))), "errors"),
}

if not TYPE_CHECKING:  # else a type checker would take every name to be here

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
