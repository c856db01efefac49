"""What happens in one call, from its arguments to its report?

In the order of a call:

1. `request` checks the arguments, and all ranks agree on them.
2. `planner` makes a `plan` from the metadata and the arguments.
3. `execution` does a job of one or many arrays, each an `array_load`.
4. `report` says what was done.

`saving` and `writing` make a new file (docs/design/save.md), `appending` adds to one.

`copying` copies a file into another layout or format: `copy_request` says what, `copy_plan` in which slabs, `copy_reading`
reads them, and `writing` writes the new file, which `read_back` compares with what was to be written. `journal` says what of it
is there after a kill, and `copy_resume` goes on from there.

`machine_file` finds the figures of the machine. `describe` and `picture` print a plan, `progress` shows how far a load is, and
`consistency` checks that all ranks read the same file and that it did not change. Read `execution` first.
"""
