"""Was this job started correctly? The package behind ``shardload doctor``.

run      the examination, in order; open this first
facts    what one rank sees of the job: MPI, JAX, devices, environment, versions
rules    every known misconfiguration, and what to type to fix it
checks   what every load needs, tried out: messages, shared memory, an all-reduce, a scatter
report   the result, as text or JSON
"""
