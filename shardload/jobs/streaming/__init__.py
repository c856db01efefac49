"""How do batches of a dataset come one after the other, with the next ones under way?

- `request`: from the arguments of `stream` to a plan, which all ranks agree on.
- `planner`: from metadata and checked arguments to a plan.
- `plan`: which arrays are read, in which order, in which rounds.
- `endpoints`: files that stay open, and the memory from which batches are made.
- `reader`: the rounds, and the threads that do them ahead of the program.
- `stream`: what the caller gets: `Stream` and its iterator; also as a source of Grain.
"""
