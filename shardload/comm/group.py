"""Which ranks take part in a call, on which machines and cores do they run (`Topology`), and do they agree?

A `Group` is the ranks of one call. It owns a duplicate of the user's communicator (made once, and kept on the user's
communicator as an MPI attribute), so that its messages can never match a message of the user. It allows one call at a time,
watches the progress of the call, and exchanges small texts and integers, which are then the same on every rank.

The rule for errors: a rank that fails says so at the next `agree`, and there every rank raises the same error.

The rule for calls: each call begins with the same two messages (`begin`, `all_same`), which say what is called (`Invocation`).
So ranks that make different calls, or the same calls in another order, find out before any other message could be taken for one
of another call. A rank sends these messages for every call, also for one that it refuses, so that the ranks stay in step.

Without MPI a group is this process alone, or, if JAX was started with several processes, these processes. They agree, and send
each other values, through JAX's coordination service (`store`).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardload.comm.collectives import (
    Collectives,
    IntArray,
    MpiCollectives,
    abandoned,
    duplicate,
    wait_for,
)
from shardload.comm.heartbeat import Departures, NoteMailbox, leave_at_exit
from shardload.comm.mpi import attribute_of, check_communicator, load_mpi, world
from shardload.comm.shared_errors import as_shardload, from_json, share, to_json
from shardload.comm.shared_memory import Node, Segment
from shardload.comm.store import StoreCollectives, StoreTransport, jax_processes
from shardload.comm.transport import MpiTransport, Transport
from shardload.comm.watchdog import Watchdog, look_before_first_call
from shardload.errors import ConfigError, PeerError, ShardloadError, ShardloadWarning, StallError
from shardload.system.garbage import let_go
from shardload.system.memory_limit import limit_nbytes
from shardload.system.scratch import is_in_a_call, scratch_of_its_own
from shardload.system.undo import Undo
from shardload.units import counted

UNKNOWN_NBYTES = 1 << 62  # of memory, if nothing says how much there is
_TAGS = 1 << 15  # two tags per exchange, up to 32767, which every MPI guarantees
_WATCH_TAG = _TAGS - 1  # no load uses it


_HEAD_NBYTES = 4096
_LENGTH_NBYTES = 8  # at the beginning of the head
_TEXT, _BYTES, _FAILED = b"+", b"*", b"-"  # what a rank tells the others


@dataclass(frozen=True)
class Invocation:
    """A call of this package on one rank, as text. It must be the same on all ranks.

    Attributes
    ----------
    kind : str
        The function that was called: ``"load"``, ``"execute"``. It determines the keys of `values`.
    title : str
        The call, for people: ``"load of 'data.h5'"``.
    values : mapping of str to str
        Its arguments, as text.
    names : tuple of str
        The names of its arrays, in their order, if it was given several by name. They too determine the keys of `values`.
    of_arrays : sequence of (str, mapping of str to str)
        The arguments of each of these arrays, after the text that says which array it is: ``"array ['gas']"``.
    """

    kind: str
    title: str
    values: Mapping[str, str]
    names: tuple[str, ...] = ()
    of_arrays: Sequence[tuple[str, Mapping[str, str]]] = ()

    @cached_property
    def digest(self) -> int:
        """64-bit digest of kind, names and values."""
        return digest_of(json.dumps([self.kind, self.names, self.values, self.of_arrays]))

    @property
    def entries(self) -> list[tuple[str, str]]:
        """The texts that ranks compare one by one, the kind first, each with the clause that a message has for it."""
        n_names = counted(len(self.names), "array") if self.names else "one array alone"
        array_names = {f"array number {k}": name for k, name in enumerate(self.names, 1)}
        of_arrays = {f"{name} of {where}": text for where, values in self.of_arrays for name, text in values.items()}
        arguments = {**array_names, **self.values, **of_arrays}
        return [
            (self.kind, f"called {self.title}"),
            (n_names, f"called {self.title} with {n_names}"),
            *((text, f"was called with {name} = {text}") for name, text in arguments.items()),
        ]

    def also(self, **values: str) -> Invocation:
        """A copy with more values."""
        return replace(self, values={**self.values, **values})


@dataclass(frozen=True)
class Topology:
    """The machines and cores that the ranks of a group run on.

    Attributes
    ----------
    leaders : tuple of int
        For each rank the lowest rank on its machine: equal for ranks on the same machine.
    n_threads : int
        Cores that a rank has for itself (minimum over the ranks; 1 if ranks share cores).
    memory_nbytes : int
        Bytes of memory that a rank may use at most (minimum over the ranks): its share of its machine's, and of limits.
    """

    leaders: tuple[int, ...]
    n_threads: int
    memory_nbytes: int = field(default=UNKNOWN_NBYTES, compare=False)

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
    texts = os.environ.get("SHARDLOAD_RANKS_PER_NODE", "").split(",")
    if not all(number.isdecimal() for number in texts):
        return None
    numbers = [int(number) for number in texts]
    if len(numbers) == 1:
        return rank // numbers[0] if numbers[0] else None
    return numbers[rank] if rank < len(numbers) else None


def group_of(comm: Any = None, timeout: float | None = None) -> Group:
    """The group of a communicator (default: COMM_WORLD; without MPI: this process alone).

    Collective over `comm` the first time, local afterwards. StallError if some rank does not call within `timeout` seconds.
    """
    if comm is None:
        comm = world()
    if comm is None:
        client, process, n_processes = jax_processes()
        with _making_group:
            return _without_mpi(client, process, n_processes)
    check_communicator(comm)
    attribute = attribute_of(comm)
    with attribute.making:  # a lock per communicator: duplicating another one may have to wait for its ranks
        if attribute.value is None or (isinstance(attribute.value, Group) and attribute.value.is_torn):
            try:
                group = Group(duplicate(comm, look_before_first_call(comm.rank, timeout)))
                group.watch.begin("the first message over a communicator", timeout)
                group.name = group.send_text(uuid.uuid4().hex if group.rank == 0 else None, 0)
                group.watch_departures()
                attribute.value = group
            except StallError as error:
                attribute.value = error
                leave_at_exit(load_mpi()[0], timeout or 0.0)
        if isinstance(attribute.value, StallError):
            raise StallError(str(attribute.value))
        return cast(Group, attribute.value)


_making_group = threading.RLock()  # two threads may make their first calls at the same time
_of_jax: dict[tuple[Any, int, int], tuple[Group, int]] = {}  # and of a process alone


def _without_mpi(client: Any, process: int, n_processes: int) -> Group:
    """The group of JAX's processes, or of this one alone. After an interrupted call it is a new group with a new name."""
    processes = client, process, n_processes
    group, generation = _of_jax.get(processes, (None, -1))
    if group is None or group.is_torn:  # nothing keeps the old one: it has threads, pipes and shared memory
        generation += 1
        group = Group(None, processes if n_processes > 1 else None, f"processes{generation or ''}")
        group.watch_departures()
        _of_jax[processes] = group, generation
    return group


class Group:
    """The ranks of one call. All ranks must call every method that is marked as collective.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    name : str
        The same on all ranks, and of no other group: with it begin the keys of its messages, if they go through JAX's store.
    comm : mpi4py.MPI.Comm or None
        The private duplicate. None for a single process, and for JAX processes without MPI.
    watch : Watchdog
        Checks that the ranks make progress. After it has detected a stall, every collective raises `StallError`.
    """

    def __init__(self, comm: Any, processes: tuple[Any, int, int] | None = None, name: str = "") -> None:
        self.comm, self.name, self._n_duplicates = comm, name, 0
        self._client: Any = None
        if processes is not None:
            self._client, self.rank, self.size = processes
        else:
            self.rank, self.size = (0, 1) if comm is None else (int(comm.rank), int(comm.size))
        self.has_mpi = self._client is None  # else ranks send each other values through JAX's coordinator
        # After a stall, the end of this process ends the job: otherwise it would wait for the stalled rank.
        ends = partial(leave_at_exit, None if comm is None else self.mpi, rank=self.rank) if self.size > 1 else None
        self._departures = Departures(self.rank, lambda: jax_processes()[0])
        self._mailbox = NoteMailbox(self.transport((_WATCH_TAG, _WATCH_TAG), {})) if self.size > 1 else None
        self.watch = Watchdog(self.rank, self.size, self._mailbox, on_stall=ends, departed=self._departures.departed)
        self._collectives = Collectives()
        if processes is not None:
            prefix = f"shardload/{self.name}/all"
            self._collectives = StoreCollectives(*processes, prefix, self.watch.look, self.watch.agreed)
        elif self.size > 1:
            self._collectives = MpiCollectives(comm, self.mpi, self.watch.look, self.watch.agreed)
        self._n_exchanges = 0
        self._processes: tuple[int, ...] | None = None
        self._node: Node | None = None
        self._machine: Topology | None = None
        self._call_lock = threading.Lock()
        self._pid = os.getpid()
        self.is_torn = False  # a call was interrupted: ranks may be at different collectives

    def transport(self, tags: tuple[int, int], segments: Mapping[int, Segment]) -> Transport:
        """Make what carries the messages of one exchange, with the tags of `next_tags`; without segments, only messages."""
        if self._client is None:
            return MpiTransport(self.rank, self.comm, self.mpi, tags, segments)
        return StoreTransport(self._client, self.rank, self.size, f"shardload/{self.name}/{tags[0]}", segments)

    def watch_departures(self) -> None:
        """From now on, tell waiting ranks when a rank reaches the end of its program."""
        if self.size > 1:
            watch = weakref.ref(self.watch)  # the watchdog references the departures: avoid a cycle
            self._departures.begin(self.name, lambda: 0 if (watchdog := watch()) is None else watchdog.n_agreed)

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

        An interrupted call (Ctrl-C) leaves the ranks at different messages. The next call of all ranks then makes a new group.

        Raises
        ------
        ConfigError
            If this thread is in a call already, over whichever communicator, if another thread is in a call for `timeout`
            seconds, if a call of this group was interrupted, or in a fork that cannot call.
        """
        self._check_fork()
        if is_in_a_call():  # which has locks, such as h5py's, that the threads of another one may wait for
            raise ConfigError(
                "this thread is in a call already (a function that was passed to it, such as progress=, or a signal handler "
                "calls shardload): make the call when that one has returned, from a signal handler by way of a flag"
            )
        refusal = None
        if not self._call_lock.acquire(blocking=False):
            if not self._call_lock.acquire(timeout=-1 if timeout is None else timeout):
                raise ConfigError(
                    f"another thread of this process has been in a call over the same communicator for {timeout:g} s. Does it "
                    "wait for this one? Call one after the other, or give each thread its own, comm=MPI.COMM_WORLD.Dup()"
                )
            if self.size > 1:
                refusal = ConfigError(
                    "another thread of this process was in a call over the same communicator, and ranks could not tell the two "
                    "calls apart: give each thread its own, comm=MPI.COMM_WORLD.Dup(), or call one after the other"
                )
        try:
            if self.is_torn:
                raise ConfigError("a call of this plan's ranks was interrupted: make the plan again, on all ranks")
            with scratch_of_its_own():
                yield refusal
        except ShardloadError as error:  # all ranks raise it, though each may have found it by itself
            self.is_torn = self.is_torn or self.watch.is_left
            if not isinstance(error, StallError) and not self.is_torn:  # the watchdog has decided who shows a stall
                self.shared(error)
            let_go(error)  # a function that has the error which it raises as a variable holds what its callers have
            raise
        except ShardloadWarning:  # all ranks raise it if warnings are errors
            raise
        except BaseException as error:
            self.is_torn = self.size > 1  # a single process cannot be out of step
            self.watch.leave(error)
            raise
        finally:
            self._call_lock.release()

    def _check_fork(self) -> None:
        """Raise ConfigError in a fork of a rank, and in one made during a call: no thread of it could end that call."""
        is_in_a_call = self._call_lock.locked()  # first: a thread of this process that is in a call has set `_pid` already
        if self._pid == os.getpid():
            return
        if self.size > 1 or is_in_a_call:
            what = f"from rank {self.rank} of {self.size}" if self.size > 1 else "while a thread was in a call of shardload"
            fix = "Make them in the rank itself"  # MPI ends a process that a rank has started, if that one starts MPI, too
            if self.size == 1:
                fix = "Start processes by 'spawn' or 'forkserver' (multiprocessing.get_context), or fork when none is under way"
            raise ConfigError(f"process {os.getpid()} was forked {what}, and cannot make calls. {fix}")
        self._pid = os.getpid()

    def next_tags(self) -> tuple[int, int]:
        """Two tags for the next exchange, the same on all ranks. Messages of an interrupted one match none of them."""
        self._n_exchanges += 1
        tag = 2 * (self._n_exchanges % (_TAGS // 2 - 1))
        return tag, tag + 1

    @property
    def node(self) -> Node:
        """The ranks on this machine. Collective the first time."""
        if self._node is None:
            self._node = Node(self.rank, self.machine.leaders, self._collectives)
        return self._node

    @property
    def machine(self) -> Topology:
        """The machines that the ranks run on, the same on every rank. Collective the first time."""
        if self._machine is None:
            pretended = pretended_node(self.rank)
            cores = sorted(os.sched_getaffinity(0))
            place = [-1 if pretended is None else pretended, host_number(), digest_of(repr(cores)) >> 1]
            places = self.gather_ints(place)
            _, first, number = np.unique(places[:, :2], axis=0, return_index=True, return_inverse=True)
            leaders = first[number.reshape(-1)]
            here = leaders == leaders[self.rank]
            n_alike = int((places[here, 2] == place[2]).sum())  # ranks that are bound to different cores do not share them
            memory_nbytes = int(min(limit_nbytes(int(here.sum())), UNKNOWN_NBYTES))
            minima = self.least_ints(np.array([max(1, len(cores) // n_alike), memory_nbytes], dtype=np.int64))
            self._machine = Topology(tuple(leaders.tolist()), *minima.tolist())
        return self._machine

    def forget_shared_memory(self) -> None:
        """Stop using this rank's shared memory, after an interrupted exchange: other ranks may still read it."""
        if self._node is not None:
            self._node.segments = {}

    def duplicate(self) -> Group:
        """A group of the same ranks with messages of its own, for what goes on beside other calls. Collective, in a call of
        this group, whose watchdog looks on; `free` it.
        """
        self._n_duplicates += 1
        name = f"{self.name}.{self._n_duplicates}"
        if self._client is not None:
            group = Group(None, (self._client, self.rank, self.size), name)
        else:
            group = Group(duplicate(self.comm, self.watch.look) if self.size > 1 else None, name=name)
        group._machine = self._machine
        return group

    def free(self) -> None:
        """Free the communicator of this group."""
        self.forget_shared_memory()
        if self.is_torn or self.watch.is_stalled:
            return  # messages may still be pending in it
        if self.comm is not None and self._mailbox is not None:
            for _ in self._mailbox.receive():  # beats that nobody waited for
                pass
        if self.comm is not None:
            self.comm.Free()

    def processes(self, process: int, settle: Callable[[], None] = lambda: None) -> tuple[int, ...]:
        """The JAX process of each rank. Collective the first time, and after JAX was started; `settle` is called before."""
        if self._processes is None or self._processes[self.rank] != process:  # the same on all ranks
            settle()
            self._processes = tuple(int(p) for p in self.gather_int(process))
        return self._processes

    # --- agreement

    def begin(self, invocation: Invocation, find: Callable[[], Any]) -> Any:
        """The first message of every call: the call of rank 0, and the text that `find` returns on rank 0. Collective.

        Returns that text, or those bytes if `find` returns bytes. If `find` raises on rank 0, every rank raises that error.
        Returns None if rank 0 made another call; the next message (`all_same`) tells all ranks.
        """
        return self.tell(find, 0, f"{invocation.digest:016x}".encode())

    def gather_int(self, value: int) -> IntArray:
        """Gather one integer from every rank, on every rank. Collective."""
        return self.gather_ints([value])[:, 0]

    def gather_ints(self, values: list[int]) -> IntArray:
        """Gather some integers from every rank, on every rank: a row for each. Collective."""
        return self._collectives.gather(np.array(values, dtype=np.int64))

    def ask_root(self, row: IntArray, answer: Callable[[list[IntArray]], list[IntArray]]) -> IntArray:
        """Send integers to rank 0, and return what it answers: `answer` is called there, with a row of each rank, and returns
        one for each. The rows may have other lengths. Collective.
        """
        if self.rank:
            self._exchange_rows({0: row}, [])
            return self._exchange_rows({}, [0])[0]
        answers = answer([row, *self._exchange_rows({}, range(1, self.size))])
        self._exchange_rows(dict(enumerate(answers[1:], 1)), [])
        return answers[0]

    def pass_on(self, row: IntArray, target: int, source: int) -> IntArray:
        """Send integers to a rank, and return those that `source` sends: each rank sends once, receives once. Collective."""
        return row if target == self.rank else self._exchange_rows({target: row}, [source])[0]

    def _exchange_rows(self, rows: Mapping[int, IntArray], sources: Sequence[int]) -> list[IntArray]:
        """Send integers to ranks, and return those that `sources` send, in this order. Every rank calls it."""
        transport, received = self.transport(self.next_tags(), {}), dict[int, IntArray]()

        def is_done() -> bool:
            transport.test()
            received.update(transport.receive_notes() if len(received) < len(sources) else ())
            return len(received) == len(sources) and not transport

        self.watch.look()  # raises if the group has stalled, before a message is started
        with Undo(lambda: abandoned.append(transport.in_use())):
            for rank, row in rows.items():
                transport.send_note(rank, row)
            wait_for(is_done, self.watch.look)
        self.watch.agreed()
        return [received[source] for source in sources]

    def sum_ints(self, values: list[int]) -> list[int]:
        """Sum each value over the ranks. Collective."""
        total: list[int] = self._collectives.reduce(np.array(values, dtype=np.int64), "sum").tolist()
        return total

    def least_ints(self, values: IntArray) -> IntArray:
        """The minimum of each value over the ranks. Collective."""
        return self._collectives.reduce(values, "min")

    def send_text(self, text: str | None, root: int) -> str:
        """Send a text of `root` to every rank. Collective."""
        return _to_text(self._send_bytes(_to_bytes(text or ""), root))

    def _send_bytes(self, data: bytes, root: int) -> memoryview:
        """Send bytes of `root` to every rank. Collective."""
        # The first message says how many there are; if they fit, it has all: most texts take one broadcast.
        head = np.zeros(_HEAD_NBYTES, dtype=np.uint8)
        length, body = head[:_LENGTH_NBYTES].view("<i8"), head[_LENGTH_NBYTES:]
        if self.rank == root:
            length[0] = len(data)
            if len(data) <= len(body):
                body[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._collectives.broadcast(head, root)
        n = int(length[0])
        if n <= len(body):
            return body[:n].data
        whole = np.empty(n, dtype=np.uint8)
        if self.rank == root:
            whole[:] = np.frombuffer(data, dtype=np.uint8)
        self._collectives.broadcast(whole, root)
        return whole.data

    def gather_text(self, text: str) -> list[str]:
        """Gather a text from every rank, on every rank. Collective."""
        return [self.send_text(text, root) for root in range(self.size)]

    def tell(self, make: Callable[[], Any], root: int, mark: bytes = b"") -> Any:
        """Return on every rank what `make` returns on `root`, or raise on every rank what it raises there. Collective.

        Returns None, and raises nothing, where `mark` is another one than on `root`.
        """
        error: BaseException | None = None
        content: Any = b""
        kind = _FAILED
        if self.rank == root:
            try:
                content = make()
                kind = _TEXT if isinstance(content, str) else _BYTES
            except Exception as failure:
                error = failure
        if self.size == 1:
            if error is not None:
                raise _caused(as_shardload(error, None), error)
            return content
        if error is not None:
            content = to_json(as_shardload(error, root))
        body = _to_bytes(content) if isinstance(content, str) else content
        message, n = self._send_bytes(b"".join([mark, kind, body]), root), len(mark)
        if message[:n] != mark:
            return None
        kind, payload = bytes(message[n : n + 1]), message[n + 1 :]
        if kind != _FAILED:
            return payload if kind == _BYTES else _to_text(payload)
        text = _to_text(payload)
        # Wrong arguments are wrong on every rank, though only `root` has checked them.
        n_failed = self.size if json.loads(text)["kind"] == "ConfigError" else 1
        raise self.shared(_caused(from_json(text, root, n_failed, self.size), error))

    def agree(self, error: BaseException | None, counts: list[int] | None = None) -> list[int]:
        """Raise the same error on every rank if any rank has one; else return the sums of `counts` over the ranks. Collective.

        Of several errors, that of the lowest rank is raised. If only some ranks failed, the text says which.
        """
        failed, *sums = self.sum_ints([int(error is not None), *(counts or [])])
        if not failed:
            return sums
        if self.size == 1:
            raise _caused(as_shardload(error, None), error)
        first = int(self.gather_int(self.rank if error is not None else self.size).min())
        text = to_json(as_shardload(error, first)) if self.rank == first else None
        raise self.shared(_caused(from_json(self.send_text(text, first), first, failed, self.size), error))

    def shared(self, error: ShardloadError) -> ShardloadError:
        """Mark an error that all ranks raise now, so that it is shown once if it is not caught. Return it."""
        share(error, self.rank, self.size)
        return error

    def all_same(self, invocation: Invocation, is_fine: bool) -> bool:
        """True if no rank has an error and all ranks make the same call. Collective; the second message of every call."""
        digest = np.uint64(invocation.digest)
        # The minimum of the digest and of its complement: all ranks have the same one exactly if both equal this rank's.
        minima = self._collectives.reduce(np.array([is_fine, digest, ~digest], dtype=np.uint64), "min")
        return bool(minima[0]) and bool(minima[1] == ~minima[2])

    def settle(self, invocation: Invocation, error: BaseException | None) -> None:
        """Send both messages that every call begins with, if rank 0 has no text to send. Raises as `agree_same`. Collective."""
        is_same = self.begin(invocation, str) is not None
        if not self.all_same(invocation, is_same and error is None):
            self.agree_same(invocation, error)

    def agree_same(self, invocation: Invocation, error: BaseException | None = None) -> None:
        """Raise on every rank if any rank has an error, or if the ranks make different calls. Collective.

        Raises
        ------
        PeerError
            The text names the first entry in which a rank differs from rank 0, that rank, and what both were asked for.
        """
        self.agree(error)
        entries = invocation.entries
        reference = json.loads(self.send_text(json.dumps(entries), 0))
        pairs = enumerate(zip(entries, reference, strict=False))
        first = self.gather_int(next((k for k, (entry, of_0) in pairs if entry[0] != of_0[0]), len(reference)))
        deviating = int(first.argmin())
        position = int(first[deviating])
        if position == len(reference):
            return
        difference = self.send_text(entries[position][1] if self.rank == deviating else None, deviating)
        raise PeerError(
            f"rank {deviating} {difference}, rank 0 {reference[position][1]}: all ranks must make the same calls in the same "
            "order, and all ranks must pass the same path, sharding and options. Nothing was done",
            rank=deviating,
        )


def _caused(error: ShardloadError, cause: BaseException | None) -> ShardloadError:
    """An error with its cause, unless it is itself what was raised first."""
    if error is not cause:
        error.__cause__ = cause
    return error


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _to_text(data: memoryview) -> str:
    return bytes(data).decode("utf-8", "surrogatepass")


def host_number() -> int:
    """A number of this machine, the same in all its processes: of its name and its boot, since machines may share a name."""
    boot = ""
    with suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return digest_of(f"{socket.gethostname()} {boot}") >> 1


def digest_of(text: str) -> int:
    """64-bit digest of a text."""
    return int.from_bytes(blake2b(_to_bytes(text), digest_size=8).digest(), "little")
