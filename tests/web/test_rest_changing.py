"""What changes a job by REST: it needs the token, is checked before it reaches the job, and is told of by an id."""

from __future__ import annotations

from typing import Any

import pytest
from fixed_watch import WITH_TOKEN, FixedWatch, client_of
from fixture_jobs import JOB_ID

from tidegate.actors.runtimes.running_job import Answer, SnapshotRequest
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import CheckpointId
from tidegate.web.jobs import NotReachedError
from tidegate.web.watch import KEPT_MAX, OPEN_MAX, Triggers

JOB = f"/jobs/{JOB_ID}"
ID = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("savepoints", None, SnapshotRequest(SnapshotKind.SAVEPOINT, "/savepoints")),
        (
            "savepoints",
            {"target-directory": "s3://b/f", "cancel-job": False, "formatType": "NATIVE"},
            SnapshotRequest(SnapshotKind.SAVEPOINT, "s3://b/f", SavepointFormat.NATIVE),
        ),
        ("savepoints", {"cancel-job": True}, SnapshotRequest(SnapshotKind.SUSPEND, "/savepoints")),
        ("stop", {}, SnapshotRequest(SnapshotKind.SUSPEND, "/savepoints")),
        ("stop", {"targetDirectory": "/x", "drain": True}, SnapshotRequest(SnapshotKind.TERMINATE, "/x")),
        ("checkpoints", {"checkpointType": "CONFIGURED"}, SnapshotRequest(SnapshotKind.CHECKPOINT)),
    ],
)
def test_a_request_reaches_the_job(path: str, body: Any, wanted: SnapshotRequest) -> None:
    """What Flink's bodies ask for is what the job is asked for."""
    watch = FixedWatch()
    reply = client_of(watch).post(f"{JOB}/{path}", body, **WITH_TOKEN)
    assert reply.status == 202
    assert len(reply.json["request-id"]) == 32
    assert watch.asked == [(JOB_ID, wanted)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "savepoint-path is missing"),
        ({"savepoint-path": "s/savepoint-main-1a2b3c4d-7"}, "whole path"),
        ({"savepoint-path": "//evil/savepoint-main-1a2b3c4d-7"}, "host 'evil'"),
        ({"savepoint-path": "/c/main-1a2b3c4d/chk-17"}, "a checkpoint: a job deletes its own"),
        ({"savepoint-path": "/etc/passwd"}, "names no checkpoint"),
        ({"path": "/s"}, "savepoint-path, triggerId"),
    ],
)
def test_only_savepoints_are_deleted(body: object, said: str) -> None:
    """What is no savepoint is refused before anything is deleted, and without the token nothing is looked at."""
    reply = client_of().post("/savepoint-disposal", body, **WITH_TOKEN)
    assert (reply.status, said in reply.reason) == (400, True), reply.reason
    assert client_of().post("/savepoint-disposal", body).status == 401
    assert client_of().get(f"/savepoint-disposal/{ID}").status == 404


def test_what_has_become_of_a_request() -> None:
    """In progress, then completed with the place; a request that has failed says why."""
    watch = FixedWatch()
    client = client_of(watch)
    client.post(f"{JOB}/savepoints", {"triggerId": ID}, **WITH_TOKEN)
    assert client.get(f"{JOB}/savepoints/{ID}").json == {"status": {"id": "IN_PROGRESS"}}
    watch.triggers.answer(ID, Answer(CheckpointId(22), None, "/savepoints/s-22"))
    assert client.get(f"{JOB}/savepoints/{ID}").json == {
        "status": {"id": "COMPLETED"},
        "operation": {"location": "/savepoints/s-22"},
    }
    other = client.post(f"{JOB}/checkpoints", **WITH_TOKEN).json["request-id"]
    watch.triggers.answer(other, Answer(None, "a task declined"))
    told = client.get(f"{JOB}/checkpoints/{other}").json["operation"]
    assert told["failureCause"]["stack-trace"] == "a task declined"


def test_the_same_id_is_the_same_request() -> None:
    """Who asks again because no answer came gets no second savepoint; another request may not take the id."""
    watch = FixedWatch()
    client = client_of(watch)
    replies = [client.post(f"{JOB}/savepoints", {"triggerId": ID}, **WITH_TOKEN).json for _ in range(2)]
    assert replies == [{"request-id": ID}] * 2
    assert len(watch.asked) == 1
    assert client.post(f"{JOB}/stop", {"triggerId": ID}, **WITH_TOKEN).status == 409


@pytest.mark.parametrize(("method", "path"), [("POST", "/savepoints"), ("POST", "/stop"), ("PATCH", "")])
def test_without_the_token_nothing_changes(method: str, path: str) -> None:
    """None at all is 401, a wrong one 403, and a cookie is none: another site could have it sent."""
    watch = FixedWatch()
    client = client_of(watch)
    assert client.ask(method, JOB + path).status == 401
    assert client.ask(method, JOB + path, headers={"authorization": "Bearer another-token-here"}).status == 403
    assert client.ask(method, JOB + path, headers={"cookie": f"tidegate_rest_token={WITH_TOKEN}"}).status == 401
    assert watch.asked == []


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("savepoints", b"{", "not JSON"),
        ("savepoints", b"\xff\xfe", "not JSON"),
        ("savepoints", b"[" * 15_000, "not JSON"),
        ("savepoints", [], "is a list"),
        ("savepoints", {"target": "/x"}, "target-directory, cancel-job"),
        ("savepoints", {"target-directory": 1}, "give a text"),
        ("savepoints", {"target-directory": "folder"}, "whole path"),
        ("savepoints", {"target-directory": "file://evil/x"}, "host 'evil'"),
        ("savepoints", {"target-directory": "//evil/x"}, "host 'evil'"),
        ("savepoints", {"target-directory": "ray-memory://x"}, "ends with its driver"),
        (
            "stop",
            {"targetDirectory": "ftp://host/x"},
            "'/folder', 'file://', 's3://', 'gs://', 'abfs://', 'hdfs://', 'memory://'",
        ),
        ("savepoints", {"target-directory": "/a\nb"}, "give a folder or a URL"),
        ("savepoints", {"formatType": "ZIP"}, "CANONICAL or NATIVE"),
        ("savepoints", {"triggerId": "1"}, "32 hexadecimal"),
        ("stop", {"drain": "yes"}, "true or false"),
        ("checkpoints", {"checkpointType": "FULL"}, "the job's settings decide"),
        ("checkpoints", {"checkpointType": "HALF"}, "CONFIGURED"),
    ],
)
def test_a_wrong_body_is_refused(path: str, body: Any, reason: str) -> None:
    """400, and the job hears nothing."""
    watch = FixedWatch()
    reply = client_of(watch).post(f"{JOB}/{path}", body, **WITH_TOKEN)
    assert reply.status == 400
    assert reason in reply.reason
    assert watch.asked == []


def test_rest_cancels_a_job() -> None:
    """PATCH cancels; other modes are refused, and so is a job that is over."""
    watch = FixedWatch()
    client = client_of(watch)
    assert client.ask("PATCH", f"{JOB}?mode=cancel", headers=WITH_TOKEN).status == 202
    assert watch.asked == [(JOB_ID, "cancel")]
    stop = client.ask("PATCH", f"{JOB}?mode=stop", headers=WITH_TOKEN)
    assert (stop.status, "/stop" in stop.reason) == (400, True)
    over = client.ask("PATCH", "/jobs/other-00ff00ff", headers=WITH_TOKEN)
    assert (over.status, "FAILED" in over.reason) == (409, True)
    assert client.post("/jobs/other-00ff00ff/savepoints", **WITH_TOKEN).status == 409
    assert client.ask("DELETE", JOB, headers=WITH_TOKEN).status == 405


def test_errors_of_a_job_have_a_status() -> None:
    """A coordinator that does not answer is 503 with a time to ask again, a place that cannot be is 400."""
    watch = FixedWatch()
    watch.error = NotReachedError("it is being restarted")
    reply = client_of(watch).post(f"{JOB}/savepoints", **WITH_TOKEN)
    assert (reply.status, reply.headers["retry-after"]) == (503, "2")
    watch.error = ConfigurationError("memory: cannot be")
    assert client_of(watch).post(f"{JOB}/savepoints", **WITH_TOKEN).status == 400


def test_open_requests_have_a_limit() -> None:
    """One more than the limit is 429; when one is answered there is room again."""
    watch = FixedWatch()
    client = client_of(watch)
    ids = [client.post(f"{JOB}/checkpoints", **WITH_TOKEN).json["request-id"] for _ in range(OPEN_MAX)]
    assert client.post(f"{JOB}/checkpoints", **WITH_TOKEN).status == 429
    watch.triggers.answer(ids[0], Answer(CheckpointId(1), None))
    assert client.post(f"{JOB}/checkpoints", **WITH_TOKEN).status == 202


def test_answered_requests_are_forgotten_in_the_end() -> None:
    """So many are kept, the newest; one that is open stays."""
    triggers = Triggers()
    triggers.add("open", JOB_ID, SnapshotKind.CHECKPOINT)
    for number in range(2 * KEPT_MAX):
        triggers.add(str(number), JOB_ID, SnapshotKind.CHECKPOINT)
        triggers.answer(str(number), Answer(CheckpointId(number), None))
    assert len(triggers) <= KEPT_MAX + 1
    assert triggers.open_of(JOB_ID) == ("open",)
    assert triggers.get("0") is None


@pytest.mark.parametrize(("path", "status"), [(f"{JOB}/savepoints/{ID}", 404), (f"{JOB}/savepoints/x", 400)])
def test_an_unknown_request_id_is_answered_with_404(path: str, status: int) -> None:
    """What nobody has asked for is not there."""
    assert client_of().get(path).status == status
