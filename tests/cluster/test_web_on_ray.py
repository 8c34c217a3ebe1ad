"""The web server of a Ray: one actor, which finds the jobs, tells of them, and asks them for savepoints."""

from __future__ import annotations

import html
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import waiting
from ray_jobs import keyed_job

from tidegate.actors.ray.actor_calls import NAMESPACE
from tidegate.actors.ray.memory_store import open_store_on_ray
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.spark_bridge import RayDPSession
from tidegate.web.actor import NAME, serve_on_ray
from tidegate.web.options import WebOptions

WAIT_S = 240.0
TOKEN = "a-token-of-the-tests"
OPTIONS = WebOptions(0, "127.0.0.1")


@pytest.fixture
def runtime(raydp_session: RayDPSession) -> Iterator[RayRuntime]:
    """A runtime without spare processes, emptied after the test."""
    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    yield runtime
    runtime.stop()


@pytest.fixture
def url(raydp_session: RayDPSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server, which is gone after the test."""
    monkeypatch.setenv("TIDEGATE_REST_TOKEN", TOKEN)
    assert raydp_session.slots > 0
    url = serve_on_ray(OPTIONS, open_store_on_ray)
    yield url
    ray.kill(ray.get_actor(NAME, namespace=NAMESPACE))


def asked(url: str, method: str = "GET", body: object = None) -> Any:
    """What is answered, as JSON."""
    sent = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, sent, {"Authorization": f"Bearer {TOKEN}"}, method=method)
    with urllib.request.urlopen(request, timeout=240) as reply:
        return json.load(reply)


def shown(url: str) -> str:
    """A page, as HTML."""
    with urllib.request.urlopen(url, timeout=240) as reply:
        return str(reply.read().decode())


def state_of(path: str) -> str:
    """The state of a job, or why it is not known."""
    try:
        return str(asked(path)["state"])
    except urllib.error.HTTPError as error:
        return error.reason


def test_a_job_is_seen_saved_and_stopped(runtime: RayRuntime, url: str, tmp_path: Path) -> None:
    """Its tasks and processes, a savepoint by POST, a stop with another one, and its end, which its log tells."""
    assert serve_on_ray(OPTIONS, open_store_on_ray) == url
    keyed = keyed_job(tmp_path, tmp_path / "gate", name="seen")
    job = runtime.submit(keyed.submission)
    path = f"{url}/jobs/{keyed.submission.spec.job_id}"
    waiting.until("rows", lambda: job.progress().rows_in.get("totals", 0) > 0, job.progress)
    waiting.until("its state", lambda: state_of(path) == "RUNNING", lambda: state_of(path))
    vertices = asked(path)["vertices"]
    assert [vertex["parallelism"] for vertex in vertices] == [2, 2]
    subtasks = asked(f"{path}/vertices/{vertices[0]['id']}")["subtasks"]
    page = shown(f"{url}/ui/jobs/{keyed.submission.spec.job_id}")
    assert [html.escape(vertex["name"]) in page for vertex in vertices] == [True, True]
    pids = {process.pid for process in job.tasks()}
    assert {int(subtask["taskmanager-id"].partition("@")[0]) for subtask in subtasks} == pids
    counts = f"{path}/checkpoints"
    waiting.until("a checkpoint", lambda: asked(counts)["counts"]["completed"] > 0, lambda: asked(counts)["counts"])

    def place_of(trigger: Any) -> str:
        status = f"{path}/savepoints/{trigger['request-id']}"
        waiting.until("a savepoint", lambda: asked(status)["status"]["id"] == "COMPLETED", lambda: asked(status))
        return str(asked(status)["operation"]["location"])

    target = {"target-directory": str(tmp_path / "savepoints")}
    assert Path(place_of(asked(f"{path}/savepoints", "POST", target)), "_metadata").is_file()
    assert Path(place_of(asked(f"{path}/stop", "POST", {"targetDirectory": str(tmp_path)})), "_metadata").is_file()
    end = job.wait(WAIT_S)
    assert end is not None
    assert end.status == "suspended"
    waiting.until("its end", lambda: state_of(path) == "FINISHED", lambda: state_of(path))
    assert asked(counts)["latest"]["savepoint"]["checkpoint_type"] == "SYNC_SAVEPOINT"
    actor = ray.get_actor(NAME, namespace=NAMESPACE)
    assert url in ray.get(actor.__ray_call__.remote(repr))
