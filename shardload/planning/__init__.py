"""Which rank owns which block of the file, and which parts of shards lie in it? Integers only.

Open `schedule` first: blocks, their owners, and the parts where blocks and shards meet, for each way of reading. It is made of
`shards` (which rank holds which shard, and with which of its neighbours' rows) and `region` (coordinates, arrays cut into
cells, groups of chunks). `selection` is what a caller asks for. `cost` compares ways of reading, `staging` divides the memory,
`tuning` has the sizes that were measured. `saving` and `copying` plan what is written, in rounds. `sample_order` and
`batch_flow` are for streams, `samples` for values that are looked at again. Imports only NumPy and the standard library.
"""
