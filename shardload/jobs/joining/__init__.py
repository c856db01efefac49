"""How do several files become one, without a copy of their values?

`request` says what is asked for and what became of it. `parts` says what the files are together. `join` writes that, in one
process; its `concat` gives it to all ranks, in memory.
"""
