"""Zarr stores, of format 2 and 3.

Open `source` first. `store` opens folders, archives and URLs and watches what is read of them, `metadata` says what an array
is, `chunks` reads and decodes single chunks, `codecs` names those that withstand damaged data.
"""
