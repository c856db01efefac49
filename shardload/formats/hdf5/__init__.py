"""HDF5 and netCDF4 files.

Open `source` first. `metadata` says what an array is, `links` where a name leads, `missing` which chunks are not there,
`integrity` whether the file's own statements fit what is; `chunks`, `contiguous` and `raw_file` read around the library's lock;
`filters` and `chunk_heads` are checked before.
"""
