"""HDF5 and netCDF4 files.

Read `file` and `source` first.

format                         which files are HDF5
in_store, told                 files in object stores: opened by one rank, which tells the others
metadata                       describes an array
links                          follows a name, and finds the other files of a dataset
tiles                          reads a virtual dataset part by part
opened                         what is asked once of a file and of a dataset
chunks                         where the chunks are, which are missing, and a reader of them
chunk_index                    ... by the file's own index, without the library
contiguous, raw_file           read without the library and its lock
chunk_order                    where the chunks that the library lists really are
unwrapped                      functions of the library that h5py does not have
making                         what must be known to make another dataset like one
filters                        checks filters before HDF5 decodes chunks with them
sink, ledger                   write a new file: places of chunks, and metadata
in_memory                      a file that is nowhere on disk: a new one, or one that is read from its bytes
pipeline, dimensions           ... its filters and types, and the names of its axes
joined                         writes a file of virtual datasets, or makes it in memory
growable, growth               add to a file: can it grow, what is new, what is changed in place
on_disk                        says where a file ends, and what is in an object header
"""
