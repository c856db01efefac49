"""Read by Python as it starts, in every process of a test's job: end without looking for garbage.

What is in memory goes with the process; to look through all of JAX first takes a quarter of a short job's time.
"""

import atexit
import gc

atexit.register(gc.freeze)
