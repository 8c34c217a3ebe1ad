"""Keeps the bytes of inlined state from the acknowledgement to `_metadata`, and out of the event log.

Rules:

- The machine and the log see a handle without its bytes, so the fold holds none either, and a replay gives the same.
- The bytes are put back where `_metadata` is written, and forgotten when their checkpoint is not pending any more.
- They are lost with the coordinator. Its successor writes no `_metadata` of a checkpoint that it finds pending: it
  drops it, or asks for its fate by creating a tombstone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from tidegate.actors.coordinator.messages import events as ev
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, StateHandle, SubtaskState
from tidegate.storage.ids import CheckpointId, SubtaskIndex, VertexId

_Key = tuple[VertexId, SubtaskIndex, str, int]
"""A subtask, and the checksum and size of the bytes."""


class InlinedState:
    """Of the pending checkpoints of one job."""

    def __init__(self) -> None:
        self._bytes: dict[CheckpointId, dict[_Key, bytes]] = {}

    def take(self, event: ev.CoordinatorEvent) -> ev.CoordinatorEvent:
        """The event without bytes of state."""
        if not isinstance(event, ev.CheckpointAcknowledged) or not _inlined(event.state):
            return event
        known = self._bytes.setdefault(event.checkpoint_id, {})

        def without(handle: StateHandle) -> StateHandle:
            assert handle.inline is not None
            known[_key(event.state, handle)] = handle.inline
            return replace(handle, inline=b"")

        return replace(event, state=_with_handles(event.state, without))

    def put_back(self, metadata: CheckpointMetadata) -> CheckpointMetadata:
        """The metadata with the bytes of its inlined state."""
        known = self._bytes.get(metadata.checkpoint_id, {})
        subtasks = tuple(
            _with_handles(s, lambda handle, s=s: replace(handle, inline=known[_key(s, handle)]))  # type: ignore[misc]
            for s in metadata.subtasks
        )
        return replace(metadata, subtasks=subtasks)

    def keep(self, pending: Collection[CheckpointId]) -> None:
        """Forget the bytes of all other checkpoints."""
        for checkpoint_id in [number for number in self._bytes if number not in pending]:
            del self._bytes[checkpoint_id]


def _inlined(state: SubtaskState) -> bool:
    return any(handle.inline is not None for handle in state.handles)


def _key(state: SubtaskState, handle: StateHandle) -> _Key:
    return state.vertex, state.subtask, handle.checksum, handle.size_bytes


def _with_handles(state: SubtaskState, change: Callable[[StateHandle], StateHandle]) -> SubtaskState:
    """The state with every inlined handle changed."""
    if not _inlined(state):
        return state

    def changed(handle: StateHandle | None) -> StateHandle | None:
        return handle if handle is None or handle.inline is None else change(handle)

    layers = tuple(layer for layer in map(changed, state.layers) if layer is not None)
    return replace(state, handle=changed(state.handle), in_flight=changed(state.in_flight), layers=layers)
