"""Set up all tests: hypothesis profiles, and the tiny models."""

import ctypes
import faulthandler
import gc
import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import tiny_models
from emulated import QuickLauncher
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from mie.ops.blas import Blas
from mie.ops_gpu import load

# A shell ignores Ctrl-C in the jobs that it starts in the background, and children inherit that.
# The tests of interrupts need Python's own handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# By default the examples are the same in every run, so that a failure means that the code has
# changed. `make test-all` tries more examples, at random.
# How long an example takes to draw says only how busy the machine is.
UNHURRIED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", derandomize=True, max_examples=40, **UNHURRIED)
settings.register_profile("far", max_examples=3000, **UNHURRIED)
settings.load_profile(os.environ.get("MIE_HYPOTHESIS", "default"))
if hasattr(providers, "_get_local_constants"):
    # Hypothesis also draws constants that it finds in the modules imported so far. Which these are
    # depends on the tests that a process ran before, and then so would the examples.
    providers._get_local_constants = lambda: providers._local_constants

TESTS = Path(__file__).resolve().parent
HANG_SECONDS = {"quick": 600, "slow": 3600}
"""Time after which a test counts as hung, far more than any needs on a slow machine."""
RARE = {("mode", "'random'"), ("mode", "'reverse'"), ("dtype", "'float16'")}
"""Values for which `make test` builds no kernels: other orders of threads, and a second float of 16
bits."""
SHORT = ("config", "engine", "load", "memory", "model", "sched")
"""Folders of `unit` whose files all take less than two seconds."""
WARM_UP = "from mie import LLM; LLM('bundled', backend='jit', num_blocks=8)"
"""Program that compiles the kernels of most tests of `jit`."""
_stderr = pytest.StashKey[int]()
_cpu_seconds = pytest.StashKey[float]()
_warming = pytest.StashKey[tuple["subprocess.Popen[bytes]", Path]]()


def pytest_configure(config: pytest.Config) -> None:
    """Build kernels unoptimised for `make test`, whose emulated engines run few steps.

    Garbage collections would take a quarter of the time that pytest needs to collect the tests.
    """
    gc.disable()
    if config.option.markexpr == "not slow":
        load.EmulatedLauncher = QuickLauncher
    worker = getattr(config, "workerinput", None)
    if worker and [Path(each).resolve() for each in config.args] == [TESTS]:
        config.args = _from_another_folder(int(worker["workerid"][2:]), worker["workercount"])
    config.stash[_stderr] = os.dup(2)  # pytest does not capture it yet
    faulthandler.enable(config.stash[_stderr])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that shows where the time of `make test` goes."""
    words = "print the CPU seconds of the files that take most, with processes that have ended"
    parser.addoption("--cpu-seconds", type=int, metavar="N", default=0, help=words)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note the CPU seconds of a test, which xdist hands on with the report."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("cpu_seconds", cpu_seconds() - item.stash[_cpu_seconds]))
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the files that take most CPU seconds."""
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "cpu_seconds":
                    seconds[report.nodeid.partition("::")[0]] += value
    if config.option.cpu_seconds:
        terminalreporter.section(f"{seconds.total():.0f} CPU seconds")
        for file, value in seconds.most_common(config.option.cpu_seconds):
            terminalreporter.line(f"{value:7.1f} {file}")


def cpu_seconds() -> float:
    """Return the CPU time of this process, and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Print all stacks and end the process if a test hangs, in compiled code or a teardown too.

    The timers of pytest and of pytest-timeout stop at a test's first failure.
    """
    item.stash[_cpu_seconds] = cpu_seconds()
    if os.environ.get("MIE_HYPOTHESIS") == "far":
        return (yield)
    seconds = HANG_SECONDS["slow" if item.get_closest_marker("slow") else "quick"]
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)  # `pytest -p no:xdist` has no such hook
def pytest_xdist_auto_num_workers() -> int:
    """Start a worker for each CPU. One more makes threads of OpenBLAS wait for each other."""
    return os.cpu_count() or 1


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile kernels of `jit` once while the workers of pytest-xdist collect the tests.

    In a fresh clone, each worker would compile them otherwise, all at the same time.
    """
    config = session.config
    is_controller = "PYTEST_XDIST_WORKER" not in os.environ and config.getoption("numprocesses", 0)
    if is_controller and importlib.util.find_spec("numba") is not None:
        cache = Path(tempfile.mkdtemp(prefix="mie-tests-"))
        _keep_builds(config, cache)
        process = subprocess.Popen(
            [sys.executable, "-c", WARM_UP],
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
            cwd=config.rootpath,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        config.stash[_warming] = process, cache


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the program that compiles kernels if it still runs."""
    if (warming := session.config.stash.get(_warming, None)) is not None:
        process, cache = warming
        process.kill()
        process.wait(60)
        shutil.rmtree(cache, ignore_errors=True)  # the kernels themselves are elsewhere


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `make test` build few kernels and run few cases of tests marked so.

    It keeps the cases that together have each value of each parameter, but the rare ones, and marks
    the others slow. Of a test of CUDA kernels it keeps one case that is not rare. The name of the
    test chooses the case, so that all tests together have each value often. A test without
    parameters stays.
    """
    tests: dict[object, dict[pytest.Item, set[tuple[str, str]]]] = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        folder = item.path.parent.name
        builds = "mode" in params or folder == "jit" or (folder == "kernels" and "dtype" in params)
        is_reduced = params and (builds or item.get_closest_marker("few"))
        if is_reduced and isinstance(item, pytest.Function) and not item.get_closest_marker("slow"):
            values = {(name, repr(value)) for name, value in params.items()}
            tests.setdefault(item.function, {})[item] = values
    for cases in tests.values():
        common = {case: values for case, values in cases.items() if not values & RARE} or cases
        first = next(iter(cases))
        if first.path.parent.name == "kernels":
            number = zlib.crc32(first.nodeid.partition("[")[0].encode())
            del cases[[*common][number % len(common)]]
            common = {}
        missing = set[tuple[str, str]]().union(*common.values())
        while missing:
            kept = max(common, key=lambda case: len(common[case] & missing))
            missing -= common[kept]
            del cases[kept]
            common.pop(kept, None)
        for item in cases:
            item.add_marker(pytest.mark.slow)


def _from_another_folder(number: int, count: int) -> list[str]:
    """Return the folders of tests in the order in which a worker of pytest-xdist collects them.

    In a fresh clone pytest compiles each file. Workers that begin elsewhere share this work.
    """
    folders = sorted({str(path.parent) for path in TESTS.rglob("test_*.py")})
    first = len(folders) * number // count
    return [*folders[first:], *folders[:first]]


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_collection_in_order(items: list[pytest.Item]) -> None:
    """Sort tests by folder, because all workers must have the same order.

    Folders of short files are last. So no worker runs a long file while the others have no work.
    """
    items.sort(key=lambda item: (item.path.parent.name in SHORT, str(item.path.parent)))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep the collected tests out of later garbage collections, which take 0.3 s with them."""
    _tidy_up()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _tidy_up_before_each_file() -> None:
    """Keep the objects of earlier files out of garbage collections too."""
    _tidy_up()


def _tidy_up() -> None:
    gc.collect()
    gc.freeze()
    if _malloc_trim is not None:
        _malloc_trim(0)  # A fork takes longer the more memory a process has.


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


@pytest.fixture(scope="session", autouse=True)
def _one_blas_thread() -> Iterator[None]:
    """Let NumPy's products take one thread, as in a small step.

    The workers of pytest-xdist take all CPUs already, and a thread of BLAS spins while it waits.
    """
    with Blas().limit(1):
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[None]:
    """Keep builds out of the user's cache; the workers of pytest-xdist share them."""
    own = tmp_path_factory.getbasetemp()
    cache = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    _keep_builds(pytestconfig, cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


def _keep_builds(config: pytest.Config, cache: Path) -> None:
    """Let the compiled kernels of `jit` and of the emulator stay for the next run of the tests."""
    for name in ("jit", "emulator"):
        kept = config.rootpath / ".pytest_cache" / "d" / f"mie-{name}"
        with suppress(OSError):  # another worker was faster, or the folder cannot be written
            kept.mkdir(mode=0o700, parents=True, exist_ok=True)
            (cache / "mie").mkdir(mode=0o700, exist_ok=True)
            (cache / "mie" / name).symlink_to(kept)


class _Models(dict[str, tiny_models.TinyModel]):
    """Models by name, each made when a test first takes it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __missing__(self, name: str) -> tiny_models.TinyModel:
        self[name] = tiny_models.TinyModel(self._root / name, tiny_models.TINY[name])
        return self[name]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tiny_models.TinyModel]:
    """Random models of every family, by name."""
    return _Models(tmp_path_factory.mktemp("tiny"))
