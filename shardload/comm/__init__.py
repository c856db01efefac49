"""What do ranks say to each other? The only place that knows MPI.

Open `group` first: the ranks of one call, and how they agree. `collectives` are its messages, `topology` and `shared_memory`
what the ranks of a machine have in common, `error_codec` how an error travels. `watchdog` finds out who holds the others up,
and `stall_report` says so; `heartbeat` carries its letters. `launch` and `environment` start JAX on all of them.
"""
