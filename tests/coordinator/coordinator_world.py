"""A small legal environment for the coordinator machine: tasks, storage and time, driven by a list of choices.

It does what the coordinator asks for, or fails to, in any order that the protocol allows, loses messages, lets tasks
die and coordinators be replaced; and it checks from outside what must hold whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator_tasks import Step, Tasks, file_name
from coordinators import SPEC, TASKS
from shared_files import LAYOUT, SharedFiles

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.job_spec import CheckpointSettings, JobSpec
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, SnapshotKind
from tidegate.storage.codec import encode
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation

FAILING_MS = 1_000
"""How long it takes until storage has failed once."""

JOB = replace(
    SPEC,
    checkpoints=CheckpointSettings(interval_ms=100, timeout_ms=1_000, tolerable_failures=3, retained=2),
    restart=RestartStrategy.fixed_delay(1_000, 50),
    storage_attempts_max=100,
    storage_outage_ms=1_000 * FAILING_MS,
)

CONCURRENT = replace(JOB, checkpoints=replace(JOB.checkpoints, max_concurrent=3, retained=1))
"""Checkpoints are often subsumed while newer ones are still being built on them."""

BUSY = replace(
    JOB,
    checkpoints=replace(JOB.checkpoints, max_concurrent=3, min_pause_ms=20),
    hooks=("hook",),
    storage_attempts_max=4,
    storage_outage_ms=4 * FAILING_MS,
)
"""Concurrent checkpoints, hooks, savepoints, and little patience with storage."""
ADOPTED = replace(JOB, adoption_timeout_ms=500)
"""Tasks go on when the coordinator is replaced."""
KINDS = (SnapshotKind.CHECKPOINT, SnapshotKind.SAVEPOINT, SnapshotKind.SUSPEND, SnapshotKind.TERMINATE)


class CoordinatorWorld:
    """One job. `log` is what the machine was told, `answers` what it asked for, event by event."""

    def __init__(self, job: JobSpec = JOB) -> None:
        self.job = job
        self.machine = CoordinatorMachine()
        self.log: list[ev.CoordinatorEvent] = []
        self.answers: list[list[do.CoordinatorInstruction]] = []
        self.at_ms = 0
        self.tasks: Tasks | None = None
        self.ends: list[do.EndJob] = []
        self._past: dict[AttemptNumber, Tasks] = {}
        self._timers: dict[str, int] = {}
        self._asked: list[do.CoordinatorInstruction] = []
        self._notices: list[do.CoordinatorInstruction] = []
        self._storage: dict[CheckpointId, CheckpointMetadata] = {}
        self._commits: dict[CheckpointId, tuple[str, ...]] = {}
        self._generation = 0
        self._requests = 0
        self._open_requests: set[str] = set()
        self.savepoints: set[CheckpointId] = set()
        """Savepoints whose own folder is there."""
        self.given: set[CheckpointId] = set()
        """Savepoints that a user was told of."""
        self.shared = SharedFiles(lambda: (m for m in self._storage.values() if not m.void))
        self._failures: dict[str, int] = {}
        self._take_over()
        self._tell(ev.JobSubmitted(self.at_ms, self.job))

    # --- for tests ------------------------------------------------------------------------------------------------

    def step(self, choice: int) -> None:
        """Let one thing happen."""
        kind, choice = choice % 32, choice // 32
        steps = self._bad() if kind < 4 else self._rare() if kind == 4 else self._good()
        if 5 <= kind < 12 and self.tasks is not None:
            self.tasks.stage()
        if steps:
            steps[choice % len(steps)][1]()

    def settle(self, steps_max: int = 1_000) -> None:
        """Only good things from now on: the job must come to its end."""
        for _ in range(steps_max):
            if self.machine.state.status.terminal and not self._asked:
                return
            steps = self._ends() + self._good()
            assert steps, f"the job hangs in {self.machine.state.status}"
            steps[0][1]()
        raise AssertionError(f"the job does not end, it is {self.machine.state.status}")

    def check_requests(self) -> None:
        """Every request was answered, and the savepoints that are there are those that users were told of."""
        assert self._open_requests == set()
        assert self.savepoints == self.given

    def check_committed(self) -> None:
        """Invariant 6: of each attempt the files that a completed checkpoint covers are committed, each once."""
        committed = [path for paths in self._commits.values() for path in paths]
        assert len(committed) == len(set(committed)), "a file is committed once"
        expected = {
            file_name(attempt, index)
            for attempt, tasks in self._past.items()
            for checkpoint_id, end in tasks.asked.items()
            if checkpoint_id in self._completed()
            for index in range(end)
        }
        assert set(committed) == expected

    @property
    def leftovers(self) -> set[str]:
        """Shared files that no checkpoint refers to, and that nobody is about to delete."""
        discards, references = self.machine.state.discards, self.machine.state.shared.references
        asked = {path for discard in discards.values() for path in discard.shared or ()}
        # The checkpoint goes first, and then its files.
        asked |= {path for number in discards for path in references.get(number, ())}
        given_up = tuple(
            f"{LAYOUT.shared_checkpoint_dir(n)}/" for n, discard in discards.items() if discard.shared is None
        )
        return {p for p in self.shared.present - self.shared.referenced - asked if not p.startswith(given_up)}

    # --- what can happen ------------------------------------------------------------------------------------------

    def _good(self) -> list[Step]:
        steps: list[Step] = [(f"do {type(i).__name__}", self._doing(i)) for i in self._asked]
        steps += [(f"notice {type(i).__name__}", self._noticing(i)) for i in self._notices]
        tasks = self.tasks
        if tasks is not None:
            deploying = self.machine.state.status is JobStatus.DEPLOYING
            steps += [step for task in TASKS for step in tasks.steps(task, deploying)]
        if self.machine.state.storage_away:
            return [("storage comes back", lambda: self._tell(ev.StorageCameBack(self.at_ms)))]
        if self._timers:
            steps.append(("timer", self._fire_next))
        return steps

    def _ends(self) -> list[Step]:
        tasks = self.tasks
        if tasks is None or self.machine.state.status is not JobStatus.RUNNING or self.machine.state.storage_away:
            return []
        return tasks.ends()

    def _rare(self) -> list[Step]:
        return [("take over", self._take_over), *self._ends()]

    def _bad(self) -> list[Step]:
        kinds = KINDS if self.job.hooks else KINDS[:1]
        steps: list[Step] = [(f"request {kind}", lambda kind=kind: self._request(kind)) for kind in kinds]  # type: ignore[misc]
        steps += [(f"fail {type(i).__name__}", self._failing(i, lost)) for i in self._asked for lost in (False, True)]
        steps += [(f"lose {type(i).__name__}", lambda i=i: self._notices.remove(i)) for i in self._notices]  # type: ignore[misc]
        if self.log and isinstance(self.log[-1], ev.CheckpointAcknowledged):
            steps.append(("repeat", lambda: self._tell(self.log[-1])))
        if self.machine.state.storage_away:
            return []
        steps.append(("storage goes away", lambda: self._tell(ev.StorageWentAway(self.at_ms, "no answer"))))
        return steps + ([] if self.tasks is None else self.tasks.bad_steps())

    # --- the machine ----------------------------------------------------------------------------------------------

    def _tell(self, event: ev.CoordinatorEvent) -> None:
        if self.machine.ignores(event):
            # It is not logged either: a replay of the others gives the same.
            before = encode(self.machine.state)
            assert self.machine.handle(event) == []
            assert encode(self.machine.state) == before, "what is ignored changes nothing"
            return
        instructions = self.machine.handle(event)
        self.log.append(event)
        self.answers.append(instructions)
        for instruction in instructions:
            self._take_in(instruction)

    def _take_in(self, instruction: do.CoordinatorInstruction) -> None:
        match instruction:
            case do.SetTimer(timer, due_at_ms):
                self._timers[timer] = due_at_ms
            case do.DeployAttempt(attempt, restore):
                newest = max(self._completed(), default=None)
                assert (None if restore is None else restore.checkpoint_id) == newest, (
                    "an attempt starts from the newest completed checkpoint (invariant 7)"
                )
                assert not any(hook.restore != restore for hook in self._hooks_asked()), "hooks see what tasks see"
                self.tasks = self._past[attempt] = Tasks(attempt, self._tell, lambda: self.at_ms, self.shared)
                if newest is not None:
                    self.shared.check_there(self._storage[newest])
                    self.tasks.layers[newest] = self._storage[newest].subtasks[1].layers
            case do.CancelAttempt():
                self.tasks = None
            case do.CommitSinks(checkpoint_id, committables):
                paths = tuple(file.path for c in committables for file in c.files)
                assert checkpoint_id in self._completed(), "only what a completed checkpoint covers is committed"
                assert self._commits.setdefault(checkpoint_id, paths) == paths, "a repeated commit is the same"
                assert checkpoint_id == max(self._commits), "commits are made in order"
                self._asked.append(instruction)
            case do.DiscardCheckpoint(checkpoint_id, voided):
                assert checkpoint_id not in self.machine.state.copies, "what is copied stays (invariant 5)"
                if not voided and checkpoint_id in self._completed():
                    assert sum(n > checkpoint_id for n in self._completed()) >= self.job.checkpoints.retained, (
                        "what is retained is never deleted (invariant 5)"
                    )
                self.shared.asked(instruction, (p.base for p in self.machine.state.pending.values()))
                assert not any(
                    isinstance(i, do.DiscardCheckpoint) and i.checkpoint_id == checkpoint_id for i in self._asked
                ), "a deletion is asked for again only when it was answered"
                self._asked.append(instruction)
            case do.WriteMetadata(metadata):
                assert metadata.checkpoint_id > max(self._completed(), default=0), "completed in order"
                stops = metadata.kind.stops
                assert stops == (metadata.checkpoint_id in self.savepoints), "the savepoint of a stop is copied first"
                self.shared.check_there(metadata)
                assert dict(metadata.hooks) == ({"hook": b"kept"} if self.job.hooks else {})
                self._asked.append(instruction)
            case do.WriteSavepoint(_, metadata, complete):
                assert complete is not metadata.kind.stops
                assert complete == (metadata.checkpoint_id in self._completed()), (
                    "others are copied when they are complete"
                )
                self._asked.append(instruction)
            case do.VoidCheckpoint() | do.TriggerHooks() | do.RestoreHooks():
                self._asked.append(instruction)
            case do.DiscardSavepoint(checkpoint_id=n):
                assert n not in self.given, "a savepoint that a user was told of is the user's"
                assert not any(
                    isinstance(i, do.WriteSavepoint) and i.metadata.checkpoint_id == n for i in self._asked
                ), "nobody writes any more to what is deleted"
                self._asked.append(instruction)
            case do.CompleteRequest(request, n):
                assert request in self._open_requests, "every request is answered once"
                self._open_requests.remove(request)
                assert n is None or n in self._completed()
                if instruction.path is not None:
                    assert n in self.savepoints, "a user is told of a savepoint that is whole"
                    self.given.add(n)
            case do.TriggerCheckpoint() | do.NotifyCompleted() | do.StartTasks() | do.AskTasks():
                self._notices.append(instruction)
            case do.DiscardFiles():
                self.shared.deleted(instruction)
            case do.EndJob():
                self.ends.append(instruction)
                self.tasks = None
            case _:
                pass

    def _take_over(self) -> None:
        # What the old coordinator had asked for may have been done or not; its answers are lost.
        for instruction in self._asked:
            if isinstance(instruction, do.WriteMetadata) and self._generation % 2:
                self._storage.setdefault(instruction.metadata.checkpoint_id, instruction.metadata)
        self._asked.clear()
        self._notices.clear()
        self._timers.clear()
        self._generation += 1
        self._tell(ev.CoordinatorStarted(self.at_ms, Generation(self._generation)))

    def _fire_next(self) -> None:
        timer = min(self._timers, key=lambda name: (self._timers[name], name))
        self.at_ms = max(self.at_ms, self._timers.pop(timer))
        self._tell(ev.TimerFired(self.at_ms, timer))

    def _request(self, kind: SnapshotKind) -> None:
        self._requests += 1
        request = f"request {self._requests}"
        self._open_requests.add(request)
        self._tell(ev.CheckpointRequested(self.at_ms, request, kind, "folder" if kind.is_savepoint else None))

    def _hooks_asked(self) -> list[do.RestoreHooks]:
        return [i for i in self._asked if isinstance(i, do.RestoreHooks)]

    # --- storage --------------------------------------------------------------------------------------------------

    def _completed(self) -> set[CheckpointId]:
        return {n for n, metadata in self._storage.items() if not metadata.void}

    def _doing(self, instruction: do.CoordinatorInstruction) -> Callable[[], None]:
        def act() -> None:
            self._asked.remove(instruction)
            match instruction:
                case do.WriteMetadata(metadata) | do.VoidCheckpoint(metadata):
                    n = metadata.checkpoint_id
                    found = self._storage.setdefault(n, metadata)
                    answer = ev.CheckpointVoided if found.void else ev.MetadataWritten
                    self._failures.pop("metadata", None)
                    self._tell(answer(self.at_ms, n))
                case do.WriteSavepoint(_, metadata):
                    self._failures.pop(f"copy {metadata.checkpoint_id}", None)
                    self.savepoints.add(metadata.checkpoint_id)
                    self._tell(ev.SavepointWritten(self.at_ms, metadata.checkpoint_id, "folder/savepoint"))
                case do.DiscardSavepoint(checkpoint_id=n):
                    self._failures.pop(f"deletion of copy {n}", None)
                    self.savepoints.discard(n)
                    self._tell(ev.SavepointDiscarded(self.at_ms, n))
                case do.TriggerHooks(n):
                    self._tell(ev.HooksTriggered(self.at_ms, n, (("hook", b"kept"),)))
                case do.RestoreHooks(attempt):
                    self._tell(ev.HooksRestored(self.at_ms, attempt))
                case do.CommitSinks(n):
                    self._failures.pop("tables", None)
                    self._tell(ev.SinksCommitted(self.at_ms, n))
                case do.DiscardCheckpoint(n):
                    self._failures.pop(f"deletion of {n}", None)
                    self.shared.deleted(instruction)
                    self._tell(ev.CheckpointDiscarded(self.at_ms, n))

        return act

    def _failing(self, instruction: do.CoordinatorInstruction, lost: bool) -> Callable[[], None]:
        """The action fails; with `lost` it has its effect and only the answer is a failure."""

        def act() -> None:
            self._asked.remove(instruction)
            match instruction:
                case do.WriteMetadata(metadata) | do.VoidCheckpoint(metadata):
                    if lost:
                        self._storage.setdefault(metadata.checkpoint_id, metadata)
                    self._tell(
                        ev.MetadataWriteFailed(self.at_ms, metadata.checkpoint_id, "no answer", self._fails("metadata"))
                    )
                case do.WriteSavepoint(_, metadata):
                    if lost:
                        self.savepoints.add(metadata.checkpoint_id)
                    away_ms = self._fails(f"copy {metadata.checkpoint_id}")
                    self._tell(
                        ev.SavepointWriteFailed(self.at_ms, metadata.checkpoint_id, "no answer", away_ms=away_ms)
                    )
                case do.DiscardSavepoint(checkpoint_id=n):
                    away_ms = self._fails(f"deletion of copy {n}")
                    if lost or away_ms >= self.job.storage_outage_ms:
                        # In the latter case it is there, and the user's to delete.
                        self.savepoints.discard(n)
                    self._tell(ev.SavepointDiscardFailed(self.at_ms, n, "no answer", away_ms))
                case do.TriggerHooks(n):
                    self._tell(ev.HookFailed(self.at_ms, n, "not today"))
                case do.RestoreHooks(attempt):
                    self._tell(ev.HookRestoreFailed(self.at_ms, attempt, "not today"))
                case do.CommitSinks(n):
                    self._tell(ev.SinkCommitFailed(self.at_ms, n, "no answer", away_ms=self._fails("tables")))
                case do.DiscardCheckpoint(n):
                    if lost:
                        self.shared.deleted(instruction)
                    self._tell(ev.CheckpointDiscardFailed(self.at_ms, n, "no answer", self._fails(f"deletion of {n}")))

        return act

    def _fails(self, what: str) -> int:
        """For how long something has failed, one time more."""
        self._failures[what] = self._failures.get(what, 0) + FAILING_MS
        return self._failures[what]

    def _noticing(self, instruction: do.CoordinatorInstruction) -> Callable[[], None]:
        def act() -> None:
            self._notices.remove(instruction)
            if self.tasks is not None:
                if isinstance(instruction, do.TriggerCheckpoint) and instruction.attempt == self.tasks.attempt:
                    assert instruction.checkpoint_id not in self._storage, "ids are never used twice"
                self.tasks.notice(instruction)

        return act


def replayed(
    events: Sequence[ev.CoordinatorEvent], machine: CoordinatorMachine
) -> list[list[do.CoordinatorInstruction]]:
    """What a machine asks for when it is told these events."""
    return [machine.handle(event) for event in events]
