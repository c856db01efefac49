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
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

TESTS = Path(__file__).parent
JOB_SECONDS = 900.0  # a test that starts jobs; their own timeouts are shorter and say more
OUTCOMES = ("passed", "skipped", "failed")
GARBAGE = 20_000  # objects until garbage is looked for
# Marks of tests in `tests/mpi`: `make test` and `make test-all` run these in fewer stages.
ALIKE = {
    "any_library": "the same whichever MPI library there is: left out with Open MPI",
    "any_version": "the same in every version of JAX and the others: left out with the oldest",
    "any_number": "the same on 2 ranks as on 4: `make test` has it on 2 with the oldest versions, half of them on one too",
}

# `make test` leaves these to `make test-all`: whole tests, and combinations of parameters (see `_each_value_once`).
THOROUGH = "looks deeper at what cheaper tests look at too, and takes long: left out of `make test`, part of `make test-all`"
EACH_VALUE = "`make test` takes as many combinations of the parameters as show each value once; `make test-all` all of them"

IS_QUICK = bool(os.environ.get("TESTS_QUICK"))  # as in `tests.tiers`; tests of this file copy it alone

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports jax
atexit.register(gc.freeze)  # see jobs/site/sitecustomize.py
gc.disable()  # until all is imported and collected: see pytest_collection_finish
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

SIZE: int = MPI.COMM_WORLD.size

# For pytest: not even imported where they do not run. Every rank would do that, on as many cores as there are.
collect_ignore = ["unit", "jobs", "slurm"] if SIZE > 1 else []


def wait_asleep(request: Any) -> None:
    """Wait for a request of MPI, and leave the core to ranks that are at work. After a longer wait look less often."""
    began = time.monotonic()
    while not request.Test():
        time.sleep(min(0.005, max(0.0003, (time.monotonic() - began) / 4)))


@pytest.fixture(scope="session")
def comm() -> Any:
    """COMM_WORLD, which waits asleep."""
    return Patient(MPI.COMM_WORLD)


class Patient(MPI.Intracomm):
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
    from tests.tuning import tuned

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
    if SIZE == 1:
        _load_profile()
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


def _load_profile() -> None:
    import hypothesis  # half a second on each rank, and tests/mpi do without it: ranks would try different examples

    hypothesis.settings.register_profile(
        "shardload",
        deadline=None,  # the machine may be busy; pytest-timeout is the limit
        derandomize="CI" in os.environ,
        print_blob=True,
        max_examples=30 if IS_QUICK else 100,
    )
    hypothesis.settings.load_profile("shardload")


STDERR = pytest.StashKey[int]()


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """In place of a thread for each test, of which Python warns where a test forks. Prints all stacks, and ends the process, as
    that does; also if C code holds the GIL."""
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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    dropped: dict[str, list[pytest.Item]] = {}
    reasons = {item: _elsewhere(item, config) for item in items}
    if IS_QUICK:
        marked = [item for item in items if item.get_closest_marker("each_value") or _is_combined(item)]
        reasons.update(dict.fromkeys({*marked} - _each_value_once(marked), "left to `make test-all`"))
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


@functools.cache  # of some thousand tests
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
    """Whether this stage of ``make test`` has the test: of the others one, and 4 ranks unless those are 4 as well.

    If 2 ranks are as good as 4, the oldest versions have it in place of those.

    Which one, the test's name says. (`make test-all` has each test in all.)
    """
    if not stage:
        return True
    least = max((mark.kwargs.get("min_size", 2) for mark in item.iter_markers("mpi")), default=1)
    others = [
        *(["openmpi"] if not item.get_closest_marker("any_library") else []),
        *(["oldest"] if not item.get_closest_marker("any_version") and least <= 2 else []),
        *(["one"] if least == 1 else []),
    ]
    turn = others[_number("turn" + _test(item), len(others))] if others else ""
    if item.get_closest_marker("any_number") and "oldest" in others and turn != "openmpi":
        return stage in (turn, "oldest")
    return turn == stage or (stage == "four" and turn != "openmpi")


def _shared_to_us(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of each test of tests/mpi with parameters the share that this stage of ``make test`` takes, and at least one.

    ``TESTS_SHARE=0/8`` is an eighth of the values of one parameter, and a sixteenth of combinations of several. Which those
    are, their names say.
    """
    k, n = map(int, (os.environ.get("TESTS_SHARE") or "0/1").split("/"))
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[_test(item) if _folder(item) == "mpi" else item.nodeid].append(item)
    ours: set[pytest.Item] = set()
    for some in tests.values():
        n_parts = 2 * n if n > 1 and len([*some[0].iter_markers("parametrize")]) > 1 else n
        numbers = [(_number(item.nodeid, n_parts) - k) % n_parts for item in some]
        ours.update(item for item, number in zip(some, numbers, strict=True) if number == min(numbers) or number == 0)
    return ours


def _is_combined(item: pytest.Item) -> bool:
    """True for a test of tests/unit with several parameters, of which each combination is a test."""
    return _folder(item) == "unit" and len([*item.iter_markers("parametrize")]) > 1


def _test(item: pytest.Item) -> str:
    """Its name without parameters."""
    return item.nodeid.partition("[")[0]


def _number(text: str, n: int) -> int:
    """A number below `n`, the same on every rank and in every stage."""
    return zlib.crc32(text.encode()) % n


def _each_value_once(items: list[pytest.Item]) -> set[pytest.Item]:
    """As few items as show each value of each parameter of their tests, and of a fixture's."""
    tests: dict[str, dict[pytest.Item, set[tuple[str, int]]]] = defaultdict(dict)
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        tests[_test(item)][item] = {(name, id(value)) for name, value in parameters.items()}
    return {item for shown in tests.values() for item in _cover(shown)}


def _cover(shown: dict[pytest.Item, set[tuple[str, int]]]) -> Iterator[pytest.Item]:
    """One after the other the item that shows most of what is left; of several any, so that not always the same values meet."""
    seen: set[tuple[str, int]] = set()
    for _ in shown:
        item = max(shown, key=lambda item: (len(shown[item] - seen), _number(item.nodeid, 1 << 32)))
        if seen and shown[item] <= seen:
            return
        yield item
        seen |= shown[item]


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
    library = MPI.Get_library_version().split("\n")[0].split(",")[0].replace("\t", " ").strip("\x00 ")
    return f"mpi: {SIZE} rank{'s' if SIZE > 1 else ''}, {' '.join(library.split())}"


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    dropped = config.stash.get(DROPPED, {})
    return [f"{len(items)} tests run here" + "".join(f"; {n} {reason}" for reason, n in sorted(dropped.items()))]


def pytest_sessionfinish() -> None:
    if preloaded := sys.modules.get("tests.jobs.preloaded"):
        preloaded.close()


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
