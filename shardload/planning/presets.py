"""Which machines are known by name?

The figures are those of public documentation (`Machine.sources`), and say so; a figure that no public page has is assumed, and
says so too. They are good for choosing a way of reading, not for promising a time: measure your own site where you can.
"""

from __future__ import annotations

from typing import Any

from shardload.planning.machine import ASSUMED, WORKSTATION, Machine

__all__ = ["PRESETS"]


def _assumed(**figures: float) -> dict[str, Any]:
    return {name: {"value": value, "origin": ASSUMED} for name, value in figures.items()}


_PERLMUTTER = {
    "name": "perlmutter",
    "sources": [
        "docs.nersc.gov/systems/perlmutter/architecture: GPU nodes with 1 EPYC 7763, 4 GPUs, 4 Slingshot 11 NICs (200 Gb/s); "
        "docs.nersc.gov/beginner-guide/nodetypesfig: 256 GB",
        "amd.com, EPYC 7763: 64 cores, 8 channels of DDR4-3200",
        "docs.nersc.gov/filesystems/perlmutter-scratch: all-flash Lustre, more than 5 TB/s, 4 million IOPS (4 KiB), 274 OSSs, "
        "files striped over 1 (1 GB) to 72 (more than 100 GB) OSTs",
    ],
    "node": {
        "ranks": 4,
        "cores": 64,
        "memory_nbytes": 256_000_000_000,
        "memory_rate": 204.8e9,
        **_assumed(page_cache_nbytes=64 << 30),
    },
    "network": {"rate": 100e9, **_assumed(latency=2e-6)},
    "file_system": {
        "rate": 5e12,
        "operations_rate": 4e6,
        "target_rate": 18e9,  # 5 TB/s over 274 servers
        "target_nbytes": 1.25e9,  # 10 GB on 8 of them
        "most_targets": 72,
        **_assumed(node_rate=20e9, stream_rate=2e9, open_seconds=1e-3, read_seconds=3e-4, read_ahead_nbytes=4 << 20),
    },
}
_JEAN_ZAY = {
    "name": "jean-zay",
    "sources": [
        "idris.fr/eng/jean-zay/cpu/jean-zay-cpu-hw-eng.html: nodes with 2 Xeon 6248 (40 cores), 4 V100, 4 Omni-Path links of "
        "100 Gb/s",
        "ark.intel.com, Xeon 6248: 6 channels of DDR4-2933",
        "LMI MAG, March 2020, page 27: 192 GB a node",
        "idris.fr/en/docs/jean-zay/environnement/espaces-disques: WORK on rotating disks, 350 GB/s read",
    ],
    "node": {
        "ranks": 4,
        "cores": 40,
        "memory_nbytes": 192_000_000_000,
        "memory_rate": 281e9,
        **_assumed(page_cache_nbytes=48 << 30),
    },
    "network": {"rate": 50e9, **_assumed(latency=2e-6)},
    "file_system": {
        "rate": 350e9,
        **_assumed(node_rate=10e9, stream_rate=1.5e9, operations_rate=5e5, open_seconds=2e-3, read_seconds=2e-3),
        **_assumed(read_ahead_nbytes=4 << 20, target_rate=5e9, target_nbytes=1e9, most_targets=64),
    },
}
_IBEX = {
    "name": "ibex",
    "sources": ["docs.hpc.kaust.edu.sa/systems/ibex/compute_node.html: nodes with 40 cores, HDR 100 InfiniBand (12.5 GB/s)"],
    "node": {"cores": 40, **_assumed(ranks=4, memory_rate=200e9, page_cache_nbytes=64 << 30)},
    "network": {"rate": 12.5e9, **_assumed(latency=2e-6)},
    "file_system": {
        **_assumed(rate=40e9, node_rate=10e9, stream_rate=1.5e9, operations_rate=1e6, open_seconds=1e-3, read_seconds=5e-4),
        **_assumed(read_ahead_nbytes=1 << 20),
    },
}

PRESETS: dict[str, Machine] = {"workstation": WORKSTATION} | {
    str(table["name"]): Machine.from_table(table, f"preset {table['name']}") for table in (_JEAN_ZAY, _PERLMUTTER, _IBEX)
}
