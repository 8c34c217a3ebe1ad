"""Jobs that outlive their driver on Ray: what is refused, and what is known of one that has ended. Without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

import tidegate as tg
from tidegate.actors.ray import detached, ray_job
from tidegate.actors.ray.detached import check_detachable
from tidegate.actors.ray.ray_job import RayJob
from tidegate.actors.runtimes.running_job import JobCard
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import JobId


@pytest.mark.parametrize(
    ("started_here", "url", "taken", "message"),
    [
        (True, "s3://bucket", None, "this script has started Ray itself"),
        (False, "ray-memory://tidegate", None, r"checkpoints in memory \(ray-memory://tidegate\) go with this script"),
        (False, "s3://bucket", "running", "a job of this name runs on this Ray already"),
    ],
)
def test_what_cannot_outlive_its_driver_is_refused(
    started_here: bool, url: str, taken: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything has started, with what to do instead."""
    monkeypatch.setattr(detached, "started_here", lambda: started_here)
    monkeypatch.setattr(detached, "find_actor", lambda name, namespace: taken)
    monkeypatch.setattr(detached, "_is_over", lambda coordinator: False)
    with pytest.raises(tg.ConfigurationError, match=message):
        check_detachable("delays", "tidegate", [url])


def test_a_name_is_free_again_when_its_job_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator may still wait for somebody to hear the end."""
    monkeypatch.setattr(detached, "started_here", lambda: False)
    monkeypatch.setattr(detached, "find_actor", lambda name, namespace: "over")
    monkeypatch.setattr(detached, "_is_over", lambda coordinator: True)
    check_detachable("delays", "tidegate", ["s3://bucket"])


def test_a_coordinator_that_starts_is_asked_again_where_a_connection_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts it again, or a link was cut. One that has died is not there, and nobody waits for ever."""
    away, now_s = ActorUnavailableError("it is restarted", None), [0.0]
    answers: list[Exception | None] = [away, away, None]

    def get(call: str, timeout: float) -> None:
        now_s[0] += 1.0
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(detached, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(detached, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(detached.ray, "get", get)
    coordinator = SimpleNamespace(identify=SimpleNamespace(remote=lambda: "call"))
    detached.await_start(coordinator)
    answers[:] = [ActorDiedError(), None]
    with pytest.raises(ActorDiedError):
        detached.await_start(coordinator)
    answers[:] = [away] * 2
    monkeypatch.setattr(detached, "START_TIMEOUT_S", 2.0)
    with pytest.raises(ActorUnavailableError):
        detached.await_start(coordinator)
    assert answers == []


def gone(*_: object, **__: object) -> object:
    """The actor was let go."""
    raise ActorDiedError()


def handle(root: str, job_id: str, monkeypatch: pytest.MonkeyPatch) -> RayJob:
    """What a driver has of a job whose coordinator has gone."""
    monkeypatch.setattr(ray_job.ray, "get", gone)
    card = JobCard(JobId(job_id), "delays", root, None, False, 0)
    coordinator = SimpleNamespace(view=SimpleNamespace(remote=lambda wait_s: "call"))
    return RayJob(card, coordinator, None, range(0), open_store)


def test_who_comes_too_late_reads_the_end_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator does not wait for ever for drivers that sleep; that it is gone is no failure of the job."""
    with tg.StreamEnvironment.local() as env:
        env.from_batches(pa.table({"x": [1, 2]})).collect()
        job = env.execute("delays", checkpoints=tg.CheckpointConfig(storage=str(tmp_path)))
        assert job.wait("4min") == "finished"
        job_id, completed = job.job_id, job.statistics().completed
    late = handle(str(tmp_path), job_id, monkeypatch)
    end = late.wait(240)
    assert end is not None
    assert (end.status, late.statistics().completed) == ("finished", completed)


def test_a_coordinator_that_is_gone_before_the_end_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log tells of no end."""
    end = handle(str(tmp_path), "delays-1", monkeypatch).wait(240)
    assert end is not None
    assert end.status == "failed"
    assert "its coordinator is lost for good" in str(end.reason)
