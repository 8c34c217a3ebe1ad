"""Jobs without storage: their folders among the temporary files go when nobody can need them, and not before."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, opening
from waiting import until

import tidegate as tg
from tidegate.actors.local import local_runtime
from tidegate.api import environment
from tidegate.api.submission import temporary_jobs
from tidegate.api.submission.temporary_jobs import default_storage
from tidegate.storage.files.file_system_store import open_store

KILLED = """
import os, sys, tempfile
import pyarrow as pa
import tidegate as tg
tempfile.tempdir = sys.argv[1]
env = tg.StreamEnvironment.local(1)
env.from_batches(pa.table({"k": [1]})).collect()
env.execute("killed").wait()
os.kill(os.getpid(), 9)
"""
MANY = """
import collections, gc, json, sys, tempfile, threading
import pyarrow as pa
import tidegate as tg
from tidegate.actors.local import local_runtime
tempfile.tempdir = sys.argv[1]
local_runtime.ENDED_MAX = 2

def run(jobs):
    for _ in range(jobs):
        env.from_batches(pa.table({"k": [1]})).key_by("k").aggregate(n=tg.count(), emit="final").collect()
        env.execute("counted").wait()
    for thread in threading.enumerate():  # Those of the last job may still be ending, and hold what it was.
        if thread is not threading.main_thread():
            thread.join()

def objects():
    for _ in range(3):  # What a finalizer has let go is collected by the next one.
        gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return collections.Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("tidegate"))

with tg.StreamEnvironment.local(1) as env:
    run(22)  # More than the environment keeps the folders of.
    before = objects()
    run(30)
    print(json.dumps(objects() - before))
"""
ENDS = """
import os, sys, tempfile
import pyarrow as pa
import tidegate as tg
from tidegate.api.submission.temporary_jobs import default_storage
tempfile.tempdir = sys.argv[1]
held = []
for name in ("open", "closed"):
    env = tg.StreamEnvironment.local(1)
    rows = env.from_batches(pa.table({"k": [1]})).collect()
    job = env.execute(name)
    job.wait()
    if name == "closed":
        env.close()
    held.append(rows)
    assert rows.to_arrow().num_rows == 1
print(len(os.listdir(default_storage())))
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of jobs without storage, of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Path(default_storage())


def finished(name: str = "finished") -> None:
    """A job that finishes, of which nothing is referred to afterwards."""
    with tg.StreamEnvironment.local(1) as env:
        env.from_batches(pa.table({"k": [1]})).collect()
        env.execute(name).wait()
    del env
    gc.collect()
    temporary_jobs.delete_unneeded(open_store)


def cancelled(checkpoints: tg.CheckpointConfig, restore: str | None = None, triggers: bool = False) -> str:
    """A job that is cancelled after a checkpoint that its interval has brought; returns its id."""
    source = GatedSource(40, gates=(20,))
    with tg.StreamEnvironment.local(1) as env, opening(source):
        env.from_source(source).collect()
        job = env.execute("cancelled", checkpoints=checkpoints, restart=NO_RESTART, restore=restore)
        source.await_gate(20)
        if triggers:
            job.trigger_checkpoint()
        until("a checkpoint", job.checkpoints)
        job.cancel()
        job.wait()
    job_id = str(job.job_id)
    del env, job
    gc.collect()
    temporary_jobs.delete_unneeded(open_store)
    return job_id


@pytest.mark.slow
def test_folders_of_finished_jobs_go_when_nothing_reads_them_any_more(root: Path) -> None:
    """Rows that were collected can be read after the environment was closed, for as long as somebody has them."""
    with tg.StreamEnvironment.local(1) as env:
        rows = env.from_batches(pa.table({"k": [1, 2]})).collect()
        env.execute("kept").wait()
    finished()
    assert rows.to_arrow().num_rows == 2
    assert len(os.listdir(root)) == 1

    del rows, env
    finished()
    assert os.listdir(root) == []


@pytest.mark.slow
def test_one_environment_keeps_the_folders_of_its_newest_jobs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages may be looked at; the number of folders does not grow with the number of jobs."""
    for module in (environment, local_runtime):
        monkeypatch.setattr(module, "ENDED_MAX", 3)
    with tg.StreamEnvironment.local(1) as env:
        for _ in range(7):
            env.from_batches(pa.table({"k": [1]})).collect()
            env.execute("many").wait()
            gc.collect()
        assert 3 <= len(os.listdir(root)) <= 4


@pytest.mark.slow
def test_jobs_that_are_over_leave_no_objects(tmp_path: Path) -> None:
    """One environment runs many jobs, one after the other: what it keeps of them is bounded.

    In a process of its own: what jobs of other tests hold, and make meanwhile, is none of it.
    """
    counted = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path)], check=True, capture_output=True, text=True, timeout=240
    )
    more = json.loads(counted.stdout)
    assert sum(more.values()) < 30 * 3, more


@pytest.mark.slow
def test_nothing_is_left_when_the_interpreter_exits(tmp_path: Path) -> None:
    """Also of an environment that nobody has closed, and of rows that are referred to until the end."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], check=True, capture_output=True, text=True, timeout=240
    )
    assert ended.stdout.strip() == "2"
    (root,) = tmp_path.glob("tidegate-*/checkpoints")
    assert os.listdir(root) == []


@pytest.mark.slow
def test_what_a_killed_process_has_left_goes_with_the_next_start(root: Path, tmp_path: Path) -> None:
    """What else lies in the root, and what processes own that live, is not touched."""
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=240)
    (left,) = os.listdir(root)
    (root / "photos").mkdir()
    with tg.StreamEnvironment.local(1) as env:
        rows = env.from_batches(pa.table({"k": [1]})).collect()
        env.execute("next").wait()
        temporary_jobs.swept_roots.clear()
        finished()
        assert rows.to_arrow().num_rows == 1
        assert left not in os.listdir(root)
        assert "photos" in os.listdir(root)


def test_what_is_being_written_in_the_root_is_no_job(root: Path) -> None:
    """Another process may write there, or was killed at it; a week later it goes."""
    for name in (".tmp-new", ".tmp-old"):
        (root / name).touch()
    os.utime(root / ".tmp-old", (0, 0))
    temporary_jobs.swept_roots.clear()
    finished()
    assert {name for name in os.listdir(root) if name.startswith(".tmp-")} == {".tmp-new"}


@pytest.mark.slow
def test_a_sweep_is_bounded(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start does not take longer, however much was left behind."""
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=240)
        temporary_jobs.swept_roots.add(str(root))
    before = set(os.listdir(root))
    monkeypatch.setattr(temporary_jobs, "SWEPT_MAX", 1)
    temporary_jobs.swept_roots.clear()
    finished()
    assert len(before & set(os.listdir(root))) == len(before) - 1


@pytest.mark.slow
def test_checkpoints_of_a_cancelled_job_stay_for_a_week(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So `restore="latest"` finds them. Afterwards they go, but not before what was restored from them."""
    config = tg.CheckpointConfig(interval="20ms")
    with caplog.at_level("INFO", logger="tidegate"):
        first = cancelled(config)
    assert f"the checkpoints of job {first} stay in {root / first}" in caplog.text

    second = cancelled(config, restore="latest")
    temporary_jobs.swept_roots.clear()
    finished()
    assert sorted(os.listdir(root)) == sorted([first, second])

    monkeypatch.setattr(temporary_jobs, "KEPT_MS", -1)
    for _ in range(2):  # The older one is needed until the newer one is gone.
        temporary_jobs.swept_roots.clear()
        finished()
    assert os.listdir(root) == []


@pytest.mark.parametrize(
    ("retention", "triggers"),
    [
        pytest.param({"retention": "retain_on_cancellation"}, False, id="retention"),
        pytest.param({}, True, id="triggered"),
    ],
)
def test_checkpoints_that_the_user_wants_stay_for_good(
    root: Path, monkeypatch: pytest.MonkeyPatch, retention: dict[str, str], triggers: bool
) -> None:
    """A retention that was set, or a path that was returned."""
    job_id = cancelled(tg.CheckpointConfig(interval="20ms", **retention), triggers=triggers)  # type: ignore[arg-type]
    monkeypatch.setattr(temporary_jobs, "KEPT_MS", -1)
    temporary_jobs.swept_roots.clear()
    finished()
    assert os.listdir(root) == [job_id]


def test_a_savepoint_finds_the_rows_that_its_job_had_collected(root: Path, tmp_path: Path) -> None:
    """They stay in the folder of the job, and the savepoint refers to them."""
    source = GatedSource(40, gates=(20,))
    with tg.StreamEnvironment.local(1) as env, opening(source):
        env.from_source(source, uid="source").collect(uid="rows")
        job = env.execute("saved", restart=NO_RESTART)
        source.await_gate(20)
        savepoint = job.savepoint(tmp_path / "savepoints")
        source.open_all()
        job.wait()
    del env, job
    temporary_jobs.swept_roots.clear()
    finished()
    with tg.StreamEnvironment.local(1) as env, opening(GatedSource(40)) as again:
        rows = env.from_source(again, uid="source").collect(uid="rows")
        env.execute("saved", restart=NO_RESTART, restore=savepoint).wait()
        assert rows.to_arrow().num_rows == 40
