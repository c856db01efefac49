"""Which rank owns which block of the file, and which parts of shards lie in it? Integers only.

Open `schedule` first. It is made of `grid` (an array cut into equal cells), `shards` (which rank holds which shard, from
`rank_tables`), `blocks` (groups of chunks), `strategies` (which rank owns which block) and `parts` (where blocks and shards
meet). `region` and `selection` are coordinates, `source_layout` is how the array lies in its file. `traffic` counts what a
schedule moves, `cost` compares schedules by `rates` and, on a `machine` that is known, by its `limits`; `readers`
says how many ranks read, `staging` divides the memory. `copying` cuts an array into slabs that ranks copy. Imports only NumPy
and the standard library.
"""
