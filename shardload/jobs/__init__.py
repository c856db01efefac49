"""What happens in one call, from its arguments to its report?

A folder for each kind of call: `loading`, `saving`, `copying`, `joining`, `streaming`. For all of them
`consistency` checks that all ranks read the same file and that it did not change, and `progress` shows how far it is.
`contents` says what is in a file, `described` what others like its arrays need.
"""
