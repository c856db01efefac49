"""``python -m shardload``: the command line of `shardload.cli`."""

from shardload.cli import main

main()
