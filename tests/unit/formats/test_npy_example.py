"""The tests of the example of a format in a package of its own (examples/npy-format), run with ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "npy_example_tests", Path(__file__).parents[3] / "examples" / "npy-format" / "tests" / "test_npy.py"
)
if _spec is None or _spec.loader is None:
    raise ImportError("examples/npy-format/tests/test_npy.py is gone")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
globals().update({name: found for name, found in vars(_module).items() if name.startswith("test_")})
