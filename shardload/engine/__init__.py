"""How do all ranks do one thing together? The same engine for every call, whichever way the values go.

- `call`: how does a call begin, and how do the ranks agree on what to do?
- `session`: what stays open while values move?
- `ring`: where are the values of a round until they are encoded?
"""
