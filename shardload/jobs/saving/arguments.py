"""What shall be saved? From what a caller of `save` wrote to one `ToSave` for each array, checked.

1. A tree of arrays becomes arrays by their names in the file: nested dicts are groups, and a bare array has one name.
2. What belongs to single arrays (chunks, compression, names of axes, attributes, shape) is one value for all, or a dict by
   name.
3. `describe` writes everything down as text, so that the ranks can compare it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from numbers import Number
from typing import Any, Self

import jax
import numpy as np

from shardload.arrays.padding import Extent, extent_of, is_known, padded_like, was_decoded
from shardload.arrays.sharding import describe_sharding
from shardload.errors import ConfigError
from shardload.formats.contract.array import some
from shardload.formats.contract.dtypes import dtype_text, refusal
from shardload.formats.saving import SUFFIXES, format_for
from shardload.formats.sink import Compression
from shardload.formats.target import MODES
from shardload.jobs.loading.plan import Plan
from shardload.jobs.loading.tree_plan import TreePlan
from shardload.jobs.saving.labelled import is_labelled, of_xarray, refuse_halo
from shardload.options import AUTO, OPTIONS, Options, options_of
from shardload.units import shown
from shardload.values.dates import is_dates

__all__ = ["SaveArguments", "ToSave"]

_BYTE_ORDERS = {None: "=", "little": "<", "big": ">"}


@dataclass(frozen=True, eq=False)
class ToSave:
    """One array, as it shall be saved.

    Attributes
    ----------
    name : str
        Its full name in the file.
    x : object
        The array: a jax.Array, a NumPy array that every rank has, or, to plan only, a jax.ShapeDtypeStruct.
    shape : tuple of int
        Without padding.
    dtype : dtype
        In the byte order of the file.
    chunks : tuple of int, ``"auto"`` or None
        None: in one piece.
    shards, compression, dims, attrs, checksum
        As in `ArraySpec`; ``_FillValue`` is one of the attributes.
    unlimited : tuple of str or int
        Axes that can grow: names or numbers.
    is_decoded : bool or None
        Whether the load of a packed array decoded it; None if nothing says so.
    is_told : bool
        Whether a load, a plan or the caller says which of its elements are padding.
    """

    name: str
    x: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: Any
    shards: tuple[int, ...] | None
    compression: Compression | None
    dims: tuple[str | None, ...] | None
    attrs: Mapping[str, Any]
    checksum: bool = False
    unlimited: tuple[str | int, ...] = ()
    is_decoded: bool | None = None
    is_told: bool = True

    @property
    def is_everywhere(self) -> bool:
        """True if each process has an array of its own, which must be the same."""
        return not isinstance(getattr(self.x, "sharding", None), jax.sharding.NamedSharding)

    def describe(self) -> dict[str, str]:
        """What must be the same on all ranks, as text."""
        sharding = "on each process" if self.is_everywhere else describe_sharding(self.x.sharding)
        return {
            "shape": f"{self.x.shape} of which {self.shape}",
            "dtype": dtype_text(self.dtype),
            "sharding": sharding,
            "chunks": repr(self.chunks),
            "shards": repr(self.shards),
            "compression": repr(self.compression),
            "dims": repr(self.dims),
            "unlimited": repr(self.unlimited),
            "attrs": _text_of(self.attrs),
            "decode": repr(self.is_decoded),
        }


@dataclass
class SaveArguments:
    """The arguments of one call.

    Attributes
    ----------
    path, format, mode : str
        Where to, in which format (one of `formats.saving.FORMATS`), and whether the name may exist.
    arrays : list of ToSave
        The arrays, in the order of the file.
    attrs : mapping
        Attributes of the file.
    options : Options
        ``verify``, ``staging``, ``timeout``, ``progress``.
    like : mapping of str to str
        Existing arrays after which new ones are stored, by the names of these.
    packed : frozenset of str
        The arrays of which the caller said how they are compressed.
    left_out : str
        What the arrays in `like` have and the new file will not have, in words for a warning.
    group_attrs : mapping
        Attributes of groups, by their full names.
    """

    path: str
    format: str
    mode: str
    arrays: list[ToSave]
    attrs: Mapping[str, Any]
    options: Options
    like: Mapping[str, str] = field(default_factory=dict)
    packed: frozenset[str] = frozenset()
    left_out: str = ""
    group_attrs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Any, tree: Any, given: Mapping[str, Any], call: str = "save") -> SaveArguments:
        """The checked arguments. `given` are the keywords; ConfigError says which is wrong."""
        kept = {name: given[name] for name in options_of(call, given) if name in _CHECKED}
        options = Options.check(**kept)
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise ConfigError(
                f"path is {shown(path)}; expected the name of the new file, such as 'out.h5' or 'out.zarr', before the arrays"
            )
        name = os.path.expanduser(os.fspath(path))  # as loads do
        if not isinstance(name, str):
            raise ConfigError(f"path is {path!r}; expected text, such as 'out.h5'")
        if "\0" in name:
            raise ConfigError(f"path is {path!r}; no file can have a name with the character \\0")
        mode = given["mode"]
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}; expected 'w-' (the name must not exist) or 'w' (it is replaced)")
        _check_path(name)
        kind = format_for(name, given["format"])
        if given["shape"] is not None and given["plan"] is not None:
            raise ConfigError("both shape and plan are given; pass one of them")
        own = of_xarray(tree, given, kind) if is_labelled(tree) else None
        if own is not None:
            tree, given = own.arrays, own.given
        leaves, is_single = _arrays_of(tree, given["dataset"])
        leaves = {name: _unmasked(name, x) if isinstance(x, np.ndarray) else x for name, x in leaves.items()}
        arrays, attrs, of_groups = _spread(leaves, is_single, given)
        if own is not None:
            arrays = [
                replace(
                    one, dims=own.dims[one.name] if one.dims is None else one.dims, attrs=own.attrs[one.name] | dict(one.attrs)
                )
                for one in arrays
            ]
            attrs = dict(own.of_file) | dict(attrs)
        packed = _by_name(list(leaves), "compression", given["compression"], None)
        like = {key: text for key, text in _by_name(list(leaves), "like", given["like"], None).items() if text is not None}
        for key, text in like.items():
            if not isinstance(text, (str, os.PathLike)) or not os.fspath(text):
                raise ConfigError(f"like of '{key}' is {text!r}; expected an array in a file, such as 'in.h5:/rho'")
        like = {key: str(os.fspath(text)) for key, text in like.items()}
        of_caller = frozenset(key for key, one in packed.items() if one is not None)
        return cls(name, kind, mode, arrays, attrs, options, like, of_caller, group_attrs=of_groups)

    @property
    def names(self) -> list[str]:
        """The names of the arrays, in their order."""
        return [one.name for one in self.arrays]

    def in_order_of(self, names: Sequence[str]) -> Self:
        """The same arguments, with the arrays in the order of their names in a list."""
        places = {name: k for k, name in enumerate(names)}
        return replace(self, arrays=sorted(self.arrays, key=lambda one: places.get(one.name, len(places))))

    def describe(self) -> dict[str, str]:
        """What must be the same on all ranks, as text."""
        told = self.options.describe()
        return {
            "path": repr(self.path),
            "format": self.format,
            "mode": self.mode,
            "like": _text_of(self.like),
            **{name: told[name] for name in _CHECKED if name in told},
            "attrs of the file": _text_of(self.attrs),
            "attrs of groups": _text_of(self.group_attrs),
        }

    def padding_warning(self) -> str:
        """The text of a warning, if an array may have padding or halos of which nobody has told; else none.

        It goes by all arrays that this rank has loaded so far: one rank asks, for all.
        """
        found: dict[str, tuple[tuple[int, ...], Extent]] = {}
        for one in self.arrays:
            if not one.is_told and not one.is_everywhere and isinstance(one.x, jax.Array):
                like = padded_like(one.x)
                if like is not None:
                    found[one.name.lstrip("/")] = one.x.shape, like
        return _padding_warning(found) if found else ""


def _padding_warning(found: Mapping[str, tuple[tuple[int, ...], Extent]]) -> str:
    """What to pass for arrays of these shapes, which are as long as those with these extents."""
    whole, own = {name: shape for name, (shape, _) in found.items()}, {}
    for name, (shape, like) in found.items():
        lengths = zip(shape, like.shape, like.shape_global)  # noqa: B905 (it may have other axes behind these)
        own[name] = (*(n if n != held else here for here, n, held in lengths), *shape[len(like.shape) :])
    likes = [like for _, like in found.values()]
    what, fix = "padding", f"shape={_short(own)}"
    if any(any(like.halo) for like in likes):
        what, fix = "halos", "shardload.unpad(x, plan) in its place, with the plan that loaded that array"
    names = [f"{name!r} {shape}" for name, shape in whole.items()]  # as text that is printed, and sent
    return (
        f"saved with the whole shape: {some(names)}. A loaded array was as long, but only with its {what}: without, its shape "
        f"is {likes[0].shape}. If what is saved was computed from it, pass {fix}; if not, shape={_short(whole)}"
    )


def _short(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A dict of shapes as text, of which the first few show what is meant."""
    told = [f"{name!r}: {shape}" for name, shape in list(shapes.items())[:_MOST_SHAPES]]
    return f"{{{', '.join(told + ['...'] * (len(shapes) > _MOST_SHAPES))}}}"


_MOST_SHAPES = 8
_CHECKED = ("verify", "staging", "timeout", "progress")


def _check_path(path: str) -> None:
    """A load takes FILE:/NAME, and FILE:NAME; a file that is called so would be found by nobody."""
    file, colon, name = path.rpartition(":")
    if colon and file.lower().endswith(SUFFIXES) and not name.lower().endswith(SUFFIXES):
        name = name.strip("/") or "rho"
        raise ConfigError(
            f"path is '{path}'; expected the name of a file alone. Pass '{file}', and the array's name in the file as a key: "
            f"{{'{name}': x}}, or as dataset='{name}'"
        )


def _arrays_of(tree: Any, dataset: Any) -> tuple[dict[str, Any], bool]:
    """Arrays by their full names, and whether it is one array alone."""
    if not isinstance(tree, Mapping):
        if isinstance(tree, (list, tuple)):
            raise ConfigError(
                f"a {type(tree).__name__} of arrays has no names; expected a jax.Array, or a dict of them by their names in "
                "the file, such as {'rho': rho, 'g/vel': vel}"
            )
        if not isinstance(dataset, str) or (not dataset.strip("/") and dataset != "/"):
            raise ConfigError(f"dataset is {dataset!r}; expected the array's name in the file, such as 'rho' or 'group/rho'")
        return {"/" + dataset.strip("/"): tree}, True
    if dataset != OPTIONS["dataset"].default_in("save"):
        raise ConfigError(
            f"dataset is {dataset!r}, the name of an array that is passed by itself, but these have names of their own. "
            "Leave it out; a dict in the dict is a group: {'group': {'rho': rho}}"
        )
    found: dict[str, Any] = {}
    _walk(tree, "", found)
    if not found:
        raise ConfigError("there are no arrays to save: the dict is empty")
    return found, False


def _walk(tree: Mapping[Any, Any], above: str, found: dict[str, Any]) -> None:
    for key, value in tree.items():
        if not isinstance(key, str) or not key.strip("/"):
            raise ConfigError(f"a key is {key!r}; expected an array's name in the file, such as 'rho' or 'group/rho'")
        name = f"{above}/{key.strip('/')}"
        if isinstance(value, Mapping):
            _walk(value, name, found)
        elif name in found:
            raise ConfigError(f"two arrays are called '{name}'. Rename one of them")
        else:
            found[name] = value


def _spread(
    leaves: dict[str, Any], is_single: bool, given: Mapping[str, Any]
) -> tuple[list[ToSave], Mapping[str, Any], dict[str, Mapping[str, Any]]]:
    """Each array with what is its own, the attributes of the file, and those of its groups."""
    names = list(leaves)
    for name, x in leaves.items():
        if not ("dim" in given and is_dates(x)):  # appended dates become numbers by the units of the file
            _check_array(name, x)
    chunks = _by_name(names, "chunks", given["chunks"], AUTO)
    shards = _by_name(names, "shards", given["shards"], None)
    compression = _by_name(names, "compression", given["compression"], None)
    dims = _by_name(names, "dims", given["dims"], None)
    unlimited = _by_name(names, "unlimited", given["unlimited"], None)
    order = _by_name(names, "byteorder", given["byteorder"], None)
    attrs, of_file, of_groups = _attrs(names, is_single, given["attrs"])
    loaded = _loaded(leaves, is_single, given["shape"], given["plan"])
    asks_if_decoded = given["like"] is not None or "dim" in given  # the other array, or what is appended to, may be packed
    made = []
    for name, x in leaves.items():
        if order[name] not in _BYTE_ORDERS:
            raise ConfigError(f"byteorder of '{name}' is {order[name]!r}; expected 'little', 'big' or None (the machine's)")
        made.append(
            ToSave(
                name=name,
                x=x,
                shape=loaded[name][0],
                dtype=np.dtype(x.dtype).newbyteorder(_BYTE_ORDERS[order[name]]),
                chunks=_sizes("chunks", name, chunks[name], (AUTO, None)),
                shards=_sizes("shards", name, shards[name], (None,)),
                compression=_compression(name, compression[name]),
                dims=_names("dims", name, dims[name]),
                attrs=attrs[name],
                unlimited=_axes(name, unlimited[name]),
                is_decoded=loaded[name][1] if asks_if_decoded else None,
                is_told=loaded[name][2],
            )
        )
    return made, of_file, of_groups


def _unmasked(name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A NumPy array without what a subclass adds. netCDF4-python gives masked arrays, mostly with nothing masked."""
    if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
        raise ConfigError(
            f"'{name}' has masked elements, and files have none. Save x.filled(VALUE), with attrs={{'_FillValue': VALUE}}"
        )
    return np.asarray(x)


def _check_array(name: str, x: Any) -> None:
    if isinstance(x, jax.core.Tracer):
        raise ConfigError(f"'{name}' is traced: it has no values yet. Call save outside of jax.jit")
    if not isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        fix = ""
        if isinstance(x, (list, tuple)) and any(isinstance(one, (jax.Array, np.ndarray)) for one in x):
            fix = f". Its arrays need names: {{'{name.strip('/')}/0': ..., '{name.strip('/')}/1': ...}}"
        elif isinstance(x, (Number, np.generic, list, tuple, range)):
            fix = ". Pass numpy.asarray of it"
        elif hasattr(x, "dims") and hasattr(x, "attrs"):  # of xarray
            fix = ". Pass its values, x.data, with dims= and attrs=; or one xarray.Dataset in place of the dict"
        raise ConfigError(
            f"'{name}' is a {type(x).__name__}; expected a jax.Array (or a NumPy array that is the same on every rank){fix}"
        )
    if isinstance(x, jax.Array) and x.is_deleted():
        raise ConfigError(f"'{name}' was deleted (donated to a jitted function?), so it has no values. Save it before that")
    try:
        kind = np.dtype(x.dtype)
    except TypeError:
        raise ConfigError(f"'{name}' is {x.dtype}, which no file holds. Save its numbers: jax.random.key_data(x)") from None
    if kind.kind in "mM":
        raise ConfigError(
            f"'{name}' holds {'dates' if kind.kind == 'M' else 'time spans'} ({kind}), which cannot be saved. Save numbers, "
            "such as (x - np.datetime64('2000-01-01')) / np.timedelta64(1, 'h'), with attrs={'units': 'hours since 2000-01-01'}"
        )
    why = refusal(kind)
    if why is not None:
        raise ConfigError(f"'{name}' holds {why}, which cannot be saved")
    sharding = getattr(x, "sharding", None)
    if isinstance(x, jax.ShapeDtypeStruct) and sharding is not None:
        try:
            sharding.shard_shape(x.shape)
        except ValueError as error:
            raise ConfigError(f"'{name}' can be no jax.Array: {error}. Pad it, and pass shape=") from None
    if sharding is not None and not isinstance(sharding, jax.sharding.NamedSharding) and not sharding.is_fully_addressable:
        raise ConfigError(
            f"'{name}' has a {type(sharding).__name__} over several processes; expected a NamedSharding. Pass "
            "jax.device_put(x, NamedSharding(mesh, P(...)))"
        )


def _by_name(names: list[str], option: str, given: Any, default: Any) -> dict[str, Any]:
    """A value for each array: one for all, or a dict by name."""
    if isinstance(given, Mapping):
        known = _flat(names, option, given)
        if option != "compression" or set(known) <= set(names):
            _check_names(names, option, known)
            return {name: known.get(name, default) for name in names}
    return dict.fromkeys(names, given)


def _flat(names: list[str], option: str, given: Mapping[Any, Any]) -> dict[str, Any]:
    """A dict by name without its levels: dicts may be nested as the arrays are."""
    found: dict[str, Any] = {}

    def walk(part: Mapping[Any, Any], above: str) -> None:
        for key, value in part.items():
            name = f"{above}/{str(key).strip('/')}"
            if isinstance(value, Mapping) and _is_above(names, name):
                walk(value, name)
            else:
                _put(found, option, name, value)

    walk(given, "")
    return found


def _put(found: dict[str, Any], option: str, name: str, value: Any) -> None:
    """Note what is given for a name. ConfigError if something else was: it would be lost."""
    if name in found:
        raise ConfigError(f"{option} names '{name}' twice: a name may have slashes at its ends, or be nested. Give it once")
    found[name] = value


def _is_above(names: list[str], name: str) -> bool:
    """True if this is a group that has arrays."""
    return name not in names and any(other.startswith(f"{name}/") for other in names)


def _check_names(names: list[str], option: str, known: Mapping[str, Any]) -> None:
    unknown = [key for key in known if key not in names]
    if unknown:
        some = ", ".join(f"'{name.lstrip('/')}'" for name in names[:8])
        raise ConfigError(f"{option} names '{unknown[0].lstrip('/')}', which is not saved; expected some of {some}")


def _attrs(
    names: list[str], is_single: bool, given: Any
) -> tuple[dict[str, Mapping[str, Any]], Mapping[str, Any], dict[str, Mapping[str, Any]]]:
    """Attributes of each array, those of the file, and those of groups."""
    if given is None:
        return {name: {} for name in names}, {}, {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"attrs is {given!r}; expected a dict, such as {{'units': 'kg/m3'}}")
    if is_single:
        _check_each(names[0], given)
        return {names[0]: dict(given)}, {}, {}
    known: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    _part(names, given, "", known, groups)
    of_file = groups.pop("/", {})
    try:
        _check_names(names, "attrs", known)
    except ConfigError as error:
        unknown = next(name for name in known if name not in names).lstrip("/")
        raise ConfigError(
            f"{error}, '/' for the attributes of the file, or a group with / behind its name: "
            f"attrs={{'{names[0].lstrip('/')}': {{'units': 'kg'}}, '{unknown}/': {{'step': 3}}}}"
        ) from None
    for name, one in {**known, **groups, "/": of_file}.items():
        if not isinstance(one, Mapping):
            raise ConfigError(f"attrs of '{name}' are {one!r}; expected a dict, such as {{'units': 'kg/m3'}}")
        _check_each(name, one)
    return {name: dict(known.get(name, {})) for name in names}, dict(of_file), {name: dict(one) for name, one in groups.items()}


def _part(names: list[str], given: Mapping[Any, Any], above: str, known: dict[str, Any], groups: dict[str, Any]) -> None:
    """Attributes of arrays, and those of groups, by full names: dicts may be nested as the arrays are."""
    for key, one in given.items():
        name = f"{above}/{str(key).strip('/')}".rstrip("/") or "/"
        if name in names or not (str(key).endswith("/") or _is_above(names, name)):
            _put(known, "attrs", name, one)
        elif name == "/" or not isinstance(one, Mapping):
            _put(groups, "attrs", name, one)
        else:  # no attribute is a dict
            own = {sub: value for sub, value in one.items() if not isinstance(value, Mapping)}
            if own or str(key).endswith("/"):  # "g/" may have the attributes, and "g" those of the arrays in it
                _put(groups, "attrs", name, own)
            _part(names, {sub: value for sub, value in one.items() if isinstance(value, Mapping)}, name, known, groups)


def _check_each(name: str, attrs: Mapping[Any, Any]) -> None:
    """ConfigError for an attribute without a name (JSON would make one text of 3 and "3", and of a tuple none) or a value."""
    for key, value in attrs.items():
        if not isinstance(key, str) or not key:
            raise ConfigError(f"an attribute of '{name}' is called {key!r}; expected text, such as 'units'")
        if any(isinstance(one, jax.core.Tracer) for one in (value if isinstance(value, list | tuple) else [value])):
            raise ConfigError(f"the attribute {key!r} of '{name}' is traced: it has no value yet. Call save outside of jax.jit")


def _sizes(option: str, name: str, given: Any, words: tuple[Any, ...]) -> Any:
    if given is None or isinstance(given, str):
        if given not in words:
            expected = " or ".join(map(repr, words))
            raise ConfigError(
                f"{option} of '{name}' is {given!r}; expected a size for each axis, such as (64, 64, 64), or {expected}"
            )
        return given
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        given = (given,)
    is_sizes = isinstance(given, (tuple, list)) and all(
        isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in given
    )
    if not is_sizes:
        raise ConfigError(f"{option} of '{name}' is {given!r}; expected a size for each axis, such as (64, 64, 64)")
    return tuple(int(n) for n in given)


def _compression(name: str, given: Any) -> Compression | None:
    try:
        return Compression.of(given)
    except ConfigError as error:
        if isinstance(given, Mapping) and "name" not in given:  # perhaps a dict by name, with a name that is not saved
            raise ConfigError(f"{error}; or a dict by the names of arrays: {{'{name.lstrip('/')}': 'gzip'}}") from None
        raise


def _names(option: str, name: str, given: Any) -> tuple[str | None, ...] | None:
    if given is None:
        return None
    given = (given,) if isinstance(given, str) else given
    if not isinstance(given, (tuple, list)) or not all(one is None or isinstance(one, str) for one in given):
        raise ConfigError(f"{option} of '{name}' is {given!r}; expected a name for each axis, such as ('z', 'y', 'x')")
    return tuple(given)


def _axes(name: str, given: Any) -> tuple[str | int, ...]:
    """Names and numbers of axes; those of arrays that have no such axis are looked for later (`plan`)."""
    if given is None:
        return ()
    given = given if isinstance(given, (tuple, list)) else (given,)
    if not all(isinstance(one, (str, int, np.integer)) and not isinstance(one, bool) for one in given):
        raise ConfigError(
            f"unlimited of '{name}' is {given!r}; expected an axis that can grow, by its name or number: 'time' or 0"
        )
    return tuple(one if isinstance(one, str) else int(one) for one in given)


def _loaded(
    leaves: dict[str, Any], is_single: bool, shape: Any, plan: Any
) -> dict[str, tuple[tuple[int, ...], bool | None, bool]]:
    """What is known of each array: the shape without padding, whether its load decoded it, and whether anything says that."""
    given: dict[str, Any] = {}
    if shape is not None:
        given = _by_name(list(leaves), "shape", shape, None)
    elif isinstance(plan, (Plan, Extent)):
        given = dict.fromkeys(leaves, plan)
    elif plan is not None:
        plans = plan.plans if isinstance(plan, TreePlan) else plan
        if not isinstance(plans, Mapping):
            raise ConfigError(
                f"plan is a {type(plan).__name__}; expected the Plan that loaded the array, or a dict of them by name"
            )
        found: dict[str, Any] = {}
        _walk(plans, "", found)
        try:
            _check_names(list(leaves), "plan", found)
        except ConfigError as error:
            name, loaded = next((one for one in leaves if one not in found), next(iter(leaves))), next(iter(found))
            raise ConfigError(
                f"{error}. Pass the Plan of what each array was loaded or computed from, by its name in the new file: "
                f"plan={{{name.lstrip('/')!r}: plan.plans[{loaded.lstrip('/')!r}]}}"
            ) from None
        given = found
    known = {}
    for name, x in leaves.items():
        one, is_decoded = given.get(name), was_decoded(x)
        if isinstance(one, Plan):
            # An array that was computed from stored numbers may have any values: only decoding tells.
            if is_decoded is None and one.is_decoded:
                is_decoded = True
            one = one.extent
        if one is None and not is_known(x):
            known[name] = tuple(x.shape), is_decoded, False
            continue
        extent = extent_of(x, one, f"'{name}'")
        refuse_halo(name, extent)
        known[name] = extent.shape, is_decoded, True
    return known


def _text_of(value: Any) -> str:
    """Attributes as text: equal for equal ones, whatever the order of their names."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{key!r}: {_text_of(one)}" for key, one in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_text_of, value)) + "]"
    if isinstance(value, (np.ndarray, np.generic)):
        one = np.asarray(value)
        data = one.tobytes() if one.dtype.kind != "O" else repr(one.tolist()).encode()
        return f"{one.dtype} {one.shape} {blake2b(data, digest_size=8).hexdigest()}"
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex)):
        return repr(value)
    return f"a {type(value).__name__}"  # its text may have an address, which differs from rank to rank
