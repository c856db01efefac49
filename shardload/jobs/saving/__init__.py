"""How do sharded arrays get into one new file?

`arguments` checks what is to be saved (`like` takes some of it from another array, `labelled` from an object of xarray), `plan`
says which rank writes what, and `save` does it: parts travel to the ranks that write their chunks, and a `FileTarget`
writes these. `append` does the same for arrays that become longer.
"""
