"""What is in a folder of a Zarr store, of format 2 or 3: an array or a group? Metadata are parsed here alone.

`parse_node` makes a node of the metadata files of a folder, wherever these are.

zarr-python lacks JAX's smaller types. Of an array of such a type it is told integers of the same bits, which are viewed as
the type (`ArrayNode.dtype`) where they are read: TensorStore, and what stores JAX's arrays with it, writes bfloat16 in two
bytes, and each value of the others in a byte of its own, under the names of ml_dtypes.

`checked` replaces numcodecs's Blosc decoder by one that compares a chunk's header with its length. numcodecs's own decoder
reads past the end of a chunk whose header declares more bytes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import ml_dtypes
import numcodecs
import numcodecs.errors
import numpy as np
from zarr.core.buffer import default_buffer_prototype
from zarr.core.metadata import ArrayV2Metadata, ArrayV3Metadata

from shardload.errors import printable
from shardload.formats.codecs.algorithms import NOT_BLOSC, check_blosc
from shardload.formats.contract.array import is_added, refusal
from shardload.formats.zarr.metadata import Json
from shardload.system.caller import warnings_caught


class MetadataError(ValueError):
    """zarr-python does not understand the metadata of an array. The text says so in words that follow "holds"."""


@dataclass(frozen=True)
class GroupNode:
    """A group. `attributes` parses them when they are needed: if they are damaged, arrays below the group can be read."""

    attributes: Callable[[], Json]


@dataclass(frozen=True)
class ArrayNode:
    """An array.

    Attributes
    ----------
    document : dict
        Its metadata as JSON has it, also in format 2 with the attributes.
    """

    document: Json

    @classmethod
    def of(cls, array: Any) -> ArrayNode:
        """The node of an open array of zarr-python."""
        files = array.metadata.to_buffer_dict(default_buffer_prototype())
        node = cast(ArrayNode, parse_node(lambda key: files[key].to_bytes() if key in files else None))
        if node.added is None:
            vars(node)["metadata"] = array.metadata
        return node

    @property
    def version(self) -> int:
        """Of the format."""
        return int(self.document["zarr_format"])

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return tuple(self.document["shape"])

    @property
    def attributes(self) -> Json:
        """All attributes."""
        return self.document.get("attributes") or {}

    @property
    def dims(self) -> tuple[str | None, ...]:
        """The names of the axes: ``dimension_names``, or xarray's ``_ARRAY_DIMENSIONS``; None for an axis without one."""
        names = self.document.get("dimension_names") or self.attributes.get("_ARRAY_DIMENSIONS")
        if not isinstance(names, list) or len(names) != len(self.shape):
            return (None,) * len(self.shape)
        return tuple([name if isinstance(name, str) and name else None for name in names])

    @cached_property
    def added(self) -> np.dtype[Any] | None:
        """Type of the values if zarr-python does not know it: bfloat16, or a smaller type of JAX; else None."""
        name = self.document.get("dtype" if self.version == 2 else "data_type")
        kind = getattr(ml_dtypes, name, None) if isinstance(name, str) and "complex" not in name else None
        return np.dtype(kind) if isinstance(kind, type) and issubclass(kind, np.generic) else None

    @cached_property
    def metadata(self) -> Any:
        """zarr-python's object. `MetadataError` if it does not understand the document."""
        document = self.document
        if self.added is not None:
            bits, fill = bits_of(self.added), document.get("fill_value")
            kind = {"dtype": bits.str} if self.version == 2 else {"data_type": bits.name}
            document = document | kind | {"fill_value": None if fill is None else _fill_bits(fill, self.added)}
        try:
            with quiet():
                return (ArrayV2Metadata if self.version == 2 else ArrayV3Metadata).from_dict(document)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            cause = printable(f"{type(error).__name__}: {error}"[:300])
            raise MetadataError(
                f"metadata that zarr-python does not understand ({cause}). They are damaged, or name a codec or a type of a "
                "package that is not installed here: install it"
            ) from error

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        kind = self.metadata.dtype if self.version == 2 else self.metadata.data_type
        if self.added is not None:
            return self.added
        return np.dtype(kind.to_native_dtype())  # type: ignore[no-any-return]

    @property
    def fill(self) -> Any:
        """The fill value as zarr-python has it; None if there is none, which format 2 allows."""
        fill = self.metadata.fill_value
        return fill if self.added is None or fill is None else np.asarray(fill).view(self.added)[()]

    @property
    def marker(self) -> Any:
        """The fill value as a scalar if it also marks missing data, as for xarray that of numbers in format 2; else None."""
        is_number = refusal(self.dtype) is None and not is_added(self.dtype)  # of a type that xarray knows
        if self.version == 3 or self.fill is None or not is_number:
            return None
        return np.asarray(self.fill, self.dtype)[()]


def bits_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of integers that have the bits of values of a type."""
    return np.dtype(f"u{dtype.itemsize}")


def _fill_bits(fill: Any, dtype: np.dtype[Any]) -> int:
    """The bits of a fill value, of which a document has the number, or the bits as text."""
    if isinstance(fill, str) and fill.startswith("0x"):
        return int(fill, 16)
    value = np.asarray(float(fill)).astype(dtype)
    if "int" in dtype.name and float(value) != float(fill):
        raise ValueError(f"the fill value {fill!r} is no {dtype}")
    return int(value.view(bits_of(dtype)))


Node = ArrayNode | GroupNode | Exception
"""What is in a folder, or why it, or its metadata, cannot be read."""


def parse_node(read: Callable[[str], bytes | None]) -> ArrayNode | GroupNode | None:
    """The node of a folder, of which `read` returns files; None if it has no metadata. ValueError if these are damaged."""
    if (text := read("zarr.json")) is not None:
        document = _parsed("zarr.json", text)
        if document["node_type"] == "group":
            return GroupNode(lambda: document.get("attributes") or {})
        return ArrayNode(_checked(document, 3))
    if (text := read(".zarray")) is not None:
        return ArrayNode(_checked(_parsed(".zarray", text) | {"attributes": _parsed(".zattrs", read(".zattrs"))}, 2))
    return None if read(".zgroup") is None else GroupNode(lambda: _parsed(".zattrs", read(".zattrs")))


def _parsed(key: str, text: bytes | None) -> Json:
    try:
        document = {} if text is None else json.loads(text)
    except RecursionError:
        raise ValueError(f"'{key}' is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(f"'{key}' has a {type(document).__name__}, expected an object of JSON")
    return document


def _checked(document: Json, version: int) -> Json:
    shape = document["shape"]
    if document["zarr_format"] != version or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"an array of Zarr {document['zarr_format']!r} with the shape {shape!r}")
    if not isinstance(document.get("attributes") or {}, dict):
        raise ValueError("the attributes of an array are no object of JSON")
    return document


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress zarr-python's warnings about stray files, and about data types that other programs may not know."""
    with warnings_caught():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


# --- decoders that damaged chunks cannot harm


class CheckedBlosc(numcodecs.Blosc):  # type: ignore[misc]
    """numcodecs's Blosc, with a check of the header: numcodecs itself trusts the length that a chunk declares."""

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode; ValueError if the header does not fit the chunk's length."""
        data = numcodecs.compat.ensure_contiguous_ndarray(buf).view("u1")
        check_blosc(data)
        try:
            return super().decode(buf, out)
        except RuntimeError as error:
            raise ValueError(f"the blosc data is {NOT_BLOSC} ({error})") from None


def checked(metadata: Any) -> Any:
    """The same metadata, with decoders that damaged chunks cannot harm."""
    safe = copy.copy(metadata)
    if metadata.zarr_format == 2:
        object.__setattr__(safe, "compressor", _checked_decoder(metadata.compressor))
        object.__setattr__(safe, "filters", metadata.filters and tuple(_checked_decoder(codec) for codec in metadata.filters))
    else:
        object.__setattr__(safe, "codecs", tuple(map(_checked_codec, metadata.codecs)))
    return safe


def _checked_decoder(decoder: Any) -> Any:
    if type(decoder) is not numcodecs.Blosc:
        return decoder
    options = decoder.get_config()
    del options["id"]
    return CheckedBlosc(**options)


def _checked_codec(codec: Any) -> Any:
    """Replace Blosc in a codec of format 3: zarr-python's Blosc, numcodecs's, or shards with Blosc inside."""
    attribute = next((name for name in ("_blosc_codec", "_codec") if type(getattr(codec, name, None)) is numcodecs.Blosc), None)
    inside = getattr(codec, "codecs", None)
    if attribute is None and not isinstance(inside, tuple):
        return codec
    safe = copy.copy(codec)
    if attribute is not None:
        safe.__dict__[attribute] = _checked_decoder(getattr(codec, attribute))  # these classes cache their decoder there
    elif inside is not None:
        object.__setattr__(safe, "codecs", tuple(map(_checked_codec, inside)))
    return safe
