"""How does a file become one in another layout or format, without a device?

`request` says what; `copy` plans in which slabs, reads these, and has them written by a `FileTarget`.
"""
