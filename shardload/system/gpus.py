"""Which GPUs does this node have, and which of them may this process use?"""

from __future__ import annotations

import glob
from collections.abc import Mapping


def gpu_files() -> list[str]:
    """The device files of all NVIDIA GPUs of this node, including those that this process may not use."""
    return [path for path in glob.glob("/dev/nvidia[0-9]*") if path[len("/dev/nvidia") :].isdigit()]


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES lets this process use, as it names them; None if it is not set.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}), visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}), visible_gpus({})
    (['0', '3'], [], None)
    """
    names = environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else [name for name in names.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
