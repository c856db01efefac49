"""How do ranks communicate? The only package that uses MPI.

Open `group` first: it is the ranks of one call, and lets them agree on small values and errors. `collectives` are the messages
for that, and `shared_errors` turns an error into text, and decides which rank shows it. `transport` carries the values of an
exchange. `store` does all of this without MPI. `shared_memory` serves the ranks of one machine. `mpi` says which launcher
started this process, and loads mpi4py. `watchdog` detects which rank holds up the others, and `heartbeat` sends what it says.
`launch` starts JAX on all ranks.
"""
