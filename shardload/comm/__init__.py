"""What do ranks say to each other? The only place that knows MPI.

Open `group` first: the ranks of one call. `agreement` is what they tell each other, `collectives` the messages for that, and
`error_codec` how an error travels. `transport` carries the values of an exchange. `topology`, `node_memory` and `shared_memory`
are what the ranks of a machine have in common. `mpi` loads mpi4py, `objects` hands on Python objects. `watchdog` finds out who
holds the others up, `stall_report` says so, and `heartbeat` carries their messages; `tracebacks` decides which rank shows an
error, `backoff` how long a rank that waits sleeps. `launch`, `coordinator` and `environment` start JAX on all ranks.
"""
