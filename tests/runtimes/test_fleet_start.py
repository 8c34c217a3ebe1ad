"""What Ray is told of a new process of a fleet, and what a log says of processes that were not forked. Without Ray."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from ray_fakes import SINK, SOURCE, Method, source_to_sink

from tidegate.actors.runtimes.ray.fleet import fleet as fleet_module
from tidegate.actors.runtimes.ray.fleet.fleet import Fleet
from tidegate.actors.runtimes.ray.fleet_options import FleetOptions
from tidegate.actors.runtimes.ray.process.process_info import ProcessInfo
from tidegate.storage.files.file_system_store import open_store

OPTIONS = FleetOptions("job", "namespace", None, 0, 0, open_store)
FORKED = {"runtime_env": {"py_executable": "launch"}}


class Process:
    """Of a task."""

    def __init__(self) -> None:
        self.live, self.identify = Method(), Method()


def fleet(options: FleetOptions) -> Fleet:
    """Of a job whose processes have not been started."""
    return Fleet(source_to_sink()[1], None, None, options, lambda action: action())  # type: ignore[arg-type]


def test_tasks_are_forked_whatever_their_coordinator_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have had a process that Ray keeps ready, from which they would inherit nothing."""
    told: list[dict[str, Any]] = []

    class Actor:
        def options(self, **options: Any) -> Actor:
            told.append(options)
            return self

        def remote(self, *arguments: object) -> Process:
            return Process()

    monkeypatch.setattr(fleet_module, "worker_actor", Actor)
    fleet(replace(OPTIONS, started_by=FORKED)).staff((SOURCE, SINK))
    assert [each["runtime_env"] for each in told] == [FORKED["runtime_env"]] * 2
    told.clear()
    fleet(OPTIONS).staff((SOURCE, SINK))
    assert ["runtime_env" in each for each in told] == [False] * 2


def test_the_log_says_once_why_processes_are_not_forked(caplog: pytest.LogCaptureFixture) -> None:
    """As the driver knows it already, or as they say themselves: then each may say something else."""
    caplog.set_level(logging.INFO)
    fleet(replace(OPTIONS, why_not_forked="the server has threads"))
    some = fleet(OPTIONS)
    for why_not in (None, "the server has ended", "no room for another server"):
        started: Future[ProcessInfo] = Future()
        started.set_result(ProcessInfo(1, "node", why_not_forked=why_not))
        some._identified(some._member("job/sink#0", Process(), 0), started)
    said = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert said == ["the server has threads", "the server has ended"]
