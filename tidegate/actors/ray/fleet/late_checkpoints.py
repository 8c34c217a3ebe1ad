"""`LateCheckpoints`: when it is said of a checkpoint for which tasks it waits: those that have not acknowledged."""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.coordinator.state.coordinator_state import PendingCheckpoint
from tidegate.actors.drivers.log_lines import log_fields
from tidegate.actors.ray.fleet.late_tasks import LATE_MS, LateTasks
from tidegate.storage.ids import CheckpointId


class LateCheckpoints:
    """Those of one job. `look` runs on the coordinator's mailbox."""

    def __init__(self, tasks: LateTasks) -> None:
        self._tasks = tasks
        self._due_ms: dict[CheckpointId, int] = {}
        """How old a checkpoint is when it is told of again."""

    def look(self, pending: Iterable[PendingCheckpoint], now_ms: int) -> None:
        """These are under way."""
        due_ms, self._due_ms = self._due_ms, {}
        for each in pending:
            limit_ms, age_ms = due_ms.get(each.checkpoint_id, LATE_MS), now_ms - each.triggered_at_ms
            if late := age_ms >= limit_ms and bool(each.waiting):
                what = f"{each.properties.kind.words} {each.checkpoint_id}"
                fields = log_fields(checkpoint=each.checkpoint_id, attempt=each.attempt)
                self._tasks.tell(what, age_ms, each.waiting, fields)
            self._due_ms[each.checkpoint_id] = 2 * limit_ms if late else limit_ms
