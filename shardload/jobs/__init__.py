"""What happens in one call, from its arguments to its report?

`request` takes the arguments of all ranks and plans, `execution` runs the plan, `report` says what was done. `describe` and
`picture` print a plan, `progress` shows how far it is, `consistency` asks whether the file stayed the same.
"""
