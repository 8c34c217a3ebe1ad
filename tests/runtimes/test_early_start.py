"""When fork servers start, and how the processes of a job start meanwhile. Without Ray."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.exceptions import WorkerCrashedError

from tidegate.actors.runtimes.ray.fork_server import early_start
from tidegate.actors.runtimes.ray.fork_server.early_start import (
    FirstProcess,
    Start,
    coordinator_options,
    start_servers,
    task_start,
)

FORKED = {"runtime_env": {"py_executable": "launch"}}
PENDING = "it has not answered"


@dataclass
class Cluster:
    """Ray, as a program sees it that runs on the node `here`. `answers`: what the first process on a node says."""

    session: str = "session"
    job: str = "01"
    sent: list[str] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)

    def options(self, scheduling_strategy: str, **options: Any) -> Cluster:
        assert options == FORKED
        self.sent.append(scheduling_strategy)
        self.answers.pop(scheduling_strategy, None)
        return self

    def remote(self) -> str:
        return self.sent[-1]

    def get_session_name(self) -> str:
        return self.session

    def get_job_id(self) -> str:
        return self.job

    def get_node_id(self) -> str:
        return "here"

    def wait(self, nodes: list[str], timeout: float) -> tuple[list[str], list[str]]:
        assert timeout == 0, "nobody waits"
        done = [node for node in nodes if self.answers.get(node, PENDING) != PENDING]
        return done, [node for node in nodes if node not in done]

    def get(self, node: str) -> Any:
        if isinstance(answer := self.answers[node], Exception):
            raise answer
        return answer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """One to which this process has just connected."""
    found = Cluster()
    monkeypatch.setattr(early_start, "_programs", [])
    monkeypatch.setattr(early_start, "_first_process", lambda: found)
    monkeypatch.setattr(early_start, "actor_options", lambda: FORKED)
    monkeypatch.setattr(early_start, "not_possible", lambda: None)
    monkeypatch.setattr(early_start, "NodeAffinitySchedulingStrategy", lambda node, soft: node)
    monkeypatch.setattr("ray.get_runtime_context", lambda: found)
    monkeypatch.setattr("ray.wait", found.wait)
    monkeypatch.setattr("ray.get", found.get)
    return found


def starts(of: Start) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What Ray is told of a job's coordinator, and of its tasks."""
    return coordinator_options(of.options), of.options


def test_nobody_waits_for_a_server_that_is_not_ready(cluster: Cluster) -> None:
    """Until it is, a coordinator takes a process that Ray keeps ready; tasks come later, and are forked."""
    assert starts(task_start(True, on_spark=False)) == ({}, FORKED)
    assert starts(task_start(True, on_spark=False)) == ({}, FORKED)
    cluster.answers["here"] = FirstProcess(None, os.getpid())
    assert starts(task_start(True, on_spark=False)) == (FORKED, FORKED)
    assert cluster.sent == ["here"]


def test_a_program_starts_one_server_a_node(cluster: Cluster) -> None:
    """And the next program others, also where it has the number of the former one, in another Ray."""
    start_servers()
    start_servers(["there", "here"])
    task_start(True, on_spark=False)
    assert cluster.sent == ["here", "there"]
    cluster.job = "02"
    start_servers()
    cluster.session = "next"
    start_servers()
    assert cluster.sent == ["here", "there", "here", "here"]


def test_few_of_many_nodes_get_a_server_early(cluster: Cluster) -> None:
    """This one among them."""
    start_servers([f"node-{number:03}" for number in range(100)])
    assert len(cluster.sent) == early_start.NODES_MAX
    assert cluster.sent[0] == "here"


def test_jobs_start_as_ever_where_the_server_forks_nothing(cluster: Cluster) -> None:
    """With its script processes would only start later. The job says why."""
    start_servers()
    cluster.answers["here"] = FirstProcess("the server has 2 threads", os.getppid())
    start = task_start(True, on_spark=False)
    assert (starts(start), start.why_not_forked) == (({}, {}), "the server has 2 threads")


def test_a_first_process_that_is_lost_is_started_again(cluster: Cluster) -> None:
    """It says nothing about the server."""
    start_servers()
    cluster.answers["here"] = WorkerCrashedError()
    assert starts(task_start(True, on_spark=False)) == ({}, FORKED)
    assert starts(task_start(True, on_spark=False)) == ({}, FORKED)
    assert cluster.sent == ["here", "here"]


def test_servers_are_started_anew_when_the_one_here_has_ended(cluster: Cluster) -> None:
    """As it does some time after its last child: a coordinator would wait for another one."""
    with subprocess.Popen(["sleep", "1000"]) as server:
        start_servers(["there"])
        cluster.answers["here"] = FirstProcess(None, server.pid)
        assert starts(task_start(True, on_spark=False)) == (FORKED, FORKED)
        server.kill()
    assert coordinator_options(FORKED) == {}
    start_servers(["there"])
    assert cluster.sent == ["here", "there", "here", "there"]
    cluster.answers["here"] = FirstProcess(None, server.pid)
    assert coordinator_options(FORKED) == {}, "it has ended before anybody looked"


def test_nothing_is_started_where_nothing_is_to_be_forked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job does not want it, which nobody needs to be told; or its environment does not allow it, or Spark."""
    assert task_start(False, on_spark=False) == Start()
    monkeypatch.setattr(early_start, "not_possible", lambda: "not on this system")
    monkeypatch.setattr(early_start, "actor_options", dict)
    start_servers()
    start = task_start(True, on_spark=False)
    assert (starts(start), start.why_not_forked) == (({}, {}), "not on this system")
    assert "executor of Spark" in str(task_start(True, on_spark=True).why_not_forked)
    assert cluster.sent == []
