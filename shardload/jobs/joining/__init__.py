"""How do several files become one, without a copy of their values?

`request` says what is asked for and what became of it, and `join` does it: in one process, which needs neither MPI nor JAX.
"""
