"""`env.serve_web` on the local runtime: a real server on loopback, asked as a script would ask it."""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, fails_once, local, opening
from waiting import until

import tidegate as tg
from tidegate.web import server
from tidegate.web.jobs import seen

TOKEN = "a-token-of-the-tests"
ASKED_MAX = 30


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is that of the environment."""
    monkeypatch.setenv("TIDEGATE_REST_TOKEN", TOKEN)


@pytest.fixture(autouse=True)
def looked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server looks at its jobs often: tests wait for what it has seen, and it would look each second."""
    monkeypatch.setattr(server, "JobWatch", partial(server.JobWatch, refresh_s=0.02))


def asked(url: str, method: str = "GET", body: object = None) -> Any:
    """What is answered, as JSON. Whoever asks in a loop may be told to ask again later, and does."""
    sent = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, sent, {"Authorization": f"Bearer {TOKEN}"}, method=method)
    for _ in range(ASKED_MAX):
        try:
            with urllib.request.urlopen(request, timeout=240) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as refused:
            if refused.code != HTTPStatus.TOO_MANY_REQUESTS:
                raise
            threading.Event().wait(float(refused.headers["Retry-After"]))
    raise AssertionError(f"{url} refused {ASKED_MAX} times as a flood")


def disposed(url: str, path: str) -> Any:
    """Waits for the deletion of a savepoint, and returns its outcome."""
    trigger = asked(f"{url}/savepoint-disposal", "POST", {"savepoint-path": path})["request-id"]
    status = f"{url}/savepoint-disposal/{trigger}"
    until("a deletion", lambda: asked(status)["status"]["id"] == "COMPLETED", lambda: asked(status))
    return asked(status)["operation"]


def test_a_job_is_asked_saved_and_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its state, a savepoint by POST, and a stop with another one; what it was stays to be seen."""
    with opening(GatedSource(20, gates=[10])) as source, local(1) as env:
        url = env.serve_web(port=0)
        assert env.serve_web() == url == env.web_url
        assert capfd.readouterr().err.count(url) == 1
        env.from_source(source).to_table(str(tmp_path / "table"))
        job = env.execute("main", checkpoints=config(tmp_path, savepoints=str(tmp_path / "s")), restart=NO_RESTART)
        source.await_gate(10)
        assert job.web_url == f"{url}/ui/jobs/{job.job_id}"
        path = f"{url}/jobs/{job.job_id}"
        until("it runs", lambda: {"id": job.job_id, "status": "RUNNING"} in asked(f"{url}/jobs")["jobs"])

        def place_of(trigger: Any) -> str:
            status = f"{path}/savepoints/{trigger['request-id']}"
            until("a savepoint", lambda: asked(status)["status"]["id"] == "COMPLETED", lambda: asked(status))
            return str(asked(status)["operation"]["location"])

        saved = Path(place_of(asked(f"{path}/savepoints", "POST", {})))
        assert saved.parent == tmp_path / "s"
        gone = [disposed(url, str(saved)) for _ in range(2)]
        assert gone[0] == {}
        assert "there is no savepoint" in gone[1]["failure-cause"]["stack-trace"]
        assert not saved.exists()
        other = tmp_path / "other"
        assert Path(place_of(asked(f"{path}/stop", "POST", {"targetDirectory": str(other)}))).parent == other
        assert job.wait("4min") == "suspended"
        until("its end", lambda: asked(path)["state"] == "FINISHED", lambda: asked(path))
        kinds = [each["checkpoint_type"] for each in asked(f"{path}/checkpoints")["history"]]
        assert kinds == ["SYNC_SAVEPOINT", "SAVEPOINT"]
    with pytest.raises(urllib.error.URLError):
        asked(url + "/jobs")


def test_a_job_that_is_over_keeps_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that ended before the server looked at all, and behind many others: as long as the environment lives."""
    from tidegate.actors.local import local_runtime

    monkeypatch.setattr(local_runtime, "ENDED_MAX", 2)
    with local(1) as env:
        ids = []
        for number in range(4):
            env.from_batches(pa.table({"x": [1]})).to_table(str(tmp_path / f"table-{number}"))
            job = env.execute(f"short-{number}", checkpoints=config(tmp_path), restart=NO_RESTART)
            assert job.wait("4min") == "finished"
            ids.append(str(job.job_id))
            del job
        url = env.serve_web(port=0)
        until("the jobs", lambda: asked(f"{url}/jobs")["jobs"])
        assert {each["id"] for each in asked(f"{url}/jobs")["jobs"]} == {*ids[1:]}
        assert asked(f"{url}/jobs/{ids[-1]}")["state"] == "FINISHED"


def test_a_failure_is_told_with_its_cause_and_its_recovery(tmp_path: Path) -> None:
    """Of a job that goes on after it: nothing of that needs the event log."""
    from tidegate.web.jobs_in_process import LocalJobs

    flag = tmp_path / "failed"

    with opening(GatedSource(30, gates=[20])) as source, local(1) as env:
        env.from_source(source).map(fails_once(12, flag, "row 12 is odd"), schema=source.schema, uid="map").to_table(
            str(tmp_path / "table")
        )
        restart = tg.RestartStrategy.fixed_delay(2, "10ms")
        job = env.execute("main", checkpoints=config(tmp_path / "checkpoints"), restart=restart)
        source.await_gate(20)
        jobs = LocalJobs()
        (snapshot,) = jobs.look({}).snapshots
        known = seen(None, snapshot)
        assert known is not None
        (failure,), (recovery,) = known.past.failures, known.past.recoveries
        assert "row 12 is odd" in failure.reason
        assert recovery.failure == failure
        assert recovery.running_at_ms is not None
        settings = known.about.configuration
        assert settings["execution.checkpointing.dir"].strip('"') == str(tmp_path / "checkpoints")
        assert settings["restart-strategy.fixed-delay.attempts"] == "2"
        source.open_all()
        assert job.wait("4min") == "finished"
        jobs.close()


def test_the_configuration_switches_it_on(tmp_path: Path) -> None:
    """Then the first job is shown without a word of the program; what the program says counts more."""
    settings = {"rest.enabled": True, "rest.port": 0, "rest.bind-address": "localhost"}
    with opening(GatedSource(20, gates=[10])) as source, tg.StreamEnvironment.local(config=settings) as env:
        assert env.web_url is None
        env.from_source(source).to_table(str(tmp_path / "table"))
        job = env.execute("main")
        source.await_gate(10)
        assert env.web_url is not None
        assert asked(f"{env.web_url}/jobs/{job.job_id}")["name"] == "main"
        source.open_all()
        assert job.wait("4min") == "finished"
    with tg.StreamEnvironment.local(config=settings) as env:
        assert "127.0.0.2" in env.serve_web(address="127.0.0.2")


@pytest.mark.parametrize("wrong", [{"rest.port": 65_536}, {"rest.bind-address": "two words"}, {"rest.enabled": 1}])
def test_wrong_settings_are_named(wrong: dict[str, object]) -> None:
    """Before anything listens."""
    with pytest.raises(tg.ConfigurationError, match=next(iter(wrong))):
        tg.StreamEnvironment.local(config=wrong)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is missing is no traceback."""
    for name in [name for name in sys.modules if name.startswith("tidegate.web.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with local(1) as env, pytest.raises(tg.ConfigurationError, match=r"uvicorn.*tidegate\[web\]"):
        env.serve_web(port=0)
