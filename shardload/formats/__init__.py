"""Where do values come from? One array, read by region; nothing here knows ranks or shardings.

Open `base` first: what a format has to say. `lookup` finds the array that is meant, `hdf5`, `zarr` and `memory` are formats,
`codecs` decodes chunks, `containment` keeps a file from leading elsewhere, `untrusted` opens one in a process of its own.
"""
