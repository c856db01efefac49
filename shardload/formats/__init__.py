"""Where do values come from? From one array in a file, read by region. Nothing here knows ranks or shardings.

Read `contract` first: what a format implements. Then, in the order in which a call uses them:

access       what the caller allows: one object that is passed through every step
lookup       which array does the caller mean, and how is it opened?
registry     which formats are there, and which of them claims a file?
diagnosis    the errors about files that no format claims, and names that are not found
hdf5, zarr, memory   the formats
stored_chunks  fetches and decodes stored chunks, wherever a format says that they are
codecs       one object for each codec: decodes and encodes chunks
labelling    reads the coordinates of an array
concatenation  several files as one, in the place of a path
sink, saving the opposite direction: a new file, which many ranks write (docs/design/save.md), or what an append adds to one
likeness     which spec makes an array of a new file like one of another file
netcdf       names and attributes that HDF5 holds, but the netCDF library does not read
untrusted    opens a file in helper processes, which run `untrusted_process`
"""
