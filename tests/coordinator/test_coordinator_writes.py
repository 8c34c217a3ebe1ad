"""Metadata whose write was not answered, and commits of sinks: decided once, in order, and given up in the end."""

from __future__ import annotations

from any_permit import ANY_PERMIT
from coordinators import SPEC, Coordinator, files, kinds, only, spec

from tidegate.actors.coordinator import instructions as do
from tidegate.storage.ids import CheckpointId

TOLERANT = spec(tolerable_failures=5)


# --- ambiguous writes ---------------------------------------------------------------------------------------------


def ambiguous() -> tuple[Coordinator, list[do.CoordinatorInstruction]]:
    """A checkpoint whose write had no answer, and what follows when the retry is due."""
    coordinator = Coordinator(TOLERANT).run()
    coordinator.request("wanted")
    coordinator.collect(1, files(0, "f0"))
    found = coordinator.write_failed(1)
    assert found == [do.SetTimer("void:1", 100)]
    return coordinator, coordinator.fire("void:1", at_ms=100)


def test_an_unanswered_write_is_decided_by_a_tombstone() -> None:
    """The tombstone names the checkpoint, and nothing of what it would have held."""
    _, found = ambiguous()

    (void,) = only(found, do.VoidCheckpoint)
    tombstone = void.tombstone
    assert (tombstone.checkpoint_id, tombstone.void, tombstone.subtasks) == (1, True, ())


def test_if_the_metadata_was_there_the_checkpoint_is_complete() -> None:
    """The create had worked, only its answer was lost: tasks are told, files are committed."""
    coordinator, _ = ambiguous()

    found = coordinator.written(1)

    assert kinds(found) == ["CommitSinks", "NotifyCompleted", "CompleteRequest"]


def test_if_the_tombstone_won_the_checkpoint_has_failed_and_its_files_come_with_the_next() -> None:
    """Its folder goes but for the tombstone; the sink reports the same file again, and it is committed then."""
    coordinator, _ = ambiguous()

    found = coordinator.voided(1)
    assert only(found, do.DiscardCheckpoint) == [do.DiscardCheckpoint(CheckpointId(1), voided=True, permit=ANY_PERMIT)]
    assert only(found, do.CompleteRequest)[0].checkpoint_id is None

    checkpoint_id = coordinator.ask()
    metadata = coordinator.collect(checkpoint_id, files(0, "f0", "f1"))
    assert metadata.subtasks[1].committables == (files(0, "f0", "f1"),)


def test_storage_that_never_answers_fails_the_job_when_the_outage_has_lasted_too_long() -> None:
    """Invariant 7: the fate of the checkpoint stays unknown, so the job ends with that as its reason, not before."""
    coordinator, _ = ambiguous()
    outage_ms = coordinator.state.spec.storage_outage_ms
    assert only(coordinator.write_failed(1, away_ms=outage_ms - 1), do.EndJob) == []
    coordinator.fire("void:1")

    found = coordinator.write_failed(1, "connection refused", outage_ms)

    (end,) = only(found, do.EndJob)
    assert end.status == "failed"
    assert "fate of checkpoint 1 is unknown after 3 attempts in 600 s (connection refused)" in (end.reason or "")


# --- sink commits -------------------------------------------------------------------------------------------------


def test_commits_are_made_in_order_one_at_a_time() -> None:
    """Checkpoint 2 is complete while the files of 1 are not visible yet: they wait for their turn."""
    coordinator = Coordinator().run()
    coordinator.complete(files(0, "f0"))
    checkpoint_id = coordinator.ask()
    coordinator.collect(checkpoint_id, files(0, "f0", "f1"))
    assert only(coordinator.written(checkpoint_id), do.CommitSinks) == []
    assert coordinator.committed(2) == [], "an answer to a question that was not asked yet"

    assert only(coordinator.committed(1), do.CommitSinks) == [
        do.CommitSinks(CheckpointId(2), (files(1, "f1"),), permit=ANY_PERMIT)
    ]


def test_files_that_are_reported_twice_are_committed_once() -> None:
    """A task that has not heard of a completed checkpoint reports its files again: they are trimmed by number."""
    coordinator = Coordinator(spec(retained=9)).run()
    committed = []
    for reported in [("f0",), ("f0", "f1"), ("f0", "f1"), ("f0", "f1", "f2")]:
        checkpoint_id = coordinator.ask()
        metadata = coordinator.collect(checkpoint_id, files(0, *reported))
        coordinator.written(checkpoint_id)
        coordinator.committed(checkpoint_id)
        committed.append([f.path for c in metadata.subtasks[1].committables for f in c.files])

    assert committed == [["f0"], ["f1"], [], ["f2"]]


def test_numbers_start_anew_with_an_attempt() -> None:
    """The files of another attempt are other files, though their numbers are the same."""
    coordinator = Coordinator().run()
    coordinator.complete(files(0, "old"))
    coordinator.committed(1)
    coordinator.fail()
    coordinator.fire("restart:1")
    coordinator.all_ready()

    metadata = coordinator.collect(coordinator.ask(), files(0, "new"))

    assert metadata.subtasks[1].committables == (files(0, "new"),)


def test_a_commit_that_fails_is_repeated_and_then_fails_the_job() -> None:
    """Commits are idempotent, so they are repeated with growing pauses; after too long the job says why."""
    coordinator = Coordinator().run()
    coordinator.complete(files(0, "f0"))
    commit = do.CommitSinks(CheckpointId(1), (files(0, "f0"),), permit=ANY_PERMIT)
    for attempt in (1, 2):
        assert coordinator.commit_failed(1, away_ms=599_999) == [do.SetTimer("commit:1", 100 * attempt)]
        assert coordinator.fire("commit:1") == [commit]

    (end,) = only(coordinator.commit_failed(1, "table lost", SPEC.storage_outage_ms), do.EndJob)

    assert end.status == "failed"
    assert "sink files of checkpoint 1 could not be committed in 3 attempts (table lost)" in (end.reason or "")
    assert "restored from it commits them" in (end.reason or "")
