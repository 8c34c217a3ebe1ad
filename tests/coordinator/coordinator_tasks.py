"""The tasks of one attempt, as a coordinator knows them: what they may do next, and what they then tell it.

`CoordinatorWorld` chooses what happens; here is what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from coordinators import SINK, SOURCE, TASKS, files, part
from shared_files import SharedFiles, layer

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import SnapshotKind, StateHandle
from tidegate.storage.ids import AttemptNumber, CheckpointId

LAYERS_MAX = 3

Step = tuple[str, Callable[[], None]]
"""One thing that can happen: its name, and what makes it happen."""


def file_name(attempt: AttemptNumber, index: int) -> str:
    """The file that the sink of an attempt wrote as this one in order."""
    return f"{attempt}/{index}"


@dataclass
class Tasks:
    """The tasks of one attempt. They reach their coordinator through `tell`, with the time of `now_ms`."""

    attempt: AttemptNumber
    tell: Callable[[ev.CoordinatorEvent], None]
    now_ms: Callable[[], int]
    shared: SharedFiles
    ready: set[TaskId] = field(default_factory=set)
    ended: set[TaskId] = field(default_factory=set)
    finished: set[TaskId] = field(default_factory=set)
    triggered: list[CheckpointId] = field(default_factory=list)
    kinds: dict[CheckpointId, SnapshotKind] = field(default_factory=dict)
    acknowledged: set[tuple[CheckpointId, TaskId]] = field(default_factory=set)
    staged: int = 0
    """Files that the sink has written."""
    known: int = 0
    """Files that the sink knows to be committed."""
    asked: dict[CheckpointId, int] = field(default_factory=dict)
    """For each checkpoint that the sink acknowledged, the end of its files."""
    covered: dict[CheckpointId, set[TaskId]] = field(default_factory=dict)
    """For each checkpoint, the tasks that acknowledged it after their operators had finished."""
    halting: CheckpointId | None = None
    """The savepoint at which the data of this attempt ends."""
    halted: set[TaskId] = field(default_factory=set)
    """Tasks that have taken part in it, and wait for it."""
    bases: dict[CheckpointId, CheckpointId | None] = field(default_factory=dict)
    """What each checkpoint that was triggered may be built on."""
    layers: dict[CheckpointId, tuple[StateHandle, ...]] = field(default_factory=dict)
    """The keyed state of the sink in the checkpoints that it may build on."""
    free: set[TaskId] = field(default_factory=set)
    """Tasks that know that a completed checkpoint covers their finish: they may leave."""

    # --- what can happen ------------------------------------------------------------------------------------------

    def steps(self, task: TaskId, deploying: bool) -> list[Step]:
        """What a task can do next: get ready, acknowledge, leave."""
        if task not in self.ready:
            return [("ready", lambda: self.report_ready(task))]
        steps: list[Step] = []
        if not deploying:
            steps += [
                ("ack", lambda n=n: self.acknowledge(task, n))  # type: ignore[misc]
                for n in self.triggered
                # Barriers keep their order: an older one that comes late is stale.
                if all(other != task or n > m for m, other in self.acknowledged) and task not in self.finished
            ]
        if task in self.free - self.finished and (task == SOURCE or SOURCE in self.finished):
            steps.append(("finished", lambda: self.finish(task)))
        return steps

    def ends(self) -> list[Step]:
        """Data can end, first at the source."""
        still_open = [t for t in TASKS if t not in self.ended | self.halted and (t == SOURCE or SOURCE in self.ended)]
        return [("end of data", lambda t=t: self.end_of_data(t)) for t in still_open]  # type: ignore[misc]

    def bad_steps(self) -> list[Step]:
        """The sink can fail, or decline the newest checkpoint."""
        if SINK in self.finished:
            return []
        steps: list[Step] = [
            ("task fails", lambda: self.tell(ev.TaskFailed(self.now_ms(), self.attempt, SINK, "boom")))
        ]
        return steps + [("decline", lambda n=n: self.decline(n)) for n in self.triggered[-1:]]  # type: ignore[misc]

    # --- what they are told ---------------------------------------------------------------------------------------

    def notice(self, instruction: do.CoordinatorInstruction) -> None:
        """What a coordinator of any attempt sends; that of another attempt changes nothing."""
        match instruction:
            case do.TriggerCheckpoint(attempt, n, options=options, base=base) if attempt == self.attempt:
                self.triggered.append(n)
                self.bases[n] = base
                self.kinds[n] = options.kind
                if options.kind.stops:
                    self.halting = n
            case do.AskTasks(attempt, tasks, generation) if attempt == self.attempt:
                for task in tasks:
                    ended, finished = task in self.ended, task in self.finished
                    newest = max((n for n, other in self.acknowledged if other == task), default=CheckpointId(0))
                    self.tell(
                        ev.TaskAnswered(
                            self.now_ms(), attempt, task, generation, True, ended, finished, snapshotted=newest
                        )
                    )
            case do.NotifyCompleted(attempt, n) if attempt == self.attempt:
                self.known = max(self.known, self.asked[n])
                self.free |= self.halted if n == self.halting else set()
                self.free |= self.covered.get(n, set())

    # --- what they tell -------------------------------------------------------------------------------------------

    def report_ready(self, task: TaskId) -> None:
        """Deployed and restored."""
        self.ready.add(task)
        self.tell(ev.TaskReady(self.now_ms(), self.attempt, task))

    def stage(self) -> None:
        """The sink writes a file, if its data goes on."""
        if SINK in self.ready and SINK not in self.ended | self.halted:
            self.staged += 1

    def acknowledge(self, task: TaskId, n: CheckpointId) -> None:
        """One task's part of a checkpoint is durable: the sink names its files and the layers of its state."""
        self.acknowledged.add((n, task))
        if n == self.halting:
            self.halted.add(task)
        if task in self.ended:
            self.covered.setdefault(n, set()).add(task)
        committables = ()
        if task == SINK:
            self.asked[n] = self.staged
            names = [file_name(self.attempt, index) for index in range(self.known, self.staged)]
            committables = (files(self.known, *names),) if names else ()
        state = part(n, task, *committables, finished=task in self.ended)
        if task == SINK and task not in self.ended and not self.kinds[n].is_savepoint:
            below = self.layers.get(self.bases[n] or n, ())
            below = below if len(below) < LAYERS_MAX else ()
            # Every fifth has nothing new to write.
            own = () if below and n % 5 == 0 else (self.shared.written(layer(n, task)),)
            self.layers[n] = (*below, *own)
            state = replace(state, layers=self.layers[n])
        self.tell(ev.CheckpointAcknowledged(self.now_ms(), self.attempt, task, n, state, kind=self.kinds[n]))

    def decline(self, n: CheckpointId) -> None:
        """The sink cannot take part."""
        reason = CheckpointFailureReason.DECLINED
        self.tell(ev.CheckpointDeclined(self.now_ms(), self.attempt, SINK, n, reason, "cannot"))

    def end_of_data(self, task: TaskId) -> None:
        """Nothing comes any more."""
        self.ended.add(task)
        self.tell(ev.TaskReachedEndOfData(self.now_ms(), self.attempt, task))

    def finish(self, task: TaskId) -> None:
        """A completed checkpoint covers the end of this task, and it leaves."""
        self.finished.add(task)
        self.tell(ev.TaskFinished(self.now_ms(), self.attempt, task))
