"""Is each format found, and imported when it is needed alone?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardload.formats.access import Access
from tests.unit.files import flat, write_hdf5


def test_a_format_is_imported_when_it_is_needed(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", {"a": flat((3,))})
    code = (
        "import sys\nfrom shardload.formats import lookup\n"
        "assert not {'h5py', 'zarr', 'importlib.metadata'} & {*sys.modules}, {*sys.modules}\n"
        "lookup.find_array(sys.argv[1])\n"
        "assert 'h5py' in sys.modules and 'zarr' not in sys.modules and 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, path], check=True, timeout=60, cwd=Path(__file__).parents[3])


def test_what_a_text_would_allow_is_refused() -> None:
    with pytest.raises(TypeError, match="allow_filters is 'all'; expected a collection of names"):
        Access(allow_filters="all")  # type: ignore[arg-type]
