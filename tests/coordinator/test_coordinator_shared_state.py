"""Checkpoints that are built on one another: what they may be built on, and how long shared files stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from any_permit import ANY_PERMIT
from coordinators import SINK, SOURCE, SPEC, Coordinator, handle, only, part, spec
from shared_files import LAYOUT, layer

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.job_spec import Retention
from tidegate.protocol.task_reports import SnapshotMetrics
from tidegate.storage.checkpoints.metadata import NativeFile, NativeState, SavepointFormat, SnapshotKind, StateHandle
from tidegate.storage.codec import decode, encode
from tidegate.storage.ids import CheckpointId

KEEP, NEVER = Retention.RETAIN_ON_CANCELLATION, Retention.NEVER_RETAIN
CONCURRENT = spec(max_concurrent=3, tolerable_failures=100)


def path(checkpoint_id: int) -> str:
    """The layer that the sink wrote for a checkpoint."""
    return LAYOUT.layer_file(CheckpointId(checkpoint_id), SINK.vertex, SINK.subtask)


def trigger(job: Coordinator) -> do.TriggerCheckpoint:
    """The next checkpoint."""
    (found,) = only(job.request(f"r{job.state.next_checkpoint_id}"), do.TriggerCheckpoint)
    return found


def collect(job: Coordinator, checkpoint_id: int, *layers: StateHandle) -> list[do.CoordinatorInstruction]:
    """Every task acknowledges, the sink with these layers."""
    found = job.ack(checkpoint_id, SOURCE)
    state = replace(part(checkpoint_id, SINK), layers=layers)
    told = ev.CheckpointAcknowledged(job.at_ms, job.state.attempt, SINK, CheckpointId(checkpoint_id), state)
    return found + job.tell(told)


def complete(job: Coordinator, *layers: int) -> list[do.CoordinatorInstruction]:
    """A whole checkpoint whose sink has the layers of these checkpoints."""
    number = trigger(job).checkpoint_id
    return collect(job, number, *(layer(n, SINK) for n in layers)) + job.written(number)


def discards(job: Coordinator, instructions: list[do.CoordinatorInstruction]) -> dict[int, tuple[str, ...] | None]:
    """The checkpoints that are deleted, with the shared files that go when each is gone."""
    found: dict[int, tuple[str, ...] | None] = {}
    for discard in only(instructions, do.DiscardCheckpoint):
        files = only(gone(job, discard.checkpoint_id), do.DiscardCheckpoint)
        assert discard.shared in ((), None), "the checkpoint goes first"
        found[discard.checkpoint_id] = files[0].shared if files else discard.shared
    return found


def gone(job: Coordinator, checkpoint_id: int) -> list[do.CoordinatorInstruction]:
    """A deletion has succeeded."""
    return job.tell(ev.CheckpointDiscarded(job.at_ms, CheckpointId(checkpoint_id)))


def asked(instructions: list[do.CoordinatorInstruction]) -> dict[int, tuple[str, ...] | None]:
    """The deletions that are asked for, and the shared files among them."""
    return {d.checkpoint_id: d.shared for d in only(instructions, do.DiscardCheckpoint)}


# --- what a checkpoint is built on --------------------------------------------------------------------------------


def test_a_checkpoint_is_built_on_the_newest_completed_one_that_has_layers() -> None:
    """None before there is one, and none where no task keeps state in layers; the pending one remembers it."""
    job = Coordinator(spec(retained=3)).run()
    assert trigger(job).base is None
    collect(job, 1)
    job.written(1)
    assert trigger(job).base is None
    collect(job, 2, layer(2, SINK))
    job.written(2)

    assert trigger(job).base == 2
    assert job.state.pending[CheckpointId(3)].base == 2


def test_inlined_layers_can_be_built_on_as_well() -> None:
    """They are in the metadata of each checkpoint that has them: no file, and a base nevertheless."""
    job = Coordinator().run()
    collect(job, trigger(job).checkpoint_id, layer(1, SINK, path=None))
    job.written(1)

    assert trigger(job).base == 1


def test_a_restored_attempt_builds_on_what_it_was_restored_from() -> None:
    """Also when the checkpoint is that of an attempt before, and under a coordinator that has taken over."""
    job = Coordinator().run()
    complete(job, 1)
    job.start(generation=2)
    job.all_ready()

    assert trigger(job).base == 1


@pytest.mark.parametrize(("kept", "base"), [(1, None), (2, 1)])
def test_savepoints_are_built_on_nothing_and_nothing_is_built_on_them(kept: int, base: int | None) -> None:
    """A savepoint is whole: the checkpoint after it is built on the one before it, if that is still there."""
    job = Coordinator(spec(retained=kept)).run()
    complete(job, 1)
    (savepoint,) = only(job.request("wanted", SnapshotKind.SAVEPOINT), do.TriggerCheckpoint)
    assert savepoint.base is None
    job.acknowledge_all(2)
    job.written(2)
    job.exported(2)

    assert trigger(job).base == base


def test_a_native_savepoint_is_a_checkpoint_like_any_other() -> None:
    """It is built on the newest one, the next one is built on it, and its metadata says what it is."""
    job = Coordinator().run()
    complete(job, 1)
    wish = ev.CheckpointRequested(job.at_ms, "r", SnapshotKind.SAVEPOINT, "folder", SavepointFormat.NATIVE)
    (savepoint,) = only(job.tell(wish), do.TriggerCheckpoint)
    assert savepoint.base == 1
    assert not savepoint.options.canonical
    job.ack(2, SOURCE)
    state = replace(part(2, SINK), layers=(layer(1, SINK), layer(2, SINK)))
    told = ev.CheckpointAcknowledged(
        job.at_ms, job.state.attempt, SINK, CheckpointId(2), state, kind=SnapshotKind.SAVEPOINT
    )
    (write,) = only(job.tell(told), do.WriteMetadata)
    assert write.metadata.savepoint_format is SavepointFormat.NATIVE
    job.written(2)

    assert trigger(job).base == 2


def test_the_shared_files_of_a_native_savepoint_stay_until_it_is_copied() -> None:
    """They go when its copy is over, although newer checkpoints have long subsumed it."""
    job = Coordinator().run()
    wish = ev.CheckpointRequested(job.at_ms, "r", SnapshotKind.SAVEPOINT, "folder", SavepointFormat.NATIVE)
    job.tell(wish)
    job.ack(1, SOURCE)
    state = replace(part(1, SINK), layers=(layer(1, SINK),))
    job.tell(
        ev.CheckpointAcknowledged(
            job.at_ms, job.state.attempt, SINK, CheckpointId(1), state, kind=SnapshotKind.SAVEPOINT
        )
    )
    job.written(1)
    for _ in range(3):
        deleted = discards(job, complete(job, job.state.next_checkpoint_id))
        assert path(1) not in [shared for paths in deleted.values() for shared in paths]

    assert discards(job, job.exported(1)) == {1: (path(1),)}


# --- how long shared files stay -----------------------------------------------------------------------------------


def test_a_shared_file_goes_with_the_last_checkpoint_that_refers_to_it() -> None:
    """A subsumed checkpoint takes along what the retained one does not need: nothing, or all below a new base."""
    job = Coordinator().run()
    complete(job, 1)

    assert discards(job, complete(job, 1, 2)) == {1: ()}
    assert discards(job, complete(job, 1, 2)) == {2: ()}
    assert discards(job, complete(job, 4)) == {3: (path(1), path(2))}


def test_several_retained_checkpoints_count() -> None:
    """What any of them refers to stays."""
    job = Coordinator(spec(retained=2)).run()
    complete(job, 1)
    complete(job, 2)

    assert discards(job, complete(job, 2, 3)) == {1: (path(1),)}
    assert discards(job, complete(job, 4)) == {2: ()}
    assert discards(job, complete(job, 4, 5)) == {3: (path(2), path(3))}


@pytest.mark.parametrize("fate", ["completes", "fails"])
def test_what_a_pending_checkpoint_is_built_on_stays_until_that_is_over(fate: str) -> None:
    """A checkpoint that is subsumed meanwhile is deleted when nobody builds on it any more, with what nobody needs."""
    job = Coordinator(CONCURRENT).run()
    complete(job, 1)
    numbers = [trigger(job).checkpoint_id for _ in range(2)]
    assert numbers == [2, 3]
    collect(job, 2, layer(2, SINK))
    assert discards(job, job.written(2)) == {}, "3 is built on it"

    if fate == "fails":
        assert discards(job, job.decline(3)) == {3: None, 1: (path(1),)}
    else:
        collect(job, 3, layer(1, SINK), layer(3, SINK))
        assert discards(job, job.written(3)) == {2: (path(2),), 1: ()}


def test_a_failed_checkpoint_takes_along_what_it_wrote() -> None:
    """All of its own folder of shared files, whoever wrote into it; nothing of what it was built on."""
    job = Coordinator(CONCURRENT).run()
    complete(job, 1)
    trigger(job)

    assert discards(job, job.decline(2)) == {2: None}


def test_a_deletion_is_asked_for_again_until_nothing_is_left() -> None:
    """After a failure, and by the coordinator that takes over, though it has only the stored fold."""
    job = Coordinator().run()
    complete(job, 1)
    assert asked(complete(job, 2)) == {1: ()}
    job.tell(ev.CheckpointDiscardFailed(job.at_ms, CheckpointId(1), "no answer"))
    assert asked(job.fire("discard:1")) == {1: ()}
    successor = Coordinator(machine=CoordinatorMachine(decode(encode(job.state))))
    assert asked(successor.start(generation=2)) == {1: ()}

    assert asked(gone(successor, 1)) == {1: (path(1),)}
    assert asked(successor.start(generation=3)) == {1: (path(1),)}
    assert asked(gone(successor, 1)) == {}
    assert asked(successor.start(generation=4)) == {}


def test_files_stay_while_a_checkpoint_that_refers_to_them_is_not_gone() -> None:
    """Whoever finds its metadata finds its files; where it cannot be deleted they stay until the sweep."""
    job = Coordinator(spec(retained=1)).run()
    complete(job, 1)
    assert asked(complete(job, 1, 2)) == {1: ()}
    assert asked(complete(job, 3)) == {2: ()}
    assert asked(gone(job, 2)) == {2: (path(2),)}
    job.tell(ev.CheckpointDiscardFailed(job.at_ms, CheckpointId(1), "no answer", SPEC.storage_outage_ms))

    assert asked(complete(job, 4)) == {3: ()}
    assert job.state.shared.references.keys() == {1, 3, 4}


def test_references_survive_a_takeover() -> None:
    """A generation that knows the fold alone deletes neither too much nor too little (invariant 5)."""
    job = Coordinator().run()
    complete(job, 1)
    successor = Coordinator(machine=CoordinatorMachine(decode(encode(job.state))))
    successor.start(generation=2)
    successor.all_ready()

    assert discards(successor, complete(successor, 1, 2)) == {1: ()}
    assert discards(successor, complete(successor, 3)) == {2: (path(1), path(2))}


def test_a_takeover_asks_for_each_deletion_once() -> None:
    """A second answer to the deletion of a checkpoint would stand for that of its shared files, which may fail."""
    job = Coordinator(CONCURRENT).run()
    complete(job, 1)
    for _ in range(2):
        trigger(job)
    collect(job, 2, layer(2, SINK))
    assert discards(job, job.written(2)) == {}, "3 is built on 1"

    found = only(job.start(generation=2), do.DiscardCheckpoint)

    assert sorted((d.checkpoint_id, d.shared) for d in found) == [(1, ()), (3, None)]


def test_a_checkpoint_that_refers_to_strange_files_is_not_completed() -> None:
    """Nobody would know how long they stay."""
    job = Coordinator(CONCURRENT).run()
    complete(job, 1)
    trigger(job)
    trigger(job)
    collect(job, 2, layer(2, SINK))
    job.written(2)
    collect(job, 3, layer(2, SINK), layer(3, SINK))

    with pytest.raises(AssertionError, match="shared/chk-2/sink-0 is neither a file of the checkpoint"):
        job.written(3)


# --- acknowledgements that are refused ----------------------------------------------------------------------------


def test_a_refused_acknowledgement_loses_its_own_files_and_none_of_its_base() -> None:
    """Layers below and files that it has in common with others are not its own."""
    job = Coordinator(CONCURRENT).run()
    complete(job, 1)
    trigger(job)
    job.decline(2)
    own, common = (f"job-12345678/shared/chk-{n}/sink-0=agg/000007.sst" for n in (2, 1))
    files = tuple(NativeFile("000007.sst", p, 10, "sum") for p in (own, common))
    state = replace(
        part(2, SINK),
        layers=(layer(1, SINK), layer(2, SINK)),
        native=(NativeState(SINK.vertex, "rocksdb", (0, 128), b"", files),),  # type: ignore[arg-type]
    )

    found = job.tell(ev.CheckpointAcknowledged(job.at_ms, job.state.attempt, SINK, CheckpointId(2), state))

    assert only(found, do.DiscardFiles) == [
        do.DiscardFiles(CheckpointId(2), (str(handle(2, SINK).path), path(2), own), permit=ANY_PERMIT)
    ]


@pytest.mark.parametrize("condition", ["retained", "held", "being deleted"])
def test_an_acknowledgement_that_comes_again_after_the_completion_changes_nothing(condition: str) -> None:
    """Whatever has become of the checkpoint: later ones may refer to the very files that it names."""
    job = Coordinator(CONCURRENT).run()
    complete(job, 1)
    if condition == "held":
        trigger(job)
        trigger(job)
        collect(job, 2, layer(1, SINK), layer(2, SINK))
        assert discards(job, job.written(2)) == {}
    elif condition == "being deleted":
        assert asked(complete(job, 1, 2)) == {1: ()}

    assert only(collect(job, 1, layer(1, SINK)), do.DiscardFiles) == []


def test_an_acknowledgement_of_a_deleted_checkpoint_spares_what_newer_ones_refer_to() -> None:
    """Nothing tells any more that it had completed; its layer is another one's by now."""
    job = Coordinator().run()
    complete(job, 1)
    complete(job, 1, 2)
    job.tell(ev.CheckpointDiscarded(job.at_ms, CheckpointId(1)))

    found = only(collect(job, 1, layer(1, SINK)), do.DiscardFiles)

    assert [p for discard in found for p in discard.paths if "shared" in p] == []


# --- the end, and statistics --------------------------------------------------------------------------------------


def test_nothing_is_referred_to_any_more_when_a_job_ends_without_checkpoints() -> None:
    """The sweep takes everything, and the fold says so."""
    kept, swept = (Coordinator(spec(retention=retention)).run() for retention in (KEEP, NEVER))
    for job in (kept, swept):
        complete(job, 1)
        job.cancel()

    assert kept.state.shared.references == {1: (path(1),)}
    assert (swept.state.completed, swept.state.shared.references) == ((), {})


def test_statistics_tell_what_a_checkpoint_wrote_apart_from_what_it_refers_to() -> None:
    """The full size counts all layers, the incremental one is what the tasks say that they have written."""
    job = Coordinator().run()
    complete(job, 1)
    number = trigger(job).checkpoint_id
    job.ack(number, SOURCE)
    state = replace(part(number, SINK), layers=(layer(1, SINK), layer(2, SINK)))
    metrics = SnapshotMetrics(state_bytes=30, incremental_bytes=20)
    job.tell(ev.CheckpointAcknowledged(job.at_ms, job.state.attempt, SINK, number, state, metrics))
    job.written(number)

    newest = job.state.statistics.latest_completed
    assert newest is not None
    assert (newest.state_bytes, newest.incremental_bytes) == (40, 20)
    assert [(v.state_bytes.total, v.incremental_bytes.total) for v in newest.vertices][::-1] == [(10, 0), (30, 20)]
