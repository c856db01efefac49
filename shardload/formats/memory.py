"""How are values read that are already in memory? A NumPy array or memory map serves as a source."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardload.errors import SourceError
from shardload.formats.contract.array import ArrayInfo, check_request, native_dtype, refusal
from shardload.formats.contract.format import Source
from shardload.planning.region import Region

_PATH, _NAME = "<memory>", "/array"


class MemorySource(Source):
    """A NumPy array with any strides and any byte order.

    Parameters
    ----------
    array : numpy.ndarray
        Not copied, never written.
    info : ArrayInfo, optional
        Metadata of the file that it was read from, for messages.
    read_in : tuple of int, optional
        The state of that file (`OpenFile.state`) before it was read.
    origin : tuple of int, optional
        Where `array` begins in the array of `info`, if it is a part of it: then only regions inside this part can be read.

    Raises
    ------
    SourceError
        If JAX has no type for the values, or some are masked.

    Examples
    --------
    >>> source = MemorySource(np.arange(6, dtype=">i4").reshape(2, 3))
    >>> out = np.empty((2, 1), "int32")
    >>> source.read_into(Region((0, 1), (2, 2)), out)
    ()
    >>> out.tolist()
    [[1], [4]]
    """

    def __init__(
        self,
        array: np.ndarray[Any, Any],
        info: ArrayInfo | None = None,
        read_in: tuple[int, ...] | None = None,
        origin: tuple[int, ...] | None = None,
    ) -> None:
        self.read_in, self._origin = read_in, origin
        reason = None
        if refused := refusal(array.dtype):
            reason = f"holds {refused}. Pass an array of booleans, integers, floats or complex numbers"
        elif np.ma.is_masked(array):  # netCDF4-python returns masked arrays, most of them without a masked element
            reason = "has masked elements, and a jax.Array has no mask. Pass array.filled(value), with NaN for instance"
        if reason is not None:
            raise SourceError(f"the array of shape {array.shape} in memory {reason}.", path=_PATH, dataset=_NAME)
        self._array = np.asarray(array)
        self.dtype = native_dtype(array.dtype)
        self.info = info or ArrayInfo(
            path=_PATH,
            dataset=_NAME,
            format="memory",
            shape=array.shape,
            dtype=self.dtype.name,
            nbytes_stored=array.nbytes,
        )

    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> tuple[()]:
        """Copy the values of `region` into `out`, swapping bytes where the array's are not native."""
        check_request(self.info, self.dtype, region, out)
        out[...] = self._array[self._inside(region)]
        return ()

    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """The values as NumPy's indexing gives them."""
        return np.asarray(self._array[self._inside(region)])

    def view(self, region: Region) -> np.ndarray[Any, Any] | None:
        """The values of `region` without a copy, with the array's own strides. None if they cannot be sent as they are: the
        byte order is not native, or booleans may have bytes other than 0 and 1.
        """
        # Ending the index in `...` keeps a 0-d array an array: `array[()]` would be a scalar, hence a copy.
        index: Any = (*self._inside(region), ...)
        return self._array[index] if self._array.dtype.isnative and self.dtype.kind != "b" else None

    def _inside(self, region: Region) -> tuple[slice, ...]:
        """The index of a region in `array`. ValueError if it reaches outside: NumPy would silently give less."""
        start = (0,) * region.ndim if self._origin is None else self._origin
        present = Region(start, tuple(a + n for a, n in zip(start, self._array.shape, strict=True)))
        if not present.contains(region):
            array = f"{self.info}, which has shape {self.info.shape}"
            array = array if self._origin is None else f"{present} of {array}"
            raise ValueError(f"region {region} reaches outside {array}")
        return region.slices(start)

    def state(self) -> None:
        """None: an array in memory has no file state."""
        return None

    def close(self) -> None:
        """Nothing to give back: the array is the caller's."""
