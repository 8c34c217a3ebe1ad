"""What crashes leave behind is found and can be deleted; what somebody refers to never is, wherever the sweep stops."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest
from dying_store import DiedError, deaths

from tidegate.recovery.deletion_permits import GRACE_MS_DEFAULT, may_run
from tidegate.recovery.sweeper import find_orphans, sweep
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.checkpoints.layout import CheckpointLayout, savepoint_name
from tidegate.storage.checkpoints.metadata import (
    METADATA_VERSION,
    CheckpointMetadata,
    Committable,
    DataFile,
    NativeFile,
    NativeState,
    StateHandle,
    SubtaskState,
    create_metadata,
    encode_metadata,
    read_metadata,
)
from tidegate.storage.errors import AlreadyExistsError, ConfigurationError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.files.store import Buffer
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, JobId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

JOB = JobId("job-12345678")
OTHER = JobId("job-9abcdef0")
LAYOUT = CheckpointLayout(JOB)
UID = OperatorUid("totals")
VERTEX, SUBTASK = VertexId("map"), SubtaskIndex(0)
NOW_MS = 2_000_000_000_000
"""Long after everything that the tests write."""


@dataclass(slots=True)
class Root:
    """A checkpoint root in which a test makes what jobs make."""

    store: FileSystemStore

    def job(self, job_id: JobId = JOB) -> None:
        """A job with an event log."""
        EventLog(self.store, job_id).append(LogEntry(0, Generation(1), 5, "nonce", (), 0, ()))

    def file(self, path: str) -> StateHandle:
        """A file of a checkpoint, and what refers to it."""
        self.store.write(path, [b"state"])
        return StateHandle(path, None, 5, "xxh3:0", ())

    def complete(
        self,
        number: int,
        *,
        layers: Iterable[StateHandle] = (),
        native: Iterable[str] = (),
        job_id: JobId = JOB,
        **more: object,
    ) -> CheckpointMetadata:
        """A complete checkpoint with a file of its own, which refers to others besides."""
        checkpoint_id = CheckpointId(number)
        layout = CheckpointLayout(job_id)
        own = self.file(layout.state_file(checkpoint_id, VERTEX, SUBTASK))
        files = tuple(NativeFile(path.rpartition("/")[2], path, 5, "xxh3:0") for path in native)
        for file in files:
            self.file(file.path)
        state = SubtaskState(
            VERTEX, SUBTASK, own, layers=tuple(layers), native=(NativeState(UID, "rocksdb", (0, 8), b"", files),)
        )
        metadata = replace(_METADATA, job_id=job_id, checkpoint_id=checkpoint_id, subtasks=(state,))
        metadata = replace(metadata, **more)  # type: ignore[arg-type]
        create_metadata(self.store, metadata)
        return metadata

    def orphans(self, **more: object) -> list[str]:
        """Paths below the job's folder."""
        return [o.path.removeprefix(f"{JOB}/") for o in find_orphans(self.store, JOB, **more)]  # type: ignore[arg-type]

    def paths(self) -> set[str]:
        """Every file."""
        return {file.path for file in self.store.walk("")}


_METADATA = CheckpointMetadata(
    METADATA_VERSION, JOB, "job", CheckpointId(1), AttemptNumber(0), 0, operators=(), subtasks=()
)


@pytest.fixture
def root(local_store: FileSystemStore) -> Root:
    """A root with one job."""
    made = Root(local_store)
    made.job()
    return made


def test_nothing_is_left_of_a_job_that_is_whole(root: Root) -> None:
    """Files of its own, layers and native files of older checkpoints, its event log: all are referred to."""
    base = root.file(LAYOUT.layer_file(CheckpointId(1), VERTEX, SUBTASK))
    native = LAYOUT.native_dir(CheckpointId(2), VERTEX, SUBTASK, UID) + "/000012.sst"
    root.complete(3, layers=[base], native=[native])

    assert root.orphans() == []


def test_finds_what_is_left_behind(root: Root) -> None:
    """Files of checkpoints that never completed or were voided, and shared files that nobody needs any more."""
    root.complete(3)
    for number in (1, 3, 4, 5):
        root.file(LAYOUT.layer_file(CheckpointId(number), VERTEX, SUBTASK))
    for path in ("chk-3/map-7", "chk-4/map-0", "chk-5/map-0-channels", "chk-6/map-0"):
        root.file(f"{JOB}/{path}")
    root.file(LAYOUT.native_dir(CheckpointId(4), VERTEX, SUBTASK, UID) + "/000001.sst")
    create_metadata(root.store, replace(_METADATA, checkpoint_id=CheckpointId(6), void=True))

    assert root.orphans() == [
        "chk-3/map-7",
        "chk-4/map-0",
        "chk-5/map-0-channels",
        "chk-6/map-0",
        "shared/chk-1/map-0",
        "shared/chk-3/map-0",
        "shared/chk-4/map-0",
        "shared/chk-4/map-0=totals/000001.sst",
        "shared/chk-5/map-0",
    ]


def test_what_a_changelog_is_ahead_of_checkpoints_stays_unless_the_job_is_dead(root: Root) -> None:
    """No tombstone keeps a job that only sleeps from completing a checkpoint with them; older attempts are over."""
    attempts = [AttemptNumber(n) for n in range(3)]
    files = [root.file(LAYOUT.changelog_file(VERTEX, SUBTASK, attempt, 7, whole=False)) for attempt in attempts]
    base = root.file(LAYOUT.changelog_file(VERTEX, SUBTASK, attempts[0], 3, whole=True))
    root.complete(4, layers=[base], attempt=attempts[1])
    left, *ahead = (str(file.path).removeprefix(f"{JOB}/") for file in files)

    assert root.orphans() == [left]
    assert root.orphans(dead=True) == [left, *ahead]
    swept = sweep(root.store, JOB, now_ms=NOW_MS, dry_run=False)
    assert [orphan.path for orphan in swept] == [f"{JOB}/{left}"]
    assert len(sweep(root.store, JOB, now_ms=NOW_MS, dry_run=False, force=True)) == 2
    assert root.store.exists(str(base.path))


def test_a_checkpoint_of_another_job_may_refer_to_a_file(root: Root) -> None:
    """A shared file counts as needed whoever needs it."""
    shared = root.file(LAYOUT.layer_file(CheckpointId(1), VERTEX, SUBTASK))
    root.complete(4, layers=[shared], job_id=OTHER)

    assert root.orphans() == []


def test_what_is_not_ours_is_left_alone(root: Root) -> None:
    """Names that tidegate does not make, and folders that are no jobs, are not looked at."""
    for path in ("notes.txt", "chk-x/f", "chk-07/f", "shared/readme", "shared/other/f", "taskowned/mine/f", "photos/f"):
        root.file(f"{JOB}/{path}")
    root.file("album-1/shared/chk-1/f")

    assert root.orphans() == []
    assert find_orphans(root.store, JobId("album-1")) == []


def test_a_checkpoint_that_cannot_be_read_keeps_what_it_may_need(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    """With damaged metadata its own files, all shared files and staged rows stay, and the log says so."""
    root.store.write(LAYOUT.metadata(CheckpointId(2)), [b"damaged"])
    for path in ("chk-1/map-0", "chk-2/map-0", "shared/chk-1/map-0", "taskowned/source-rows/f"):
        root.file(f"{JOB}/{path}")

    assert root.orphans() == ["chk-1/map-0"]
    assert "chk-2 cannot be read" in caplog.text


def test_young_files_are_no_orphans_yet(root: Root) -> None:
    """Somebody may be about to refer to what was just written."""
    root.file(f"{JOB}/chk-1/map-0")
    root.file(f"{JOB}/chk-2/map-0")
    os.utime(Path(root.store.url, JOB, "chk-1/map-0"), (1_000, 1_000))

    assert root.orphans(written_before_ms=1_000_001) == ["chk-1/map-0"]


class TestTaskowned:
    """Staged rows and collected rows."""

    table = f"{JOB}/taskowned/collect-out"
    data = f"data/{JOB}/000000"

    def test_staged_rows_are_needed_while_something_can_be_restored(self, root: Root) -> None:
        """A checkpoint of the job, of a job that goes back to it, or a savepoint in another folder keeps them."""
        root.file(f"{JOB}/taskowned/source-rows/part-0")
        assert root.orphans() == ["taskowned/source-rows/part-0"]

        elsewhere = open_store(f"{root.store.url}-savepoints")
        savepoint = open_store(f"{elsewhere.url}/{savepoint_name(JOB, CheckpointId(7))}")
        savepoint.create("_metadata", encode_metadata(replace(_METADATA, checkpoint_id=CheckpointId(7))))
        assert root.orphans(savepoints=[elsewhere]) == []

        root.complete(1, job_id=OTHER)
        assert root.orphans() == ["taskowned/source-rows/part-0"]
        root.complete(2, job_id=OTHER, restored_from=f"{root.store.url}/{JOB}/chk-1")
        assert root.orphans() == []

    def test_a_savepoint_that_was_relocated_needs_no_staged_rows(self, root: Root) -> None:
        """It has a copy of them; a savepoint beside it that has none keeps them."""
        root.file(f"{JOB}/taskowned/source-rows/part-0")
        for number, carried in ((7, ()), (8, None)):
            savepoint = open_store(f"{root.store.url}/{savepoint_name(JOB, CheckpointId(number))}")
            metadata = replace(_METADATA, checkpoint_id=CheckpointId(number), carried=carried)
            savepoint.create("_metadata", encode_metadata(metadata))
            assert root.orphans() == (["taskowned/source-rows/part-0"] if number == 7 else [])

    def test_a_line_with_a_gap_keeps_staged_rows(self, root: Root) -> None:
        """Where nothing is left of the job in between, it may have gone back to this one."""
        root.file(f"{JOB}/taskowned/source-rows/part-0")
        root.complete(2, job_id=JobId("job-77777777"), restored_from=f"{root.store.url}/{OTHER}/chk-1")

        assert root.orphans() == []

    def test_collected_rows_are_the_tables(self, root: Root) -> None:
        """Files in the table's log, and files that a checkpoint is still to commit, stay; others of the job go."""
        table = open_store(f"{root.store.url}/{self.table}")
        committed, pending, lost = (f"{self.data}/out-0-00000{n}.parquet" for n in range(3))
        for path in (committed, pending, lost, f"data/{OTHER}/000000/out-0-000000.parquet"):
            root.file(f"{self.table}/{path}")
        log = TableLog(table)
        log.create(TableInfo.of(pa.schema([("n", pa.int64())]), "append"))
        log.claim(JOB)
        log.commit(JOB, CheckpointId(1), (DataFile(committed, 1, 5, "xxh3:0"),))
        committable = Committable(UID, SUBTASK, f"{table.url}/", 0, (DataFile(pending, 1, 5, "xxh3:0"),))
        state = SubtaskState(VERTEX, SUBTASK, None, committables=(committable,))
        root.complete(2, subtasks=(state,))

        assert [path for path in root.orphans() if path.startswith("taskowned")] == [
            f"taskowned/collect-out/{lost}",
        ]

    def test_a_log_that_cannot_be_read_keeps_collected_rows(self, root: Root) -> None:
        """Damage is no reason to delete."""
        root.file(f"{self.table}/{self.data}/out-0-000000.parquet")
        root.store.write(f"{self.table}/_tidegate/log/{0:012d}", [b"damaged"])

        assert root.orphans() == []


def test_by_default_nothing_is_deleted(root: Root) -> None:
    """A dry run says what would be deleted, also for a job that may run."""
    root.file(f"{JOB}/chk-1/map-0")
    before = root.paths()

    found = sweep(root.store, JOB, now_ms=NOW_MS)

    assert [orphan.path for orphan in found] == [f"{JOB}/chk-1/map-0"]
    assert root.paths() == before


def test_a_sweep_deletes_orphans_alone(root: Root) -> None:
    """Afterwards there are the same complete checkpoints, with their files; a second sweep finds nothing."""
    root.complete(2)
    root.file(f"{JOB}/chk-3/map-0")
    root.file(LAYOUT.layer_file(CheckpointId(3), VERTEX, SUBTASK))
    Path(root.store.url, JOB, "chk-3", ".tmp-torn").write_bytes(b"half")
    kept = root.paths() - {f"{JOB}/chk-3/map-0", f"{JOB}/shared/chk-3/map-0"}

    deleted = sweep(root.store, JOB, now_ms=NOW_MS, dry_run=False)

    assert [orphan.size_bytes for orphan in deleted] == [5, 5]
    assert root.paths() == kept | {f"{JOB}/chk-3/_metadata"}
    assert not Path(root.store.url, JOB, "chk-3", ".tmp-torn").exists()
    assert sweep(root.store, JOB, now_ms=NOW_MS, dry_run=False) == []


def test_a_job_that_may_run_is_not_swept(root: Root) -> None:
    """Its event log is younger than the grace period; whoever knows better can force it, and young files stay."""
    root.file(f"{JOB}/chk-1/map-0")
    written_ms = max(file.modified_at_ms or 0 for file in root.store.walk(f"{JOB}/events"))
    soon_ms = written_ms + GRACE_MS_DEFAULT - 1

    assert may_run(root.store, JOB, soon_ms)
    assert not may_run(root.store, JOB, soon_ms + 1)
    with pytest.raises(ConfigurationError, match=f"job {JOB} may be running"):
        sweep(root.store, JOB, now_ms=soon_ms, dry_run=False)
    assert sweep(root.store, JOB, now_ms=soon_ms - 1_000_000, dry_run=False, force=True) == []
    assert len(sweep(root.store, JOB, now_ms=soon_ms + 10_000, dry_run=False, force=True)) == 1


def test_what_was_swept_cannot_be_completed(root: Root) -> None:
    """A coordinator that was only asleep finds its checkpoint voided: it is never complete without its files."""
    root.file(f"{JOB}/chk-1/map-0")
    sweep(root.store, JOB, now_ms=NOW_MS, dry_run=False)

    with pytest.raises(AlreadyExistsError):
        root.complete(1)
    assert read_metadata(root.store, JOB, CheckpointId(1)).void


class _Interrupted(FileSystemStore):
    """A store that does something just before a call that changes it."""

    def __init__(self, url: str, before_change: Callable[[int], None]) -> None:
        super().__init__(url)
        self._before_change = before_change
        self.changes = 0

    def _change(self) -> None:
        self._before_change(self.changes)
        self.changes += 1

    def create(self, path: str, data: Buffer) -> None:
        """Create, unless something happens before."""
        self._change()
        super().create(path, data)

    def delete(self, path: str) -> None:
        """Delete, unless something happens before."""
        self._change()
        super().delete(path)

    def delete_temporary(self, prefix: str) -> int:
        """Clean, unless something happens before."""
        self._change()
        return super().delete_temporary(prefix)


def test_a_checkpoint_that_completes_meanwhile_keeps_its_files(root: Root) -> None:
    """Completed between the first look and the tombstone: the second look sees it, and what it refers to."""
    shared = root.file(LAYOUT.layer_file(CheckpointId(1), VERTEX, SUBTASK))
    root.file(LAYOUT.state_file(CheckpointId(2), VERTEX, SUBTASK))

    def complete(changes: int) -> None:
        if changes == 1:
            root.complete(2, layers=[shared])

    store = _Interrupted(root.store.url, complete)

    assert sweep(store, JOB, now_ms=NOW_MS, dry_run=False) == []
    assert {f"{JOB}/chk-2/map-0", f"{JOB}/shared/chk-1/map-0"} <= root.paths()


def test_a_sweep_may_stop_anywhere(tmp_path: Path) -> None:
    """Whatever operation on storage it dies at, the complete checkpoints are whole, and another sweep does the rest."""
    died = 0
    for number, death in enumerate(deaths()):
        root = Root(open_store(str(tmp_path / str(number))))
        root.job()
        base = root.file(LAYOUT.layer_file(CheckpointId(1), VERTEX, SUBTASK))
        complete = root.complete(2, layers=[base])
        for path in ("chk-1/map-0", "chk-3/map-0", "shared/chk-2/map-0", "shared/chk-3/map-0"):
            root.file(f"{JOB}/{path}")
        needed = {path for subtask in complete.subtasks for path in subtask.paths} | {LAYOUT.metadata(CheckpointId(2))}

        with contextlib.suppress(DiedError):
            sweep(death.open_store(root.store.url), JOB, now_ms=NOW_MS, dry_run=False, open_store=death.open_store)
        died += death.came
        assert needed <= root.paths()

        sweep(root.store, JOB, now_ms=NOW_MS, dry_run=False)
        tombstones = {LAYOUT.metadata(CheckpointId(n)) for n in (1, 3)}
        assert root.paths() == needed | tombstones | {f"{JOB}/events/{0:012d}"}
    assert died > 2 * 9, "it looks before it changes anything"


def test_sweeps_on_s3(s3_store: FileSystemStore) -> None:
    """Times and sizes come with a listing, and what was deleted is gone."""
    root = Root(s3_store)
    root.job()
    root.complete(1)
    root.file(f"{JOB}/chk-2/map-0")

    assert [orphan.path for orphan in sweep(s3_store, JOB, now_ms=NOW_MS, dry_run=False)] == [f"{JOB}/chk-2/map-0"]
    assert root.orphans() == []
    assert s3_store.exists(f"{JOB}/chk-1/map-0")
