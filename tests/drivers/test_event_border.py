"""What comes in to the coordinator can be written down, whatever users have put into it."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest
from coordinators import SOURCE, SPEC

from tidegate.actors.coordinator import events as ev
from tidegate.actors.drivers.coordinator_driver import sanitize_event
from tidegate.protocol.failures import TEXT_BYTES_MAX, CheckpointFailureReason
from tidegate.storage.checkpoints.metadata import StateHandle, SubtaskState
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import CodecError
from tidegate.storage.ids import AttemptNumber, CheckpointId

FIRST, ONE = AttemptNumber(0), CheckpointId(1)
RUDE = "\udcff" + "x" * 3_000_000
TEXT_FIELDS = {"reason", "message", "error"}

_with_texts = [kind for kind in get_args(ev.CoordinatorEvent) if TEXT_FIELDS & {field.name for field in fields(kind)}]


@pytest.mark.parametrize("kind", _with_texts, ids=lambda kind: kind.__name__)
def test_every_free_text_is_bounded_and_escaped(kind: type) -> None:
    """Of every event that has one, those of tomorrow too."""
    values = {
        "at_ms": 0,
        "attempt": FIRST,
        "task": SOURCE,
        "checkpoint_id": ONE,
        "process": "sink#0",
        "message": RUDE,
        "error": RUDE,
        "reason": CheckpointFailureReason.DECLINED if kind is ev.CheckpointDeclined else RUDE,
    }
    event = kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})
    encoded = encode(sanitize_event(event, str))
    assert len(encoded) < TEXT_BYTES_MAX + 300
    assert type(decode(encoded)) is kind


def test_an_acknowledgement_that_cannot_be_written_down_fails_its_task() -> None:
    """With the cause, by the rules of any failure."""
    state = SubtaskState(SOURCE.vertex, SOURCE.subtask, StateHandle("a\udcff", None, 1, "sum", ()))
    event = sanitize_event(ev.CheckpointAcknowledged(3, FIRST, SOURCE, ONE, state), str)
    assert isinstance(event, ev.TaskFailed)
    assert (event.at_ms, event.attempt, event.task) == (3, FIRST, SOURCE)
    assert "CheckpointAcknowledged cannot be written to the event log: CodecError" in event.reason


def test_what_hooks_keep_under_a_name_that_cannot_be_written_down_fails_the_checkpoint() -> None:
    """As when the hook had raised."""
    event = sanitize_event(ev.HooksTriggered(3, ONE, (("a\udcff", b""),)), str)
    assert isinstance(event, ev.HookFailed)
    assert event.checkpoint_id == ONE


def test_what_nothing_can_take_the_place_of_is_an_error() -> None:
    """The host says so to whoever asked, or stops with that cause."""
    with pytest.raises(CodecError):
        sanitize_event(ev.CheckpointRequested(0, "request", target="memory://\udcff"), str)


def test_whatever_can_be_written_down_stays_as_it_is() -> None:
    """Nearly always."""
    for event in (ev.JobSubmitted(0, SPEC), ev.TaskFailed(0, FIRST, SOURCE, "no"), ev.CancelRequested(0)):
        assert sanitize_event(event, str) == event
