"""The end of a bounded input, emitted in steps: what operators have left waits for room, and no barrier splits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
from link import BY_X, Subject, Summing, describe, node, only, sent

from tidegate.actors.graph.stream_graph import translate
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.subtask_checkpoints import HELD_MAX
from tidegate.actors.task.task_descriptor import TaskStatus
from tidegate.operators.operator import Emit, Operator
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.stream_elements import Barrier, CancelBarrier, EndOfData, element_size_bytes
from tidegate.storage.ids import VertexId

SUBSUMED = CheckpointFailureReason.SUBSUMED
STEPS = 5
STEP = pa.record_batch({"x": [0] * 10})
STEP_BYTES = element_size_bytes(STEP)
LIMITS = BufferLimits(
    credit_bytes=STEP_BYTES, queue_bytes_max=STEP_BYTES, frame_bytes_min=1, frame_bytes_max=STEP_BYTES, linger_ms=0
)


class LeavesMuch(Operator):
    """Keeps all rows to itself and emits batches of `STEP_BYTES` in the end."""

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Nothing comes out before the end."""

    def finish(self, emit: Emit) -> Iterator[None]:
        for step in range(STEPS):
            emit(pa.record_batch({"x": [step] * 10}))
            yield


def at_its_end() -> tuple[Subject, list[do.TaskInstruction]]:
    """A source task with nothing to read, which has begun to emit what its operator has left."""
    source = node("source")
    leaves = node("leaves", (source, None), factory=LeavesMuch)
    down = node("down", (leaves, BY_X), factory=Summing)
    subject = Subject(describe(translate([source, leaves, down]), VertexId("source"), limits=LIMITS))
    return subject, subject.start() + subject.read_all()


def grant(subject: Subject, steps: int) -> list[do.TaskInstruction]:
    """Room for this many batches in all, and turns for as long as there is room."""
    (channel,) = subject.descriptor.outputs[0].channels
    attempt = subject.machine.attempt
    found = subject.tell(ev.CreditGranted(subject.at_ms, attempt, channel, (steps + 1) * STEP_BYTES, 10**9))
    return found + subject.turns()


def test_what_is_left_waits_for_room() -> None:
    """The output queue never holds more than its limit and one batch, however much the operators have left."""
    subject, found = at_its_end()
    batches = [e for e in sent(found) if isinstance(e, pa.RecordBatch)]

    assert 0 < len(batches) < STEPS
    assert subject.machine.status is TaskStatus.FINISHING
    assert not subject.machine.runnable
    for steps in range(1, STEPS + 1):
        assert subject.machine.outputs.queued_bytes <= 2 * STEP_BYTES
        found += grant(subject, steps)

    assert [e.num_rows for e in sent(found) if isinstance(e, pa.RecordBatch)] == [10] * STEPS
    assert sent(found)[-1] == EndOfData(drain=True)
    assert subject.machine.status is TaskStatus.END_OF_DATA


def test_a_checkpoint_comes_after_all_that_is_left() -> None:
    """A trigger in the middle of finishing is held: half of what is emitted then could not be restored."""
    subject, found = at_its_end()
    held = subject.trigger(1)
    assert only(held, do.PersistSnapshot) == []
    assert only(held, do.Decline) == []

    found = [i for steps in range(1, STEPS + 2) for i in grant(subject, steps)]

    assert [type(e) for e in sent(found)[-2:]] == [EndOfData, Barrier]
    assert [p.checkpoint_id for p in only(found, do.PersistSnapshot)] == [1]


def test_an_aborted_checkpoint_is_not_taken_after_finishing() -> None:
    """The abort that comes while the trigger is held counts."""
    subject, _ = at_its_end()
    subject.trigger(1)
    subject.abort(1)
    found = [i for steps in range(1, STEPS + 2) for i in grant(subject, steps)]

    assert only(found, do.PersistSnapshot) == []


def held(subject: Subject) -> list[int]:
    """The checkpoints that are held back, oldest first."""
    return sorted(subject.machine.checkpoints.held)


def test_what_is_held_back_has_a_limit() -> None:
    """However long the operators take, and however many checkpoints are triggered: one too many gives up the oldest."""
    subject, _ = at_its_end()
    found = [i for number in range(1, HELD_MAX + 4) for i in subject.trigger(number)]

    assert held(subject) == list(range(4, HELD_MAX + 4))
    assert [(d.checkpoint_id, d.reason) for d in only(found, do.Decline)] == [(n, SUBSUMED) for n in (1, 2, 3)]
    found += subject.trigger(2)
    assert held(subject) == list(range(4, HELD_MAX + 4))
    found += [i for steps in range(1, STEPS + 2) for i in grant(subject, steps)]
    assert [e.checkpoint_id for e in sent(found) if isinstance(e, CancelBarrier)] == [1, 2, 3, 2]
    assert [p.checkpoint_id for p in only(found, do.PersistSnapshot)] == list(range(4, HELD_MAX + 4))


def test_what_was_given_up_is_held_no_longer() -> None:
    """Nothing of it is left, and the tasks downstream are told: no barrier of it will come."""
    subject, _ = at_its_end()
    for number in (1, 2, 1, 3, 3):
        subject.trigger(number)
    subject.abort(1)
    subject.abort(3)
    assert held(subject) == [2]

    found = [i for steps in range(1, STEPS + 2) for i in grant(subject, steps)]
    assert [e.checkpoint_id for e in sent(found) if isinstance(e, CancelBarrier)] == [1, 3]
    assert [p.checkpoint_id for p in only(found, do.PersistSnapshot)] == [2]
    assert held(subject) == []


def test_the_frame_that_uses_up_the_credit_says_so() -> None:
    """Its loss would not be seen by a gap: nothing can follow it, so the runtime has to wait for its delivery."""
    _, found = at_its_end()
    frames = only(found, do.SendFrame)
    assert [frame.exhausts_credit for frame in frames if isinstance(frame.elements[0], pa.RecordBatch)][-1:] == [True]

    wide = replace(LIMITS, credit_bytes=100 * STEP_BYTES)
    source = node("source")
    leaves = node("leaves", (source, None), factory=LeavesMuch)
    down = node("down", (leaves, BY_X), factory=Summing)
    roomy = Subject(describe(translate([source, leaves, down]), VertexId("source"), limits=wide))
    sent_frames = only(roomy.start() + roomy.read_all(), do.SendFrame)
    assert sent_frames
    assert not any(frame.exhausts_credit for frame in sent_frames)
