"""How does each way load? `job` runs the `ways` that need JAX; `floor` is what the machine could do.

`heat` and `parallel_hdf5` need an environment of their own, each a small job that serves `benchmarks.remote`.
"""
