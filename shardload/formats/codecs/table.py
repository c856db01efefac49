"""Which codecs are there, and how does a caller say how an array is compressed?

One object for each codec: its names, whether it is safe on damaged data, and how it works both ways. `hdf5.filters` translates
between these objects and an HDF5 file's filters with their ``cd_values``; `zarr.metadata` between them and Zarr's metadata.

The keywords of `sink.Compression` say how an array is compressed, for every format; a caller may write them as one text, as in
a shell. A format lists the codecs of a chunk and reads their options; `compression_keywords` makes keywords of them, or says
why a new array cannot be compressed like that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from shardload.errors import ConfigError
from shardload.formats.codecs import algorithms
from shardload.formats.codecs.algorithms import Stage, Step

_TEXT = re.compile(
    r"(?P<name>[a-z0-9]+)(\((?P<inner>[a-z0-9]+)\))?(:(?P<level>-?\d+))?(?P<shuffle>\+shuffle|\+bitshuffle)?", re.ASCII
)


def has_own_shuffle(name: str) -> bool:
    """True for a compressor that shuffles bytes itself, and does so unless it is told not to."""
    return name == "blosc"


def parse_compression(text: str) -> dict[str, Any] | None:
    """The keywords of `sink.Compression` in a text, ``NAME(CODEC):LEVEL+shuffle``; None if it cannot be read.

    >>> parse_compression("gzip:6+shuffle"), parse_compression("gzip 6")
    ({'name': 'gzip', 'level': 6, 'shuffle': True}, None)
    >>> parse_compression("gzip(6)") is None, parse_compression("zstd+bitshuffle") is None  # Blosc alone has these inside
    (True, True)
    >>> parse_compression("blosc(zstd):5+bitshuffle")
    {'name': 'blosc', 'level': 5, 'shuffle': False, 'options': {'cname': 'zstd', 'bitshuffle': True}}
    """
    match = _TEXT.fullmatch(text.strip().lower())
    if match is None:
        return None
    name, inner, level, shuffle = match["name"], match["inner"], match["level"], match["shuffle"]
    if not has_own_shuffle(name) and (inner or shuffle == "+bitshuffle"):
        return None
    options = ({"cname": inner} if inner else {}) | ({"bitshuffle": True} if shuffle == "+bitshuffle" else {})
    is_shuffled = shuffle == "+shuffle" or (has_own_shuffle(name) and shuffle is None)
    keywords: dict[str, Any] = {"name": name, "level": None if level is None else int(level), "shuffle": is_shuffled}
    return {**keywords, "options": options} if options else keywords


def compression_keywords(
    names: Sequence[str], is_shuffled: bool, options: Callable[[], Mapping[str, Any]]
) -> dict[str, Any] | str | None:
    """The keywords of `sink.Compression`; None for an array that is not compressed; text as in `Properties`.

    Parameters
    ----------
    names : sequence of str
        The compressors of a chunk, in order: no shuffle, no checksum.
    is_shuffled : bool
        Whether a shuffle of its own comes before them.
    options : callable
        The other keywords, of an array with one compressor.

    Examples
    --------
    >>> compression_keywords(["gzip"], True, lambda: {"level": 4})
    {'name': 'gzip', 'shuffle': True, 'level': 4}
    >>> compression_keywords([], False, dict), compression_keywords(["zstd", "gzip"], False, dict)
    (None, 'is encoded by zstd, then by gzip; a new array has one compressor')
    """
    if not names:
        return {"name": "none", "shuffle": True} if is_shuffled else None
    if len(names) > 1:
        return f"is encoded by {', then by '.join(names)}; a new array has one compressor"
    return {"name": names[0], "shuffle": is_shuffled, **options()}


BLOSC_CODES = {"blosclz": 0, "lz4": 1, "lz4hc": 2, "zlib": 4, "zstd": 5}
"""The compressors inside of Blosc, with its numbers for them."""

BLOSC_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
"""What Blosc does to the bytes first, by its numbers."""


@dataclass(frozen=True)
class Parameters:
    """The parameters of a codec.

    Attributes
    ----------
    level : int
        How hard a compressor tries.
    itemsize : int
        Bytes of an element, for a shuffle.
    inner : str
        Blosc's compressor: one of `BLOSC_CODES`.
    shuffle : int
        Blosc's shuffle, by its number in `BLOSC_SHUFFLES`.
    """

    level: int = 0
    itemsize: int = 1
    inner: str = "lz4"
    shuffle: int = 0


@dataclass(frozen=True)
class Codec:
    """One codec.

    Attributes
    ----------
    word : str
        What people call it: ``"gzip"``.
    number : int or None
        Number of the HDF5 filter.
    zarr : str or None
        Its name in Zarr's metadata: in format 3 also after ``"numcodecs."``.
    forms : str
        Metadata of Zarr in which its chunks are decoded here: "2" and "3" for the formats, "n" for ``numcodecs.`` in format 3.
    options : frozenset of str
        The options that it may have in Zarr's metadata.
    is_safe : bool
        Whether its decoder survived damaged chunks and parameters (docs/trust-files.md). Others are used only if the caller
        allows them.
    is_sized : bool
        Whether the size of its output follows from its parameters and the size of its input.
    is_lossy : bool
        Whether it changes values unless it is told how not to.
    is_believed : bool
        Whether HDF5's decoder would believe what a damaged chunk declares of its length, and crash.
    plugin : str
        The class of hdf5plugin that knows the usual parameters of the HDF5 filter, if that is where it comes from.
    of_caller : tuple
        The first parameter of the HDF5 filter that a caller chose, and the one behind the last: it adds others itself.
    levels : tuple of int
        The usual level, the least and the highest; empty for a codec without levels.
    decoder : callable or None
        Makes the stage that undoes it; None if only the format's library can.
    encoder : callable or None
        Makes the step that applies it; None if only the format's library can.
    """

    word: str
    number: int | None = None
    zarr: str | None = None
    forms: str = ""
    options: frozenset[str] = frozenset()
    is_safe: bool = False
    is_sized: bool = False
    is_lossy: bool = False
    is_believed: bool = False
    plugin: str = ""
    of_caller: tuple[int, int | None] = (0, None)
    levels: tuple[int, ...] = ()
    decoder: Callable[[Parameters], Stage] | None = None
    encoder: Callable[[Parameters], Step] | None = None

    def checked_level(self, level: Any, where: str = "") -> int:
        """A level that the codec has, or its usual one; ConfigError, which begins with `where`, otherwise."""
        usual, least, most = self.levels
        if level is None:
            return usual
        is_number = isinstance(level, Integral) and not isinstance(level, bool)
        if not is_number or not least <= level <= most:
            raise ConfigError(f"{where}the level of {self.word} is {level!r}; expected a number from {least} to {most}")
        return int(level)

    def parameters(self, array: str, compression: Any, itemsize: int, file_format: str) -> Parameters:
        """Those of a `sink.Compression`. ConfigError, which names the array, if the codec has no such option."""
        options, inner, shuffle = dict(compression.options), Parameters.inner, Parameters.shuffle
        if has_own_shuffle(self.word):
            bits, inner = options.pop("bitshuffle", False), options.pop("cname", inner)
            if not isinstance(bits, bool):
                raise ConfigError(f"bitshuffle of '{array}' is {bits!r}; expected True or False")
            if inner not in BLOSC_CODES:
                raise ConfigError(f"Blosc's compressor for '{array}' is {inner!r}; expected one of {', '.join(BLOSC_CODES)}")
            shuffle = 2 if bits else int(compression.shuffle)
        if compression.level is not None and not self.levels:
            options["level"] = compression.level
        if options:
            raise ConfigError(
                f"compression of '{array}': {self.word} has no option {', '.join(map(repr, sorted(options)))} in {file_format}"
            )
        level = self.checked_level(compression.level, f"compression of '{array}': ") if self.levels else 0
        return Parameters(level, itemsize, inner, shuffle)

    def keywords(self, parameters: Parameters) -> dict[str, Any]:
        """The keywords of `sink.Compression` for these parameters."""
        if not has_own_shuffle(self.word):
            return {"level": parameters.level} if self.levels else {}
        kind = BLOSC_SHUFFLES[parameters.shuffle]
        options = {"cname": parameters.inner} | ({"bitshuffle": True} if kind == "bitshuffle" else {})
        return {"level": parameters.level, "shuffle": kind == "shuffle", "options": options}


_LEVEL = frozenset({"level"})
_BLOSC_OPTIONS = frozenset({"cname", "clevel", "shuffle", "blocksize", "typesize"})

CODECS = (
    Codec("gzip", 1, "zlib", "2n", _LEVEL, True, levels=(4, 0, 9),
          decoder=lambda p: algorithms.decode_gzip(is_zlib=True), encoder=lambda p: algorithms.encode_zlib(p.level)),
    Codec("gzip", None, "gzip", "23n", _LEVEL, True, levels=(4, 0, 9),
          decoder=lambda p: algorithms.decode_gzip(), encoder=lambda p: algorithms.encode_gzip(p.level)),
    Codec("zstd", 32015, "zstd", "23n", _LEVEL | {"checksum"}, True, levels=(3, -131072, 22),
          is_believed=True, plugin="Zstd",
          decoder=lambda p: algorithms.decode_zstd(), encoder=lambda p: algorithms.encode_zstd(p.level)),
    Codec("blosc", 32001, "blosc", "23n", _BLOSC_OPTIONS, True, levels=(5, 0, 9), is_believed=True, plugin="Blosc",
          decoder=lambda p: algorithms.decode_blosc(),
          encoder=lambda p: algorithms.encode_blosc(p.inner, p.level, p.shuffle, p.itemsize)),
    Codec("lz4", 32004, is_safe=True, is_believed=True, plugin="LZ4",
          decoder=lambda p: algorithms.decode_lz4(), encoder=lambda p: algorithms.encode_lz4()),
    Codec("lz4", None, "lz4", "2", frozenset({"acceleration"}), True,
          encoder=lambda p: algorithms.numcodecs().lz4.compress),
    Codec("shuffle", 2, "shuffle", "2n", frozenset({"elementsize"}), True, is_sized=True,
          decoder=lambda p: algorithms.decode_shuffle(p.itemsize),
          encoder=lambda p: algorithms.encode_shuffle(p.itemsize)),
    Codec("fletcher32", 3, "fletcher32", is_safe=True, is_sized=True,
          decoder=lambda p: algorithms.decode_fletcher32(), encoder=lambda p: algorithms.encode_fletcher32()),
    Codec("crc32c", None, "crc32c", "3", is_safe=True, is_sized=True,
          decoder=lambda p: algorithms.decode_crc32c(), encoder=lambda p: algorithms.encode_crc32c()),
    # What only a format's library decodes: HDF5's own filters, those of hdf5plugin, and codecs of zarr-python.
    Codec("szip", 4, of_caller=(0, 2)),
    Codec("nbit", 5, is_sized=True, of_caller=(0, 0)),
    Codec("scaleoffset", 6, is_sized=True, of_caller=(0, 2)),
    Codec("lzf", 32000, is_safe=True, of_caller=(0, 0)),
    Codec("blosc2", 32026, is_safe=True, plugin="Blosc2"),
    Codec("bzip2", 307, plugin="BZip2"),
    Codec("bitshuffle", 32008, plugin="Bitshuffle", of_caller=(3, None)),
    *(Codec(word, number, is_lossy=True) for word, number in (("zfp", 32013), ("sz", 32017), ("fcidecomp", 32018))),
    *(Codec(word, number, is_lossy=True) for word, number in (("sz3", 32024), ("sperr", 32028), ("htj2k", 32033))),
    *(Codec(name, None, name, is_safe=True) for name in ("lzma", "bz2")),
    *(Codec(name, None, name, is_safe=True, is_sized=True) for name in ("bytes", "transpose", "sharding_indexed", "base64")),
    *(Codec(name, None, name, is_safe=True, is_sized=True) for name in ("delta", "bitround", "quantize", "fixedscaleoffset")),
    *(Codec(name, None, name, is_safe=True, is_sized=True) for name in ("astype", "packbits", "crc32", "adler32")),
    Codec("jenkins_lookup3", None, "jenkins_lookup3", is_safe=True, is_sized=True),
)  # fmt: skip

HDF5_CODECS: Mapping[int, Codec] = {codec.number: codec for codec in CODECS if codec.number is not None}
ZARR_CODECS: Mapping[str, Codec] = {codec.zarr: codec for codec in CODECS if codec.zarr is not None}
