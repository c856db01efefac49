"""What is in a folder of a Zarr store, of format 2 or 3: an array or a group? The one parse of metadata.

`parse_node` reads the files of a folder, from wherever they come. All of Zarr that needs metadata takes it from the nodes.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numcodecs.errors
import numpy as np
import zarr
import zarr.errors
from zarr.abc.codec import ArrayArrayCodec, BytesBytesCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.metadata import ArrayV2Metadata, ArrayV3Metadata

from shardload.errors import printable
from shardload.formats.contract.dtypes import is_added, refusal
from shardload.formats.zarr.codecs import SURVIVED
from shardload.formats.zarr.dtypes import register
from shardload.formats.zarr.metadata import Json, chain_of, names_of

register()


class UnknownCodecError(ValueError):
    """zarr-python does not know a codec or a type. The text says so in words that follow "holds"."""

    def __init__(self, text: str, *, is_type: bool) -> None:
        super().__init__(text)
        self.is_type = is_type


@dataclass(frozen=True)
class GroupNode:
    """A group. Its attributes are parsed when they are asked for: arrays below it can be read if these are damaged."""

    parse: Callable[[], Json]

    @property
    def attributes(self) -> Json:
        """Its attributes."""
        return self.parse()


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
        """That of an open array of zarr-python."""
        files = array.metadata.to_buffer_dict(default_buffer_prototype())
        node = parse_node(lambda key: files[key].to_bytes() if key in files else None)
        if not isinstance(node, ArrayNode):
            raise TypeError(f"{array} is no array")
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
    def metadata(self) -> Any:
        """What zarr-python makes of it. `UnknownCodecError` if it does not know a codec or the type; others for damage."""
        try:
            with quiet():
                return (ArrayV2Metadata if self.version == 2 else ArrayV3Metadata).from_dict(self.document)
        except (numcodecs.errors.UnknownCodecError, zarr.errors.UnknownCodecError) as error:
            names = [name for name in names_of(self.document) if name not in SURVIVED]
            told = next((name for name in names if name in str(error).lower()), "")[:80]
            raise UnknownCodecError(
                f"chunks encoded with the codec '{printable(told)}', which is not installed here: install the package that it "
                "comes from",
                is_type=False,
            ) from error
        except ValueError as error:
            if "No Zarr data type" not in str(error) or "'object_codec_id': '" in str(error):  # that of Python objects
                raise
            kind = self.document.get("data_type") or self.document.get("dtype")
            kind = kind.get("name") if isinstance(kind, Mapping) else kind
            text = f"values of the type '{printable(str(kind)[:80])}', which zarr-python does not know"
            raise UnknownCodecError(text, is_type=True) from error

    @property
    def codec(self) -> str:
        """Compressors, then filters, for people; with shards, those of the chunks inside."""
        if self.version == 2:
            names = [name for name, _ in reversed(chain_of(self.document))]
        else:
            codecs = self.metadata.codecs
            inside = codecs[0].codecs if len(codecs) == 1 and hasattr(codecs[0], "codecs") else codecs
            kinds = (BytesBytesCodec, ArrayArrayCodec)
            names = [codec.to_dict()["name"] for kind in kinds for codec in inside if isinstance(codec, kind)]
        return "+".join(name.removeprefix("numcodecs.") for name in names) or "none"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        kind = self.metadata.dtype if self.version == 2 else self.metadata.data_type
        return np.dtype(kind.to_native_dtype())  # type: ignore[no-any-return]

    @property
    def fill(self) -> Any:
        """The fill value as zarr-python has it; None if there is none, which format 2 allows."""
        return self.metadata.fill_value

    @property
    def marker(self) -> Any:
        """In format 2 the fill value of numbers marks missing data as well, for xarray: as a scalar; else None."""
        is_number = refusal(self.dtype) is None and not is_added(self.dtype)  # xarray knows no others
        if self.version == 3 or self.fill is None or not is_number:
            return None
        return np.asarray(self.fill, self.dtype)[()]


Node = ArrayNode | GroupNode | Exception
"""What is in a folder, or why it, or its metadata, cannot be read."""


def parse_node(read: Callable[[str], bytes | None]) -> ArrayNode | GroupNode | None:
    """The node of a folder, of which `read` gives files; None if it has no metadata. ValueError if these are damaged."""
    if (text := read("zarr.json")) is not None:
        document = _parsed("zarr.json", text)
        if document["node_type"] == "group":
            return GroupNode(lambda: document.get("attributes") or {})
        return ArrayNode(_checked(document, 3))
    if (text := read(".zarray")) is not None:
        return ArrayNode(_checked(_parsed(".zarray", text) | {"attributes": _parsed(".zattrs", read(".zattrs"))}, 2))
    return None if read(".zgroup") is None else GroupNode(lambda: _parsed(".zattrs", read(".zattrs")))


def _parsed(key: str, text: bytes | None) -> Json:
    document = {} if text is None else json.loads(text)
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield
