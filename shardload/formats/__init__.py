"""Where do values come from? From one array in a file, read by region. Nothing here knows ranks or shardings.

Read `contract` first: what a format implements. Then, in the order in which a call uses them:

access       what the caller allows: one object that is passed through every step
lookup       which array does the caller mean, and how is it opened?
registry     which formats are there? Our own, and those of other packages (entry points of the group ``shardload.formats``)
diagnosis    the errors about files that no format claims, and names that are not found
hdf5, zarr, memory   our own formats
stored_chunks  fetches and decodes stored chunks, wherever a format says that they are
codecs       one object for each codec: decodes and encodes chunks
labelling    reads the coordinates of an array
concatenation  several files as one, in the place of a path
sink, saving the opposite direction: a new file, which many ranks write (docs/design/save.md), or what an append adds to one
likeness     which spec makes an array of a new file like one of another file
netcdf       names and attributes that HDF5 holds, but the netCDF library does not read
untrusted    opens a file in helper processes, which run `untrusted_process`

The names that this package exports are for writing a format in a package of its own. CONTRIBUTING.md says how;
`shardload.testing` has the test suite that it must pass.
"""

from shardload.formats.access import STRICT, Access
from shardload.formats.contract.array import ArrayInfo, check_request, native_dtype, refusal, unaddressable
from shardload.formats.contract.chunk_reader import ChunkReader, Encoded, read_by_chunks
from shardload.formats.contract.format import Format, OpenFile, Source
from shardload.planning.region import Region
from shardload.storage.local import read_at, state_of

__all__ = [
    "STRICT",
    "Access",
    "ArrayInfo",
    "ChunkReader",
    "Encoded",
    "Format",
    "OpenFile",
    "Region",
    "Source",
    "check_request",
    "native_dtype",
    "read_at",
    "read_by_chunks",
    "refusal",
    "state_of",
    "unaddressable",
]
