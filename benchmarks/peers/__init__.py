"""Ways of loading that need an environment of their own, each a small job that serves `benchmarks.remote`."""
