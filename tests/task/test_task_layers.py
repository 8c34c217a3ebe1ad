"""Incremental snapshots of one task: what is asked for, acknowledged, restored, and thrown away."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from batches import batch
from link import WORK, FrozenSum, Subject, describe, only, work_graph

from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.incremental_base import IncrementalBase
from tidegate.operators.operator import Emit, Operator
from tidegate.protocol.stream_elements import Barrier, BarrierOptions
from tidegate.storage.checkpoints.metadata import NativeFile, NativeState, SnapshotKind, StateHandle
from tidegate.storage.ids import CheckpointId, OperatorUid
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot


class Layered(Operator):
    """Has one keyed and one other state, and remembers what it was asked for."""

    def __init__(self, cuts: list[Cut]) -> None:
        self.cuts = cuts

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        emit(batch)

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        self.cuts.append(cut)
        return OperatorSnapshot(self.context.uid, (FrozenSum(1),), (FrozenSum(2),))


def layered(cuts: list[Cut] | None = None, lineage: IncrementalBase | None = None) -> Subject:
    """A running task with such an operator."""
    log = cuts if cuts is not None else []
    subject = Subject(describe(work_graph(lambda: Layered(log)), WORK))
    subject.tell(ev.TaskRestored(subject.at_ms, (), lineage=lineage))
    subject.tell(ev.TasksStarted(subject.at_ms))
    return subject


def barrier(checkpoint_id: int, base: int | None = None, kind: SnapshotKind = SnapshotKind.CHECKPOINT) -> Barrier:
    """A barrier that may be built on another checkpoint."""
    options = BarrierOptions(kind=kind)
    return Barrier(CheckpointId(checkpoint_id), 1_000, options, None if base is None else CheckpointId(base))


def handle(path: str | None, size_bytes: int = 10) -> StateHandle:
    """State in a file, told apart by its path."""
    return StateHandle(path, None, size_bytes, "sum", ())


def native(*paths: str) -> NativeState:
    """State in files of a backend."""
    files = tuple(NativeFile(path.rpartition("/")[2], path, 10, "sum") for path in paths)
    return NativeState(OperatorUid("work"), "rocksdb", (0, 128), b"", files)


def persisted(
    subject: Subject, number: int, layer: StateHandle | None = None, own: Sequence[NativeState] = ()
) -> list[do.TaskInstruction]:
    """A snapshot is durable: a file of the checkpoint alone, and these shared ones."""
    event = ev.SnapshotPersisted(subject.at_ms, CheckpointId(number), handle(f"chk-{number}"), 0, layer, tuple(own))
    return subject.tell(event)


def test_the_layers_of_an_acknowledgement_are_those_below_and_the_new_one() -> None:
    """The first checkpoint is whole, the next ones hold what has changed since the one that their barrier names."""
    cuts: list[Cut] = []
    subject = layered(cuts)
    subject.feed(0, batch(1), barrier(1))
    (first,) = only(persisted(subject, 1, handle("shared/1")), do.Acknowledge)
    (persist,) = only(subject.feed(0, batch(2), barrier(2, base=1)), do.PersistSnapshot)
    (second,) = only(persisted(subject, 2, handle("shared/2", 7)), do.Acknowledge)

    assert cuts == [Cut(CheckpointId(1)), Cut(CheckpointId(2), base=CheckpointId(1))]
    assert persist.base == IncrementalBase(CheckpointId(1), (handle("shared/1"),))
    assert first.state.layers == (handle("shared/1"),)
    assert second.state.layers == (handle("shared/1"), handle("shared/2", 7))
    assert (first.metrics.state_bytes, first.metrics.incremental_bytes) == (20, 20)
    assert (second.metrics.state_bytes, second.metrics.incremental_bytes) == (27, 17)


def test_no_layer_is_added_when_nothing_has_changed() -> None:
    """The checkpoint has the layers of its base."""
    subject = layered()
    subject.feed(0, barrier(1))
    persisted(subject, 1, handle("shared/1"))
    subject.feed(0, barrier(2, base=1))

    (acknowledge,) = only(persisted(subject, 2), do.Acknowledge)

    assert acknowledge.state.layers == (handle("shared/1"),)


def test_a_snapshot_is_built_on_the_one_that_completed_though_others_came_between() -> None:
    """Concurrent and aborted checkpoints are passed over: the coordinator keeps the files of the base alone."""
    cuts: list[Cut] = []
    subject = layered(cuts)
    for number, base in ((1, None), (2, 1), (3, 1)):
        subject.feed(0, batch(number), barrier(number, base))
        persisted(subject, number, handle(f"shared/{number}"))
    subject.abort(2)
    subject.feed(0, barrier(4, base=1))

    (acknowledge,) = only(persisted(subject, 4, handle("shared/4")), do.Acknowledge)

    assert [c.base for c in cuts] == [None, 1, 1, 1]
    assert acknowledge.state.layers == (handle("shared/1"), handle("shared/4"))


def test_a_task_goes_on_from_what_it_was_restored_from() -> None:
    """Its first snapshot holds what has changed since."""
    cuts: list[Cut] = []
    subject = layered(cuts, IncrementalBase(CheckpointId(7), (handle("shared/3"), handle("shared/7"))))
    subject.feed(0, barrier(9, base=7))

    (acknowledge,) = only(persisted(subject, 9, handle("shared/9")), do.Acknowledge)

    assert cuts == [Cut(CheckpointId(9), base=CheckpointId(7))]
    assert acknowledge.state.layers == (handle("shared/3"), handle("shared/7"), handle("shared/9"))


def test_a_savepoint_has_all_states_in_one_file_of_its_own() -> None:
    """Nothing in it is shared, and the checkpoint after it is whole."""
    cuts: list[Cut] = []
    subject = layered(cuts)
    subject.feed(0, barrier(1))
    persisted(subject, 1, handle("shared/1"))
    (persist,) = only(subject.feed(0, barrier(2, base=1, kind=SnapshotKind.SAVEPOINT)), do.PersistSnapshot)
    persisted(subject, 2)
    subject.feed(0, barrier(3, base=2))

    assert [(s.states, s.layer) for s in persist.snapshots] == [((FrozenSum(1), FrozenSum(2)), ())]
    assert cuts[1:] == [Cut(CheckpointId(2), canonical=True), Cut(CheckpointId(3))]


@pytest.mark.parametrize("durable_first", [True, False])
def test_a_cancelled_snapshot_discards_its_own_files_and_none_of_its_base(durable_first: bool) -> None:
    """Layers below and files that it has in common with the base are needed by others."""
    subject = layered(lineage=IncrementalBase(CheckpointId(7), (handle("shared/7"),), (native("chk-7/1.sst"),)))
    subject.feed(0, batch(1), barrier(9, base=7))
    own = (native("chk-7/1.sst", "chk-9/2.sst"),)
    if durable_first:
        # A second barrier is on its way: nothing is acknowledged before what is in flight is durable.
        subject.machine.checkpoints.tracker.await_channels(CheckpointId(9))
        persisted(subject, 9, handle("shared/9"), own)
        found = subject.abort(9)
    else:
        subject.abort(9)
        found = persisted(subject, 9, handle("shared/9"), own)

    assert only(found, do.DiscardState) == [do.DiscardState(("chk-9", "shared/9", "chk-9/2.sst"))]
