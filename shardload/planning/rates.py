"""How long does one core take for a read, and a wire for a byte? Constants of the model of costs, and what one reader costs.

A file is in the page cache. Rates are (decoded) bytes per second of one core, round on purpose: see docs/design/auto.md.
"""

from __future__ import annotations

__all__ = [
    "CHUNK_SECONDS", "EXCHANGE_SECONDS", "START_SECONDS", "WIRE_RATE", "decode_rate", "one_reader_seconds",
]  # fmt: skip

CHUNK_SECONDS = 1e-5  # to find and fetch a chunk, however small
WIRE_RATE = 1.5e9  # between nodes, into or out of one rank
# What a load on several ranks costs before it moves a value, beside the reads: each rank opens the file, all agree to start.
START_SECONDS = 5e-3
# The part of it that only ranks have which send each other values: they agree to start, and each starts a thread.
EXCHANGE_SECONDS = 1e-3
_RUN_SECONDS = 5e-6  # to read a run that is apart from the others, however short
_CONTIGUOUS_RATE = 8e9  # positional reads
_CODEC_RATES = {"none": 4e9, "zstd": 1.2e9, "blosc": 2e9, "lz4": 2e9, "lzf": 6e8, "gzip": 6.5e8, "zlib": 6.5e8}
_OTHER_CODEC_RATE = 3e8  # through h5py or zarr-python
_LIBRARY_SHARE = 0.5  # of these rates, if the format's library reads everything in one thread


def decode_rate(codec: str, has_chunks: bool) -> float:
    """Bytes per second of one core that reads, or decodes, such an array.

    >>> decode_rate("none", False) > decode_rate("zstd", True) > decode_rate("gzip+shuffle", True) > decode_rate("odd", True)
    True
    """
    if not has_chunks:
        return _CONTIGUOUS_RATE
    names = codec.lower().split("+")
    return min(
        (next((r for known, r in _CODEC_RATES.items() if known in n), _OTHER_CODEC_RATE) for n in names if n != "shuffle"),
        default=_CODEC_RATES["none"],
    )


def one_reader_seconds(nbytes: int, n_chunks: int, codec: str, n_runs: int = 0) -> float:
    """Estimate how long one rank takes to read an array with the format's library, and to send all of it to every rank.

    `n_chunks` is 0 if the file has no chunks; then `n_runs` is how many runs of the file are read.

    >>> one_reader_seconds(1_740_480, 240, "none") < START_SECONDS < one_reader_seconds(2 << 20, 240, "gzip")
    True
    """
    rate = _LIBRARY_SHARE * decode_rate(codec, n_chunks > 0)
    return nbytes / rate + n_chunks * CHUNK_SECONDS + n_runs * _RUN_SECONDS + nbytes / WIRE_RATE
