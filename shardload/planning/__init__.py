"""Who owns which block of the file, and which part of which shard meets it? Integers alone.

Open `schedule` first. It is made of `grid` (an array cut into equal cells), `shards` (who holds what, by `rank_tables`),
`blocks` (chunks that go together), `strategies` (who owns the blocks) and `parts` (what meets). `region` and `selection` are
coordinates, `source_layout` is how the array lies in its file. `traffic` counts what a schedule moves, `cost` compares
schedules, `staging` shares memory out. Imports NumPy and the standard library, nothing else.
"""
