"""How do arrays get from files, or from the memory of one rank, into sharded arrays?

In the order of a call:

1. `arguments` and `request` check the arguments, and all ranks agree on them; `trees` spreads trees of them over the arrays.
2. `planner` makes a `plan` (of several arrays a `tree_plan`) from the metadata and the arguments.
3. `execution` does a job of one or many arrays, each an `array_load`.
4. `report` says what was done.

`describe` prints a plan. `labelled` gives loaded arrays their names of axes. Read `execution` first.
"""
