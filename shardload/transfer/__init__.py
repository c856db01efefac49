"""How do blocks of the file become pieces of shards on other ranks, and the other way round?

Open `exchange` first: the loop of one rank; `moves` says what one array of it is, and which way its parts go. Blocks come out
of `reader`. `sender` and `receiver` are the two ends, `channels` the two ways to another rank, `arrivals` what has come;
`messages` packs parts, `checksum` proves them. `buffers` and `allocator` own the memory.
"""
