"""`Adoption`: what a coordinator that takes over does about the tasks. Those that run go on, under the new generation.

The machine calls it when a new generation starts, and when tasks answer. Rules:

- A task that runs according to the log is asked what it is doing. It keeps its attempt and its state, and processes
  rows meanwhile: only the coordinator was lost.
- A task that was being deployed, or waited for its restart, is deployed anew at once. Nobody knows how far it had come.
- Open checkpoints are given up, and the tasks are told. No new one starts before every task has answered.
- A task that does not answer in time has failed, like any other: its region restarts if the restart strategy allows it.
  Questions and answers may get lost, so the question is repeated until then.
- If tasks were told of a savepoint that ends the job, they have ended their data. Then all tasks start anew, and the
  stop is tried again.
- With `adoption_timeout_ms` None, all tasks start anew.
"""

from __future__ import annotations

from tidegate.actors.coordinator.checkpoints.checkpoint_keeper import CheckpointKeeper
from tidegate.actors.coordinator.job.phases import JobInput, JobStatus
from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.restarts import Restarts
from tidegate.actors.coordinator.state.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.state.coordinator_state import NEVER_MS
from tidegate.actors.coordinator.takeover_invariants import check_answer
from tidegate.protocol.identity import TaskId

QUESTIONS = 5
"""How often a task is asked within the time that it has for an answer."""


class Adoption:
    """The takeovers of one job."""

    def __init__(self, context: CoordinatorContext, checkpoints: CheckpointKeeper, restarts: Restarts) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._restarts = restarts

    def take_over(self, at_ms: int) -> None:
        """A new generation takes charge of a job that is not over."""
        state, tasks = self._context.state, self._context.spec.tasks
        state.last_failure = f"the coordinator was lost; generation {state.generation} has taken over"
        lost = self._lost()
        if len(lost) == len(tasks):
            self._context.instruct(do.CancelAttempt(state.attempt))
            state.stop(tasks)
            self._restarts.left()
        else:
            state.adopting = {task: None for task in tasks if task not in lost}
            for attempt, group in state.by_attempt(lost):
                self._context.instruct(do.CancelAttempt(attempt, group))
            state.stop(lost)
            state.final_not_before_ms = NEVER_MS
            limit_ms = self._context.spec.adoption_timeout_ms
            assert limit_ms is not None
            self._context.instruct(do.SetTimer(f"adopt:{state.generation}", at_ms + limit_ms))
            self.ask(at_ms)
        if lost:
            state.move(JobInput.RESTART)
            state.restart_due = True
        self._checkpoints.take_over(at_ms)

    def ask(self, at_ms: int) -> None:
        """Ask the tasks that have not answered, and set the timer for the next question."""
        state, limit_ms = self._context.state, self._context.spec.adoption_timeout_ms
        assert limit_ms is not None
        for attempt, tasks in state.by_attempt(state.adopting):
            self._context.instruct(do.AskTasks(attempt, tasks, state.generation))
        pause_ms = max(1, limit_ms // QUESTIONS)
        self._context.instruct(do.SetTimer(f"ask:{state.generation}", at_ms + pause_ms))

    def answered(self, event: ev.TaskAnswered) -> None:
        """Adopt a task. Repeat what may not have reached it, and take in what may not have been logged."""
        state, instruct = self._context.state, self._context.instruct
        check_answer(state, event)
        del state.adopting[event.task]
        if not event.started:
            instruct(do.StartTasks(event.attempt, (event.task,)))
        newest = state.completed[-1].checkpoint_id if state.completed else 0
        # It may hold a snapshot for a checkpoint that was given up, or still collect the barriers of one.
        for number in sorted({event.snapshotted, event.collecting or event.snapshotted}):
            if number > newest and number not in state.pending:
                instruct(do.NotifyAborted(event.attempt, number, (event.task,)))
        if event.ended:
            state.ended[event.task] = None
        if not state.adopting:
            state.adoptions += 1
            if state.status is JobStatus.RUNNING and state.due_since_ms is None:
                self._checkpoints.start_periodic(event.at_ms)

    def missing(self) -> tuple[tuple[TaskId, ...], str]:
        """The tasks that have not answered in time, and the reason for their failure."""
        state, limit_ms = self._context.state, self._context.spec.adoption_timeout_ms
        tasks = tuple(state.adopting)
        text = f"{tasks[0]}: it has not answered within {limit_ms} ms (jobmanager.adoption-timeout)"
        return tasks, f"{text}, after the coordinator was lost"

    def _lost(self) -> tuple[TaskId, ...]:
        """Tasks that do not run according to the log."""
        state, tasks = self._context.state, self._context.spec.tasks
        if self._context.spec.adoption_timeout_ms is None:
            return tasks
        if state.status is JobStatus.RUNNING:
            return ()
        if state.status is JobStatus.DEPLOYING:
            return tuple(task for task in tasks if task in state.down or task not in state.older_attempts)
        # The fold of an older version has no `down`: there a job restarted as a whole.
        return tuple(task for task in tasks if task in state.down) or tasks
