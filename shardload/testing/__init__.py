"""Does this format keep its promises? A suite for whoever writes a format for shardload; nothing in shardload imports it.

`check_format` writes small files, reads them through the format in every way that a load does, and compares each value with
the NumPy array that was written. `check_source` does so for one open array. Both raise one `ConformanceError` that names each
promise that is broken, with what was found and expected.
"""

from shardload.testing.conformance import ConformanceError, check_format, check_source

__all__ = ["ConformanceError", "check_format", "check_source"]
