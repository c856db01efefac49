"""Files that nobody vouches for, opened and decoded by helper processes (``untrusted=True``).

Open `source` first: a `Source` like any other to the rest. `helper` starts, asks and ends such a process, `answers` says which
answers can be so. What runs in it is `shardload.formats.untrusted_process`.
"""
