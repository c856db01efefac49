"""Where do values come from? One array, read by region; nothing here knows ranks or shardings.

Open `base` first: what a format has to say. Then, in the order in which a call meets them:

access       what the caller allows: one object that every step hands on
lookup       which array is meant, and how is it opened?
registry     which formats are there? Our own, and those of other packages (entry points of the group ``shardload.formats``)
diagnosis    what is this file, or this name, then? The errors
hdf5, zarr, memory   our own formats
codecs       decodes chunks
containment  where may a file lead? Keeps it from leading elsewhere
untrusted    opens a file in helper processes, which run `untrusted_process`

What is named here is what a format in a package of its own is written with: CONTRIBUTING.md has how, `shardload.testing` the
suite that it must pass.
"""

from shardload.formats.access import STRICT, Access
from shardload.formats.base import (
    ArrayInfo,
    ChunkReader,
    Encoded,
    Format,
    OpenFile,
    Scratch,
    Source,
    check_request,
    native_dtype,
    read_at,
    read_by_chunks,
    refusal,
    state_of,
    unaddressable,
)
from shardload.planning.region import Region

__all__ = [
    "STRICT",
    "Access",
    "ArrayInfo",
    "ChunkReader",
    "Encoded",
    "Format",
    "OpenFile",
    "Region",
    "Scratch",
    "Source",
    "check_request",
    "native_dtype",
    "read_at",
    "read_by_chunks",
    "refusal",
    "state_of",
    "unaddressable",
]
