"""Checkpoints that older commits wrote are restored: bytes on disk keep their meaning.

An archive in `old_checkpoints/` is the checkpoint root of a job that `old_program.py` ran at the commit in its name.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from local_jobs import NO_RESTART, GatedSource, config, local
from old_archives import ROWS
from old_program import program

from tidegate import recovery
from tidegate.offline.event_logs import logs_under
from tidegate.recovery.event_history import EventHistory
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import OperatorUid

ARCHIVES = sorted((Path(__file__).parent / "old_checkpoints").glob("*.zip"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.stem)
def old_root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The checkpoint root of the old job."""
    root = tmp_path / "checkpoints"
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(root)
    return root


def test_there_are_old_checkpoints() -> None:
    """Of both backends, and small."""
    assert {path.stem.rsplit("-", 1)[1] for path in ARCHIVES} == {"columnar", "rocksdb"}
    assert sum(path.stat().st_size for path in ARCHIVES) < 100_000


@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_job_goes_on_from_an_old_checkpoint(old_root: Path, tmp_path: Path, parallelism: int) -> None:
    """Each state has all rows once: those from before the checkpoint, and those that came after it."""
    (newest,) = recovery.list_checkpoints(str(old_root))
    backend = (
        "rocksdb" if any(subtask.native for subtask in recovery.inspect(newest.path).metadata.subtasks) else "columnar"
    )
    settings = {"backend_directory": str(tmp_path / "work")} if backend == "rocksdb" else {}

    with local(parallelism, 7) as env:
        found = program(env, GatedSource(ROWS, ROWS))
        kept = config(old_root, backend=backend, incremental=True, **settings)
        job = env.execute("old job", checkpoints=kept, restart=NO_RESTART, restore=newest.path)
        assert job.wait("300s") == "finished"
    got = {name: rows.to_arrow().to_pylist() for name, rows in found.items()}

    xs = {k: sorted([*range(k, ROWS, 5)] * 2) for k in range(5)}
    assert sorted(got["sums"], key=lambda row: row["k"]) == [
        {"k": k, "n": len(of), "total": sum(of), "mean": sum(of) / len(of), "most": max(of)} for k, of in xs.items()
    ]
    assert sorted(got["keyed"], key=lambda row: (row["k"], row["timer"])) == [
        {"k": k, "count": len(of), "seen": of, "times": [2] * (len(of) // 2), "total": sum(of), "timer": timer}
        for k, of in xs.items()
        for timer in (1, 2)
    ]
    assert sorted(row["x"] for row in got["kept"] if row["x"] >= 0) == sorted([*range(ROWS)] * 2)
    assert sum(row["count"] for row in got["kept"]) == 2 * ROWS
    assert sorted(row["x"] for row in got["rows"]) == sorted([*range(ROWS)] * 2)


def test_an_old_checkpoint_is_read_at_rest(old_root: Path) -> None:
    """Listed, verified byte by byte, and read as rows, without a job."""
    (newest,) = recovery.list_checkpoints(str(old_root))
    report = recovery.verify(newest.path)
    assert report.problems == ()
    assert report.files > 1
    store, metadata = open_store(str(old_root)), recovery.inspect(newest.path).metadata
    counts = recovery.load_operator_state(store, metadata, OperatorUid("sums"))
    assert sum(table.rows.column("n")[row].as_py() for table in counts for row in range(table.rows.num_rows)) > 0


def test_an_old_event_log_is_read(old_root: Path) -> None:
    """`tidegate events` tells what the old job did; every entry can be read."""
    ((job_id, log),) = logs_under(str(old_root), None).items()
    history = EventHistory.read(log, job_id)
    assert history.unreadable == 0
    names = [type(logged.event).__name__ for _, _, events, _ in history.entries for logged in events]
    assert names.count("CheckpointAcknowledged") == 2 * 2 * 5
