"""A job that is restored beside copies of its tables: it warns only where something may be missing."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening
from waiting import until

import tidegate as tg
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.tables.log.entries import TableEntryKind
from tidegate.storage.tables.table_log import TableLog

ROWS, GATES = 40, [10, 20]
GONE = "the table at "


def begin(env: tg.StreamEnvironment, source: GatedSource, folder: Path, table: str, restore: str | None) -> tg.Job:
    """A job that writes all rows to a table."""
    env.from_source(source, uid="source").to_table(str(folder / table), uid="table")
    settings = config(folder / f"checkpoints-{table}", savepoints=str(folder / "savepoints"))
    return env.execute("moved", checkpoints=settings, restart=NO_RESTART, restore=restore)


def has_commit(table: Path) -> bool:
    """Whether a table has one."""
    return any(entry.kind is TableEntryKind.COMMITTED for entry in TableLog(FileSystemStore(str(table))).entries())


def stopped_after_a_copy(folder: Path) -> str:
    """Stop a job with a savepoint; the copy `early` of its table was made before its last commit, `late` after it."""
    with opening(GatedSource(ROWS, ROWS, gates=GATES)) as source, local() as env:
        job = begin(env, source, folder, "old", None)
        source.await_gate(GATES[0])
        job.trigger_checkpoint()
        until("its commit", lambda: has_commit(folder / "old"))  # or files would come and go while they are copied
        shutil.copytree(folder / "old", folder / "early")
        source.open_gate(GATES[0])
        source.await_gate(GATES[1])
        savepoint = job.stop()
    shutil.copytree(folder / "old", folder / "late")
    shutil.rmtree(folder / "old")
    return savepoint


@pytest.mark.parametrize(("copy", "warns"), [("late", False), ("early", True), ("nothing", True)])
def test_a_moved_table_is_missed_only_where_it_lacks_something(
    copy: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a stop with a savepoint its copy has everything; one that is older, or none, may lack what it covers."""
    savepoint = stopped_after_a_copy(tmp_path)
    with (
        caplog.at_level(logging.INFO, "tidegate.api.submission.table_claims"),
        opening(GatedSource(ROWS, ROWS)) as source,
        local() as env,
    ):
        job = begin(env, source, tmp_path, copy, savepoint)
        assert job.wait() == "finished"
        told = [r for r in caplog.records if r.name == "tidegate.api.submission.table_claims"]
    assert [(r.levelname, "gone" in r.message) for r in told] == [("WARNING", True) if warns else ("INFO", False)]
