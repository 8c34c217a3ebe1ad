"""Names tests that take longer than the quick tests may, so that `make test-fast` stays quick.

A test that takes more than `LIMIT_S` of a processor is either made quicker or marked `slow`. Time on the clock would
say more of the machine than of the test. The first test of a process that needs a library or a kernel pays for it, so
what is named is looked at, and fails nothing.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator, Mapping

import pytest

LIMIT_S = 0.5
NAMED_MAX = 15
KINDS = {"unit", "contract", "house", "docs", "local jobs"}
"""The kinds of tests that are quick: those of `make test-fast`."""
_PROPERTY = "processor_s"
_SINCE = pytest.StashKey[float]()


def spent_s() -> float:
    """The processor time of this process so far, and of the children that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


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
