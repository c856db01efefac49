"""How do blocks of the file become pieces of shards on other ranks, and the other way round?

Open `exchange` first: the loop of one rank. Blocks come out of `reader`, which has them read whole (`block_tasks`) or chunk by
chunk (`chunk_tasks`) with the `resources` that all arrays of a job share; `sender` and `receiver` are the two ends of a way
between ranks, over `requests` and `messages`, with a `checksum`. `buffers` and `allocator` own the memory.
"""
