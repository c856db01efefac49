"""How long does one rank take to read a small array, and to send it to all? Constants round on purpose; files are in the page
cache. They decide which arrays travel with the metadata (`formats.small`).
"""

from __future__ import annotations

# What a load on several ranks costs beside the reads: each rank opens the file, all agree to start, parts are sent. It is
# enough for 8 MiB in one piece.
START_SECONDS = 8e-3
_CHUNK_SECONDS = 1e-5  # to find and fetch a chunk, however small
_RUN_SECONDS = 5e-6  # to read a run that is apart from the others, however short
_SEND_RATE = 1.5e9
# Bytes per second of one core through the format's library, in one thread.
_CONTIGUOUS_RATE, _OTHER_RATE = 4e9, 1.5e8
_CODEC_RATES = {"none": 2e9, "zstd": 6e8, "blosc": 1e9, "lz4": 1e9, "lzf": 3e8, "gzip": 3.25e8, "zlib": 3.25e8}


def _decode_rate(codec: str) -> float:
    names = [name for name in codec.lower().split("+") if name != "shuffle"] or ["none"]
    return min(next((rate for known, rate in _CODEC_RATES.items() if known in name), _OTHER_RATE) for name in names)


def one_reader_seconds(nbytes: int, n_chunks: int, codec: str, n_runs: int = 0) -> float:
    """Estimate how long one rank takes to read an array with the format's library, and to send all of it to every rank.

    `n_chunks` is 0 if the file has no chunks; then `n_runs` is how many runs of the file are read.

    >>> one_reader_seconds(1_740_480, 240, "none") < START_SECONDS < one_reader_seconds(2 << 20, 240, "gzip")
    True
    """
    rate = _decode_rate(codec) if n_chunks else _CONTIGUOUS_RATE
    return nbytes / rate + n_chunks * _CHUNK_SECONDS + n_runs * _RUN_SECONDS + nbytes / _SEND_RATE
