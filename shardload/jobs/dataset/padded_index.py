"""Which rows does a label mean along an axis with padding? Those of the file alone. (xarray is imported here.)"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from xarray.indexes import Index, PandasIndex

from shardload.jobs.loading.labelled import pad_variable


class PaddedIndex(Index):
    """The index of an axis that has padding at its end.

    A selection by labels is what the index without padding says, so `nearest` and ranges never give a row of the padding.
    """

    def __init__(self, unpadded: PandasIndex, n: int) -> None:
        self.unpadded, self.n = unpadded, n

    @property
    def n_unpadded(self) -> int:
        """Rows that are the file's."""
        return len(self.unpadded.index)

    def create_variables(self, variables: Any = None) -> Any:
        """Its coordinate: padding is NaN or NaT."""
        tail = {self.unpadded.dim: (0, self.n - self.n_unpadded)}
        unpadded = self.unpadded.create_variables(variables)
        return {name: pad_variable(variable, tail) for name, variable in unpadded.items()}

    def sel(self, labels: dict[Any, Any], method: Any = None, tolerance: Any = None) -> Any:
        """See `xarray.Index`."""
        return self.unpadded.sel(labels, method=method, tolerance=tolerance)

    def isel(self, indexers: Mapping[Any, Any]) -> Index | None:
        """See `xarray.Index`. No index along another axis, or if rows of the padding would come before others."""
        dim, indexer = self.unpadded.dim, indexers[self.unpadded.dim]
        rows = np.arange(self.n)[getattr(indexer, "values", indexer)]
        if not rows.ndim or getattr(indexer, "dims", (dim,)) != (dim,):
            return None
        n = int((rows < self.n_unpadded).sum())
        if (rows[:n] >= self.n_unpadded).any():
            return None
        unpadded = self.unpadded.isel({dim: rows[:n]})
        return PaddedIndex(unpadded, len(rows)) if unpadded is not None and n < len(rows) else unpadded

    def rename(self, name_dict: Mapping[Any, Hashable], dims_dict: Mapping[Any, Hashable]) -> PaddedIndex:
        """See `xarray.Index`."""
        renamed: Any = self.unpadded.rename(name_dict, dims_dict)  # type: ignore[no-untyped-call]
        return PaddedIndex(renamed, self.n)

    def equals(self, other: Index, *, exclude: Any = None) -> bool:
        """See `xarray.Index`."""
        return isinstance(other, PaddedIndex) and self.n == other.n and self.unpadded.equals(other.unpadded, exclude=exclude)
