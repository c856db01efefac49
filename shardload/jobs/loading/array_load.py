"""What is one array of a load, as all ranks know it? Its plan, its options, and the path or object that opens it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardload.arrays.verification import Verifier
from shardload.errors import printable
from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.format import Source
from shardload.formats.labels import OnDemand
from shardload.formats.lookup import absolute, open_source
from shardload.jobs.consistency import State, as_planned, contents_of, is_open
from shardload.jobs.loading.plan import LoadLayout, Plan
from shardload.jobs.trees import in_array, naming_errors
from shardload.options import CallOptions, Options

_UNNAMED = nullcontext()


@dataclass(frozen=True, eq=False)
class ArrayLoad:
    """One array of a job.

    Attributes
    ----------
    plan : Plan
        Its plan. Arrays of the same kind share its layouts.
    options : Options
        Its options.
    handle : object
        A path, an open array, or a source in memory (None on the ranks that do not have it).
    origin : object
        The path that opens the file, if `handle` is a source that has the values already.
    where : str
        Which array of a tree it is, for messages: ``"array ['gas']"``; empty if it is the only one.
    """

    plan: Plan
    options: Options
    handle: Any
    origin: Any = None
    where: str = ""

    @property
    def info(self) -> ArrayInfo:
        """Metadata of the array in its file."""
        return self.plan.info

    @property
    def name(self) -> str:
        """The array as messages name it."""
        return f"{self.where}, {self.info}" if self.where else str(self.info)

    @property
    def layout(self) -> LoadLayout:
        """How it lies in its file and over the ranks."""
        return self.plan._layout

    @property
    def is_open(self) -> bool:
        """True if the caller has the array open or in memory on every rank."""
        return is_open(self.handle)

    @property
    def named_in(self) -> State:
        """The state of the file in which a selection by names was looked up; None if there is no such selection."""
        labels = self.info.labels
        known = labels.brief if isinstance(labels, OnDemand) else labels  # read for a selection by names alone
        return None if known is None else known.read_in

    def named(self, error: BaseException) -> BaseException:
        """An error of this array, which names it if there are others."""
        return in_array(self.where, error, f"'{printable(self.info.dataset)}'")

    def naming_errors(self) -> AbstractContextManager[None]:
        """Let errors that are raised inside name this array."""
        return naming_errors(self.where, f"'{printable(self.info.dataset)}'") if self.where else _UNNAMED

    @property
    def is_here(self) -> bool:
        """True if every rank has all values in memory, as they are to be loaded: they came with the metadata."""
        return self.origin is not None and not self.layout.source.casts

    @property
    def read_in(self) -> State:
        """The state of the file in which values that are in memory already were read; None if that is not known."""
        return self.handle.read_in if self.origin is not None else None

    def with_staging(self, nbytes: int) -> ArrayLoad:
        """The same load under another staging cap."""
        if nbytes == self.options.staging_nbytes:
            return self
        plan = replace(self.plan, staging_nbytes=nbytes, staging_is_raised=True)
        return replace(self, plan=plan, options=replace(self.options, staging=nbytes))

    @property
    def anywhere(self) -> ArrayLoad:
        """The same load, whatever the working folder is when it is done."""
        return replace(self, handle=absolute(self.handle)) if isinstance(self.handle, (str, os.PathLike)) else self

    def contents(self) -> State:
        """A fingerprint of the open array, to compare with those of the other ranks."""
        source_layout = self.layout.source
        with closing(self.open_source(self.handle)) as source:
            chunks = source_layout.chunks if source_layout.has_chunks else None
            return contents_of(source, self.handle, source_layout.selection, chunks)

    def verifier(self, open_: Callable[[ArrayLoad, Any], Source], seed: int = 0) -> Verifier:
        """The verifier that compares an array with the file of this plan, which `open_` opens again."""
        layout = self.layout
        open_again = partial(open_, self, self.handle if self.origin is None else self.origin)
        return Verifier(self.name, layout.schedule, layout.source, layout.decoding, self.options, seed, open_again)

    def open_source(self, handle: Any, access: Access | None = None) -> Source:
        """Open the array by a path or object. Raises as `as_planned`."""
        return self.as_planned(open_source(handle, self.info.dataset, access or self.options.access, self.info))

    def as_planned(self, source: Source) -> Source:
        """Return `source` if its shape, dtype and chunks are the plan's; otherwise close it and raise SourceError."""
        return as_planned(source, self.info, is_decoded=self.layout.decoding is not None)


def options_of(loads: Sequence[ArrayLoad]) -> CallOptions:
    """The options of the call, which all its arrays have."""
    return loads[0].options
