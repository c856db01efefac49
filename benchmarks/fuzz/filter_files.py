"""Which files show what a decoder does with damage? A small good file for each filter and way of using it, and mutations of it.

1. `filter_kinds` writes one file (HDF5) or store (Zarr, both formats) for each way in which h5py with hdf5plugin, and
   zarr-python with numcodecs, can write: every filter, and its compressors, modes and types where it has several.
2. `filter_case` damages the bytes of one chunk, the parameters (HDF5's ``cd_values``, Zarr's configuration of a codec), or the
   metadata around them. A case follows from the kind and a number alone.
3. `FilterCase.write` puts it where it can be loaded.
"""

from __future__ import annotations

import json
import random
import struct
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numcodecs
import numpy as np
import zarr
import zarr.codecs
from zarr.codecs import numcodecs as of_numcodecs

from benchmarks.fuzz.files import METADATA, STRANGE, damaged, some_field

__all__ = ["FilterCase", "FilterKind", "filter_case", "filter_kinds", "hdf5_kinds"]

Array = np.ndarray[Any, Any]
SHAPE, CHUNKS = (48, 40), (24, 40)
LARGE, LARGE_CHUNKS = (1024, 384), (512, 384)  # decoders that read past the end of what is stored get past the end of memory
NUMBERS = (*range(10), 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 1000, 3840, 65535, 2**20, 2**24, 2**30)
NUMBERS += (2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1)


@dataclass
class FilterKind:
    """A good file of one filter.

    Attributes
    ----------
    filter : str
        For the results: ``"bitshuffle (HDF5 32008)"``.
    way : str
        How it is used: ``"zstd, float32"``.
    format : str
        ``"hdf5"``, ``"zarr2"`` or ``"zarr3"``.
    files : dict of str to bytes
        By name below the folder.
    chunks : dict of tuple to bytes
        What is stored of each chunk.
    parameters : list of (int, int)
        HDF5: where in the file each number of ``cd_values`` is, and how many bytes it has.
    header : tuple of (int, int)
        HDF5: where the metadata of the dataset is.
    values : ndarray
        What its library reads of it; None where it cannot be read.
    """

    filter: str
    way: str
    format: str
    files: dict[str, bytes]
    chunks: dict[tuple[int, ...], bytes] = field(default_factory=dict)
    parameters: list[tuple[int, int]] = field(default_factory=list)
    header: tuple[int, int] = (0, 0)
    values: Any = None

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.format} {self.filter}: {self.way}"


@dataclass
class FilterCase:
    """One damaged file. `touched`: the chunk whose bytes are not what they were; None where metadata is not."""

    kind: FilterKind
    number: int
    what: str
    files: dict[str, bytes]
    chunks: dict[tuple[int, ...], tuple[bytes, int]] = field(default_factory=dict)
    touched: tuple[int, ...] | None = None

    def write(self, folder: Path) -> str:
        """Write what is not as it was; returns the path to load."""
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        if self.kind.format != "hdf5":
            return str(folder / "store.zarr")
        path = folder / "f.h5"
        if self.chunks:
            with h5py.File(path, "r+") as file:
                for index, (data, mask) in self.chunks.items():
                    start = tuple(i * c for i, c in zip(index, file["a"].chunks, strict=True))
                    file["a"].id.write_direct_chunk(start, data, mask)
        return str(path)


# --- good files


def smooth(dtype: str, shape: tuple[int, ...] = SHAPE) -> Array:
    """Values that compress, and not only by runs: a wave with small steps on it."""
    n = int(np.prod(shape))
    rng = np.random.default_rng(5)
    wave = np.round(100 * (1 + np.sin(np.arange(n) / 37.0))) + rng.integers(0, 4, n) * (np.arange(n) % 160 < 40)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return (wave > 100).reshape(shape)
    if kind.kind == "c":
        return (wave + 1j * wave[::-1]).reshape(shape).astype(kind)
    return wave.reshape(shape).astype(kind)


def filter_kinds(folder: Path) -> list[FilterKind]:
    """All of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [*hdf5_kinds(folder), *_zarr_kinds(folder)]


def hdf5_kinds(folder: Path) -> list[FilterKind]:
    kinds = []
    for k, (name, way, dtype, options) in enumerate(_hdf5_ways()):
        path = folder / f"{k}.h5"
        with h5py.File(path, "w", libver="earliest") as file:
            shape, chunks = (LARGE, LARGE_CHUNKS) if "large" in way else (SHAPE, CHUNKS)
            if "pipeline" in options:
                _create_by_pipeline(file, dtype, shape, chunks, options)
            else:
                file.create_dataset("a", data=smooth(dtype, shape), chunks=chunks, **options)
        try:
            kinds.append(_hdf5_kind(name, way, path))
        except OSError:  # HDF5 1.14.4 cannot read bytes that its scale-offset filter wrote
            if h5py.version.hdf5_version_tuple >= (2, 0):
                raise
    return kinds


def _create_by_pipeline(
    file: h5py.File, dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], options: dict[str, Any]
) -> None:
    """For filters and types that h5py has no words for."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk(chunks)
    for number, values in options["pipeline"]:
        creation.set_filter(number, h5py.h5z.FLAG_OPTIONAL, values)
    values = smooth(dtype, shape)
    kind = h5py.h5t.py_create(values.dtype).copy()
    if "precision" in options:
        kind.set_precision(options["precision"])
    made = h5py.h5d.create(file.id, b"a", kind, h5py.h5s.create_simple(values.shape), creation)
    made.write(h5py.h5s.ALL, h5py.h5s.ALL, values)


def _hdf5_ways() -> list[tuple[str, str, str, dict[str, Any]]]:
    """Filter, way, type of the values, options."""
    made: list[tuple[str, str, str, dict[str, Any]]] = [
        ("none (HDF5)", "float32", "<f4", {}),
        ("gzip (HDF5 1)", "float32", "<f4", {"compression": "gzip"}),
        ("gzip (HDF5 1)", "level 9, shuffle, int64", "<i8", {"compression": 9, "shuffle": True}),
        ("shuffle (HDF5 2)", "float32", "<f4", {"shuffle": True}),
        ("shuffle (HDF5 2)", "float64, big-endian", ">f8", {"shuffle": True}),
        ("fletcher32 (HDF5 3)", "float32", "<f4", {"fletcher32": True}),
        ("szip (HDF5 4)", "nn, int32", "<i4", {"compression": "szip", "compression_opts": ("nn", 8)}),
        ("szip (HDF5 4)", "ec, float32", "<f4", {"compression": "szip", "compression_opts": ("ec", 16)}),
        ("szip (HDF5 4)", "nn, uint8", "u1", {"compression": "szip", "compression_opts": ("nn", 32)}),
        ("nbit (HDF5 5)", "int32 of 17 bits", "<i4", {"pipeline": [(5, ())], "precision": 17}),
        ("nbit (HDF5 5)", "int16 of 9 bits, big-endian", ">i2", {"pipeline": [(5, ())], "precision": 9}),
        ("nbit (HDF5 5)", "complex64", "<c8", {"pipeline": [(5, ())]}),
        ("scaleoffset (HDF5 6)", "int32", "<i4", {"scaleoffset": 0}),
        ("scaleoffset (HDF5 6)", "int64, 12 bits", "<i8", {"scaleoffset": 12}),
        ("scaleoffset (HDF5 6)", "uint8", "u1", {"scaleoffset": 0}),
        ("scaleoffset (HDF5 6)", "float32, 3 digits", "<f4", {"scaleoffset": 3}),
        ("scaleoffset (HDF5 6)", "float64, 2 digits, big-endian", ">f8", {"scaleoffset": 2, "fillvalue": -1.0}),
        ("szip (HDF5 4)", "nn, int32, large", "<i4", {"compression": "szip"}),
        ("nbit (HDF5 5)", "int32 of 17 bits, large", "<i4", {"pipeline": [(5, ())], "precision": 17}),
        ("scaleoffset (HDF5 6)", "int32, large", "<i4", {"scaleoffset": 0}),
        ("scaleoffset (HDF5 6)", "gzip, int32, large", "<i4", {"scaleoffset": 0, "compression": "gzip"}),
        ("lzf (HDF5 32000)", "int16, large", "<i2", {"compression": "lzf"}),
        ("lz4 (HDF5 32004)", "int16, large", "<i2", hdf5plugin.LZ4()),
        ("blosc (HDF5 32001)", "int32, large", "<i4", hdf5plugin.Blosc()),
        ("blosc2 (HDF5 32026)", "int32, large", "<i4", hdf5plugin.Blosc2()),
        ("fcidecomp (HDF5 32018)", "uint16, large", "<u2", hdf5plugin.FciDecomp()),
        ("htj2k (HDF5 32033)", "uint16, large", "<u2", hdf5plugin.Htj2k()),
        ("lzf (HDF5 32000)", "float32", "<f4", {"compression": "lzf"}),
        ("lzf (HDF5 32000)", "int64, shuffle", "<i8", {"compression": "lzf", "shuffle": True}),
        ("bzip2 (HDF5 307)", "float32", "<f4", hdf5plugin.BZip2()),
        ("lz4 (HDF5 32004)", "float32", "<f4", hdf5plugin.LZ4()),
        ("lz4 (HDF5 32004)", "blocks of 512 bytes, int16", "<i2", hdf5plugin.LZ4(nbytes=512)),
        ("zstd (HDF5 32015)", "float32", "<f4", hdf5plugin.Zstd()),
        ("zstd (HDF5 32015)", "shuffle, int32", "<i4", {**hdf5plugin.Zstd(9), "shuffle": True}),
        ("fcidecomp (HDF5 32018)", "uint16", "<u2", hdf5plugin.FciDecomp()),
        ("fcidecomp (HDF5 32018)", "uint8", "u1", hdf5plugin.FciDecomp()),
        ("htj2k (HDF5 32033)", "uint16", "<u2", hdf5plugin.Htj2k()),
        ("htj2k (HDF5 32033)", "uint8", "u1", hdf5plugin.Htj2k()),
    ]
    for cname in ("blosclz", "lz4", "lz4hc", "zlib", "zstd"):
        for shuffle in (0, 1, 2):
            made.append(("blosc (HDF5 32001)", f"{cname}, shuffle {shuffle}", "<f4", hdf5plugin.Blosc(cname, 5, shuffle)))
    for cname, filters in (("blosclz", 1), ("lz4", 2), ("lz4hc", 0), ("zlib", 1), ("zstd", 3), ("zstd", 4)):
        made.append(("blosc2 (HDF5 32026)", f"{cname}, filters {filters}", "<f4", hdf5plugin.Blosc2(cname, 5, filters)))
    for cname, dtype in (("none", "<f4"), ("lz4", "<f4"), ("zstd", "<f4"), ("lz4", "<i2"), ("zstd", "<f8")):
        made.append(("bitshuffle (HDF5 32008)", f"{cname}, {dtype}", dtype, hdf5plugin.Bitshuffle(cname=cname)))
        made.append(
            ("bitshuffle (HDF5 32008)", f"{cname}, {dtype}, small blocks", dtype, hdf5plugin.Bitshuffle(64, cname=cname))
        )
    zfp: dict[str, dict[str, Any]] = {
        "rate": {"rate": 10.0}, "precision": {"precision": 12}, "accuracy": {"accuracy": 0.5},
        "reversible": {"reversible": True},
    }  # fmt: skip
    for way, options in zfp.items():
        made.append(("zfp (HDF5 32013)", f"{way}, float32", "<f4", hdf5plugin.Zfp(**options)))
    made.append(("zfp (HDF5 32013)", "reversible, int64", "<i8", hdf5plugin.Zfp(reversible=True)))
    for way, options in {"absolute": {"absolute": 0.1}, "relative": {"relative": 0.01}}.items():
        made.append(("sz (HDF5 32017)", f"{way}, float32", "<f4", hdf5plugin.SZ(**options)))
        made.append(("sz (HDF5 32017)", f"{way}, float64", "<f8", hdf5plugin.SZ(**options)))
        made.append(("sz3 (HDF5 32024)", f"{way}, float32", "<f4", hdf5plugin.SZ3(**options)))
        made.append(("sz3 (HDF5 32024)", f"{way}, float64", "<f8", hdf5plugin.SZ3(**options)))
    made.append(("sz3 (HDF5 32024)", "absolute, int32", "<i4", hdf5plugin.SZ3(absolute=1)))
    for way, options in {"rate": {"rate": 8.0}, "psnr": {"peak_signal_to_noise_ratio": 60.0}, "pwe": {"absolute": 0.1}}.items():
        made.append(("sperr (HDF5 32028)", f"{way}, float32", "<f4", hdf5plugin.Sperr(**options)))
    made.append(("sperr (HDF5 32028)", "rate, float64", "<f8", hdf5plugin.Sperr(rate=12.0)))
    return made


def _hdf5_kind(name: str, way: str, path: Path) -> FilterKind:
    """What is known of a good file."""
    data = path.read_bytes()
    with h5py.File(path, "r") as file:
        found = file["a"]
        creation = found.id.get_create_plist()
        chunks = {}
        for k in range(found.id.get_num_chunks()):
            stored = found.id.get_chunk_info(k)
            index = tuple(a // c for a, c in zip(stored.chunk_offset, found.chunks, strict=True))
            chunks[index] = bytes(found.id.read_direct_chunk(stored.chunk_offset)[1])
        parameters: list[tuple[int, int]] = []
        for k in range(creation.get_nfilters()):
            number, _, values, _ = creation.get_filter(k)
            parameters += _places(data, number, values)
        at = h5py.h5o.get_info(found.id).addr
        kind = FilterKind(name, way, "hdf5", {"f.h5": data}, chunks, parameters, (at, min(at + 700, len(data))))
        kind.values = found[()]
    if len(chunks) < 2:
        raise RuntimeError(f"{kind.name}: {len(chunks)} chunks")
    return kind


def _places(data: bytes, number: int, values: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where the count of a filter's parameters and they themselves are, in a message of version 1 (HDF5 format, IV.A.2.l)."""
    stored = struct.pack(f"<{len(values)}I", *values)[: 4 * 16]  # h5py 3.12 delivers 16, and noise after them
    at = -1
    while (at := data.find(struct.pack("<H", number), at + 1)) >= 0:
        length, _, count = struct.unpack_from("<HHH", data, at + 2) if at + 8 <= len(data) else (0, 0, -1)
        first = at + 8 + length
        if count == len(values) and length % 8 == 0 and length <= 256 and data[first : first + len(stored)] == stored:
            return [(at + 6, 2), *((first + 4 * k, 4) for k in range(count))]
    raise RuntimeError(f"the parameters {values} of filter {number} are not in the file")


def _zarr_kinds(folder: Path) -> list[FilterKind]:
    n = numcodecs
    two: list[tuple[str, str, dict[str, Any]]] = [
        ("none", "<f4", {"compressors": None}),
        ("zlib", "<f4", {"compressors": n.Zlib()}),
        ("gzip", "<f4", {"compressors": n.GZip()}),
        ("bz2", "<f4", {"compressors": n.BZ2()}),
        ("lzma", "<f4", {"compressors": n.LZMA()}),
        ("lz4", "<f4", {"compressors": n.LZ4()}),
        ("zstd", "<f4", {"compressors": n.Zstd()}),
        *(("blosc", "<f4", {"compressors": n.Blosc(c, shuffle=s)}) for c in n.blosc.list_compressors() for s in (0, 1, 2)),
        ("shuffle", "<f4", {"compressors": None, "filters": [n.Shuffle(4)]}),
        ("shuffle", ">f8", {"compressors": n.Zlib(), "filters": [n.Shuffle(8)]}),
        ("delta", "<i4", {"compressors": None, "filters": [n.Delta("<i4")]}),
        ("delta", "<f4", {"compressors": n.Zlib(), "filters": [n.Delta("<f4", astype="<f8")]}),
        ("fixedscaleoffset", "<f8", {"compressors": None, "filters": [n.FixedScaleOffset(100, 10, "<f8", "<i2")]}),
        ("quantize", "<f4", {"compressors": None, "filters": [n.Quantize(2, "<f4")]}),
        ("packbits", "bool", {"compressors": None, "filters": [n.PackBits()]}),
        ("astype", "<f8", {"compressors": None, "filters": [n.AsType("<f4", "<f8")]}),
        ("bitround", "<f4", {"compressors": None, "filters": [n.BitRound(10)]}),
        ("crc32", "<f4", {"compressors": None, "filters": [n.CRC32()]}),
        ("adler32", "<f4", {"compressors": None, "filters": [n.Adler32()]}),
        ("fletcher32", "<f4", {"compressors": None, "filters": [n.Fletcher32()]}),
        ("jenkins_lookup3", "<f4", {"compressors": None, "filters": [n.JenkinsLookup3()]}),
        ("base64", "<f4", {"compressors": n.Base64()}),
    ]
    z, o = zarr.codecs, of_numcodecs
    plain = z.BytesCodec()
    three: list[tuple[str, str, list[Any]]] = [
        ("bytes", "<f4", [plain]),
        ("bytes", ">f4", [z.BytesCodec(endian="big")]),
        ("zstd", "<f4", [plain, z.ZstdCodec()]),
        ("zstd", "<f8", [plain, z.ZstdCodec(checksum=True)]),
        ("gzip", "<f4", [plain, z.GzipCodec()]),
        *(("blosc", "<f4", [plain, z.BloscCodec(cname=c, shuffle="bitshuffle")]) for c in ("lz4", "zstd", "blosclz", "zlib")),
        ("crc32c", "<f4", [plain, z.Crc32cCodec()]),
        ("transpose", "<f4", [z.TransposeCodec(order=(1, 0)), plain]),
        ("sharding_indexed", "<f4", [z.ShardingCodec(chunk_shape=(12, 20), codecs=[plain, z.ZstdCodec()])]),
        ("sharding_indexed", "<i4", [z.ShardingCodec(chunk_shape=(8, 40), codecs=[plain], index_location="start")]),
        ("numcodecs.blosc", "<f4", [plain, o.Blosc(cname="lz4")]),
        ("numcodecs.zstd", "<f4", [plain, o.Zstd()]),
        ("numcodecs.zlib", "<f4", [plain, o.Zlib()]),
        ("numcodecs.gzip", "<f4", [plain, o.GZip()]),
        ("numcodecs.bz2", "<f4", [plain, o.BZ2()]),
        ("numcodecs.lzma", "<f4", [plain, o.LZMA()]),
        ("numcodecs.lz4", "<f4", [plain, o.LZ4()]),
        ("numcodecs.shuffle", "<f4", [plain, o.Shuffle(elementsize=4)]),
        ("numcodecs.crc32", "<f4", [plain, o.CRC32()]),
        ("numcodecs.crc32c", "<f4", [plain, o.CRC32C()]),
        ("numcodecs.adler32", "<f4", [plain, o.Adler32()]),
        ("numcodecs.fletcher32", "<f4", [plain, o.Fletcher32()]),
        ("numcodecs.jenkins_lookup3", "<f4", [plain, o.JenkinsLookup3()]),
        ("numcodecs.delta", "<i4", [o.Delta(dtype="<i4"), plain]),
        ("numcodecs.bitround", "<f4", [o.BitRound(keepbits=10), plain]),
        ("numcodecs.fixedscaleoffset", "<f8", [o.FixedScaleOffset(offset=100, scale=10, dtype="<f8", astype="<i2"), plain]),
        ("numcodecs.quantize", "<f4", [o.Quantize(digits=2, dtype="<f4"), plain]),
        ("numcodecs.packbits", "bool", [o.PackBits(), plain]),
        ("numcodecs.astype", "<f8", [o.AsType(encode_dtype="<f4", decode_dtype="<f8"), plain]),
    ]
    kinds = []
    for k, (name, dtype, options) in enumerate(two):
        where = folder / f"{k}-2.zarr"
        made = zarr.open_group(where, mode="w", zarr_format=2)
        made.create_array("a", shape=SHAPE, dtype=dtype, chunks=CHUNKS, **options)[...] = smooth(dtype)
        told = json.loads((where / "a" / ".zarray").read_text())
        way = ", ".join(str(value) for value in (told["compressor"] or {}).values()) + f" {dtype}"
        kinds.append(_zarr_kind(f"{name} (Zarr 2)", way, "zarr2", where))
    for k, (name, dtype, chain) in enumerate(three):
        where = folder / f"{k}-3.zarr"
        kind = np.dtype(dtype)
        arrays = [
            c for c in chain if isinstance(c, z.TransposeCodec) or (hasattr(c, "codec_config") and type(c).__name__ in _ARRAY)
        ]
        rest = [c for c in chain if c not in arrays]
        made = zarr.open_group(where, mode="w")
        made.create_array(
            "a", shape=SHAPE, dtype=kind.newbyteorder("="), chunks=CHUNKS, filters=arrays or None, serializer=rest[0],
            compressors=rest[1:] or None,
        )[...] = smooth(dtype).astype(kind.newbyteorder("="))  # fmt: skip
        kinds.append(
            _zarr_kind(f"{name} (Zarr 3)", f"{chain[-1].to_dict().get('configuration', {})} {dtype}"[:80], "zarr3", where)
        )
    return kinds


_ARRAY = ("Delta", "BitRound", "FixedScaleOffset", "Quantize", "PackBits", "AsType")


def _zarr_kind(name: str, way: str, form: str, where: Path) -> FilterKind:
    files = {f"store.zarr/{file.relative_to(where)}": file.read_bytes() for file in sorted(where.rglob("*")) if file.is_file()}
    chunks = {}
    for file, stored in files.items():
        if file.rpartition("/")[2] not in METADATA:
            key = file.removeprefix("store.zarr/a/").removeprefix("c/").replace("/", ".")
            chunks[tuple(int(k) for k in key.split("."))] = stored
    kind = FilterKind(name, way, form, files, chunks)
    kind.values = np.asarray(zarr.open_group(where, mode="r")["a"][...])
    if len(chunks) < 2:
        raise RuntimeError(f"{name}: {len(chunks)} chunks")
    return kind


# --- mutations


def filter_case(kind: FilterKind, seed: int, number: int) -> FilterCase:
    """The case of a kind and a number: the same in every process."""
    rng = random.Random(f"{seed}/{kind.name}/{number}")
    way = rng.random()
    if way < 0.5:
        return _chunk_case(rng, kind, number)
    if kind.format == "hdf5":
        return _parameters_case(rng, kind, number) if way < 0.92 else _header_case(rng, kind, number)
    return _configuration_case(rng, kind, number)


def _chunk_case(rng: random.Random, kind: FilterKind, number: int) -> FilterCase:
    """Damage what is stored of one chunk, one to three times; often its first bytes, which say how long the rest is."""
    index = rng.choice(sorted(kind.chunks))
    data, told = kind.chunks[index], []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if data:
            at = rng.randrange(min(len(data), rng.choice([8, 24, 64, 1 << 20, 1 << 20])))
            what, found = damaged(rng, data, at)
            if kind.filter.startswith("none (HDF5") and len(found) != len(data):
                continue  # HDF5 would write it over the next one
            data = found
            told.append(f"{what} at {at}")
    what = f"chunk {index}: {', '.join(told)}"
    if kind.format == "hdf5":
        mask = rng.choice([0] * 20 + [1, 2, 3])
        return FilterCase(kind, number, what + f", mask {mask}", kind.files, {index: (data or b"\0", mask)}, index)
    name = "store.zarr/a/" + ("c/" if kind.format == "zarr3" else "")
    name += ("/" if kind.format == "zarr3" else ".").join(map(str, index))
    return FilterCase(kind, number, what, kind.files | {name: data}, touched=index)


def _parameters_case(rng: random.Random, kind: FilterKind, number: int) -> FilterCase:
    """Other parameters: numbers that mean something to somebody, or noise."""
    data, told = bytearray(kind.files["f.h5"]), []
    for at, width in rng.sample(kind.parameters, min(len(kind.parameters), rng.choice([1, 1, 1, 2, 3]))):
        old = int.from_bytes(data[at : at + width], "little")
        new = rng.choice([*NUMBERS, *NUMBERS, old + 1, old - 1, old * 2, old ^ (1 << rng.randrange(32)), rng.getrandbits(32)])
        data[at : at + width] = (new % 2 ** (8 * width)).to_bytes(width, "little")
        told.append(f"{width} bytes at {at}: {old} to {new % 2 ** (8 * width)}")
    return FilterCase(kind, number, f"parameters: {', '.join(told)}", {"f.h5": bytes(data)})


def _header_case(rng: random.Random, kind: FilterKind, number: int) -> FilterCase:
    """Damage to the metadata of the dataset: type, shape, chunks, filters."""
    data, (first, end) = kind.files["f.h5"], kind.header
    at, new = rng.randrange(first, end), rng.randrange(256)
    out = bytearray(data)
    if rng.random() < 0.5:
        out[at] ^= 1 << rng.randrange(8)
    else:
        out[at] = new
    return FilterCase(kind, number, f"metadata: byte {at}: {data[at]} to {out[at]}", {"f.h5": bytes(out)})


def _configuration_case(rng: random.Random, kind: FilterKind, number: int) -> FilterCase:
    """Another configuration of the codecs, or anything else in the metadata of the array."""
    name = "store.zarr/a/" + (".zarray" if kind.format == "zarr2" else "zarr.json")
    found = json.loads(kind.files[name])
    keys = ("compressor", "filters") if kind.format == "zarr2" else ("codecs",)
    part = {key: found[key] for key in keys if found[key]} if rng.random() < 0.8 else found
    place, parent, key = some_field(rng, part)
    if parent is None:
        place, parent, key = some_field(rng, found)
    what = rng.choice(["replace", "number", "number", "remove", "add"])
    if what == "number" and isinstance(parent[key], int) and not isinstance(parent[key], bool):
        parent[key] = rng.choice([*NUMBERS, -1, -(2**31), 2**63 - 1, 2**64, parent[key] + 1])
    elif what == "remove":
        del parent[key]
    elif what == "add" and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif what == "add":
        parent[f"new{key}"] = parent[key]
    else:
        parent[key] = rng.choice(STRANGE)
    found |= part
    return FilterCase(kind, number, f"configuration: {what} {place}", kind.files | {name: json.dumps(found).encode()})
