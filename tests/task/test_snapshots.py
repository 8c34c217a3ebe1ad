"""Snapshots under way: one winner between completion and cancellation, and when sink files are reported."""

from __future__ import annotations

import pytest

from tidegate.actors.task.snapshots import SnapshotPart, SnapshotTracker, StagedFiles, TaskSnapshot, Written
from tidegate.storage.checkpoints.metadata import Committable, DataFile, SnapshotKind, StateHandle
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex

SINK = OperatorUid("sink")
STATE, CHANNELS = SnapshotPart.STATE, SnapshotPart.CHANNELS


def written(path: str = "chk/1") -> Written:
    """A part of a snapshot in a file, told apart by its path."""
    return Written(StateHandle(path, None, 10, "sum", ()))


def data_file(name: str) -> DataFile:
    """A sink file, told apart by its path."""
    return DataFile(name, rows=1, size_bytes=1, checksum="sum")


def tracker(sink: bool = True) -> SnapshotTracker:
    """The tracker of a task with one sink, or with none."""
    return SnapshotTracker(SubtaskIndex(3), {SINK: "table"} if sink else {})


def begin(snapshots: SnapshotTracker, checkpoint_id: int) -> None:
    """The synchronous part of a snapshot is done."""
    kind = SnapshotKind.CHECKPOINT
    snapshots.begin(TaskSnapshot(CheckpointId(checkpoint_id), kind, False, False, 0, 0, 0, snapshots.ends()))


def acknowledged(snapshots: SnapshotTracker) -> list[tuple[int, tuple[Committable, ...]]]:
    """What is acknowledged now, as (checkpoint, committables)."""
    return [(snapshot.checkpoint_id, committables) for snapshot, committables, _ in snapshots.to_acknowledge()]


def committable(first_index: int, *names: str) -> Committable:
    """What the sink asks to be committed: these files, the first with this number."""
    return Committable(SINK, SubtaskIndex(3), "table", first_index, tuple(data_file(n) for n in names))


def test_a_snapshot_is_acknowledged_when_state_and_files_are_durable() -> None:
    """Neither the state alone nor the files alone are enough, in whichever order they come; and it happens once."""
    for state_first in (True, False):
        snapshots = tracker()
        snapshots.files[SINK].start()
        begin(snapshots, 1)
        steps = [
            lambda s=snapshots: s.persisted(CheckpointId(1), STATE, written()),
            lambda s=snapshots: s.files[SINK].durable(0, data_file("f0")),
        ]
        first, second = steps if state_first else steps[::-1]

        first()
        assert acknowledged(snapshots) == []
        second()
        assert acknowledged(snapshots) == [(1, (committable(0, "f0"),))]
        assert acknowledged(snapshots) == []


def test_files_that_were_started_after_the_barrier_are_not_waited_for() -> None:
    """A snapshot asks for exactly the files from before its barrier."""
    snapshots = tracker()
    begin(snapshots, 1)
    snapshots.files[SINK].start()
    snapshots.persisted(CheckpointId(1), STATE, written())

    assert acknowledged(snapshots) == [(1, ())]


def test_files_of_an_aborted_checkpoint_are_asked_for_by_the_next_one() -> None:
    """A staged file stays pending until a checkpoint that covers it is known to be complete."""
    snapshots = tracker()
    files = snapshots.files[SINK]
    files.durable(files.start(), data_file("f0"))
    begin(snapshots, 1)
    snapshots.abort(CheckpointId(1))
    files.durable(files.start(), data_file("f1"))
    begin(snapshots, 2)
    snapshots.persisted(CheckpointId(2), STATE, written())
    assert acknowledged(snapshots) == [(2, (committable(0, "f0", "f1"),))]

    snapshots.complete(CheckpointId(2))
    files.durable(files.start(), data_file("f2"))
    begin(snapshots, 3)
    snapshots.persisted(CheckpointId(3), STATE, Written())

    assert acknowledged(snapshots) == [(3, (committable(2, "f2"),))]


def test_a_cancelled_snapshot_is_never_acknowledged_and_its_state_discarded() -> None:
    """Whichever comes second, the abort or the end of the write, gives the state to be discarded."""
    late, early = tracker(sink=False), tracker()
    begin(late, 1)
    assert late.abort(CheckpointId(1)) == []
    assert late.persisted(CheckpointId(1), STATE, written()) == ["chk/1"]
    assert acknowledged(late) == []

    early.files[SINK].start()
    begin(early, 1)
    assert early.persisted(CheckpointId(1), STATE, written()) == []
    assert early.abort(CheckpointId(1)) == ["chk/1"]
    assert early.abort(CheckpointId(1)) == []
    assert acknowledged(early) == []


def test_state_that_was_acknowledged_is_the_coordinators_to_delete() -> None:
    """An abort after the acknowledgement leaves the file to the coordinator, which knows of it."""
    snapshots = tracker(sink=False)
    begin(snapshots, 1)
    snapshots.persisted(CheckpointId(1), STATE, written())
    snapshots.to_acknowledge()

    assert snapshots.abort(CheckpointId(1)) == []


def test_a_failed_snapshot_is_declined_once_unless_it_was_cancelled() -> None:
    """Only a snapshot that somebody waits for has to be declined."""
    snapshots = tracker(sink=False)
    begin(snapshots, 1)
    begin(snapshots, 2)
    snapshots.abort(CheckpointId(2))

    assert snapshots.failed(CheckpointId(1), STATE) == (True, [])
    assert snapshots.failed(CheckpointId(1), STATE) == (False, [])
    assert snapshots.failed(CheckpointId(2), STATE) == (False, [])


def test_completion_needs_the_acknowledgement() -> None:
    """Invariant 4 as the task sees it; a completion that is told twice changes nothing."""
    snapshots = tracker(sink=False)
    begin(snapshots, 1)
    with pytest.raises(ProtocolError, match="without this task's acknowledgement"):
        snapshots.complete(CheckpointId(1))

    begin(snapshots, 2)
    snapshots.persisted(CheckpointId(2), STATE, Written())
    snapshots.to_acknowledge()
    completed = snapshots.complete(CheckpointId(2))

    assert completed is not None
    assert completed.checkpoint_id == 2
    assert snapshots.complete(CheckpointId(2)) is None


def test_older_snapshots_are_over_with_a_newer_completed_one() -> None:
    """An abort that was never heard of leaks no state: what is durable is discarded now, the rest when it is."""
    snapshots = tracker()
    begin(snapshots, 1)
    snapshots.files[SINK].start()
    begin(snapshots, 2)
    snapshots.persisted(CheckpointId(2), STATE, written("chk/2"))

    assert snapshots.abort_before(CheckpointId(3)) == ["chk/2"]
    assert snapshots.persisted(CheckpointId(1), STATE, written("chk/1")) == ["chk/1"]
    assert snapshots.abort_before(CheckpointId(3)) == []


def test_files_in_flight_are_those_being_written() -> None:
    """A file counts from its start until it is durable; being told twice is being told once."""
    files = StagedFiles()
    files.start()
    files.start()
    assert files.in_flight == 2

    files.durable(1, data_file("f1"))
    files.durable(1, data_file("f1"))
    assert files.in_flight == 1
    assert files.covered(2) is None
    files.durable(0, data_file("f0"))
    files.commit(2)
    files.durable(0, data_file("f0"))

    assert files.in_flight == 0
    assert files.covered(2) == (2, ())
    with pytest.raises(ProtocolError, match="sink file 2 was written"):
        files.durable(2, data_file("f2"))
