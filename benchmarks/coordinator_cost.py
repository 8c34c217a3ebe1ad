"""What a checkpoint costs the coordinator: CPU, events and bytes of its log, for more and more subtasks.

    python benchmarks/coordinator_cost.py [--subtasks 10,100,1000,10000] [--checkpoints 5]

Drives the machine as its host does: acknowledgements come in groups, each group is one entry of the event log and is
encoded; metadata is encoded too. No storage and no network. Prints a row a size, with what a subtask costs, and the
ratio to the row before: 1.0 is linear growth. Exit code 1 if the largest size takes a second of CPU or more.
"""

from __future__ import annotations

import argparse
import sys
import time

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.job_spec import CheckpointSettings, JobEdgeInfo, JobSpec
from tidegate.protocol.identity import TaskId
from tidegate.protocol.task_reports import SnapshotMetrics
from tidegate.recovery import RestartStrategy
from tidegate.storage.checkpoints.event_log import LogEntry
from tidegate.storage.checkpoints.metadata import (
    OperatorInfo,
    SectionRef,
    StateHandle,
    StateKind,
    SubtaskState,
    encode_metadata,
)
from tidegate.storage.codec import encode
from tidegate.storage.ids import AttemptNumber, Generation, JobId, OperatorUid, SubtaskIndex, VertexId

EVENTS_AN_ENTRY = 100
START_MS = 1_700_000_000_000


class _Coordinator:
    """A machine whose instructions are carried out at once, and whose events are encoded as its host does."""

    def __init__(self, subtasks: int) -> None:
        half = subtasks // 2
        self.tasks = [TaskId(VertexId("source"), SubtaskIndex(i)) for i in range(half)]
        self.tasks += [TaskId(VertexId("sink"), SubtaskIndex(i)) for i in range(subtasks - half)]
        self.machine = CoordinatorMachine()
        self.now_ms = START_MS
        self.events = 0
        self.log_bytes = 0
        self.entries = 0
        self.completed = 0
        self.tasks_s = 0.0
        """CPU of what tasks do: making the acknowledgements."""
        self._asked: list[do.TriggerCheckpoint] = []
        self._timers: dict[str, int] = {}
        spec = JobSpec(
            JobId("cost"),
            "cost",
            "mem://cost",
            tuple(self.tasks),
            tuple(self.tasks[:half]),
            tuple(
                OperatorInfo(OperatorUid(name), name, VertexId(name), count, 32_768)
                for name, count in (("source", half), ("sink", subtasks - half))
            ),
            CheckpointSettings(interval_ms=1_000),
            RestartStrategy.none(),
            edges=(JobEdgeInfo(VertexId("source"), VertexId("sink"), pointwise=False),),
        )
        self.tell(co.CoordinatorStarted(self.now_ms, Generation(1)))
        self.tell(co.JobSubmitted(self.now_ms, spec))
        self.tell_all([co.TaskReady(self.now_ms, AttemptNumber(0), task) for task in self.tasks])

    def tell_all(self, events: list[co.CoordinatorEvent]) -> None:
        """Events in groups, each an entry of the log."""
        for start in range(0, len(events), EVENTS_AN_ENTRY):
            self.tell(*events[start : start + EVENTS_AN_ENTRY])

    def tell(self, *events: co.CoordinatorEvent) -> None:
        """One entry."""
        instructions = [instruction for event in events for instruction in self.machine.handle(event)]
        entry = LogEntry(self.entries, Generation(1), self.now_ms, "cost", events, self.events, (None,) * len(events))
        self.log_bytes += len(encode(entry))
        self.entries += 1
        self.events += len(events)
        for instruction in instructions:
            self._perform(instruction)

    def _perform(self, instruction: do.CoordinatorInstruction) -> None:
        match instruction:
            case do.TriggerCheckpoint():
                self._asked.append(instruction)
            case do.SetTimer():
                self._timers[instruction.timer] = instruction.due_at_ms
            case do.WriteMetadata():
                encode_metadata(instruction.metadata)
                self.tell(co.MetadataWritten(self.now_ms, instruction.metadata.checkpoint_id))
            case do.CommitSinks():
                self.tell(co.SinksCommitted(self.now_ms, instruction.checkpoint_id))
            case do.DiscardCheckpoint():
                self.tell(co.CheckpointDiscarded(self.now_ms, instruction.checkpoint_id))
            case do.NotifyCompleted():
                self.completed += 1

    def checkpoint(self) -> None:
        """The next periodic checkpoint, from its timer to its end."""
        timer = next(name for name in self._timers if name.startswith("periodic:"))
        self.now_ms = max(self.now_ms, self._timers.pop(timer))
        self.tell(co.TimerFired(self.now_ms, timer))
        trigger = self._asked.pop()
        metrics = SnapshotMetrics(state_bytes=1_000, async_ms=5)
        before_s = time.process_time()
        acknowledged: list[co.CoordinatorEvent] = [
            co.CheckpointAcknowledged(
                self.now_ms + 10, trigger.attempt, task, trigger.checkpoint_id, _state(task), metrics
            )
            for task in self.tasks
        ]
        self.tasks_s += time.process_time() - before_s
        self.tell_all(acknowledged)


def _state(task: TaskId) -> SubtaskState:
    uid = OperatorUid(task.vertex)
    section = SectionRef(uid, "state", StateKind.LIST, 64, 900, 10)
    path = f"cost/chk-1/{task.vertex}-{task.subtask}"
    return SubtaskState(task.vertex, task.subtask, StateHandle(path, None, 1_000, "xxh3:0123456789abcdef", (section,)))


def main() -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subtasks", default="10,100,1000,10000")
    parser.add_argument("--checkpoints", type=int, default=5)
    options = parser.parse_args()
    print(f"{'subtasks':>9} {'CPU ms a checkpoint':>20} {'us a subtask':>13} {'growth':>7} {'events':>8} {'log kB':>8}")
    before_us = 0.0
    cpu_s = 0.0
    for subtasks in (int(text) for text in options.subtasks.split(",")):
        coordinator = _Coordinator(subtasks)
        coordinator.checkpoint()
        events, log_bytes, done = coordinator.events, coordinator.log_bytes, coordinator.completed
        started, tasks_s = time.process_time(), coordinator.tasks_s
        for _ in range(options.checkpoints):
            coordinator.checkpoint()
        cpu_s = (time.process_time() - started - (coordinator.tasks_s - tasks_s)) / options.checkpoints
        assert coordinator.completed == done + options.checkpoints, "every checkpoint has completed"
        each_us = cpu_s * 1e6 / subtasks
        growth = f"{each_us / before_us:.2f}" if before_us else "-"
        print(
            f"{subtasks:>9,} {cpu_s * 1e3:>20.1f} {each_us:>13.1f} {growth:>7} "
            f"{(coordinator.events - events) / options.checkpoints:>8,.0f} "
            f"{(coordinator.log_bytes - log_bytes) / options.checkpoints / 1e3:>8,.0f}"
        )
        before_us = each_us
    return 0 if cpu_s < 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
