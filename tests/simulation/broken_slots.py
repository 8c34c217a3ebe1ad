"""Rules of slots, whose subtasks share a process, broken on purpose. Each is a patch that holds while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from broken_failover import Both

from tidegate.actors.coordinator.coordinator_state import PendingCheckpoint
from tidegate.actors.drivers.worker import Subtask, Worker
from tidegate.actors.graph.slot_plan import WorkerId
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import Barrier
from tidegate.storage.checkpoints.metadata import SubtaskState
from tidegate.testing.runtime import ports
from tidegate.testing.runtime.processes import SimulatedProcess, SimulatedProcesses

Patch = Callable[[], AbstractContextManager[Any]]

_send_frame, _acknowledge, _send_reports = Subtask.send_frame, PendingCheckpoint.acknowledge, ports.send_reports
_end, _start = SimulatedProcess.end, SimulatedProcesses.start_process


def _leaves_its_queue(self: SimulatedProcess) -> Any:
    """Breaks: with a process goes what is in its queue. Here it is still there."""
    left = tuple(self.queue)
    failed = _end(self)
    self.queue.extend(left)
    return failed


def _takes_over_the_queue(self: SimulatedProcesses, slot: WorkerId) -> SimulatedProcess:
    """Lets the next process of a slot continue with the queue of the previous one."""
    before = self._of.get(slot)
    process = _start(self, slot)
    for left in () if before is None else before.queue:
        assert isinstance(left, partial)
        process.queue.append(partial(process.deliver, *left.args))
    return process


def _in_any_attempt(self: Worker, task: TaskId, attempt: int, event: ev.TaskEvent) -> bool:
    """Breaks: what was sent in an attempt comes in that alone. Here it comes in the one that runs, as if sent in it."""
    subtask = self.subtasks.get(task)
    if subtask is None:
        return False
    if isinstance(event, ev.FrameArrived):
        event = replace(event, attempt=subtask.attempt)
    self.guarded(subtask, partial(subtask.host.handle, event))
    return True


def _goes_ahead(self: Subtask, frame: do.SendFrame) -> None:
    """Breaks: the queue keeps its order. Here a frame with a barrier goes ahead of all others."""
    _send_frame(self, frame)
    queue = self.worker.queue
    if self.is_sibling(self.worker.graph.receiver(frame.channel)) and any(
        isinstance(one, Barrier) for one in frame.elements
    ):
        queue.rotate(1)


def _barriers_first(self: Subtask, frame: do.SendFrame) -> None:
    """Breaks: a barrier does not overtake rows on the queue. Here it does so with the numbers of its frame intact."""
    elements = frame.elements
    if self.is_sibling(self.worker.graph.receiver(frame.channel)):
        elements = tuple(sorted(elements, key=lambda one: not isinstance(one, Barrier)))
    _send_frame(self, replace(frame, elements=elements))


def _for_its_slot(self: PendingCheckpoint, task: TaskId, state: SubtaskState) -> Any:
    """Breaks: each subtask acknowledges for itself. Here the first one of a slot does so for all of them."""
    result = _acknowledge(self, task, state)
    for other in [other for other in self.waiting if other.subtask == task.subtask]:
        _acknowledge(self, other, SubtaskState(other.vertex, other.subtask, None))
    return result


def _only_the_first(job: Any, process: SimulatedProcess) -> None:
    """Breaks: a message has all that the subtasks of a process have reported. Here it has the first report alone."""
    del process.unreported[1:]
    _send_reports(job, process)


SLOT_PATCHES: dict[str, tuple[int, Patch]] = {
    "slots: the queue of a dead process comes to the next one": (
        1,
        lambda: Both(
            patch.object(SimulatedProcess, "end", _leaves_its_queue),
            patch.object(SimulatedProcesses, "start_process", _takes_over_the_queue),
            patch.object(Worker, "deliver", _in_any_attempt),
        ),
    ),
    "slots: a frame with a barrier goes ahead of the queue": (
        1,
        lambda: patch.object(Subtask, "send_frame", _goes_ahead),
    ),
    "slots: a barrier overtakes rows on the queue": (3, lambda: patch.object(Subtask, "send_frame", _barriers_first)),
    "slots: one subtask acknowledges for its slot": (
        4,
        lambda: patch.object(PendingCheckpoint, "acknowledge", _for_its_slot),
    ),
    "slots: a message has the first report alone": (7, lambda: patch.object(ports, "send_reports", _only_the_first)),
}
"""Each rule with the invariant that it belongs to."""

_TOGETHER: Mapping[str, Hashable] = {
    "slots": "shared",
    "topology": "chain",
    "ending": "finish",
    "interval_ms": 60,
    "mode": "exactly-once",
    "alignment": "aligned",
    "sources": "at once",
    "rows": 60,
}
SLOT_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    **dict.fromkeys(SLOT_PATCHES, _TOGETHER),
    "slots: the queue of a dead process comes to the next one": {**_TOGETHER, "faults": "tasks"},
}
"""Fixed values of the scenarios for these breaks: subtasks have to share processes, and exchange frames."""
