"""What are the objects of an HDF5 file called? An object has as many names as hard links lead to it; HDF5 tells of one.

Names are bytes to HDF5: mostly UTF-8, and text here.
"""

from __future__ import annotations

from typing import Any

import h5py

_ERRORS = (KeyError, OSError, RuntimeError, ValueError)


def encoded(name: str) -> bytes:
    """The name of an object as HDF5 stores it: UTF-8, whatever the locale's encoding, in which names of files are."""
    return name.encode("utf-8", "surrogateescape")


def decoded(name: str | bytes) -> str:
    """The inverse of `encoded`. h5py gives bytes for names that are not UTF-8, and text for others."""
    return name if isinstance(name, str) else name.decode("utf-8", "surrogateescape")


def names_below(group: h5py.Group, most: int | None = None) -> tuple[list[str], dict[str, str]]:
    """The names of all objects below a group to which hard links alone lead, in HDF5's order; and those of groups that HDF5
    cannot read, with the reason. What is in a group has one name, however many the group has. With `most`, each object has one
    name, and no more links than `most` are read.

    Raises
    ------
    RuntimeError
        If HDF5 cannot read `group` itself.
    """
    links, lost = _links_below(group, most)
    if most is None:
        return [name for name, _ in links], lost
    first: dict[int, str] = {}
    for name, address in links:
        first.setdefault(address, name)
    return list(first.values()), lost


def places_in(file: h5py.File) -> dict[int, list[str]]:
    """The full names of each object of a file, by its address. HDF5 would search the whole file for each single one."""
    places: dict[int, list[str]] = {}
    for name, address in _links_below(file["/"], None)[0]:
        places.setdefault(address, []).append(f"/{name}")
    return places


def _links_below(group: h5py.Group, most: int | None) -> tuple[list[tuple[str, int]], dict[str, str]]:
    """Hard links below a group, each with the address of its object; and groups that HDF5 cannot read, with the reason.

    Not by HDF5's own visit: one object that it cannot read ends that, also one whose index of chunks is damaged.
    """
    links: list[tuple[str, int]] = []
    lost: dict[str, str] = {}
    groups = {int(h5py.h5o.get_info(group.id).addr)}
    todo = [("", iter(_links_in(group.id)))]
    while todo and (most is None or len(links) < most):
        name, address = next(todo[-1][1], ("", 0))
        if not name:
            todo.pop()
            continue
        name = f"{todo[-1][0]}{name}"
        links.append((name, address))
        if address in groups:
            continue
        try:
            opened = h5py.h5o.open(group.id, encoded(name))
        except _ERRORS:  # who opens it is told
            continue
        if isinstance(opened, h5py.h5g.GroupID):
            groups.add(address)
            try:
                todo.append((f"{name}/", iter(_links_in(opened))))
            except _ERRORS as error:
                lost[name] = str(error)
    return links, lost


def _links_in(group: h5py.h5g.GroupID) -> list[tuple[str, int]]:
    """The hard links in a group."""
    links: list[tuple[str, int]] = []

    def keep(name: bytes, link: Any) -> None:  # h5py hands the same `link` in for the next one
        if link.type == h5py.h5l.TYPE_HARD:
            links.append((decoded(name), int(link.u)))

    group.links.iterate(keep, info=True)
    return links
