"""Read by Python as it starts, in every process of a test's job: look for garbage less often, and not at the end.

What is in memory goes with the process; to look through all of JAX again and again while it is imported, and once more at the
end, takes a third of a short job's time.
"""

import atexit
import gc

gc.set_threshold(50_000)
atexit.register(gc.freeze)
