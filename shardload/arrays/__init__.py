"""What does JAX ask for, and does it hold the right values?

1. `sharding` turns a sharding into regions per rank.
2. `assemble` hands pieces to JAX, each matched to the index that JAX asks for.
3. `verification` then proves that the devices hold the file's values: `local_shards` has the shards on this process's devices.
4. `padding` says which elements are the file's, and which are padding or halo.
"""
