"""How does a file become one in another layout or format, without a device?

`request` says what, `plan` in which slabs, and `copy` reads these, and has them written by a `FileTarget`.
"""
