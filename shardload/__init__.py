"""Load HDF5, netCDF4 and Zarr arrays into sharded `jax.Array`s over MPI, each shard proven to be where it belongs.

    import shardload
    shardload.initialize()
    x = shardload.load("data.h5", mesh, P("a", "b"))

Nothing else than what is named here is public.
"""

from shardload.errors import (
    ConfigError,
    MissingChunksWarning,
    PeerError,
    ShardloadError,
    SourceError,
    StallError,
    VerifyError,
)
from shardload.execute import LoadReport, Plan, VerifyReport
from shardload.launch import initialize
from shardload.load import load, plan, scatter, verify

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
