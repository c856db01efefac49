"""Zarr stores, of format 2 and 3.

Read `source` first. `store` opens folders, zip files and URLs, and checks what is read from them; `metadata` says where chunks
are and how they are encoded; `chunks` reads and decodes single chunks; `codecs` lists the codecs that withstand damaged data.
`sink` writes a new store, `encodings` its metadata; `growth` adds to one. `making` says what must be known to make another
array like one.
"""
