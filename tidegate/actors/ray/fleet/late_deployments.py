"""`LateDeployments`: when it is said of an attempt which of its tasks are not ready, as where `open` does not return.

Time counts from when the tasks have room: before that the job says what it waits for.
"""

from __future__ import annotations

from tidegate.actors.coordinator.deployment import not_ready
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.actors.drivers.log_lines import log_fields
from tidegate.actors.ray.fleet.late_tasks import LATE_MS, LateTasks
from tidegate.storage.ids import AttemptNumber


class LateDeployments:
    """Those of one job. `look` runs on the coordinator's mailbox."""

    def __init__(self, tasks: LateTasks) -> None:
        self._tasks = tasks
        self._attempt: AttemptNumber | None = None
        self._since_ms = 0
        self._due_ms = LATE_MS
        """How old the attempt is when it is told of again."""

    def look(self, state: CoordinatorState, has_room: bool, now_ms: int) -> None:
        """This is how the job gets on."""
        waiting = not_ready(state) if has_room else ()
        if not waiting:
            self._attempt = None
            return
        if self._attempt != state.attempt:
            self._attempt, self._since_ms, self._due_ms = state.attempt, now_ms, LATE_MS
        age_ms = now_ms - self._since_ms
        if age_ms >= self._due_ms:
            self._due_ms *= 2
            self._tasks.tell(f"attempt {state.attempt}", age_ms, waiting, log_fields(attempt=state.attempt))
