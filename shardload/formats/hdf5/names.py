"""What are the objects of an HDF5 file called? An object has as many names as hard links lead to it; HDF5 tells of one.

Names are bytes to HDF5: mostly UTF-8, and text here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import h5py

__all__ = ["decoded", "encoded", "names_below", "places_in"]

_MOST_TWINS = 1 << 17  # names below groups that have more than one: a few links can make any number of them
_ERRORS = (KeyError, OSError, RuntimeError, ValueError)


def encoded(name: str) -> bytes:
    """The name of an object as HDF5 stores it: UTF-8, whatever the locale's encoding, in which names of files are."""
    return name.encode("utf-8", "surrogateescape")


def decoded(name: str | bytes) -> str:
    """The inverse of `encoded`. h5py gives bytes for names that are not UTF-8, and text for others."""
    return name if isinstance(name, str) else name.decode("utf-8", "surrogateescape")


def names_below(group: h5py.Group, most: int | None = None) -> tuple[list[str], dict[str, str]]:
    """The names of all objects below a group to which hard links alone lead, in HDF5's order; and those of groups that HDF5
    cannot read, with the reason. With `most`, each object has one name, and no more links than `most` are read.

    Raises
    ------
    RuntimeError
        If HDF5 cannot read `group` itself, or groups have too many names.
    """
    found, lost = _links_below(group, most)
    if most is not None:
        one_of_each: dict[int, str] = {}
        for name, address in found:
            one_of_each.setdefault(address, name)
        return list(one_of_each.values()), lost
    return _with_twins(found, int(h5py.h5o.get_info(group.id).addr)), lost


def places_in(file: h5py.File) -> dict[int, list[str]]:
    """The full names of each object of a file, by its address. HDF5 would search the whole file for each single one."""
    places: dict[int, list[str]] = {}
    for name, address in _links_below(file["/"], None)[0]:
        places.setdefault(address, []).append(f"/{name}")
    return places


def _with_twins(found: list[tuple[str, int]], own: int) -> list[str]:
    """The names of all links, also below a group's second name. HDF5 goes through each group once.

    Examples
    --------
    >>> _with_twins([("a", 1), ("a/x", 2), ("a/up", 0), ("b", 1), ("y", 2)], own=0)
    ['a', 'a/x', 'a/up', 'b', 'b/x', 'b/up', 'y']
    """
    inside: dict[int, list[tuple[str, int]]] = {own: []}
    at = {"": own}
    for name, address in found:
        above, _, last = name.rpartition("/")
        inside.setdefault(at[above], []).append((last, address))
        at[name] = address
    n_names = Counter(address for _, address in found)
    if not any(n_names[address] > 1 for address in inside):
        return [name for name, _ in found]
    names: list[str] = []
    todo = [("", own, iter(inside[own]))]
    while todo:
        above, _, left = todo[-1]
        last, address = next(left, ("", own))
        if not last:
            todo.pop()
            continue
        names.append(f"{above}{last}")
        if len(names) > len(found) + _MOST_TWINS:
            raise RuntimeError(f"links to groups make more than {_MOST_TWINS} names of the same objects")
        if address in inside and all(address != one for _, one, _ in todo):  # else it leads back to where it is
            todo.append((f"{names[-1]}/", address, iter(inside[address])))
    return names


def _links_below(group: h5py.Group, most: int | None) -> tuple[list[tuple[str, int]], dict[str, str]]:
    """Hard links below a group, each with the address of its object; and groups that HDF5 cannot read, with the reason."""
    found: list[tuple[str, int]] = []

    def keep(name: bytes, link: Any) -> bool | None:  # h5py hands the same `link` in for the next one
        if link.type == h5py.h5l.TYPE_HARD:
            found.append((decoded(name), int(link.u)))
        return True if most is not None and len(found) >= most else None

    try:
        group.id.links.visit(keep, info=True)
        return found, {}
    except _ERRORS:  # one object that HDF5 cannot read ends the visit, also one whose index of chunks is damaged
        return _readable(group, most)


def _readable(group: h5py.Group, most: int | None) -> tuple[list[tuple[str, int]], dict[str, str]]:
    found: list[tuple[str, int]] = []
    lost: dict[str, str] = {}
    todo, seen = [""], {int(h5py.h5o.get_info(group.id).addr)}
    for above in todo:  # grows
        inside: list[tuple[str, int]] = []

        def keep(name: bytes, link: Any, inside: list[tuple[str, int]] = inside) -> None:
            if link.type == h5py.h5l.TYPE_HARD:
                inside.append((decoded(name), int(link.u)))

        try:
            opened = h5py.h5g.open(group.id, encoded(above) or b".")  # which its `links` do not hold open
            opened.links.iterate(keep, info=True)
        except _ERRORS as error:
            if not above:
                raise
            lost[above] = str(error)
        for last, address in inside:
            if most is not None and len(found) >= most:
                break
            name = f"{above}/{last}".lstrip("/")
            found.append((name, address))
            if address in seen:
                continue
            seen.add(address)
            try:
                if isinstance(h5py.h5o.open(group.id, encoded(name)), h5py.h5g.GroupID):
                    todo.append(name)
            except _ERRORS:
                pass  # who opens it is told
    return sorted(found), lost
