"""An externally induced source: the reader says where a checkpoint begins, not the trigger."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
from batches import batch, values
from frozen_tables import tables_of
from link import BY_X, SCHEMA, SOURCE, UNALIGNED, Subject, Summing, barrier, cancel, describe, node, only, sent

from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.connectors.memory_source import MemorySource
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, BarrierOptions, Element, EndOfData, Watermark
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import CheckpointId, OperatorUid


class Induced(MemorySource):
    """Six rows; what its reader induces is told by hand."""

    externally_induced: Literal[True] = True


def induced_source() -> Subject:
    """A started task of this source."""
    source = StreamNode(OperatorUid("source"), "source", 1, SCHEMA, Induced(pa.table({"x": list(range(1, 7))}), 1))
    subject = Subject(describe(translate([source, node("down", (source, BY_X), factory=Summing)]), SOURCE))
    subject.start()
    return subject


def read(subject: Subject, *rows: int, induces: int | None = None, at_end: bool = False) -> list[do.TaskInstruction]:
    """The oldest read is answered with these rows, and processed."""
    question = subject.reads.pop(0)
    offset = question.offset + len(rows)
    checkpoint_id = None if induces is None else CheckpointId(induces)
    data = batch(*rows) if rows else None
    told = ev.SourceBatchRead(subject.at_ms, question.read, data, offset, at_end, checkpoint_id)
    return subject.tell(told) + subject.turns()


def order(found: list[do.TaskInstruction]) -> list[object]:
    """What was sent, batches as lists."""
    return [values(e) if isinstance(e, pa.RecordBatch) else e for e in sent(found)]


def offset_of(found: list[do.TaskInstruction]) -> int:
    """The position in the one snapshot among these."""
    (persist,) = only(found, do.PersistSnapshot)
    rows = tables_of(persist.snapshots[0].states[0])[0].rows
    position: int = rows.column("next_offset")[0].as_py()
    return position


def test_a_triggered_checkpoint_begins_where_the_reader_says() -> None:
    """The trigger alone starts nothing; the barrier comes right after the rows of the answer, as it was triggered."""
    subject = induced_source()
    assert sent(subject.trigger(1)) == []

    found = read(subject, 1, 2) + read(subject, 3, induces=1) + read(subject, 4)

    assert order(found) == [[1, 2], [3], barrier(1)]
    assert offset_of(found) == 3


def test_the_reader_may_be_first() -> None:
    """Its word alone begins a checkpoint; the trigger that comes afterwards begins no second one."""
    subject = induced_source()
    found = read(subject, 1, induces=1)
    assert order(found) == [[1], barrier(1)]

    assert subject.trigger(1) == []
    found = read(subject, 2) + read(subject, induces=2)

    assert order(found) == [[2], barrier(2)]


def test_the_options_of_the_trigger_count() -> None:
    """How the checkpoint is taken is the coordinator's to say, when is the reader's; older triggers are over."""
    subject = induced_source()
    subject.trigger(1)
    subject.at_ms = 1_500
    subject.trigger(2, UNALIGNED)
    found = read(subject, induces=2)
    assert order(found) == [barrier(2, UNALIGNED, at_ms=1_500)]

    ended = read(subject, at_end=True)

    assert only(ended, do.PersistSnapshot) == [], "checkpoint 1 is not begun at the end any more"


def test_an_abort_counts_before_the_reader_speaks() -> None:
    """What was given up is not begun, and those downstream need not wait for it."""
    subject = induced_source()
    subject.trigger(1)
    subject.abort(1)

    found = read(subject, 1, induces=1)

    assert only(found, do.PersistSnapshot) == []
    assert cancel(1) in sent(found)


def test_the_end_of_the_input_begins_what_still_waits() -> None:
    """The reader will not speak again: the checkpoint is taken after the end, with the task finished."""
    subject = induced_source()
    subject.trigger(1)

    found = read(subject, 1, at_end=True)

    expected: list[Element] = [Watermark(MAX_WATERMARK_MS), EndOfData(drain=True), barrier(1)]
    assert order(found)[1:] == expected
    assert only(subject.persisted(1), do.Acknowledge)[0].state.finished
    assert sent(subject.trigger(2)) == [barrier(2)], "from now on the trigger is enough"


def test_savepoints_do_not_wait_for_the_reader() -> None:
    """They are the user's, who asks for them now."""
    savepoint = BarrierOptions(kind=SnapshotKind.SAVEPOINT)
    assert sent(induced_source().trigger(1, savepoint)) == [barrier(1, savepoint)]
