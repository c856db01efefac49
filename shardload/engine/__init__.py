"""How do all ranks do one thing together? The same engine for every call, whichever way the values go.

- `call`: how does a call begin, and how do the ranks agree on what to do?
- `session`: what stays open while values move, and how does a round of them go?
- `file_source`: how are arrays of files the source of a round?
- `file_target`: how is one new file the target of rounds? `read_back`: is on disk what was to be written?
"""
