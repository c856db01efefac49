"""One suite, under plain ``pytest`` and under ``mpiexec -n 4 python -m pytest --with-mpi tests``.

Which tests run where. Other folders are not even imported; what else does not fit is deselected, and the header says how many:

==============  =============================  ==================================================
folder          plain ``pytest``               under mpiexec
==============  =============================  ==================================================
`tests/unit`    yes                            no
`tests/mpi`     yes, as a job of one process   yes; ``@pytest.mark.mpi(min_size=4)`` asks for ranks
`tests/jobs`    yes; they start their own      no
`tests/slurm`   when it is named               no
==============  =============================  ==================================================

Under mpiexec, after each phase of a test (setup, call, teardown) the ranks agree on its outcome: what fails on one
rank fails on all, so they go on together, and rank 0, which alone prints, shows what each rank had to say. A rank that
waits for one that never comes runs into the test's timeout, which prints every rank's stack and ends the job.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

TESTS = Path(__file__).parent
JOB_SECONDS = 900.0  # a test that starts jobs; their own timeouts are shorter and say more
OUTCOMES = ("passed", "skipped", "failed")
N_SLOWEST = 25
GARBAGE = 20_000  # objects until garbage is looked for
# Files whose tests share more than a file's own fixtures, and files whose tests share nothing and take long each.
TOGETHER = {
    # Copies of one process (`tests.unit.copies`).
    "copies": (
        "test_assemble",
        "test_cost",
        "test_doctor_report",
        "test_labels",
        "test_lookup",
        "test_main",
        "test_packing",
        "test_save_ledger",
        "test_save_target",
        "test_sharding",
        "test_untrusted_helpers",
    ),
}
APART_IN_JOBS = (
    "test_doctor",
    "test_harness",
    "test_modes_of_launch",
    "test_verify_command",
)

# Marks of tests in `tests/mpi`: `make test` and `make test-all` run these in fewer stages.
ALIKE = {
    "any_library": "the same whichever MPI library there is: left out with Open MPI",
    "any_version": "the same in every version of JAX and the others: left out with the oldest",
    "few_ranks": "each rank starts processes of its own: left out on 4 ranks",
}

# `make test` leaves these to `make test-all`: whole tests, and combinations of parameters (see `_beside_the_diagonal`).
THOROUGH = "looks deeper at what cheaper tests look at too, and takes long: left out of `make test`, part of `make test-all`"
EACH_VALUE = "`make test` takes as many combinations of the parameters as show each value once; `make test-all` all of them"

IS_QUICK = bool(os.environ.get("TESTS_QUICK"))  # as in `tests.tiers`; tests of this file copy it alone

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports jax
atexit.register(gc.freeze)  # see jobs/site/sitecustomize.py
gc.disable()  # until all is imported and collected: see pytest_collection_finish
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

MPI: Any
try:
    from mpi4py import MPI
except (ImportError, RuntimeError):  # RuntimeError: mpi4py's wheel found no MPI library
    MPI = None

SIZE: int = MPI.COMM_WORLD.size if MPI else 1

# For pytest: not even imported where they do not run. Every rank would do that, on as many cores as there are.
collect_ignore = ["unit", "jobs", "slurm"] if SIZE > 1 else []


class Alone:
    """What tests need of a communicator, where there is no MPI."""

    rank, size = 0, 1

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def Barrier(self) -> None: ...

    barrier = Barrier

    def bcast(self, value: Any, root: int = 0) -> Any:
        return value

    def gather(self, value: Any, root: int = 0) -> list[Any]:
        return [value]

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def allreduce(self, value: Any, op: Any = None) -> Any:
        return value


def wait_asleep(request: Any) -> None:
    """Wait for a request of MPI, and leave the core to ranks that are at work. After a longer wait look less often."""
    began = time.monotonic()
    while not request.Test():
        time.sleep(min(0.005, max(0.0003, (time.monotonic() - began) / 4)))


@pytest.fixture(scope="session")
def comm() -> Any:
    """COMM_WORLD, which waits asleep; a stand-in of size 1 where there is no MPI library."""
    return Patient(MPI.COMM_WORLD) if MPI else Alone()


if MPI:

    class Patient(MPI.Intracomm):  # type: ignore[misc]
        """A communicator whose collectives of Python objects wait asleep.

        MPI's own spin, on all ranks but the one that makes a file for all of them, say: on fewer cores than ranks that was a
        quarter of the CPU time of these tests. What is derived from it (`Dup`, `Split`) is MPI's own kind again: shardload
        waits in its own way.
        """

        def barrier(self) -> None:
            wait_asleep(self.Ibarrier())

        Barrier = barrier

        def bcast(self, value: Any, root: int = 0) -> Any:
            self.barrier()
            return super().bcast(value, root)

        def gather(self, value: Any, root: int = 0) -> Any:
            self.barrier()
            return super().gather(value, root)

        def allgather(self, value: Any) -> Any:
            self.barrier()
            return super().allgather(value)

        def allreduce(self, value: Any, op: Any = MPI.SUM) -> Any:
            self.barrier()
            return super().allreduce(value, op)

        def Dup(self, info: Any = MPI.INFO_NULL) -> Any:
            return MPI.Intracomm(super().Dup(info))

        def Split(self, color: int = 0, key: int = 0) -> Any:
            return MPI.Intracomm(super().Split(color, key))


@pytest.fixture
def shared_tmp_path(comm: Any) -> Iterator[Path]:
    """One empty folder for all ranks; gone after the test. (pytest's own `tmp_path` is another one on each rank.)"""
    path = Path(comm.bcast(tempfile.mkdtemp(prefix="shardload-test-") if comm.rank == 0 else None, root=0))
    yield path
    comm.barrier()  # nobody reads it any more
    if comm.rank == 0:
        shutil.rmtree(path)


@pytest.fixture
def tune() -> Iterator[Callable[..., Any]]:
    """Let jobs go by other sizes until the test ends: ``tune(inline_nbytes=-1)``."""
    from shardload.planning.tuning import tuned

    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(tuned(**changes))


@pytest.fixture(autouse=True)
def _examples_write_elsewhere(request: pytest.FixtureRequest) -> None:
    """An example in a docstring may write a file where it runs: not into the checkout."""
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))


@pytest.fixture(autouse=True)
def _no_load_was_padded() -> None:
    """What other tests have loaded is no reason for a `PaddingWarning`."""
    padding = sys.modules.get("shardload.arrays.padding")
    if padding is not None:
        padding._padded.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "programs(name, ...): needs these programs; left out without them, fails in CI")
    # Under MPI all ranks must try the same examples, and none may give up on its own because it is slow.
    together: dict[str, Any] = {"database": None, "suppress_health_check": list(hypothesis.HealthCheck)}
    hypothesis.settings.register_profile(
        "shardload",
        deadline=None,  # the machine may be busy; pytest-timeout is the limit
        derandomize=SIZE > 1 or "CI" in os.environ,
        print_blob=True,
        max_examples=30 if IS_QUICK else 100,
        **(together if SIZE > 1 else {}),
    )
    hypothesis.settings.load_profile("shardload")
    for name, why in {**ALIKE, "thorough": THOROUGH, "each_value": EACH_VALUE}.items():
        config.addinivalue_line("markers", f"{name}: {why}")
    # What runs is chosen below. pytest-mpi's own choice would skip all of tests/mpi in plain runs: to it a folder of
    # that name is the mark.
    config.option.with_mpi = True
    config.stash[STDERR] = os.dup(2)  # the real one: pytest redirects 2 while tests run
    if SIZE > 1:
        if MPI.COMM_WORLD.rank:
            config.option.xmlpath = None  # rank 0 writes the report
        config.pluginmanager.register(Ranks(config.stash[STDERR]), "shardload-ranks")


STDERR = pytest.StashKey[int]()


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """In place of a thread for each test, which takes longer to start and to end than many a test. Prints all stacks, and ends
    the process, as that does; also if C code holds the GIL."""
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=item.config.stash[STDERR])
    return True


def pytest_timeout_cancel_timer() -> bool:
    faulthandler.cancel_dump_traceback_later()
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__module__ == "pytest_mpi":
            plugin._is_testing_mpi = False  # all it does is print 40 lines about the MPI library at the end
        if type(plugin).__name__ == "WorkerInteractor":
            _send_what_counts(plugin)


def _send_what_counts(worker: Any) -> None:
    """Of a test that passes, a worker of xdist sends the report of its call: each message takes longer, at both ends, than many
    a test, and there are five of them."""
    send = worker.sendevent

    def send_some(name: str, **what: Any) -> None:
        report = what["data"] if name == "testreport" else {}
        is_silent = report and report["when"] != "call" and report["outcome"] == "passed" and report["duration"] < 0.1
        if name not in ("logstart", "logfinish") and not is_silent:
            send(name, **what)

    worker.sendevent = send_some


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    dropped: dict[str, list[pytest.Item]] = {}
    reasons = {item: _elsewhere(item, config) for item in items}
    if IS_QUICK:
        reasons.update(dict.fromkeys(_beside_the_diagonal(items), "left to `make test-all`"))
    ours = _shared_to_us([item for item in items if reasons[item] is None])
    for item in items:
        reason = reasons[item] or (None if item in ours else "left to the other stages")
        (dropped.setdefault(reason, []) if reason else kept).append(item)
        if _folder(item) in ("jobs", "slurm") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(JOB_SECONDS))
    items[:] = kept
    config.stash[DROPPED] = {reason: len(tests) for reason, tests in dropped.items()}
    for tests in dropped.values():
        config.hook.pytest_deselected(items=tests)


DROPPED = pytest.StashKey[dict[str, int]]()


def _folder(item: pytest.Item) -> str:
    return _folder_of(item.path)


@functools.cache
def _folder_of(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


def _elsewhere(item: pytest.Item, config: pytest.Config) -> str | None:
    """Why this test is not for this run; None if it is."""
    if SIZE > 1 and _folder(item) != "mpi":
        return "left to plain pytest"
    if _folder(item) == "slurm" and not _is_named(TESTS / "slurm", config):
        return "left to `make test-slurm`"  # it needs root, and starts a cluster
    if IS_QUICK and item.get_closest_marker("thorough"):
        return "left to `make test-all`"
    if _folder(item) == "mpi" and not _is_its_turn(item, os.environ.get("TESTS_TURN", "")):
        return "left to the other stages"
    if SIZE == 1 and _folder(item) == "mpi" and _parameter(item, "readers") in ("root", 2):
        return "the same as 'parallel' on one process"  # there is one reader, this one
    if any(mark.kwargs.get("min_size", 2) > SIZE for mark in item.iter_markers("mpi")):
        return "left to runs with more ranks"
    wanted = [name for mark in item.iter_markers("programs") for name in mark.args if shutil.which(name) is None]
    if wanted and not os.environ.get("CI"):  # in CI they run, and fail
        return f"NOT RUN: {', '.join(wanted)} {'is' if len(wanted) == 1 else 'are'} not installed (.ci/debian-packages.txt)"
    return None


def _is_its_turn(item: pytest.Item, stage: str) -> bool:
    """Whether this stage of ``make test`` has the test: 4 ranks have all that they can, and of the other stages one.

    Which one, the test's name says: for few ranks, where two have the test. (`make test-all` has each test in all.)
    """
    if not stage:
        return True
    least = max((mark.kwargs.get("min_size", 2) for mark in item.iter_markers("mpi")), default=1)
    marks = {name for name in ALIKE if item.get_closest_marker(name)}
    others = [
        *(["openmpi"] if "any_library" not in marks else []),
        *(["oldest"] if "any_version" not in marks and least <= 2 else []),
        *(["one"] if least == 1 else []),
    ]
    if "few_ranks" in marks and "oldest" in others:
        return stage == "oldest"
    return stage in others and others.index(stage) == zlib.crc32(b"turn" + _test(item).encode()) % len(others)


def _shared_to_us(items: list[pytest.Item]) -> set[pytest.Item]:
    """The items whose parameters this stage of ``make test`` takes; of each test with parameters at least one."""
    places = _places([item for item in items if _folder(item) == "mpi"])
    steps = {item: _steps_to_our_share(item, places[item]) if item in places else 0 for item in items}
    nearest: dict[str, pytest.Item] = {}
    for item in items:
        least = nearest.setdefault(_test(item), item)
        if steps[item] < steps[least]:
            nearest[_test(item)] = item
    return {item for item in items if steps[item] == 0} | set(nearest.values())


def _test(item: pytest.Item) -> str:
    """Its name without parameters."""
    return item.nodeid.partition("[")[0]


def _places(items: list[pytest.Item]) -> dict[pytest.Item, list[int]]:
    """For each ``parametrize`` of an item's test, which of its values the item has, counted from 0.

    (pytest's own ``callspec.indices`` count the items instead, for each parameter the same.)
    """
    seen: dict[tuple[str, int], list[list[Any]]] = {}
    places: dict[pytest.Item, list[int]] = {}
    for item in items:
        places[item] = []
        for axis, mark in enumerate(item.iter_markers("parametrize") if isinstance(item, pytest.Function) else ()):
            value = [_parameter(item, name) for name in _names_of(mark)]
            places[item].append(_place(value, seen.setdefault((_test(item), axis), [])))
    return places


def _names_of(mark: pytest.Mark) -> Sequence[str]:
    """The parameters that a ``parametrize`` gives."""
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names


def _place(value: list[Any], values: list[list[Any]]) -> int:
    """Which one it is of those that were seen, to which it is added if it is new."""
    for k, one in enumerate(values):
        if _are_the_same(value, one):
            return k
    values.append(value)
    return len(values) - 1


def _beside_the_diagonal(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of tests marked `each_value` all combinations but those on a diagonal of the grid: there each value of each parameter is
    met, of a fixture's too.
    """
    marked = [item for item in items if item.get_closest_marker("each_value") and hasattr(item, "callspec")]
    places = _places(marked)
    seen: dict[tuple[str, str], list[list[Any]]] = {}
    longest: dict[str, list[int]] = {}
    for item in marked:
        named = {name for mark in item.iter_markers("parametrize") for name in _names_of(mark)}
        for name, value in getattr(item, "callspec").params.items():  # noqa: B009  # mypy knows of no such attribute
            if name not in named:
                places[item].append(_place([value], seen.setdefault((_test(item), name), [])))
        sizes = longest.setdefault(_test(item), [0] * len(places[item]))
        sizes[:] = [max(n, place + 1) for n, place in zip(sizes, places[item], strict=True)]
    return {item for item in marked if not _is_on_diagonal(places[item], longest[_test(item)])}


def _is_on_diagonal(places: list[int], sizes: list[int]) -> bool:
    """Whether the places are where the longest axis leads. Shorter ones begin anew with another step each time, and another one
    each, so that two of them do not always meet in the same places.

    >>> [(a, b, c) for a in range(4) for b in range(2) for c in range(2) if _is_on_diagonal([a, b, c], [4, 2, 2])]
    [(0, 0, 0), (1, 1, 1), (2, 1, 0), (3, 0, 1)]
    """
    main = sizes.index(max(sizes))
    along, others = places[main], [k for k in range(len(sizes)) if k != main]
    return all(places[k] == (along + step * (along // sizes[k])) % sizes[k] for step, k in enumerate(others, 1))


def _are_the_same(one: list[Any], other: list[Any]) -> bool:
    """Whether these are the same objects: arrays, for one, cannot be asked whether they are equal."""
    return all(a is b for a, b in zip(one, other, strict=True))


def _steps_to_our_share(item: pytest.Item, places: list[int]) -> int:
    """How far the item's parameters are from those that this stage of ``make test`` takes; 0 if it is one of these.

    Which values those are differs from test to test, so that each value, a file format say, is in the share of some test.
    """
    share = os.environ.get({0: "", 1: "TESTS_SHARE_OF_ONE"}.get(len(places), "TESTS_SHARE"))
    if not share or item.get_closest_marker("few_ranks"):  # which are left out where all others have all values
        return 0
    k, n = map(int, share.split("/"))
    return (zlib.crc32(_test(item).encode()) + sum(places) - k) % n


def _parameter(item: pytest.Item, name: str) -> object:
    """What a test was parametrized with."""
    return item.callspec.params.get(name) if hasattr(item, "callspec") else None


def _is_named(folder: Path, config: pytest.Config) -> bool:
    """Whether the command line asks for this folder, or for something in it, by name."""
    asked = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return any(path.resolve().is_relative_to(folder) for path in asked)


def pytest_collection_finish() -> None:
    """Leave what is there now out of every search for garbage: JAX and all tests, a third of a second each time. And search
    less often."""
    gc.freeze()
    gc.set_threshold(GARBAGE)
    gc.enable()


def pytest_report_header(config: pytest.Config) -> str:
    if not MPI:
        return "mpi: no library; one process"
    library = MPI.Get_library_version().split("\n")[0].split(",")[0].replace("\t", " ").strip("\x00 ")
    return f"mpi: {SIZE} rank{'s' if SIZE > 1 else ''}, {' '.join(library.split())}"


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    dropped = config.stash.get(DROPPED, {})
    return [f"{len(items)} tests run here" + "".join(f"; {n} {reason}" for reason, n in sorted(dropped.items()))]


def pytest_sessionfinish() -> None:
    if preloaded := sys.modules.get("tests.jobs.preloaded"):
        preloaded.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add this run's counts and its slowest tests to those of all runs of `make test` (see `stages`)."""
    is_worker = hasattr(terminalreporter.config, "workerinput")  # of xdist, which tells all to the one that started it
    if (tally := os.environ.get("SHARDLOAD_TALLY")) and not is_worker and (SIZE == 1 or MPI.COMM_WORLD.rank == 0):
        counts = [len(terminalreporter.stats.get(key, ())) for key in ("passed", "failed", "error")]
        seconds: dict[str, float] = {}
        for report in chain.from_iterable(terminalreporter.stats.values()):
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
        said = {"stage": os.environ.get("SHARDLOAD_STAGE", ""), "passed": counts[0], "failed": counts[1] + counts[2]}
        slowest = [[took, name] for name, took in sorted(seconds.items(), key=lambda item: -item[1])[:N_SLOWEST]]
        with open(tally, "a") as file:
            file.write(json.dumps({**said, "slowest": slowest}) + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadscope``: which worker gets which tests. See `unit_of_work`."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of_work(nodeid)

    return ByUnit(config, log)


def unit_of_work(nodeid: str) -> str:
    """Tests of the same unit go to the same worker, one after the other: those that share what takes long to make.

    >>> unit_of_work("tests/unit/test_region.py::test_text[a]"), unit_of_work("tests/jobs/test_doctor.py::test_a")
    ('tests/unit/test_region.py', 'tests/jobs/test_doctor.py::test_a')
    """
    file = nodeid.partition("::")[0]
    name = file.rpartition("/")[2].removesuffix(".py")
    if name in APART_IN_JOBS and "/jobs/" in file:
        return nodeid
    return next((what for what, names in TOGETHER.items() if name in names), file)


class Ranks:
    """What `pytest` needs to be one program on many ranks. Registered under mpiexec only."""

    def __init__(self, stderr: int) -> None:
        self.comm = MPI.COMM_WORLD.Dup()  # no test can take a message of ours
        self.rank: int = self.comm.rank
        self.stderr = stderr
        self.collect_errors: list[str] = []
        self.pending = ""  # this rank's failure, while it waits for the others
        self.running: tuple[str, float, float] | None = None  # the test, its seconds, and when they are over
        self.watcher = threading.Thread(target=self.watch, name="tests-watch", daemon=True)

    def say(self, text: str) -> None:
        """Print past pytest, in one write, so that ranks do not mix their lines."""
        prefix = f"[rank {self.rank}] "
        os.write(self.stderr, "".join(f"{prefix}{line}\n" for line in text.splitlines()).encode())

    # --- the session ----------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionstart(self, session: pytest.Session) -> Generator[None, object, object]:
        manager = session.config.pluginmanager
        for name in ("lfplugin", "nfplugin", "stepwise"):  # they would write .pytest_cache, all ranks at once
            if manager.has_plugin(name):
                manager.unregister(name=name)
        if self.rank:
            reporter: Any = manager.get_plugin("terminalreporter")
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
        try:
            import shardload

            shardload.initialize()  # before any test can touch JAX's devices
        except BaseException:
            self.end_job("cannot start jax.distributed:\n" + traceback.format_exc())
        return (yield)

    def end_job(self, why: str) -> None:
        """End the whole job: the other ranks would wait for this one for ever."""
        self.say(why)
        self.comm.Abort(3)

    def pytest_internalerror(self, excrepr: object) -> None:
        self.end_job(f"INTERNAL ERROR of pytest or a plugin:\n{excrepr}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collect_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Every rank must have collected the same tests, or they would wait for each other for ever."""
        names = "\n".join(item.nodeid for item in session.items)
        mine = (hashlib.sha256(names.encode()).hexdigest(), len(session.items), "\n".join(self.collect_errors))
        wait_asleep(self.comm.Ibarrier())  # they need the cores to import all tests
        everyone = self.comm.allgather(mine)
        if len({(digest, bool(errors)) for digest, _, errors in everyone}) > 1:
            lines = [f"rank {k} collected {n} tests {errors}".rstrip() for k, (_, n, errors) in enumerate(everyone)]
            pytest.exit("the ranks collected different tests:\n" + "\n".join(lines), returncode=4)

    # --- outcomes -------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # the outermost: it sees the report that would be printed
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self.agree(report)
        return report

    def agree(self, report: pytest.TestReport) -> None:
        """Give all ranks the same outcome. Collective."""
        if not report.passed:
            self.pending = "\n".join([report.longreprtext, *(text for _, text in report.sections if text)])
        outcomes = self.gather_outcomes(report.outcome)
        agreed = len(set(outcomes)) == 1 and "failed" not in outcomes
        texts = None if agreed else self.comm.gather(self.pending)
        self.pending = ""
        if agreed:
            return
        ranks = {o: [k for k in range(len(outcomes)) if outcomes[k] == o] for o in OUTCOMES if o in outcomes}
        summary = ", ".join(f"{outcome} on {_names(those)}" for outcome, those in ranks.items())
        if not report.failed:
            report.outcome = "failed"
            report.longrepr = f"{summary}; the ranks must agree"
            if hasattr(report, "wasxfail"):
                del report.wasxfail
        elif len(ranks) > 1:
            report.sections.append(("outcomes", summary))
        for text in dict.fromkeys(texts or []):  # on rank 0; the same text of several ranks once
            those = [k for k, one in enumerate(texts or []) if one == text]
            if text and not (0 in those and outcomes[0] == "failed"):  # that is this report's own
                report.sections.append((f"{outcomes[those[0]]} on {_names(those)}", text))

    def gather_outcomes(self, outcome: str) -> list[str]:
        """Everyone's outcome. Waits asleep: a rank that is still at work may need the core."""
        codes = np.empty(self.comm.size, np.int8)
        request = self.comm.Iallgather(np.array([OUTCOMES.index(outcome)], np.int8), codes)
        wait_asleep(request)
        return [OUTCOMES[code] for code in codes]

    # --- timeouts -------------------------------------------------------------------------------------------

    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        """In place of pytest-timeout's own timer, whose report only rank 0 would show."""
        self.running = item.nodeid, settings.timeout, time.monotonic() + settings.timeout
        if not self.watcher.is_alive():
            self.watcher.start()
        # Should C code hold the GIL, no Python thread can run; this one is not Python.
        faulthandler.dump_traceback_later(settings.timeout + 10, exit=True, file=self.stderr)
        return True

    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool:
        self.running = None
        faulthandler.cancel_dump_traceback_later()
        return True

    def watch(self) -> None:
        """End the job when a test takes too long. One thread for all tests: to start one for each takes longer than many do."""
        sleep, now = time.sleep, time.monotonic  # where the program ends in a copy, this module loses its names first
        while True:
            sleep(0.5)
            if (running := self.running) is not None and now() > running[2]:
                self.expire(*running[:2])

    def expire(self, test: str, seconds: float) -> None:
        """Say where this rank is, give the others a moment to do the same, and end the process and so the job."""
        main = sys._current_frames()[threading.main_thread().ident or 0]
        stack = "".join(traceback.format_stack(main)[-12:])
        failed = f"this rank has FAILED and waits for the others:\n{self.pending}\n" if self.pending else ""
        self.say(f"TIMEOUT: {test} took more than {seconds} s\n{failed}it is here:\n{stack}")
        time.sleep(2)
        os._exit(1)


def _names(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
