"""Every event of the coordinator describes itself in a sentence."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import pytest

from tidegate.actors.coordinator import events as ev
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import SubtaskIndex, VertexId

KINDS: tuple[type, ...] = get_args(ev.CoordinatorEvent)
_KNOWN: dict[str, Any] = {
    "at_ms": 1, "attempt": 3, "checkpoint_id": 17, "generation": 2, "timer": "periodic:3", "spec": ev,
    "task": TaskId(VertexId("sums"), SubtaskIndex(1)), "kind": SnapshotKind.CHECKPOINT, "target": None, "stop": None,
}  # fmt: skip


def of(kind: type) -> Any:
    """An event of this kind. Texts say the name of their field."""
    event: Any = object.__new__(kind)
    for field in fields(kind):
        object.__setattr__(event, field.name, _KNOWN.get(field.name, f"the {field.name}"))
    return event


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind is not ev.JobSubmitted], ids=lambda kind: kind.__name__
)
def test_every_event_describes_itself(kind: type) -> None:
    """A sentence, which names what the event is about, and says why where something went wrong."""
    event = of(kind)
    words = event.describe()
    assert kind.__name__ not in words
    assert " " in words
    named = {"checkpoint_id": "17", "task": "sums[1]", "error": "the error", "message": "the message"}
    if not hasattr(event, "message"):
        named["reason"] = "the reason"
    assert [name for name, text in named.items() if hasattr(event, name) and text not in words] == []
