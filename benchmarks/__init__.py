"""How fast is shardload, and beside what? ``python -m benchmarks --help``.

The order of reading: `cells` (what is compared), `layouts` (the files), `ways` (how each way loads), `remote` and `job`
(how ways in several environments take turns in one run), `measure` (the turns), `floor` (how fast it could be),
`report` (tables, plot).
"""
