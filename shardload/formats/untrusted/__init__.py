"""Untrusted files, opened and decoded by helper processes (``untrusted=True``).

Read `source` first: for the rest of the package this is a format like any other, which checks what a helper process answers.
`helper` starts, asks and ends such a process, which itself runs `shardload.formats.untrusted_process`.
"""
