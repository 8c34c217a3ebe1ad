"""`Triggers`: what clients have asked jobs for, until they have fetched the answer.

Rules: an id stands for one request, so who asks again gets the same one. Of those that are answered the newest are
kept; of each job only so many may be open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tidegate.actors.runtimes.running_job import Answer
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import JobId

KEPT_MAX = 200
OPEN_MAX = 10
"""Open ones of one job."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """A request; `answer` is None while it is open."""

    job_id: JobId
    kind: SnapshotKind
    answer: Answer | None = None


class Triggers:
    """Those of one server. Not thread-safe."""

    def __init__(self) -> None:
        self._all: dict[str, Trigger] = {}

    def __len__(self) -> int:
        return len(self._all)

    def get(self, trigger_id: str) -> Trigger | None:
        """The request of this id; None if there is none, or none any more."""
        return self._all.get(trigger_id)

    def open_of(self, job_id: JobId) -> tuple[str, ...]:
        """The open ones of a job."""
        return tuple(name for name, t in self._all.items() if t.job_id == job_id and t.answer is None)

    def add(self, trigger_id: str, job_id: JobId, kind: SnapshotKind) -> None:
        """A request is made. The caller has seen that there may be another one."""
        assert trigger_id not in self._all, "an id stands for one request"
        assert len(self.open_of(job_id)) < OPEN_MAX, "the number of open requests has a limit"
        self._all[trigger_id] = Trigger(job_id, kind)
        answered = [name for name, trigger in self._all.items() if trigger.answer is not None]
        for name in answered[: max(0, len(self._all) - KEPT_MAX)]:
            del self._all[name]

    def drop(self, trigger_id: str) -> None:
        """A request has not reached its job."""
        self._all.pop(trigger_id, None)

    def answer(self, trigger_id: str, answer: Answer) -> None:
        """The job has answered; the first answer stays."""
        trigger = self._all.get(trigger_id)
        if trigger is not None and trigger.answer is None:
            self._all[trigger_id] = replace(trigger, answer=answer)
