"""What does JAX ask for, and does it hold what it should?

`sharding` turns a sharding into regions per rank, `assemble` gives pieces to JAX, each matched to the index that JAX asks for,
and `verification` proves afterwards that the devices (`local_shards`) hold the file's values, which `compare` reads again.
"""
