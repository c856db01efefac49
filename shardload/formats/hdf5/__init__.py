"""HDF5 and netCDF4 files.

Read `file` and `source` first.

file           which files are HDF5, how they are opened, and what is in them
opened         what is asked once of a file and of a dataset
metadata       describes an array, its attributes and the names of its axes
links          follows a name, and finds the other files of a dataset
source         reads values; those in one piece without the library and its lock
chunks         where the chunks are, by the file's own index or the library, which are missing, and a reader of them
tiles          reads a virtual dataset part by part
skeleton       reads a dataset in an object store by what the rank that opened the file tells the others
filters        checks filters before HDF5 decodes chunks with them, and applies those of a new dataset
sink, ledger   write a new file: places of chunks, and metadata
dimensions     ... the names of its axes
joined         writes a file of virtual datasets, or makes it in memory
growth         adds to a file: can it grow, what is new, what is changed in place
"""
