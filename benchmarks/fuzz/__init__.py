"""What comes of damaged files? Thousands of mutations of good ones, each loaded in a process that may crash.

`loads` runs whole loads of `files` in `worker` processes; `filters` runs single decoders on `filter_files`.
"""
