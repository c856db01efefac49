"""Untrusted files, opened and decoded by helper processes (``untrusted=True``).

Read `source` first: for the rest of the package this is a format like any other. `helper` starts, asks and ends a helper
process. `answers` checks its answers. The process itself runs `shardload.formats.untrusted_process`.
"""
