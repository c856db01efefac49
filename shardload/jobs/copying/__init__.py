"""How does a file become one in another layout or format, without a device?

`request` says what, `plan` in which slabs, `reading` reads them, and `copy` has them written by a `FileTarget`.
"""
