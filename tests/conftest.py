"""Settings of the whole suite: examples of Hypothesis, what runs beside what, and the kinds of tests.

`--kinds "unit, local jobs"` runs tests of these kinds alone. `--examples 20` tries more examples in property tests.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import hanging
import patient_ray
import processor_time
import pytest
import spreading
import stores
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tidegate",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    # On a busy machine a process may wait for a minute between two examples, and the check measures that wait.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tidegate")

_TESTS = Path(__file__).parent
_ROOMS = {"api": "local jobs", "house": "house", "docs": "docs"}
"""Folders whose tests are of this kind, unless they need Ray or a server."""
_ALL_OF_A_KIND = {"simulation": "simulation", "cluster": spreading.RAY}
_MEMORY = "/dev/shm"
_SHORT_LIVED_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For Java programs that end after a minute: the second compiler costs them a third of their processor time."""
_NEW_OBJECTS, _YOUNG, _MIDDLE = 50_000, 20, 20
"""When garbage is looked for: after so many objects, and in the older ones after so many looks at the younger."""
_ROOM_BYTES_MIN = 4 * 1024**3
_SETTINGS = "_hypothesis_internal_use_settings"
"""The attribute in which Hypothesis, and its plugin for pytest, keep the settings of a test."""
_SERVERS = (
    spreading.RAY,
    spreading.S3,
    spreading.KAFKA,
    spreading.HDFS,
    spreading.OBJECTS,
    spreading.POSTGRES,
)
_KINDS = {"unit", "property", "contract", *_SERVERS, *_ROOMS.values(), *_ALL_OF_A_KIND.values()}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that choose kinds, and the number of examples."""
    kinds = ", ".join(sorted(_KINDS))
    times = "try this many times as many examples in property tests, and other examples each time"
    parser.addoption("--examples", metavar="TIMES", type=int, default=1, help=times)
    parser.addoption("--kinds", metavar="KINDS", help=f"run tests of these kinds alone, with commas between: {kinds}")


def pytest_configure(config: pytest.Config) -> None:
    """Tests are dealt out by `spreading`, looked at by `processor_time` and `hanging`, and may ask for `stores`."""
    config.pluginmanager.register(spreading, "spreading")
    config.pluginmanager.register(processor_time, "processor_time")
    config.pluginmanager.register(hanging, "hanging")
    config.pluginmanager.register(stores, "stores")
    if unknown := sorted(_wanted(config) - _KINDS):
        raise pytest.UsageError(f"--kinds: no kind of test is called {unknown}; there are {sorted(_KINDS)}")
    if _memory_has_room():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)
    os.environ["JDK_JAVA_OPTIONS"] = f"{os.environ.get('JDK_JAVA_OPTIONS', '')} {_SHORT_LIVED_JVM}".strip()
    # Ray would kill processes of a test where other programs take the machine's memory.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    # Ray's processes make way for all others, so that beside other tests they would hardly get a turn.
    os.environ.setdefault("RAY_worker_niceness", "0")
    patient_ray.set_intervals()


def _memory_has_room() -> bool:
    """Whether there is a file system in memory for the files of tests, from which programs can be run.

    Tests make files durable, as jobs do: tens of thousands of times in a run. A disk takes milliseconds for each.
    """
    if not os.access(_MEMORY, os.W_OK):
        return False
    found = os.statvfs(_MEMORY)
    return found.f_bavail * found.f_frsize >= _ROOM_BYTES_MIN and not found.f_flag & os.ST_NOEXEC


def _wanted(config: pytest.Config) -> set[str]:
    """The kinds that were asked for: all, if none was named."""
    named: str | None = config.getoption("kinds")
    return _KINDS if named is None else {kind.strip() for kind in named.split(",")}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A folder whose tests are all of a kind that nobody wants is not even imported."""
    folder = collection_path.name if collection_path.parent == _TESTS else ""
    return True if folder in _ALL_OF_A_KIND and _ALL_OF_A_KIND[folder] not in _wanted(config) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Thousands of tests and the libraries that they import stay to the end, so nobody looks for garbage in them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS, _YOUNG, _MIDDLE)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say of each test what kind it is, leave out what was not asked for, and sort the others."""
    kinds = {item: _kind(item) for item in items}
    for item, kind in kinds.items():
        item.user_properties.append(("kind", kind))
    wanted = _wanted(config)
    if wanted != _KINDS:
        config.hook.pytest_deselected(items=[item for item in items if kinds[item] not in wanted])
        items[:] = [item for item in items if kinds[item] in wanted]
    if (times := config.getoption("examples")) > 1:
        _try_more_examples(items, times)
    spreading.spread(config, items)


def _try_more_examples(items: list[pytest.Item], times: int) -> None:
    """Multiplies the number of examples of each property test. They are drawn anew in each run, to search for errors.

    A usual run tries the same few examples each time.
    """
    for test in {function for item in items if (function := getattr(item, "obj", None)) is not None}:
        if (usual := getattr(test, _SETTINGS, None)) is not None:
            setattr(test, _SETTINGS, settings(usual, max_examples=times * usual.max_examples, derandomize=False))


@pytest.fixture(autouse=True)
def own_log_settings() -> Iterator[None]:
    """What is set up for tidegate's loggers in a test ends with it: of lines that are not logged no test could tell.

    A test that has a process of a job begin in this one sets them up as that process would.
    """
    root = logging.getLogger("tidegate")
    handlers = list(root.handlers)
    levels = {logger: logger.level for logger in _loggers()}
    yield
    root.handlers[:] = handlers
    for logger in _loggers():
        if logger.level != levels.get(logger, logging.NOTSET):
            logger.setLevel(levels.get(logger, logging.NOTSET))


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict
    found = (known[name] for name in _names_of_loggers(len(known)))
    return [logger for logger in found if isinstance(logger, logging.Logger)]


@lru_cache(maxsize=1)
def _names_of_loggers(known: int) -> list[str]:
    """Those of tidegate. There are hundreds of others, and none is forgotten: all are looked at when one is new."""
    return [name for name in list(logging.root.manager.loggerDict) if name.startswith("tidegate")]


@pytest.fixture(autouse=True)
def watched_jobs_of_tests(request: pytest.FixtureRequest) -> None:
    """Waits end where the jobs of their test have failed. What runs no job does not import what that needs."""
    if "tidegate.api.submission.job" in sys.modules or hasattr(request.module, "tg"):
        from watched_jobs import watch_jobs

        watch_jobs()


@pytest.fixture(scope="session", autouse=True)
def own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What rests in the folder of temporary files when nobody names another is this run's alone.

    Jobs under one root have names of their own while they live, and other runs on the machine have the same names.
    """
    before = tempfile.tempdir
    tempfile.tempdir = str(tmp_path_factory.mktemp("tmp"))
    yield
    tempfile.tempdir = before


@pytest.fixture(scope="module")
def plain_ray() -> Iterator[None]:
    """The Ray of this process, or where there is none a small one of its own, whatever else runs on the machine."""
    import ray  # Half a second, which most runs of a few tests can do without.

    started = not ray.is_initialized()
    if started:
        patient_ray.await_nodes()
        ray.init(address="local", num_cpus=2, include_dashboard=False, configure_logging=False)
    yield
    if started:
        ray.shutdown()


def _kind(item: pytest.Item) -> str:
    """What a test needs, and if it needs nothing, how it goes about it."""
    room = _room(item.path)
    if room in _ALL_OF_A_KIND:
        return _ALL_OF_A_KIND[room]
    needs = spreading.together(item)
    if needs in _SERVERS:
        return str(needs)
    if room in _ROOMS:
        return _ROOMS[room]
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        return "property"
    return "contract" if item.path.stem.endswith("_contract") else "unit"


@lru_cache
def _room(module: Path) -> str:
    """The folder of a module's tests: the same for thousands of them."""
    return module.relative_to(_TESTS).parts[0] if module.is_relative_to(_TESTS) else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests of each kind there were, and how long they took."""
    kinds: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                kind = dict(report.user_properties).get("kind", "other")
                kinds[str(kind)] += report.when == "call"
                seconds[str(kind)] += round(report.duration * 1000)
    if kinds:
        counts = ", ".join(f"{count} {kind} ({seconds[kind] // 1000} s)" for kind, count in kinds.most_common())
        terminalreporter.write_line(f"tests by kind: {counts}")
