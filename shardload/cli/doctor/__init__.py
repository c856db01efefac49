"""Was this job started correctly? The package behind ``shardload doctor``.

run      the examination, in order, what every load needs, tried out, and what is printed; open this first
facts    what one rank sees of the job: MPI, JAX, devices, environment, versions
rules    every known misconfiguration, and what to type to fix it
"""
