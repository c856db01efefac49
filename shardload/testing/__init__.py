"""Does a format keep its promises? A test suite for authors of formats; nothing in shardload imports it.

`check_format` writes small files, reads them through the format in every way that a load does, and compares each value with
the NumPy array that was written. `check_source` does the same for one open array. Both raise one `ConformanceError` that names
each broken promise, with the values found and expected. The promises are in `conformance`.
"""

from shardload.testing.conformance import ConformanceError, check_format, check_source

__all__ = ["ConformanceError", "check_format", "check_source"]
