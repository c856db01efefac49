"""Load HDF5, netCDF4 and Zarr arrays into sharded `jax.Array`s over MPI, each shard checked to be where it belongs.

    import shardload
    shardload.initialize()
    x = shardload.load("data.h5", mesh, P("a", "b"))

Only the names in `_HOMES` are public. What is where: docs/design/data-flow.md. Importing the package imports none of its
rooms: each public name is imported when it is first used, so that `shardload --help` and `shardload.planning` do not wait for
JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# The names with "as" are what type checkers take for public.
if TYPE_CHECKING:
    from shardload.api import append as append
    from shardload.api import load as load
    from shardload.api import mask as mask
    from shardload.api import plan as plan
    from shardload.api import plan_save as plan_save
    from shardload.api import save as save
    from shardload.api import scatter as scatter
    from shardload.api import stream as stream
    from shardload.api import unpad as unpad
    from shardload.api import verify as verify
    from shardload.arrays.verification import VerifyReport as VerifyReport
    from shardload.comm.launch import initialize as initialize
    from shardload.errors import ConfigError as ConfigError
    from shardload.errors import LeftOutWarning as LeftOutWarning
    from shardload.errors import MissingChunksWarning as MissingChunksWarning
    from shardload.errors import PackedWarning as PackedWarning
    from shardload.errors import PaddingWarning as PaddingWarning
    from shardload.errors import PeerError as PeerError
    from shardload.errors import ShardloadError as ShardloadError
    from shardload.errors import ShardloadWarning as ShardloadWarning
    from shardload.errors import SourceError as SourceError
    from shardload.errors import StallError as StallError
    from shardload.errors import VerifyError as VerifyError
    from shardload.formats.concatenation import Concatenation as Concatenation
    from shardload.jobs.contents import open as open
    from shardload.jobs.copying.copy import CopyReport as CopyReport
    from shardload.jobs.copying.copy import copy as copy
    from shardload.jobs.dataset.loading import load_dataset as load_dataset
    from shardload.jobs.joining.join import concat as concat
    from shardload.jobs.joining.join import join as join
    from shardload.jobs.joining.request import JoinReport as JoinReport
    from shardload.jobs.loading.labelled import to_xarray as to_xarray
    from shardload.jobs.loading.plan import LoadReport as LoadReport
    from shardload.jobs.loading.plan import Plan as Plan
    from shardload.jobs.loading.plan import TreePlan as TreePlan
    from shardload.jobs.saving.append import AppendReport as AppendReport
    from shardload.jobs.saving.plan import SavePlan as SavePlan
    from shardload.jobs.saving.save import BackgroundSave as BackgroundSave
    from shardload.jobs.saving.save import SaveReport as SaveReport
    from shardload.jobs.streaming.plan import StreamPlan as StreamPlan
    from shardload.jobs.streaming.reader import StreamReport as StreamReport
    from shardload.jobs.streaming.stream import Stream as Stream
    from shardload.jobs.streaming.stream import StreamIterator as StreamIterator
    from shardload.planning.selection import between as between
    from shardload.planning.selection import near as near

__version__ = "0.1.0.dev0"

# No module of the package has one of these names: importing it would replace the function by the module.
_NAMES = {
    "api": "append load mask plan plan_save save scatter stream unpad verify",
    "arrays.verification": "VerifyReport",
    "comm.launch": "initialize",
    "errors": "ConfigError LeftOutWarning MissingChunksWarning PackedWarning PaddingWarning PeerError ShardloadError "
    "ShardloadWarning SourceError StallError VerifyError",
    "formats.concatenation": "Concatenation",
    "jobs.contents": "open",
    "jobs.copying.copy": "CopyReport copy",
    "jobs.dataset.loading": "load_dataset",
    "jobs.joining.join": "concat join",
    "jobs.joining.request": "JoinReport",
    "jobs.loading.labelled": "to_xarray",
    "jobs.loading.plan": "LoadReport Plan TreePlan",
    "jobs.saving.append": "AppendReport",
    "jobs.saving.plan": "SavePlan",
    "jobs.saving.save": "BackgroundSave SaveReport",
    "jobs.streaming.plan": "StreamPlan",
    "jobs.streaming.reader": "StreamReport",
    "jobs.streaming.stream": "Stream StreamIterator",
    "planning.selection": "between near",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # or a type checker would accept any name
    __all__ = sorted(_HOMES)

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from shardload.system.garbage import collections_wait

        with collections_wait():  # among all objects of JAX: a third of the time that the imports take
            value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*_HOMES, *(name for name in globals() if name.startswith("__"))})  # what an editor offers
