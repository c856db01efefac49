"""Zarr stores, of format 2 and 3.

Read `source` first. `store` opens folders, zip files and URLs, and checks what is read from them; `nodes` parses the metadata
of arrays and groups, for all others; `metadata` says where chunks are and how they are encoded; `chunks` reads stored chunks;
`codecs` lists the codecs that withstand damaged data. `sink` writes a new store, `encodings` its metadata; `growth` adds to
one. `making` says what must be known to make another array like one.
"""
