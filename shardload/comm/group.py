"""Who takes part, and do they agree?

A `Group` is the ranks of one call. It owns a duplicate of the user's communicator (made once, kept on it as an MPI
attribute), so that nothing here can ever match a message of the user's. Its collectives carry small buffers, never pickles.

The one rule for errors: a rank that fails says so at the next `agree`, and there every rank raises the same error.

The one rule for calls: each begins with the same two messages (`begin`, `all_same`), which say what is called. Ranks that make
different calls, or the same calls in another order, meet there, before any other message could be taken for another call's.
A rank makes them for every call that it is asked for, also for one that it refuses, so that the ranks stay in step.

The only module that imports mpi4py. Without MPI a group is this process alone, and all is local; or, where JAX was started with
several processes, these: they agree through JAX's own coordination, and can send each other nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import blake2b
from typing import Any

import numpy as np

from shardload.comm.collectives import Collectives, JaxCollectives, MpiCollectives, duplicate, jax_processes
from shardload.comm.environment import mpi_is_off
from shardload.comm.error_codec import as_shardload, from_json, to_json
from shardload.comm.heartbeat import Departures, MpiOffice, leave_alone_at_exit, leave_at_exit
from shardload.comm.shared_memory import HANDLE_SIZE, Segment
from shardload.comm.topology import Machine, Node, pretended_ranks_per_node
from shardload.comm.tracebacks import share
from shardload.comm.watchdog import Watchdog
from shardload.errors import ConfigError, MissingChunksWarning, PeerError, ShardloadError, StallError
from shardload.system.interruption import let_interruption_pass

__all__ = ["Group", "Invocation", "Machine", "Node", "end_job", "group_of", "mpi_problem", "world"]

_HEAD_NBYTES = 4096
_TAGS = 1 << 15  # three tags per load, up to the 32767 that every MPI grants
_WATCH_TAG = _TAGS - 1  # which no load has


@cache
def _load_mpi() -> tuple[Any, str]:
    """mpi4py's MPI module, or None and why not. Importing it starts MPI, so it waits until somebody needs it."""
    if mpi_is_off(os.environ):
        return None, "SHARDLOAD_MPI=0 says to do without"
    try:
        from mpi4py import MPI
    except ImportError as error:
        return None, str(error)
    except RuntimeError as error:  # mpi4py's wheel finds no MPI library
        return None, str(error)
    return MPI, ""


def world() -> Any:
    """COMM_WORLD as an ``mpi4py.MPI.Comm``, or None where no MPI library can be loaded."""
    mpi, _ = _load_mpi()
    return None if mpi is None else mpi.COMM_WORLD


def mpi_problem() -> str:
    """Why MPI cannot be loaded; empty where it can."""
    return _load_mpi()[1]


def group_of(comm: Any = None, timeout: float | None = None) -> Group:
    """The group of a communicator (default: COMM_WORLD; without MPI: this process alone).

    Collective over `comm` the first time, free afterwards. StallError if not all come within `timeout` seconds.
    """
    mpi, _ = _load_mpi()
    if comm is None:
        comm = world()
    if comm is None:
        client, process, n_processes = jax_processes()
        with _keeping:
            return _without_mpi(client, process, n_processes) if n_processes > 1 else _alone()
    if mpi is None or not isinstance(comm, mpi.Comm):
        raise ConfigError(f"comm is {comm!r}; expected an mpi4py communicator such as MPI.COMM_WORLD")
    if comm == mpi.COMM_NULL:
        raise ConfigError("comm is COMM_NULL: this rank is not in it and should not call")
    if comm.Is_inter():
        raise ConfigError("comm is an intercommunicator; expected an ordinary one such as MPI.COMM_WORLD")
    with _keeping:
        kept: _Kept | None = comm.Get_attr(_keyval())
        if kept is None:
            kept = _Kept()
            comm.Set_attr(_keyval(), kept)
    with kept.making:  # of this communicator alone: to duplicate another one may take as long as its ranks need
        if kept.group is None or (isinstance(kept.group, Group) and kept.group.is_torn):
            try:
                made = Group(duplicate(comm, timeout))
                made.watch_departures()
                kept.group = made
            except StallError as error:
                kept.group = error
                leave_at_exit(mpi, timeout or 0.0)
        if isinstance(kept.group, StallError):
            raise StallError(str(kept.group))
        return kept.group


def end_job(seconds: float) -> None:
    """End all processes of the job, `seconds` from now. Not collective: whoever calls it ends everybody."""
    mpi, _ = _load_mpi()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        time.sleep(seconds)
        mpi.COMM_WORLD.Abort(1)


_keeping = threading.Lock()  # two threads may make their first calls at the same time


@dataclass(eq=False)
class _Kept:
    """What is kept on a communicator: its group, or why there can be none."""

    group: Group | StallError | None = None
    making: threading.Lock = field(default_factory=threading.Lock)


@cache
def _alone() -> Group:
    return Group(None)


_of_jax: dict[tuple[Any, int, int], list[Group]] = {}


def _without_mpi(client: Any, process: int, n_processes: int) -> Group:
    """The group of JAX's processes: another one, of another name, after one that an interruption has left."""
    made = _of_jax.setdefault((client, process, n_processes), [])
    if not made or made[-1].is_torn:
        group = Group(None, (client, process, n_processes), generation=len(made))
        group.watch_departures(f"processes{len(made) or ''}")
        made.append(group)
    return made[-1]


@cache
def _keyval() -> int:
    mpi, _ = _load_mpi()

    def free(_comm: Any, _keyval: int, kept: _Kept) -> None:
        if isinstance(kept.group, Group):
            kept.group.free()

    # No copy function: a duplicate that the user makes gets a group of its own.
    return mpi.Comm.Create_keyval(delete_fn=free)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Invocation:
    """What a rank is asked to do together with the others. All must be asked for the same.

    Attributes
    ----------
    kind : str
        The function that was called: ``"load"``, ``"execute"``. It decides which values there are.
    title : str
        The call, for people: ``"load of 'data.h5'"``.
    values : mapping of str to str
        Its arguments, as text.
    """

    kind: str
    title: str
    values: Mapping[str, str]

    @property
    def digest(self) -> int:
        """Of all of it, 64 bits."""
        return _digest(json.dumps([self.kind, *self.values.items()]))

    def also(self, **values: str) -> Invocation:
        """The same with more values."""
        return Invocation(self.kind, self.title, {**self.values, **values})


class Group:
    """The ranks of one call. Every method that says so is collective and must be reached by all of them.

    Attributes
    ----------
    rank, size : int
        This rank and how many there are.
    comm : mpi4py.MPI.Comm or None
        The private duplicate; None for a process alone, and for processes of JAX without MPI.
    watch : Watch
        Whether the ranks still move. Once it has found that they do not, every collective raises `StallError`.
    """

    def __init__(self, comm: Any, processes: tuple[Any, int, int] | None = None, generation: int = 0) -> None:
        self.comm = comm
        if processes is not None:
            _, self.rank, self.size = processes
        else:
            self.rank, self.size = (0, 1) if comm is None else (int(comm.rank), int(comm.size))
        office = MpiOffice(comm, self.mpi, _WATCH_TAG) if comm is not None and self.size > 1 else None
        # When this process ends after a stall, so does the job: it would wait for the rank that is held up.
        ends = leave_alone_at_exit if self.size == 1 else partial(leave_at_exit, None if comm is None else self.mpi)
        self._departures = Departures(self.rank, lambda: jax_processes()[0])
        self.watch = Watchdog(self.rank, self.size, office, on_verdict=ends, departed=self._departures.known)
        mpi = None if comm is None else self.mpi
        self._collectives: Collectives = (
            MpiCollectives(comm, mpi, self.watch.look, self.watch.agreed)
            if processes is None
            else JaxCollectives(*processes, self.watch.look_for_departed, self.watch.agreed, generation)
        )
        self._n_loads = 0
        self._processes: tuple[int, ...] | None = None
        self._node: Node | None = None
        self._machine: Machine | None = None
        self._segments: dict[int, Segment] = {}
        self._shared_nbytes = 0
        self._can_share = os.environ.get("SHARDLOAD_SHARED_MEMORY", "1") != "0"
        self._one_call = threading.Lock()
        self._caller = 0  # the thread that is in a call
        self.is_torn = False  # a call was interrupted: ranks may be at different collectives

    def _over(self, comm: Any) -> MpiCollectives:
        return MpiCollectives(comm, None if comm is None else self.mpi, self.watch.look)

    def watch_departures(self, name: str = "") -> None:
        """From now on ranks that come to the end of their program are known to those that wait for them.

        Collective, unless there is a `name` that all ranks know and no other group has.
        """
        if self.size > 1:
            name = name or self.send_text(uuid.uuid4().hex if self.rank == 0 else None, 0)
            watch = weakref.ref(self.watch)  # which asks for them
            self._departures.begin(name, lambda: 0 if (mine := watch()) is None else mine.n_agreed)

    @property
    def can_send(self) -> bool:
        """Whether ranks can send each other values; without MPI they can only agree."""
        return self.size == 1 or self.comm is not None

    @property
    def mpi(self) -> Any:
        """mpi4py's MPI module."""
        return _load_mpi()[0]

    @contextmanager
    def call(self, timeout: float | None = None) -> Iterator[ConfigError | None]:
        """One call at a time, from its first message to its last; gives what it is to be refused for, if it is.

        A thread that comes while another one is in a call waits, and is then refused, in its turn: ranks could not tell the
        two calls apart. It still makes the messages that every call begins with, so that all ranks refuse it, and none waits
        for a call that another one has refused. A process that is alone has nobody to mistake them: it makes one call after
        the other.

        A call that is interrupted (Ctrl-C, an exception of a signal handler) leaves the ranks at different messages; the next
        call of all ranks makes a group anew.

        Raises
        ------
        ConfigError
            If this very thread is in a call, if another one is for `timeout` seconds, or if an interrupted one has left this
            group.
        """
        if self._caller == threading.get_ident():
            raise ConfigError(
                "this thread is in a call over the same communicator already (a function that was passed to it, such as "
                "progress=, calls shardload): call it afterwards, or pass comm=MPI.COMM_WORLD.Dup()"
            )
        refusal = None
        if not self._one_call.acquire(blocking=False):
            if not self._one_call.acquire(timeout=-1 if timeout is None else timeout):
                raise ConfigError(
                    f"another thread of this process has been in a call over the same communicator for {timeout:g} s. Does it "
                    "wait for this one? Call one after the other, or give each thread its own, comm=MPI.COMM_WORLD.Dup()"
                )
            if self.size > 1:
                refusal = ConfigError(
                    "another thread of this process was in a call over the same communicator, and ranks could not tell the two "
                    "calls apart: give each thread its own, comm=MPI.COMM_WORLD.Dup(), or call one after the other"
                )
        self._caller = threading.get_ident()
        try:
            if self.is_torn:
                raise ConfigError("a call of this plan's ranks was interrupted: make the plan again, on all ranks")
            yield refusal
        except ShardloadError as error:  # which all ranks raise together, though each may have found it by itself
            if not isinstance(error, StallError) and not self.is_torn:  # of a stall the watch has decided who shows it
                self.shared(error)
            raise
        except MissingChunksWarning:  # which all ranks raise, where warnings are errors
            raise
        except BaseException:
            self.is_torn = self.size > 1  # a process alone has nobody to be out of step with
            raise
        finally:
            self._caller = 0
            self._one_call.release()

    def begin(self, asked: Invocation, find: Callable[[], str]) -> str | None:
        """The first message of every call: what rank 0 was asked for, and what `find` returns there. Collective.

        If `find` raises there, that error on every rank. None where rank 0 was asked for something else: the next message
        (`all_same`) tells all.
        """
        found = self._tell(find, 0, f"{asked.digest:016x}")
        return None if found is None else self._told(found, 0)

    def next_tags(self) -> tuple[int, int, int]:
        """Three tags for the next exchange. All ranks count alike, so what an interrupted load left behind matches nothing."""
        self._n_loads += 1
        tag = 3 * (self._n_loads % (_TAGS // 3))
        return tag, tag + 1, tag + 2

    @property
    def node(self) -> Node:
        """The ranks on this machine. Collective the first time."""
        if self._node is None:
            if self.comm is None:
                self._node = Node(None, (self.rank,))
            else:
                self.gather_int(0)  # what comes now waits spinning and for ever: only when all are there
                comm = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED, self.rank)
                pretended = pretended_ranks_per_node()
                if pretended:
                    whole, comm = comm, comm.Split(self.rank // pretended, self.rank)
                    whole.Free()
                ranks = self._over(comm).gather(np.array([self.rank], dtype=np.int64))[:, 0]
                self._node = Node(comm, tuple(int(r) for r in ranks))
        return self._node

    @property
    def machine(self) -> Machine:
        """What the ranks run on, the same on every rank. Collective the first time."""
        if self._machine is None:
            node = self.node
            cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
            n_alike = 1
            if node.comm is not None:
                digest = np.array([_digest(repr(cores)) >> 1], dtype=np.int64)
                everyone = self._over(node.comm).gather(digest)[:, 0]
                n_alike = int((everyone == digest[0]).sum())  # ranks bound to cores of their own share them with nobody
            leaders = self.gather_int(node.ranks[0])
            if not self.can_send:
                hosts = self.gather_int(_digest(socket.gethostname()) >> 1)
                leaders = np.array([int(np.argmax(hosts == host)) for host in hosts])
                n_alike = int((hosts == hosts[self.rank]).sum())
            n_threads = int(self.gather_int(max(1, len(cores) // n_alike)).min())
            n_ranks = int((leaders == leaders[self.rank]).sum())
            n_cores = int(self.gather_int(max(1, len(cores) * n_ranks // n_alike)).min())
            self._machine = Machine(tuple(int(v) for v in leaders), n_threads, n_cores)
        return self._machine

    def shared_memory(self, nbytes: int) -> dict[int, Segment]:
        """Memory of at least `nbytes` of every rank on this machine, by rank; empty where it cannot be shared.

        Collective over the node: all its ranks pass what they need of their own (0: nothing). Kept for the next load.
        """
        node = self.node
        if node.comm is None or len(node.ranks) == 1 or not self._can_share:
            return {}
        # A rank whose exchange was interrupted has forgotten its segments: then all make new ones.
        state = np.array([nbytes > self._shared_nbytes or not self._segments, nbytes], dtype=np.int64)
        state = self._over(node.comm).reduce(state, "max")
        if state[0] and state[1]:
            self._make_segments(node, nbytes)
        return self._segments

    def _make_segments(self, node: Node, nbytes: int) -> None:
        self._segments = {}
        over = self._over(node.comm)
        own, problem = None, False
        try:
            own = Segment.create(max(nbytes, self._shared_nbytes))
        except (OSError, AttributeError):
            problem = True
        handles = over.gather(np.zeros(HANDLE_SIZE, dtype=np.int64) if own is None else own.handle)
        found: dict[int, Segment] = {}
        try:
            for rank, handle in zip(node.ranks, handles, strict=True):
                found[rank] = own if rank == self.rank and own is not None else Segment.attach(handle)
        except (OSError, ValueError):
            problem = True
        failed = over.reduce(np.array([problem], dtype=np.int64), "max")
        if own is not None:
            own.seal()
        self._can_share = not failed[0]
        if self._can_share:
            self._segments, self._shared_nbytes = found, max(nbytes, self._shared_nbytes)

    def forget_shared_memory(self) -> None:
        """After an interrupted exchange: other ranks may still look into this rank's memory, so it is not used again."""
        self._segments = {}

    def free(self) -> None:
        """Give back what MPI made for this group."""
        self._segments = {}
        if self.is_torn:
            return  # something may still be under way in it
        if self._node is not None and self._node.comm is not None:
            self._node.comm.Free()
        if self.comm is not None:
            self.comm.Free()

    def processes(self, process: int) -> tuple[int, ...]:
        """The JAX process of each rank. Collective the first time."""
        if self._processes is None or self._processes[self.rank] != process:
            self._processes = tuple(int(p) for p in self.gather_int(process))
        return self._processes

    def gather_int(self, value: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """One integer of every rank, on every rank. Collective."""
        mine = np.array([value], dtype=np.int64)
        return mine if self.size == 1 else self._collectives.gather(mine)[:, 0]

    def sum_ints(self, values: list[int]) -> list[int]:
        """Sums over the ranks, on every rank. Collective."""
        total = np.array(values, dtype=np.int64)
        if self.size > 1:
            total = self._collectives.reduce(total, "sum")
        return [int(v) for v in total]

    def least_ints(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The least of each value over the ranks, on every rank. Collective."""
        return values if self.size == 1 else self._collectives.reduce(values, "min")

    def send_text(self, text: str | None, root: int) -> str:
        """A text of `root`, on every rank. Collective."""
        if self.size == 1:
            return text or ""
        # The first message has the length and, where it fits, all of the text: one broadcast for nearly every text.
        data = np.frombuffer((text or "").encode("utf-8", "surrogatepass") if self.rank == root else b"", dtype=np.uint8)
        head = np.zeros(_HEAD_NBYTES, dtype=np.uint8)
        room = _HEAD_NBYTES - 8
        if self.rank == root:
            head[:8] = np.array([len(data)], dtype="<i8").view(np.uint8)
            head[8 : 8 + min(room, len(data))] = data[:room]
        self._collectives.broadcast(head, root)
        length = int(head[:8].view("<i8")[0])
        if length <= room:
            return head[8 : 8 + length].tobytes().decode("utf-8", "surrogatepass")
        whole = data.copy() if self.rank == root else np.empty(length, dtype=np.uint8)
        self._collectives.broadcast(whole, root)
        return whole.tobytes().decode("utf-8", "surrogatepass")

    def gather_text(self, text: str) -> list[str]:
        """A text of every rank, on every rank. Collective."""
        return [self.send_text(text, root) for root in range(self.size)]

    def tell(self, make: Callable[[], str], root: int) -> str:
        """What `make` returns on `root`, on every rank; if it raises there, that error on every rank. Collective."""
        found = self._tell(make, root, "")
        return "" if found is None else self._told(found, root)

    def _tell(self, make: Callable[[], str], root: int, mark: str) -> tuple[str, BaseException | None] | None:
        """The text and, on `root`, what was raised; None where the mark of `root` is another."""
        if self.size == 1:
            try:
                return "+" + make(), None
            except ShardloadError as found:
                let_interruption_pass(found)
                raise
            except Exception as found:  # the same type as with more ranks
                let_interruption_pass(found)
                raise as_shardload(found, None) from found
        text, error = None, None
        if self.rank == root:
            try:
                text = "+" + make()
            except Exception as found:
                let_interruption_pass(found)
                error = found
                text = "-" + to_json(as_shardload(found, root))
        text = self.send_text(None if text is None else mark + text, root)
        return (text[len(mark) :], error) if text.startswith(mark) else None

    def _told(self, found: tuple[str, BaseException | None], root: int) -> str:
        text, error = found
        if text[0] == "-":
            # What is wrong with the arguments is wrong on every rank; only `root` has looked.
            n_failed = self.size if json.loads(text[1:])["kind"] == "ConfigError" else 1
            shared = from_json(text[1:], root, n_failed, self.size)
            shared.__cause__ = error
            raise self.shared(shared)
        return text[1:]

    def agree(self, error: BaseException | None, counts: list[int] | None = None) -> list[int]:
        """Raise the same error on every rank if any rank has one; else sum `counts` over the ranks. Collective.

        Of several errors the lowest failing rank's is raised. Where only some ranks failed, the text says which.
        """
        failed, *sums = self.sum_ints([int(error is not None), *(counts or [])])
        if not failed:
            return sums
        if self.size == 1:
            alone = as_shardload(error, None)
            if alone is error:
                raise alone
            raise alone from error
        first = int(self.gather_int(self.rank if error is not None else self.size).min())
        text = to_json(as_shardload(error, first)) if self.rank == first else None
        shared = from_json(self.send_text(text, first), first, failed, self.size)
        shared.__cause__ = error
        raise self.shared(shared)

    def shared(self, error: ShardloadError) -> ShardloadError:
        """An error that all ranks raise now: where nobody catches it, it is shown once. The error itself."""
        share(error, self.rank, self.size)
        return error

    def all_same(self, asked: Invocation, is_fine: bool) -> bool:
        """Whether all ranks are fine and were asked for the same. Collective; the second message of every call."""
        if self.size == 1:
            return is_fine
        all_fine, differs = self._compare([asked.digest], is_fine)
        return all_fine and not differs.size

    def settle(self, asked: Invocation, error: BaseException | None) -> None:
        """Both messages that every call begins with, where nothing is to be found. Raises as `agree_same` does. Collective."""
        is_same = self.begin(asked, str) is not None
        if not self.all_same(asked, is_same and error is None):
            self.agree_same(asked, error)

    def _compare(self, digests: list[int], is_fine: bool) -> tuple[bool, np.ndarray[Any, np.dtype[np.intp]]]:
        """Whether all ranks are fine, and which digests differ."""
        digest = np.array(digests, dtype=np.uint64)
        # The least of each digest and of its complement: all ranks have the same one exactly when both are one's own.
        sent = np.concatenate([[np.uint64(is_fine)], digest, ~digest])
        least = self._collectives.reduce(sent, "min")
        n = len(digest)
        return bool(least[0]), np.flatnonzero(least[1 : n + 1] != ~least[n + 1 :])

    def agree_same(self, asked: Invocation, error: BaseException | None = None) -> None:
        """Raise on every rank if any rank has an error, or if the ranks were asked for different things. Collective.

        Whatever they were asked for, the messages are the same until it is known.

        Raises
        ------
        PeerError
            Naming the two calls, or the first value that differs, and the first rank that differs from rank 0.
        """
        if self.size == 1:
            self.agree(error)
            return
        all_fine, differs = self._compare([_digest(asked.kind)], error is None)
        if not all_fine:
            self.agree(error)
        if differs.size:
            other, theirs, reference = self._first_other(asked.kind, asked.title)
            raise PeerError(
                f"rank {other} called {theirs}, rank 0 called {reference}: all ranks must make the same calls in the same "
                "order, and all ranks must pass the same path, sharding and options. Nothing was loaded",
                rank=other,
            )
        _, differs = self._compare([_digest(v) for v in asked.values.values()], True)
        if not differs.size:
            return
        name, mine = list(asked.values.items())[int(differs[0])]
        other, theirs, reference = self._first_other(mine, mine)
        raise PeerError(
            f"rank {other} was called with {name} = {theirs} (digest {_digest(theirs):016x}), "
            f"rank 0 with {reference} (digest {_digest(reference):016x}): all ranks must pass the same path, sharding and "
            "options. Nothing was loaded",
            rank=other,
        )

    def _first_other(self, mine: str, text: str) -> tuple[int, str, str]:
        """The first rank with another value than rank 0, its text and that of rank 0. Collective."""
        reference = self.send_text(mine, 0)
        other = int(self.gather_int(self.rank if mine != reference else self.size).min())
        return other, self.send_text(text, other), self.send_text(text, 0)


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
