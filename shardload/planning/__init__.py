"""Which rank owns which block of the file, and which parts of shards lie in it? Integers only.

Open `schedule` first. It is made of `grid` (an array cut into cells), `shards` (which rank holds which shard; `halo` if shards
come with their neighbours' rows), `blocks` (groups of chunks) and `parts` (where blocks and shards meet); `strategies` makes
one for each way of reading. `region` and `selection` are coordinates, `source_layout` is how the array lies in its file. `cost`
compares ways of reading, `staging` divides the memory. `saving` and `copying` plan what is written, in `rounds`. Imports only
NumPy and the standard library.
"""
