"""Which ranks take part in a call, and on which machines and cores do they run (`Topology`)?

A `Group` is the ranks of one call. It owns a duplicate of the user's communicator (made once, and kept on the user's
communicator as an MPI attribute), so that its messages can never match a message of the user. It lets the ranks agree
(`agreement`), allows one call at a time, watches the progress of the call, and knows which machines the ranks run on.

Without MPI a group is this process alone, or, if JAX was started with several processes, these processes. They agree, and send
each other values, through JAX's coordination service (`store`).
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, cast

import numpy as np

from shardload.comm.agreement import Agreement, digest_of
from shardload.comm.collectives import Collectives, MpiCollectives, duplicate
from shardload.comm.heartbeat import Departures, MpiMailbox, leave_at_exit
from shardload.comm.mpi import check_communicator, kept_on, load_mpi, world
from shardload.comm.shared_memory import Node, Segment
from shardload.comm.store import StoreCollectives, StoreMailbox, StoreMessages, StoreTransport, jax_processes
from shardload.comm.transport import MpiTransport, Transport
from shardload.comm.watchdog import Mailbox, Watchdog
from shardload.errors import ConfigError, ShardloadError, ShardloadWarning, StallError
from shardload.system.interruption import is_called_by_handler
from shardload.system.memory_limit import limit_nbytes
from shardload.system.scratch import is_in_a_call, scratch_of_its_own

UNKNOWN_NBYTES = 1 << 62  # of memory, if nothing says how much there is
_TAGS = 1 << 15  # two tags per exchange, up to 32767, which every MPI guarantees
_WATCH_TAG = _TAGS - 1  # no load uses it


@dataclass(frozen=True)
class Topology:
    """The machines and cores that the ranks of a group run on.

    Attributes
    ----------
    leaders : tuple of int
        For each rank the lowest rank on its machine: equal for ranks on the same machine.
    n_threads : int
        Cores that a rank has for itself (minimum over the ranks; 1 if ranks share cores).
    n_cores : int
        Cores that the ranks of a machine have together (minimum over the machines).
    memory_nbytes : int
        Bytes of memory that a rank may use at most (minimum over the ranks): its share of its machine's, and of limits.
    """

    leaders: tuple[int, ...]
    n_threads: int
    n_cores: int
    memory_nbytes: int = field(default=UNKNOWN_NBYTES, compare=False)

    @cached_property
    def ranks_per_node(self) -> int:
        """Number of ranks on the machine that has most."""
        return max(Counter(self.leaders).values())

    @cached_property
    def n_nodes(self) -> int:
        """Number of machines."""
        return len(set(self.leaders))


def pretended_node(rank: int) -> int | None:
    """The machine that a rank is to be treated as being on, to measure or test traffic between machines; None: its own.

    From SHARDLOAD_RANKS_PER_NODE: the number of consecutive ranks of one machine, or for each rank the number of its machine.

    >>> os.environ["SHARDLOAD_RANKS_PER_NODE"] = "2"
    >>> [pretended_node(rank) for rank in range(4)]
    [0, 0, 1, 1]
    >>> os.environ["SHARDLOAD_RANKS_PER_NODE"] = "0,1,0,1"
    >>> [pretended_node(rank) for rank in range(4)]
    [0, 1, 0, 1]
    >>> del os.environ["SHARDLOAD_RANKS_PER_NODE"]
    """
    given = os.environ.get("SHARDLOAD_RANKS_PER_NODE", "").split(",")
    if not all(one.isdigit() for one in given):
        return None
    numbers = [int(one) for one in given]
    if len(numbers) == 1:
        return rank // numbers[0] if numbers[0] else None
    return numbers[rank] if rank < len(numbers) else None


def find_topology(ranks: Agreement, node: Node) -> Topology:
    """Find out what the ranks run on. Collective."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    digest = np.array([digest_of(repr(cores)) >> 1], dtype=np.int64)
    everyone = node.collectives.gather(digest)[:, 0]
    n_alike = int((everyone == digest[0]).sum())  # ranks that are bound to different cores do not share them
    leaders = ranks.gather_int(node.ranks[0])
    n_threads = int(ranks.gather_int(max(1, len(cores) // n_alike)).min())
    n_ranks = int((leaders == leaders[ranks.rank]).sum())
    memory = min(limit_nbytes(n_ranks), UNKNOWN_NBYTES)
    n_cores, memory_nbytes = ranks.gather_ints([max(1, len(cores) * n_ranks // n_alike), int(memory)]).min(axis=0).tolist()
    return Topology(tuple(int(v) for v in leaders), n_threads, n_cores, memory_nbytes)


def group_of(comm: Any = None, timeout: float | None = None) -> Group:
    """The group of a communicator (default: COMM_WORLD; without MPI: this process alone).

    Collective over `comm` the first time, local afterwards. StallError if some rank does not call within `timeout` seconds.
    """
    if comm is None:
        comm = world()
    if comm is None:
        client, process, n_processes = jax_processes()
        with _making:
            return _without_mpi(client, process, n_processes) if n_processes > 1 else _alone()
    check_communicator(comm)
    kept = kept_on(comm)
    with kept.making:  # a lock per communicator: duplicating another one may have to wait for its ranks
        if kept.value is None or (isinstance(kept.value, Group) and kept.value.is_torn):
            try:
                made = Group(duplicate(comm, timeout))
                made.watch_departures()
                kept.value, kept.free = made, Group.free
            except StallError as error:
                kept.value, kept.free = error, None
                leave_at_exit(load_mpi()[0], timeout or 0.0)
        if isinstance(kept.value, StallError):
            raise StallError(str(kept.value))
        return cast(Group, kept.value)


_making = threading.RLock()  # two threads may make their first calls at the same time


@cache
def _alone() -> Group:
    return Group(None)


_of_jax: dict[tuple[Any, int, int], list[Group]] = {}


def _without_mpi(client: Any, process: int, n_processes: int) -> Group:
    """The group of JAX's processes. After an interrupted call it is a new group with a new name."""
    made = _of_jax.setdefault((client, process, n_processes), [])
    if not made or made[-1].is_torn:
        group = Group(None, (client, process, n_processes), generation=len(made))
        group.watch_departures(f"processes{len(made) or ''}")
        made.append(group)
    return made[-1]


class Group(Agreement):
    """The ranks of one call. All ranks must call every method that is marked as collective.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    comm : mpi4py.MPI.Comm or None
        The private duplicate. None for a single process, and for JAX processes without MPI.
    watch : Watchdog
        Checks that the ranks make progress. After it has detected a stall, every collective raises `StallError`.
    """

    def __init__(self, comm: Any, processes: tuple[Any, int, int] | None = None, generation: int | str = 0) -> None:
        self.comm = comm
        self._generation, self._n_duplicates = generation, 0
        self._client: Any = None
        self._place = f"shardload/{generation}"
        mailbox: Mailbox | None = None
        if processes is not None:
            self._client, self.rank, self.size = processes
            mailbox = StoreMailbox(self._messages("beats"))
        else:
            self.rank, self.size = (0, 1) if comm is None else (int(comm.rank), int(comm.size))
            if self.size > 1:
                mailbox = MpiMailbox(comm, self.mpi, _WATCH_TAG)
        # After a stall, the end of this process ends the job: otherwise it would wait for the stalled rank.
        ends = partial(leave_at_exit, None if comm is None else self.mpi) if self.size > 1 else None
        self._departures = Departures(self.rank, lambda: jax_processes()[0])
        self._mailbox = mailbox
        self.watch = Watchdog(self.rank, self.size, mailbox, on_stall=ends, departed=self._departures.known)
        self._collectives = Collectives()
        if self._client is not None:
            self._collectives = self._over_store("all", tuple(range(self.size)), self.watch.agreed)
        elif self.size > 1:
            self._collectives = MpiCollectives(comm, self.mpi, self.watch.look, self.watch.agreed)
        self._n_exchanges = 0
        self._processes: tuple[int, ...] | None = None
        self._node: Node | None = None
        self._machine: Topology | None = None
        self._one_call = threading.Lock()
        self._caller = 0  # id of the thread that is in a call
        self.is_torn = False  # a call was interrupted: ranks may be at different collectives

    def _messages(self, name: str) -> StoreMessages:
        return StoreMessages(self._client, f"{self._place}/{name}", self.rank)

    def _over_store(self, name: str, ranks: tuple[int, ...], done: Callable[[], None] = lambda: None) -> StoreCollectives:
        return StoreCollectives(self._client, f"{self._place}/{name}", self.rank, ranks, self.watch.look, done)

    def transport(self, tags: tuple[int, int], segments: Mapping[int, Segment]) -> Transport:
        """Make what carries the messages of one exchange, with the tags of `next_tags`."""
        if self._client is None:
            return MpiTransport(self.rank, self.comm, self.mpi, tags, segments)
        return StoreTransport(self.rank, self.size, self._messages(f"exchange {tags[0]}"), segments)

    def watch_departures(self, name: str = "") -> None:
        """From now on, tell waiting ranks when a rank reaches the end of its program.

        Collective, unless a `name` is given, which must be the same on all ranks and differ from that of any other group.
        """
        if self.size > 1:
            name = name or self.send_text(uuid.uuid4().hex if self.rank == 0 else None, 0)
            watch = weakref.ref(self.watch)  # the watchdog references the departures: avoid a cycle
            self._departures.begin(name, lambda: 0 if (mine := watch()) is None else mine.n_agreed)

    @property
    def has_mpi(self) -> bool:
        """True if ranks send each other values by MPI; False if through JAX's coordinator."""
        return self._client is None

    @property
    def mpi(self) -> Any:
        """mpi4py's MPI module."""
        return load_mpi()[0]

    @contextmanager
    def call(self, timeout: float | None = None) -> Iterator[ConfigError | None]:
        """Allow one call at a time, from its first message to its last. Yields an error if the call must be refused.

        A thread that calls while another thread is in a call waits for it, and is then refused, because ranks could not tell
        the two calls apart. A refused call still sends the messages that every call begins with, so that all ranks refuse it
        and no rank waits for a call that another rank has refused. A single process cannot confuse calls: it makes one call
        after the other.

        An interrupted call (Ctrl-C, an exception of a signal handler) leaves the ranks at different messages. The next call of
        all ranks then makes a new group.

        Raises
        ------
        ConfigError
            If this thread is in a call already, if a signal handler has interrupted any other call of it, if another thread is
            in a call for `timeout` seconds, or if a call of this group was interrupted.
        """
        if self._caller == threading.get_ident():
            raise ConfigError(
                "this thread is in a call over the same communicator already (a function that was passed to it, such as "
                "progress=, calls shardload): call it afterwards, or pass comm=MPI.COMM_WORLD.Dup()"
            )
        if is_in_a_call() and is_called_by_handler():
            raise ConfigError(
                "a signal handler calls shardload in the middle of another call of this thread, which has locks that the new "
                "one may wait for. Set a flag in the handler, and call when that call has returned"
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
            with scratch_of_its_own():
                yield refusal
        except ShardloadError as error:  # all ranks raise it, though each may have found it by itself
            if not isinstance(error, StallError) and not self.is_torn:  # the watchdog has decided who shows a stall
                self.shared(error)
            raise
        except ShardloadWarning:  # all ranks raise it if warnings are errors
            raise
        except BaseException:
            self.is_torn = self.size > 1  # a single process cannot be out of step
            raise
        finally:
            self._caller = 0
            self._one_call.release()

    def next_tags(self) -> tuple[int, int]:
        """Two tags for the next exchange, the same on all ranks. Messages of an interrupted one match none of them."""
        self._n_exchanges += 1
        tag = 2 * (self._n_exchanges % (_TAGS // 2 - 1))
        return tag, tag + 1

    @property
    def node(self) -> Node:
        """The ranks on this machine. Collective the first time."""
        if self._node is None:
            pretended = pretended_node(self.rank)
            host = digest_of(socket.gethostname()) >> 1
            # MPI's calls spin without a timeout: make them only when all ranks are there, and all the same ones.
            told = self.gather_ints([-1 if pretended is None else pretended, host])
            if self.size == 1:
                self._node = Node(0, (0,), self._collectives)
            elif self._client is not None:
                ranks = tuple(np.flatnonzero((told == told[self.rank]).all(axis=1)).tolist())
                self._node = Node(self.rank, ranks, self._over_store(f"node {ranks[0]}", ranks))
            else:
                comm = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED, self.rank)
                if told[:, 0].max() >= 0:
                    whole, comm = comm, comm.Split(int(told[self.rank, 0]) + 1, self.rank)
                    whole.Free()
                on_node = MpiCollectives(comm, self.mpi, self.watch.look)
                found = on_node.gather(np.array([self.rank], dtype=np.int64))[:, 0]
                self._node = Node(self.rank, tuple(found.tolist()), on_node, comm.Free)
        return self._node

    @property
    def machine(self) -> Topology:
        """The machines that the ranks run on, the same on every rank. Collective the first time."""
        if self._machine is None:
            self._machine = find_topology(self, self.node)
        return self._machine

    def forget_shared_memory(self) -> None:
        """Stop using this rank's shared memory, after an interrupted exchange: other ranks may still read it."""
        if self._node is not None:
            self._node.segments = {}

    def duplicate(self, timeout: float | None = None) -> Group:
        """A group of the same ranks with messages of its own, for what goes on beside other calls. Collective; `free` it."""
        self._n_duplicates += 1
        if self._client is not None:
            name = f"{self._generation}.{self._n_duplicates}"
            made = Group(None, (self._client, self.rank, self.size), generation=name)
            made.watch_departures(f"processes{name}")
        else:
            made = Group(None if self.size == 1 else duplicate(self.comm, timeout))
            made.watch_departures()
        made._machine = self._machine
        return made

    def free(self) -> None:
        """Free the communicators of this group."""
        self.forget_shared_memory()
        if self.is_torn or self.watch.is_stalled:
            return  # messages may still be pending in it
        if self.comm is not None and self._mailbox is not None:
            for _ in self._mailbox.receive():  # beats that nobody waited for
                pass
        if self._node is not None:
            self._node.free()
        if self.comm is not None:
            self.comm.Free()

    def processes(self, process: int) -> tuple[int, ...]:
        """The JAX process of each rank. Collective the first time."""
        if self._processes is None or self._processes[self.rank] != process:
            self._processes = tuple(int(p) for p in self.gather_int(process))
        return self._processes
