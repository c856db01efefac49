"""How does a call begin, and how do the ranks agree on what to do? In the same steps for every kind of call.

1. `begin_request` reads the arguments, and `begin_call` finds the ranks, and holds their group until the call ends.
2. `Call.plan`: one rank finds what only a file can say, and tells all; each rank makes the plan of it; all compare what they
   were asked for and what they have planned. If nothing is wrong, that takes one broadcast and one reduction.
3. If something is wrong on any rank, the ranks compare step by step, and all raise the first cause: a wrong argument, then
   arguments that differ, then an error in the file, then a plan that cannot be made or that differs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from shardload.comm.group import Group, Invocation, group_of
from shardload.errors import ConfigError, ShardloadError, ShardloadWarning, StallError
from shardload.options import TIMEOUT
from shardload.system.caller import warn_once
from shardload.system.steps import steps_told_to

Plan = TypeVar("Plan")
Arguments = TypeVar("Arguments")


class Call:
    """One call of all ranks, from its first message to its last. Every method is collective.

    Attributes
    ----------
    group : Group
        The ranks.
    invocation : Invocation
        What must be the same on every rank. After `plan` it includes the plan.
    """

    def __init__(self, group: Group, invocation: Invocation, error: BaseException | None) -> None:
        self.group, self.invocation, self._error = group, invocation, error

    def settle(self) -> None:
        """Compare what the ranks were asked for, in the messages with which every call begins, without a plan."""
        self.group.settle(self.invocation, self._error)

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
            Returns what only one rank knows: it is pickled. Not called if the arguments are wrong.
        make : callable
            Makes the plan of it, on each rank of a copy of its own.
        describe : callable
            The plan as text, which must be the same on all ranks.
        root : int, optional
            The rank that runs `find`; call `settle` first. Without it, rank 0 runs `find`, and this begins the call.
        """
        group, plan, metadata = self.group, None, None
        find_error: ShardloadError | None = None
        plan_error: BaseException | None = None

        def run() -> Any:
            if self._error is not None:
                raise self._error
            return pickle.dumps(find(), protocol=5)  # with fewer copies of values

        group.watch.enter("metadata")
        try:
            metadata = group.begin(self.invocation, run) if root is None else group.tell(run, root)
        except StallError:
            raise  # the ranks can compare nothing any more
        except ShardloadError as error:  # the same on every rank
            find_error = error
        group.watch.enter("plan")
        if metadata is not None and self._error is None:
            try:
                plan = make(pickle.loads(metadata))  # of a rank of this job, never of a file
            except Exception as error:
                plan_error = error
        description = {"plan": "" if plan is None else describe(plan)}
        agreed = self.invocation.also(**description)
        if not group.all_same(agreed, plan is not None):
            group.agree_same(self.invocation, self._error)
            if find_error is not None:
                raise find_error
            group.agree_same(Invocation("a plan", self.invocation.title, description), plan_error)
        if plan is None:
            raise find_error or plan_error or ConfigError("nothing was planned")
        self.invocation = agreed
        return plan


@contextmanager
def watched(group: Group, title: str, timeout: float | None, warns: bool = False) -> Iterator[ConfigError | None]:
    """Let the watchdog look on while all ranks do something together. Gives an error if the call must be refused. `warns`: see
    `Watchdog.begin`.
    """
    with group.call(timeout) as refusal:
        group.watch.begin(title, timeout, warns)
        try:
            with steps_told_to(group.watch.step_done):
                yield refusal
        finally:
            if not group.watch.is_stalled:
                group.watch.close()


@contextmanager
def begin_call(
    invocation: Invocation,
    error: BaseException | None = None,
    *,
    comm: Any,
    timeout: float | None,
    process: Callable[[], int] | None = None,
) -> Iterator[Call]:
    """Hold the group of ranks that make a call until it ends. Collective: yes.

    Parameters
    ----------
    invocation : Invocation
        What must be the same on every rank.
    error : Exception, optional
        What is wrong with the arguments on this rank. `Call.plan` and `Call.settle` raise it on all ranks.
    comm : mpi4py.MPI.Comm, optional
        The communicator that the caller passed.
    timeout : float, optional
        Seconds after which the call fails if no rank makes progress.
    process : callable, optional
        Returns the number of this process in JAX, for calls about arrays on devices.
    """
    group = group_of(comm, timeout)
    with watched(group, invocation.title, timeout) as refusal:
        _ = group.machine  # collective the first time, and here every rank is present
        call = Call(group, invocation, refusal or error)
        try:
            if process is not None:  # other ranks may make a call without JAX, which does not send what follows `settle`
                group.processes(process(), call.settle)
            yield call
        finally:
            call._error = None
            del error, refusal  # a variable with an error keeps the arrays of its calls: see `system.garbage.let_go`


def warn_all(text: str, category: type[ShardloadWarning], group: Group) -> None:
    """Warn once in the job, before anything is written. If warnings are errors on any rank, all raise this one. Collective."""
    is_error = False
    try:
        warn_once(text, category, group.rank)
    except category:
        is_error = True
    if any(group.sum_ints([is_error])):
        raise category(text)


@contextmanager
def begin_request(
    kind: str, title: str, read: Callable[[], Arguments], *, comm: Any, process: Callable[[], int] | None = None
) -> Iterator[tuple[Call, Arguments]]:
    """Read the arguments of a call, and begin it. Collective: yes.

    `read` returns the checked arguments: their `options` (`CallOptions`), and an `invocation` of the kind and title of a call,
    which must be the same on every rank. Gives the call and these arguments, or None for them if they are wrong: then
    `Call.plan` raises the error on all ranks, and calls nothing that takes them.
    """
    request: Any = None
    error: BaseException | None = None
    timeout: float | None = TIMEOUT
    invocation = Invocation(kind, title, {})
    try:
        request = read()
        timeout = request.options.timeout
        invocation = request.invocation(kind, title)
    except ShardloadError as failure:
        error = failure
    except Exception as failure:
        error = ConfigError(f"the arguments could not be read: {type(failure).__name__}: {failure}")
    with begin_call(invocation, error, comm=comm, timeout=timeout, process=process) as call:
        del error  # see `begin_call`
        yield call, request
