"""How do arrays get from files, or from the memory of one rank, into sharded arrays?

In the order of a call:

1. `call` is one call, from its arguments to arrays; `request` checks what is asked of each; `trees` spreads trees of arguments.
2. `planner` makes a `plan`, which can be printed, from the metadata and the arguments. It also has the report.
3. `execution` loads one or many arrays, between the ends that `endpoints` has. `given_arrays` has other calls.

`labelled` gives loaded arrays their names of axes. Read `call` first.
"""
