"""How do blocks of the file become pieces of shards on other ranks, and the other way round?

Open `exchange` first: it is the main loop of one rank. `moves` describes one array of an exchange and the direction of its
parts, and counts what has arrived of it. `reader` reads blocks, either whole or chunk by chunk, into the `buffers` that all
arrays of a round share. `channels` has the two ways in which parts travel to and from another rank. `checksum` verifies parts.
`cast` makes values of stored numbers. `pieces` puts shards together, and `allocator` owns their memory. `counters` counts what
this cost and which chunks are missing; `read_errors` names the chunk that could not be read.
"""
