"""What happens in one call, from its arguments to its report?

In the order of a call: `request` takes the arguments of all ranks, and has them agree; `planner` makes a `plan` of what was
found; `execution` does a job of one or many arrays, each an `array_load`; `report` says what was done. Open `execution` first.

Beside them: `describe` and `picture` print a plan, `progress` shows how far a load is, `consistency` asks whether all ranks
read the same file and whether it stayed as it was.
"""
