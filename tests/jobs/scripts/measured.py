"""Measure the slowed-down machine that this job runs on. ``measured.py FOLDER OUTPUT``."""

from __future__ import annotations

import sys

from benchmarks.throttle.network import slow_down
from shardload.cli.doctor import measure as module

if __name__ == "__main__":
    slow_down()
    module._FILE_NBYTES = 2 << 20
    module._SENT_NBYTES, module._N_SMALL, module._N_ROUNDS = 4 << 20, 24, 12
    module._SECONDS |= {"operations": 0.5, "decode": 0.1, "copy": 0.1}
    module.measure(*sys.argv[1:3])
