"""How does a call begin, and how do the ranks agree on what to do? In the same steps for every kind of call.

1. `begin_request` reads the arguments, and `begin_call` finds the ranks, and holds their group until the call ends.
2. `Call.plan`: one rank finds what only a file can say, and tells all; each rank makes the plan of it; all compare what they
   were asked for and what they have planned. If nothing is wrong, that takes one broadcast and one reduction.
3. If something is wrong on any rank, the ranks compare step by step, and all raise the first cause: a wrong argument, then
   arguments that differ, then an error in the file, then a plan that cannot be made or that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from shardload.comm.group import Group, Invocation, group_of
from shardload.errors import ConfigError, ShardloadError, StallError
from shardload.options import TIMEOUT
from shardload.system.interruption import let_interruption_pass, outer_exception

_PLAN = "a plan"

Plan = TypeVar("Plan")


class Call:
    """One call of all ranks, from its first message to its last. Every method is collective.

    Attributes
    ----------
    group : Group
        The ranks.
    asked : Invocation
        What must be the same on every rank. After `plan` it includes the plan.
    """

    def __init__(self, group: Group, asked: Invocation, error: BaseException | None) -> None:
        self.group, self.asked, self._error = group, asked, error

    def settle(self) -> None:
        """Compare what the ranks were asked for, in the messages with which every call begins, without a plan."""
        self.group.settle(self.asked, self._error)

    def plan(
        self,
        find: Callable[[], Any],
        make: Callable[[Any], Plan],
        describe: Callable[[Plan], str],
        *,
        root: int | None = None,
    ) -> Plan:
        """Run `find` on one rank and `make` on every rank, and check that all ranks plan the same.

        Parameters
        ----------
        find : callable
            Returns what only one rank knows, as text or bytes (`Group.begin`). Not called if the arguments are wrong.
        make : callable
            Makes the plan of it.
        describe : callable
            The plan as text, which must be the same on all ranks.
        root : int, optional
            The rank that runs `find`; call `settle` first. Without it, rank 0 runs `find`, and this begins the call.
        """
        group, made, told = self.group, None, None
        unfound: ShardloadError | None = None
        unplanned: BaseException | None = None

        def run() -> Any:
            if self._error is not None:
                raise self._error
            return find()

        try:
            group.watch.enter("metadata")
            try:
                told = group.begin(self.asked, run) if root is None else group.tell(run, root)
            except StallError:
                raise  # the ranks can compare nothing any more
            except ShardloadError as error:  # the same on every rank
                unfound = error
            group.watch.enter("plan")
            if told is not None and self._error is None:
                try:
                    made = make(told)
                except Exception as error:
                    let_interruption_pass(error)
                    unplanned = error
            planned = {"plan": "" if made is None else describe(made)}
            agreed = self.asked.also(**planned)
            if not group.all_same(agreed, made is not None):
                group.agree_same(self.asked, self._error)
                if unfound is not None:
                    raise unfound
                group.agree_same(Invocation(_PLAN, self.asked.title, planned), unplanned)
            if made is None:
                raise unfound or unplanned or ConfigError("nothing was planned")
        finally:
            del unfound, unplanned  # an error that stays a variable keeps the arrays of its calls: see `system.garbage.let_go`
        self.asked = agreed
        return made


@contextmanager
def watched(group: Group, what: str, timeout: float | None) -> Iterator[ConfigError | None]:
    """For what all ranks do together: the watchdog looks on. Gives an error if the call must be refused."""
    with group.call(timeout) as refusal:
        group.watch.begin(what, timeout)
        try:
            yield refusal
        finally:
            if not group.watch.is_stalled:
                group.watch.close()


@contextmanager
def begin_call(
    asked: Invocation,
    error: BaseException | None,
    *,
    comm: Any,
    timeout: float | None,
    watched_as: str = "",
    process: Callable[[], int] | None = None,
) -> Iterator[Call]:
    """Hold the group of ranks that make a call until it ends. Collective: yes.

    Parameters
    ----------
    asked : Invocation
        What must be the same on every rank.
    error : Exception, optional
        What is wrong with the arguments on this rank. `Call.plan` and `Call.settle` raise it on all ranks.
    comm : mpi4py.MPI.Comm, optional
        The communicator that the caller passed.
    timeout : float, optional
        Seconds after which the call fails if no rank makes progress.
    watched_as : str
        The call in messages of the watchdog; by default the title of `asked`.
    process : callable, optional
        Returns the number of this process in JAX, for calls about arrays on devices.
    """
    group = group_of(comm, timeout)
    with outer_exception(), watched(group, watched_as or asked.title, timeout) as refusal:
        _ = group.machine  # collective the first time, and here every rank is present
        if process is not None:
            group.processes(process())
        call = Call(group, asked, refusal or error)
        try:
            yield call
        finally:
            call._error = None
            del error, refusal  # see `Call.plan`


@contextmanager
def begin_request(
    call: str, title: str, read: Callable[[], Any], *, comm: Any, process: Callable[[], int] | None = None
) -> Iterator[tuple[Call, Any]]:
    """Read the arguments of a call, and begin it. Collective: yes.

    `read` returns the checked arguments, an object with a ``timeout``, and with a method ``invocation(call, title)`` that says
    what must be the same on every rank. Gives the call and that object. What is wrong with the arguments, on any rank, is
    raised by `Call.plan` on all ranks: it is None then.
    """
    request: Any = None
    error: BaseException | None = None
    try:
        request = read()
    except ShardloadError as wrong:
        error = wrong
    except Exception as wrong:
        error = unforeseen(wrong)
    timeout = TIMEOUT if request is None else request.timeout
    asked = Invocation(call, title, {}) if request is None else request.invocation(call, title)
    with begin_call(asked, error, comm=comm, timeout=timeout, process=process) as begun:
        del error  # see `Call.plan`
        yield begun, request


def unforeseen(error: Exception) -> ConfigError:
    """The error for arguments that could not be read for a reason that nobody thought of: the other ranks wait for this one."""
    let_interruption_pass(error)
    return ConfigError(f"the arguments could not be read: {type(error).__name__}: {error}")
