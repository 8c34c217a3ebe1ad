"""Names tests that take longer than the quick tests may, so that `make test-fast` stays quick.

A test that takes more than `LIMIT_S` of a processor is either made quicker or marked `slow`. Time on the clock would
say more of the machine than of the test. The first test of a process that needs a library or a kernel pays for it, so
what is named is looked at, and fails nothing.

The time of fixtures of the session is not counted. The end of a session waits for the processes of Ray, Spark, S3 and
Kafka, and their whole processor time is added at that moment: it would fall to the test that happens to run last.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator, Mapping

import pytest

LIMIT_S = 0.2
NAMED_MAX = 15
KINDS = {"unit", "contract", "house", "docs", "local jobs"}
"""The kinds of tests that are quick: those of `make test-fast`."""
_PROPERTY = "processor_s"
_SINCE = pytest.StashKey[float]()


class _SharedTime:
    """The processor time that fixtures of the session took to start and to end. They may be nested."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._depth = 0
        self._since_s = 0.0

    def begin(self) -> None:
        """Starts the clock."""
        if self._depth == 0:
            self._since_s = _process_s()
        self._depth += 1

    def end(self) -> None:
        """Stops the clock."""
        self._depth -= 1
        if self._depth == 0:
            self.spent_s += _process_s() - self._since_s


_SHARED = _SharedTime()


def _process_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def spent_s() -> float:
    """The processor time of this process and of the children that it waited for, without fixtures of the session."""
    return _process_s() - _SHARED.spent_s


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
    """Measures a fixture of the session, and its end: finalizers run in reverse order."""
    if fixturedef.scope != "session":
        return (yield)
    _SHARED.begin()
    try:
        fixturedef.addfinalizer(_SHARED.end)
        return (yield)
    finally:
        fixturedef.addfinalizer(_SHARED.begin)
        _SHARED.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test begins."""
    item.stash[_SINCE] = spent_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """One of its three phases is over: set-up, call, or what comes after."""
    report = yield
    now_s = spent_s()
    report.user_properties.append((_PROPERTY, now_s - item.stash[_SINCE]))
    item.stash[_SINCE] = now_s
    return report


def over_limit(reports: Iterable[pytest.TestReport]) -> Mapping[str, float]:
    """Tests of a quick kind over the limit that are not marked, the longest first, with the seconds of all phases."""
    seconds: dict[str, float] = {}
    for report in reports:
        told = dict(report.user_properties)
        if told.get("kind") in KINDS and "slow" not in report.keywords:
            seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + float(str(told.get(_PROPERTY, 0.0)))
    longest_first = sorted(seconds.items(), key=lambda each: -each[1])
    return {test: spent for test, spent in longest_first if spent > LIMIT_S}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name them."""
    every = [each for reports in terminalreporter.stats.values() for each in reports]
    found = over_limit(each for each in every if isinstance(each, pytest.TestReport))
    if found:
        terminalreporter.write_line(f"more than {LIMIT_S} s of a processor, and not marked slow:")
    for test, spent in list(found.items())[:NAMED_MAX]:
        terminalreporter.write_line(f"  {spent:5.2f} s  {test}")
    if len(found) > NAMED_MAX:
        terminalreporter.write_line(f"  and {len(found) - NAMED_MAX} others")
