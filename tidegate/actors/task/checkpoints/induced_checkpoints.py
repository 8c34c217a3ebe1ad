"""Checkpoints of an externally induced source: triggered by the coordinator, begun where the reader says so."""

from __future__ import annotations

from tidegate.protocol.stream_elements import ALIGNED_BARRIER, Barrier
from tidegate.storage.ids import CheckpointId


class InducedCheckpoints:
    """Triggers that wait for the reader. The reader may also be first: its word alone begins a checkpoint."""

    def __init__(self) -> None:
        self._waiting: dict[CheckpointId, Barrier] = {}

    def triggered(self, barrier: Barrier) -> None:
        """The coordinator has triggered a checkpoint."""
        self._waiting[barrier.checkpoint_id] = barrier

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        """The coordinator has given a checkpoint up."""
        self._waiting.pop(checkpoint_id, None)

    def induced(self, checkpoint_id: CheckpointId, at_ms: int) -> Barrier:
        """The reader says that the checkpoint begins here. Older ones that still wait are passed over."""
        known = self._waiting.get(checkpoint_id, Barrier(checkpoint_id, at_ms, ALIGNED_BARRIER))
        self._waiting = {n: barrier for n, barrier in self._waiting.items() if n > checkpoint_id}
        return known

    def take_rest(self) -> list[Barrier]:
        """Take the triggers that still wait: the reader has ended, and will begin none of them."""
        rest, self._waiting = list(self._waiting.values()), {}
        return rest
