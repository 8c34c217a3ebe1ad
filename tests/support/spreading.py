"""How a run of several processes (`make test`) deals tests out: what shares something expensive stays together.

The tests on Ray and Spark have one session, tests on S3, Kafka, PostgreSQL, HDFS and other object stores one server of
each kind, and the tests of a module with a fixture of its own that fixture. Everything else goes to whoever is free,
small tests a handful of a module at a time: to hand one over costs as much as to run it, and more with each that was
handed over before. The long ones come first, so that all processes end together.

A session or a server ends after the last test of its group. Ray and Spark alone would keep half a processor busy for as
long as the process has other tests.

The process that deals out knows tests by their names alone. So those that run them say what each has to stay with.
Where somebody asks for another way of dealing (`--dist worksteal`), xdist deals, and nothing stays together.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

RAY = "Ray and Spark"
S3 = "S3"
KAFKA = "Kafka"
HDFS = "HDFS"
OBJECTS = "object stores"
POSTGRES = "PostgreSQL"
_SHARED = {
    "raydp_session": RAY,
    "plain_ray": RAY,
    "s3_server": S3,
    "kafka_server": KAFKA,
    "hdfs_server": HDFS,
    "gcs_server": OBJECTS,
    "azure_server": OBJECTS,
    "postgres_server": POSTGRES,
}
_STORES = {"ray": RAY, "s3": S3, "hdfs": HDFS, "gcs": OBJECTS, "azure": OBJECTS}
_LONG_FIRST = {RAY: -9, KAFKA: -8, S3: -7, POSTGRES: -6, HDFS: -5, OBJECTS: -4}
_LONG_KINDS = {RAY: -3, "simulation": -2}
"""Kinds of tests that come next. Those on Ray and Spark that share nothing start a cluster, which takes a minute."""
_SLOW_NEXT = -1
"""The place in the order for tests that are marked `slow`."""
_QUICK_FIRST = {OBJECTS: 1, POSTGRES: 2, HDFS: 3, KAFKA: 4, S3: 5, RAY: 6}
_DEALT_HERE = {"load", "loadgroup"}
"""What `pytest -n 2` asks for, and what `make test` does. The other modes of xdist say themselves what goes where."""
_SMALL = {"unit", "contract", "local jobs", "house", "docs"}
"""Kinds of tests that take milliseconds, but for those marked `slow`."""
_HANDFUL = 8
"""How many small tests of a module are handed over at a time."""
_FOLDER = pytest.StashKey[str]()
_started: dict[str, Callable[[], None]] = {}
"""For each fixture of a group that runs in this process how to end it."""


def together(item: pytest.Item) -> str | None:
    """What a test shares with others that belong into the same process."""
    named = getattr(item, "_fixtureinfo", None)
    fixtures = {} if named is None else {name: found[-1] for name, found in named.name2fixturedefs.items() if found}
    for name, shared in _SHARED.items():
        if name in fixtures:
            return shared
    callspec = getattr(item, "callspec", None)
    for name, value in () if callspec is None else callspec.params.items():
        # Such a fixture asks for another one, by the name of the store.
        if name.endswith(("store", "server")) and isinstance(value, str) and value in _STORES:
            return _STORES[value]
    return str(item.path) if any(fixture.scope == "module" for fixture in fixtures.values()) else None


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> Iterator[None]:
    """Remembers what was started for a group."""
    result = yield
    if fixturedef.argname in _SHARED and fixturedef.scope == "session":
        _started[fixturedef.argname] = lambda: fixturedef.finish(request)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Ends what the tests of a group share once the next test is of another group. A later test would start it anew."""
    yield
    group = together(item)
    if group in _SHARED.values() and nextitem is not None and together(nextitem) != group:
        for name in [name for name in _started if _SHARED[name] == group]:
            _started.pop(name)()


def spread(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort tests, the long ones first where several processes run them, and tell what stays together."""
    groups = {item.nodeid: together(item) for item in items}
    workerinput: dict[str, Any] | None = getattr(config, "workerinput", None)
    if workerinput is None:
        items.sort(key=lambda item: _QUICK_FIRST.get(groups[item.nodeid] or "", 0))
    else:
        items.sort(key=lambda item: _LONG_FIRST.get(groups[item.nodeid] or "") or _rank(item))
    if workerinput is not None and "groups" in workerinput:
        # All write the same; whoever reads waits for all of them, and finds a whole file.
        target = Path(workerinput["groups"])
        own = target.with_name(f"{target.name}-{workerinput['workerid']}")
        own.write_text(json.dumps({item.nodeid: groups[item.nodeid] or group for item, group in handfuls(items)}))
        os.replace(own, target)


def _rank(item: pytest.Item) -> int:
    """The place in the order for a test that shares nothing with other modules. A long one would end alone."""
    kind = str(dict(item.user_properties).get("kind"))
    return _LONG_KINDS.get(kind) or (_SLOW_NEXT if item.get_closest_marker("slow") else 0)


def handfuls(items: Iterable[pytest.Item]) -> Iterator[tuple[pytest.Item, str]]:
    """With each test the name of the handful that it is in; one that is not small is alone."""
    seen: Counter[Path] = Counter()
    for item in items:
        if dict(item.user_properties).get("kind") in _SMALL and item.get_closest_marker("slow") is None:
            yield item, f"{item.path}, handful {seen[item.path] // _HANDFUL}"
            seen[item.path] += 1
        else:
            yield item, item.nodeid


def pytest_configure(config: pytest.Config) -> None:
    """A folder for what is told, where tests are dealt out."""
    if config.getoption("dist", "no") in _DEALT_HERE:
        config.stash[_FOLDER] = tempfile.mkdtemp(prefix="tidegate-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Gone with the run."""
    if _FOLDER in config.stash:
        shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process where to tell."""
    if _FOLDER in node.config.stash:
        node.workerinput["groups"] = os.path.join(node.config.stash[_FOLDER], "groups")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """By what tests share."""
    return Groups(config, log) if _FOLDER in config.stash else None


class Groups(LoadScopeScheduling):
    """Tests of a group in one process, wherever there is time."""

    @cached_property
    def _groups(self) -> dict[str, str]:
        groups: dict[str, str] = json.loads(Path(self.config.stash[_FOLDER], "groups").read_text())
        return groups

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.get(nodeid, nodeid)

    def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
        """How many tests of a process are not done. Groups that are done go: each test would count them once more."""
        for done in [scope for scope, tests in workload.items() if all(tests.values())]:
            del workload[done]
        return super()._pending_of(workload)
