"""How does zarr-python know bfloat16 and the smaller types of JAX? They are registered there, by their names in ml_dtypes.

TensorStore, and what stores JAX's arrays with it, writes these types under these names: bfloat16 in two bytes, each value of
the others in a byte of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import HasEndianness
from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry


@dataclass(frozen=True, kw_only=True)
class _Added(ZDType[Any, Any]):
    """One of these types, as zarr-python asks for it."""

    dtype: ClassVar[np.dtype[Any]]

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if type(dtype) is not cls.dtype_cls:
            raise DataTypeValidationError(f"{dtype} is not {cls.dtype}")
        return cls() if dtype == cls.dtype else cls(**{"endianness": "big"})

    def to_native_dtype(self) -> Any:
        is_big = getattr(self, "endianness", "little") == "big"
        return self.dtype.newbyteorder(">") if is_big else self.dtype

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        return cls._from_json_v3(data.get("name") if isinstance(data, dict) else None)

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls.dtype.name:
            raise DataTypeValidationError(f"{data!r} is not {cls.dtype}")
        return cls()

    def to_json(self, zarr_format: Any) -> Any:
        return self.dtype.name if zarr_format == 3 else {"name": self.dtype.name, "object_codec_id": None}

    def _check_scalar(self, data: object) -> bool:
        return True

    def cast_scalar(self, data: object) -> Any:
        if isinstance(data, str) and data.startswith("0x"):  # its bits
            return np.array(int(data, 16), f"u{self.dtype.itemsize}").view(self.dtype)[()]
        number = float(cast(float, data))
        found = np.asarray(number).astype(self.dtype)[()]
        if "int" in self.dtype.name and float(found) != number:
            raise ValueError(f"the fill value {data!r} is no {self.dtype}")
        return found

    def default_scalar(self) -> Any:
        return self.cast_scalar(0)

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        return self.cast_scalar(data)

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> Any:
        number = float(self.cast_scalar(data))
        if "int" in self.dtype.name:
            return int(number)
        return number if math.isfinite(number) else "NaN" if math.isnan(number) else f"{'-' * (number < 0)}Infinity"


def register() -> None:
    """Make the types known to zarr-python that it does not know yet."""
    for scalar in vars(ml_dtypes).values():
        if not (isinstance(scalar, type) and issubclass(scalar, np.generic)) or "complex" in scalar.__name__:
            continue
        dtype = np.dtype(scalar)
        bases = (_Added,) if dtype.itemsize == 1 else (_Added, HasEndianness)
        if dtype.name not in data_type_registry.contents:
            one = type(dtype.name, bases, {"dtype": dtype, "dtype_cls": type(dtype), "_zarr_v3_name": dtype.name})
            data_type_registry.register(dtype.name, dataclass(frozen=True, kw_only=True)(one))
