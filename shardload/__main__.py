"""``python -m shardload``: the command line of `shardload.cli.main`."""

from shardload.cli.main import main

main()
