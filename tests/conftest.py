"""Settings of the whole suite: examples of Hypothesis, what runs beside what, and the number of tests by kind.

A run of several processes (`make test`) keeps together what shares something expensive: the tests on Ray and Spark have
one session, those on S3 one server, and those of a module with a fixture of its own that fixture. These come first, the
longest ahead, so that all processes end together. In one process quick tests come first.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("tidegate", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("tidegate")

_TESTS = Path(__file__).parent

RAY, S3 = "Ray and Spark", "S3"
_SHARED = {"raydp_session": RAY, "ray_memory": RAY, "s3_server": S3}
_STORES = {"ray": RAY, "s3": S3}
_ROOMS = {"api": "local jobs", "simulation": "simulation", "house": "house"}
_LONG_FIRST = {RAY: -2, S3: -1}
_QUICK_FIRST = {S3: 1, RAY: 2}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say of each test what kind it is and what it has to stay with, and sort them."""
    for item in items:
        item.user_properties.append(("kind", _kind(item)))
        together = _together(item)
        if together is not None:
            item.add_marker(pytest.mark.xdist_group(together))
    order = _LONG_FIRST if hasattr(config, "workerinput") else _QUICK_FIRST
    items.sort(key=lambda item: order.get(_together(item) or "", 0))


def _fixtures(item: pytest.Item) -> dict[str, pytest.FixtureDef[object]]:
    """Fixtures that a test names, itself or through others."""
    named = getattr(item, "_fixtureinfo", None)
    return {} if named is None else {name: found[-1] for name, found in named.name2fixturedefs.items() if found}


def _together(item: pytest.Item) -> str | None:
    """What a test shares with others that belong into the same process."""
    fixtures = _fixtures(item)
    for name, shared in _SHARED.items():
        if name in fixtures:
            return shared
    callspec = getattr(item, "callspec", None)
    for name, value in () if callspec is None else callspec.params.items():
        # Such a fixture asks for another one, by the name of the store.
        if name.endswith("store") and value in _STORES:
            return _STORES[str(value)]
    if any(fixture.scope == "module" for fixture in fixtures.values()):
        return str(item.path.relative_to(_TESTS))
    return None


def _kind(item: pytest.Item) -> str:
    """What a test needs, and if it needs nothing, how it goes about it."""
    together = _together(item)
    if together in _SHARED.values():
        return str(together)
    room = item.path.relative_to(_TESTS).parts[0] if item.path.is_relative_to(_TESTS) else ""
    if room in _ROOMS:
        return _ROOMS[room]
    if item.get_closest_marker("hypothesis") is not None:
        return "property"
    return "contract" if item.path.stem.endswith("_contract") else "unit"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests of each kind there were."""
    kinds: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                kind = dict(report.user_properties).get("kind", "other")
                kinds[kind] += report.when == "call"
                seconds[kind] += report.duration
    if kinds:
        counts = ", ".join(f"{count} {kind} ({seconds[kind]:.0f} s)" for kind, count in kinds.most_common())
        terminalreporter.write_line(f"tests by kind: {counts}")
