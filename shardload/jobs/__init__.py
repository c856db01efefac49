"""What happens in one call, from its arguments to its report?

A folder for each kind of call: `loading`, `saving`, `copying`, `joining`, `streaming`, and `dataset` (of xarray). For all of
them `trees` says which arrays are meant if names and options are trees, `consistency` checks that all ranks read the same file
and that it did not change, and `progress` shows how far it is. `contents` says what is in a file, `described` what others like
its arrays need.
"""
