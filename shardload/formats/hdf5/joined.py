"""How does an HDF5 file say that its arrays lie in other files? By virtual datasets, whose parts are arrays of other files.

1. `JoinedFile` is a sink of all that is not values: groups, datasets, attributes, names of axes. Virtual datasets among its
   arrays are given by their parts (`PlacedPart`).
2. `JoinedFile.write` makes the file as a save does, under a temporary name. It is opened there again, as a load would, and each
   part is looked up: HDF5 itself takes fill values for one that it does not find.
3. Then it gets its name.

`JoinedFile.image` makes the same file in memory, for a `Concatenation`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import h5py
import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats.access import STRICT, Access
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.format import OpenFile
from shardload.formats.hdf5.filters import Hdf5Encoder, let_list_grow
from shardload.formats.hdf5.links import look_through
from shardload.formats.hdf5.opened import OpenFacts, encoded, file_in_memory, image_of, open_to_read
from shardload.formats.hdf5.sink import Hdf5Sink
from shardload.formats.hdf5.source import Hdf5Source
from shardload.formats.hdf5.tiles import Names, PartMetadata, version_of
from shardload.formats.sink import ArraySpec
from shardload.planning.region import Region
from shardload.storage.local import Fence

Blocks = Iterable[tuple[Region, np.ndarray[Any, Any]]]


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """Where one part of a virtual dataset is.

    Attributes
    ----------
    path : str
        Its file: absolute, or as seen from the folder of the new file.
    dataset : str
        Its full name in that file.
    region : Region
        The elements of the virtual dataset that it holds. They are all of the part.
    shape : tuple of int
        The shape of the part, which may lack axes of one element.
    """

    path: str
    dataset: str
    region: Region
    shape: tuple[int, ...]


class JoinedFile(Hdf5Sink):
    """A new file whose arrays, or some of them, lie in other files.

    Parameters
    ----------
    path, specs
        As for `Hdf5Sink`. An array of `specs` that lies in other files has no chunks here.
    parts : mapping of str to sequence of PlacedPart
        The parts of each array that lies in other files. Together they hold each of its elements once.
    **options
        The other arguments of `Hdf5Sink`.
    """

    def __init__(
        self,
        path: str,
        specs: Mapping[str, ArraySpec],
        parts: Mapping[str, Sequence[PlacedPart]],
        **options: Any,
    ) -> None:
        self._parts = parts
        super().__init__(path, specs, **options)

    def write(self, values: Mapping[str, Blocks], check: Callable[[], None] = lambda: None) -> None:
        """Write the file. `values` are those of the arrays that lie in it; `check` is called before it gets its name.

        Raises
        ------
        ConfigError, SourceError
            If the name is taken, the file cannot be written, or a part is not found where it was said to be. What had the name
            before is as it was.
        """
        with self.create():
            self.chunks.clear()  # HDF5 itself writes all values
            with self.calls():
                self._put(self.library, values)
            self.finish()
            temporary = self.ticket.temporary
            with contextlib.closing(OpenFacts(open_to_read(temporary))) as facts:
                self._check(facts, os.path.dirname(temporary), Fence(), Access(allow_external=True))
            check()
            self.commit()

    def image(self, values: Mapping[str, Blocks], fence: Fence, in_store: Mapping[Names, PartMetadata]) -> bytes:
        """The bytes of the file, which is nowhere on disk. Paths of parts are absolute, in a fence, or URLs of which `in_store`
        has all names. Raises as `write` does.
        """
        with file_in_memory(track_order=self.is_netcdf or None) as file:
            self.describe(file)
            self._put(file, values)
            image = image_of(file)
        with contextlib.closing(OpenFacts.of_image(image, in_store)) as facts:
            self._check(facts, "/", fence, STRICT)  # as a load will look, so that it need not look again
        return image

    def _put(self, file: h5py.File, values: Mapping[str, Blocks]) -> None:
        for name, blocks in values.items():
            dataset = file[self.stored_names[name]]
            for region, block in blocks:
                dataset[region.slices() if region.ndim else ()] = block

    def _make(self, group: h5py.Group, last: str, name: str, array: Hdf5Encoder, is_trial: bool) -> None:
        parts, spec = self._parts.get(name), array.spec
        if parts is None:
            super()._make(group, last, name, array, is_trial)
            return
        space = h5py.h5s.create_simple(spec.shape)
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        let_list_grow(creation, name, spec)
        if spec.fill_value is not None:
            creation.set_fill_value(np.asarray(spec.fill_value, spec.dtype))
        for part in parts:
            if not part.region.size:
                continue
            space.select_hyperslab(part.region.start, (1,) * part.region.ndim, block=part.region.shape)
            part_space = h5py.h5s.create_simple(part.shape)
            creation.set_virtual(space, _escaped(os.fsencode(part.path)), _escaped(encoded(part.dataset)), part_space)
        space.select_all()
        h5py.h5d.create(group.id, last.encode(), array.kind, space, creation)

    def _check(self, facts: OpenFacts, folder: str, fence: Fence, access: Access) -> None:
        """Raise SourceError if a load would not find the parts of an array; ConfigError if the file would be one of them."""
        real_of = functools.cache(os.path.realpath)
        for name, parts in self._parts.items():
            dataset = facts.dataset(facts.file[self.stored_names[name]].id)
            others = look_through(dataset, fence, access)
            if others.refused is not None:
                raise SourceError(f"'{name}' in '{self.path}' would hold {others.refused}", path=self.path, dataset=name)
            if real_of(self.path) in map(real_of, others.versions):
                raise ConfigError(
                    f"'{self.path}' is the new file, and the parts of '{name}' lead to it: it would consist of itself. "
                    "Choose another name"
                )
            for part in parts:
                place = part.path if "://" in part.path else real_of(os.path.join(folder, part.path))
                metadata = others.metadata.get((place, part.dataset))
                if part.region.size and (metadata is None or metadata.shape != part.shape):
                    raise SourceError(
                        f"'{name}' in '{self.path}' cannot be made: its part '{part.path}', of shape {part.shape}, is not "
                        "where it was looked for: unset HDF5_VDS_PREFIX",
                        path=self.path,
                        dataset=name,
                    )


def part_in_store(file: OpenFile, url: str, info: ArrayInfo) -> PartMetadata:
    """What is known of an array of an open file at a URL. `info` is what other ranks must know to open it."""
    with contextlib.closing(file.open(info.dataset)) as source:
        dataset, version = cast(Hdf5Source, source).dataset, source.state() or (0, 0)
        return replace(PartMetadata.of(dataset, version_of({url: version})), info=info)


def _escaped(name: bytes) -> bytes:
    """A name as HDF5 takes it in a virtual dataset, where a percent sign begins the number of a block."""
    return name.replace(b"%", b"%%")
