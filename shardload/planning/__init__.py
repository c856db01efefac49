"""Who owns which block of the file, and which part of which shard meets it? Integers alone.

Open `schedule` first. It is made of `region` (coordinates), `grid` (an array cut into equal pieces) and `shards` (who holds
what); `traffic` counts what a plan will move, and `cost` compares plans. Imports NumPy and the standard library, nothing else.
"""
