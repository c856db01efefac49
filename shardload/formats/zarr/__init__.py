"""Zarr stores, of format 2 and 3.

Read `source` first. `store` opens folders and URLs, and checks what is read from them; `references` does it for sets
of references. `nodes` parses the metadata of arrays and groups, and has the decoders that withstand damaged data; `metadata`
says where chunks are, how they are encoded, and whether they may be decoded; `chunks` reads stored chunks. `sink` writes a new
store, with its metadata; `growth` appends to one.
"""
