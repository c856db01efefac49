"""How do all ranks together write one new file, of chunks that each rank has in memory?

`file` writes it in rounds, and `read_back` compares it with what was to be written.
"""
