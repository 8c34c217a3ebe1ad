"""Deploys attempts on Ray: gives processes their orders, watches how they end, and measures how long recovery takes.

Rules:

- An attempt is told to the processes of its tasks and watched through its pending `run` call: its result, or its loss
  with the process, becomes a fact for the coordinator at once.
- Where only the connection broke, and the process answers, it is watched on, and told again what may not have arrived
  (`lost_nodes.py`). What is told bears being told twice.
- An attempt is deployed when all processes that live have let go of the one before it. Who has not after a while is
  given up (`letting_go.py`), and ended once the log says so (`given_up.py`): no task is ever given to a process that is
  stuck.
- While a node may be lost an attempt waits for spare processes elsewhere, or until Ray knows (`lost_nodes.py`). A wait
  for room in the cluster is told, and fails the attempt in the end (`room.py`).
- A task whose `run` has returned needs its process no more: what is still said to it may get lost.
- A coordinator that takes over finds the processes that its predecessor has left, and watches them in their attempts. A
  task that has none any more has failed; that is told when it is asked.
- What is said about an attempt that is not the current one any more is for the machine to ignore, by its number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import RayError

from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.coordinator.messages import events as co
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.messages.events import CoordinatorEvent
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.actors.hosts.heartbeat_settings import TIMEOUT_MS
from tidegate.actors.protocol.failure_reasons import bounded_text
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.runtimes.metrics.recovery_times import RecoveryWatch
from tidegate.actors.runtimes.ray.fleet.fleet import Fleet
from tidegate.actors.runtimes.ray.fleet.given_up import GivenUp
from tidegate.actors.runtimes.ray.fleet.inheritance import Found, by_task, find_processes, memory_death_of_tasks
from tidegate.actors.runtimes.ray.fleet.letting_go import LettingGo
from tidegate.actors.runtimes.ray.fleet.lost_nodes import LostNodes
from tidegate.actors.runtimes.ray.fleet.member import Member, reason_of
from tidegate.actors.runtimes.ray.fleet.reconnections import Reconnections, limit_ms
from tidegate.actors.runtimes.ray.fleet.suspect_nodes import SuspectNodes
from tidegate.actors.runtimes.ray.process.belonging import Known
from tidegate.actors.runtimes.ray.process.calls import LOST_CALL_GRACE_MS, Watched
from tidegate.actors.runtimes.ray.process.mailbox import Mailbox
from tidegate.actors.runtimes.ray.process.orders import Handle, Order
from tidegate.actors.runtimes.ray.process.outcomes import Outcome
from tidegate.actors.runtimes.ray.slots.bundle_nodes import BundleNodes, nodes_of
from tidegate.actors.runtimes.ray.slots.room import Room, look_at
from tidegate.actors.runtimes.ray.slots.slots_elsewhere import NOWHERE, Nodes
from tidegate.actors.runtimes.ray.vertex_labels import task_names
from tidegate.actors.runtimes.running_job import TaskProcessInfo
from tidegate.actors.task.messages import events as ev
from tidegate.storage.clock import now_ms
from tidegate.storage.ids import AttemptNumber, JobId
from tidegate.storage.user_values import logged_text

log = logging.getLogger(__name__)


class AttemptSupervisor:
    """The current attempt. All on the coordinator's mailbox, save `processes`, `standbys`, `waits_for`, `heard`."""

    def __init__(
        self,
        fleet: Fleet,
        tell_coordinator: Callable[[CoordinatorEvent], None],
        mailbox: Mailbox,
        heartbeat_timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        self._fleet = fleet
        self._tell_coordinator = tell_coordinator
        self._mailbox = mailbox
        self._attempt = AttemptNumber(-1)
        """The newest one."""
        self._attempts: dict[TaskId, AttemptNumber] = {}
        """The attempt of each task: regions restart on their own."""
        self._members: dict[TaskId, Member] = {}
        self._finished: set[TaskId] = set()
        """Tasks that need no process any more in their attempt."""
        self._cancelled: dict[TaskId, AttemptNumber] = {}
        """The newest attempt of which each task was told to let go: nothing of it is said again."""
        self._neighbours = fleet.graph.neighbours()
        self._names = task_names(fleet.graph)
        self._due: do.DeployAttempt | None = None
        """An attempt that waits for processes to let go of the one before."""
        self.generation = ev.UNFENCED
        """That of the coordinator, with which processes are told what to do."""
        self._has_looked = False
        """Whether the processes that a predecessor has left were looked for."""
        self._why_gone: str | None = None
        """Why processes were gone when this coordinator took over, if Ray reports that."""
        self._given_up = GivenUp(fleet, tell_coordinator)
        self.give_up, self.kill = self._given_up.give_up, self._given_up.kill
        suspects = SuspectNodes(fleet.node_id, heartbeat_timeout_ms)
        again = Reconnections(limit_ms(heartbeat_timeout_ms))
        self._lost_nodes = LostNodes(mailbox, self.give_up, self._deploy_if_free, suspects, again, fleet.is_kept)
        self._broke = fleet.broke = self._lost_nodes.broke
        self._letting_go = LettingGo(mailbox, self._broke, self.give_up, self._deploy_if_free)
        self.silent = self._lost_nodes.silent
        self._room: Room | None = None
        """None where nothing is reserved."""
        self._bundles: BundleNodes | None = None
        """None where there are no common slots."""
        if (placement := fleet.options.placement) is not None:
            self._bundles = BundleNodes(mailbox, partial(nodes_of, placement), self._deploy_if_free)
        if fleet.slots.groups:
            wait_ms_max = fleet.options.slot_request_timeout_ms
            self._room = Room(mailbox, partial(look_at, fleet.slots), self._starting, self._no_room, wait_ms_max)
        self.recoveries = RecoveryWatch(fleet.graph)
        """Those under this coordinator."""

    def take_over(self, state: CoordinatorState, job_id: JobId) -> None:
        """A predecessor was lost, and the log says what its tasks are: find their processes, and watch how they end."""
        if not self._has_looked:
            self._has_looked = True
            options, running = self._fleet.options, {task for task in state.ready if task not in state.down}
            self._inherit(*find_processes(options.prefix, options.namespace, job_id, running), state.given_up)
            if running - self._members.keys():
                self._why_gone = memory_death_of_tasks(options.prefix)
        self._attempt = state.attempt
        for task in self._fleet.graph.tasks():
            attempt = state.attempt_of(task)
            if task not in state.down and self._attempts.get(task) != attempt:
                self._attempts[task] = attempt
                if (member := self._members.get(task)) is not None:
                    self._watch_end(task, attempt, member)

    def _inherit(self, found: Sequence[Found], silent: Mapping[str, Handle], given_up: Collection[str]) -> None:
        tasks, standbys, useless = by_task(found, given_up)
        self._members = self._fleet.inherit(tasks, standbys)
        log.info("%d processes of tasks and %d spare ones are still there", len(tasks), len(standbys))
        left = [self._fleet.left_behind(one) for one in useless]
        left += [Member(name, handle, None, Future()) for name, handle in silent.items()]
        # Later: the first entry of this coordinator says that it takes over.
        self._mailbox.post(lambda: [self.give_up(member, f"{member.name} is left over") for member in left])
        self._mailbox.call_later(self._fleet.options.standby_delay_ms, self._fleet.refill)

    def deploy(self, instruction: do.DeployAttempt) -> None:
        """Give every task of an attempt to a process, once those that live have let go of the one before."""
        self._due = instruction
        self._deploy_if_free()

    def _deploy_if_free(self) -> None:
        if not self._letting_go.is_over or self._due is None:
            return
        tasks = self._fleet.graph.tasks() if self._due.tasks is None else self._due.tasks
        doubtful = self._lost_nodes.doubtful
        if self._bundles is not None:
            starts = self._fleet.starts_in_bundles(tasks, doubtful)
            self._bundles.ask(doubtful, self._due.attempt if starts else None)
            if starts and not doubtful and not self._bundles.settled:
                return
        if self._fleet.lacks(tasks, doubtful, self._nodes):
            log.warning("attempt %d waits until Ray knows whether nodes are lost", self._due.attempt)
            return
        due, self._due = self._due, None
        self._deploy(due)

    @property
    def _nodes(self) -> Nodes:
        """Where bundles are, as far as that matters now."""
        return NOWHERE if self._bundles is None else self._bundles.nodes

    def _without(self, tasks: Sequence[TaskId]) -> do.DeployAttempt | None:
        """What is left of the attempt that waits, once these are cancelled: a region of its own goes on waiting."""
        if self._due is None:
            return None
        due = self._fleet.graph.tasks() if self._due.tasks is None else self._due.tasks
        left = tuple(task for task in due if task not in tasks)
        return replace(self._due, tasks=left) if left else None

    def _deploy(self, instruction: do.DeployAttempt) -> None:
        """Give every task of an attempt to a process."""
        tasks = self._fleet.graph.tasks() if instruction.tasks is None else instruction.tasks
        self._attempt = instruction.attempt
        self._attempts |= dict.fromkeys(tasks, instruction.attempt)
        self._finished.difference_update(tasks)
        at_ms = now_ms()
        self.recoveries.deployed(instruction.attempt, tasks, at_ms)
        known = {id(member) for member in self._members.values()}
        self._members = self._fleet.staff(tasks, self._lost_nodes.doubtful, self._nodes)
        fresh = [m.name for m in self._members.values() if id(m) not in known]
        for task in tasks:
            member = self._members[task]
            peers = {peer: self._members[peer].handle for peer in self._neighbours[task]}
            order = Order(task, instruction.attempt, instruction.restore, peers, self.generation)
            self._tell(task, member, partial(member.handle.deploy.remote, order))
            self._watch_end(task, instruction.attempt, member)
        log.info(
            "attempt %d of %s is deployed from %s%s; new to it: %s",
            instruction.attempt,
            "the job" if instruction.tasks is None else f"{len(tasks)} of {len(self._members)} tasks",
            "nothing" if instruction.restore is None else instruction.restore.pointer,
            self.recoveries.since_failure(at_ms),
            ", ".join(fresh) or "nobody",
        )
        if self._room is not None:
            self._room.watch()
        self._mailbox.call_later(self._fleet.options.standby_delay_ms, self._fleet.refill)

    def _watch_end(self, task: TaskId, attempt: AttemptNumber, member: Member) -> None:
        # Ray shows the name of a call that is pending: it says which task a process holds that was a standby.
        name = f"{self._fleet.options.prefix}: {self._names[task]}, attempt {attempt}"
        running = member.handle.run.options(name=name).remote(attempt).future()
        running.add_done_callback(partial(self._ended, attempt, task, member))

    def cancel(self, instruction: do.CancelAttempt) -> None:
        """Have every process that lives let go of an attempt; one that does not is killed."""
        attempt = instruction.attempt
        tasks = tuple(self._fleet.graph.tasks() if instruction.tasks is None else instruction.tasks)
        self._due = self._without(tasks)
        self._cancelled |= dict.fromkeys(tasks, attempt)
        for task in tasks:
            member = self._members.get(task)
            if member is not None and member.usable:
                self._letting_go.tell(member, attempt, self.generation)

    def tell(self, task: TaskId, event: ev.TaskEvent) -> None:
        """Say something to a task in its current attempt, if its process lives."""
        member = self._members.get(task)
        if member is not None and member.usable:
            self._tell(task, member, partial(member.line.say, "tell", self._attempts[task], event))
        elif isinstance(event, ev.CoordinatorTookOver):
            why = "" if self._why_gone is None else f": {self._why_gone}"
            reason = f"its process was gone when a new coordinator took over{why}"
            self._tell_coordinator(co.TaskFailed(now_ms(), event.attempt, task, reason))

    def completed(self, task: TaskId, event: ev.CheckpointCompleted, state: CoordinatorState) -> None:
        """A task was told of a checkpoint: whoever follows it is told as well, unless it has gone meanwhile."""
        spec, number = state.spec, event.checkpoint_id
        if spec is not None and number in state.kept:
            self._fleet.completed(task, RestorePoint(spec.root, spec.job_id, number, final=False))

    def knows(self, name: str, actor_id: str, in_charge: bool) -> Known:
        """Whether a process is one of this job's; only who is in charge can tell. From any thread."""
        return Known(self.generation, self._fleet.has(name, actor_id) if in_charge else None)

    def found_hung(self, member: Member) -> Callable[[str], object]:
        """A process lives and does not get on; what is returned takes the failure of the task that it has."""
        task = next((t for t, m in self._members.items() if m is member and t not in self._finished), None)
        attempt = self._attempt if task is None else self._attempts.get(task, self._attempt)

        def tell(text: str) -> None:
            if task is not None:
                self._noticed(attempt, task, member)
                self._tell_coordinator(co.TaskFailed(now_ms(), attempt, task, bounded_text(text)))

        self._deploy_if_free()
        return tell

    def dismiss(self) -> None:
        """This coordinator cannot go on: processes end, unless they obey another one."""
        for look in (self._room, self._bundles):
            if look is not None:
                look.close()
        self._due = None
        self._fleet.dismiss(self.generation)

    def close(self) -> list[Future[None]]:
        """The job is over. End all processes; the futures are done when they have gone."""
        for look in (self._room, self._bundles):
            if look is not None:
                look.close()
        return self._fleet.close()

    def processes(self) -> tuple[TaskProcessInfo, ...]:
        """The process of each task, of those that live and have started."""
        return tuple(
            TaskProcessInfo(task, member.name, member.info.pid, member.info.node_id, self._attempts.get(task, 0))
            for task, member in list(self._members.items())
            if member.info is not None and not member.dead
        )

    def standbys(self) -> tuple[int, int]:
        """Spare processes that have started and wait, and those that are starting."""
        return self._fleet.ready_standbys, self._fleet.starting_standbys

    def waits_for(self) -> str | None:
        """What the cluster lacks that the job needs, if it waits for that. From any thread."""
        if self._due is not None and (nodes := self._lost_nodes.doubtful):
            return f"word of {', '.join(sorted(nodes))}: nobody there answers, and Ray has not given it up"
        return None if self._room is None else self._room.waits_for

    @property
    def suspect_nodes(self) -> int:
        """How many nodes may be lost. From any thread."""
        return len(self._lost_nodes.doubtful)

    def observe(self, event: CoordinatorEvent) -> None:
        """Note when an attempt failed, to tell how long recovery takes."""
        if isinstance(event, co.TaskFailed) and event.attempt == self._attempts.get(event.task):
            self.recoveries.failed(event.at_ms)
            log.warning("task %s of attempt %d failed: %s", event.task, event.attempt, logged_text(event.reason))
        elif isinstance(event, co.TaskReady) and event.attempt == self._attempt:
            self.recoveries.ready(event.attempt, event.task, event.at_ms)
            origin = "" if event.origin is None else f" with its state from {event.origin.value}"
            log.info("task %s is ready%s%s", event.task, origin, self.recoveries.since_failure(event.at_ms))

    def heard(self, attempt: AttemptNumber, task: TaskId, rows_in: int) -> None:
        """A task has told how many rows have come in. The first ones behind the sources end a recovery."""
        at_ms = now_ms()
        if (member := self._members.get(task)) is not None:
            member.heard_at_ms = at_ms
            member.line.used()
        if rows_in > 0 and (words := self.recoveries.row_came_in(attempt, task, at_ms)) is not None:
            log.info("attempt %d: the first rows came into %s %s", attempt, task, words)

    def doing(self, task: TaskId) -> Future[str] | None:
        """Ask the process of a task what it is doing; None if it has none that lives."""
        member = self._members.get(task)
        return None if member is None or not member.usable else member.handle.doing.remote().future()

    def _noticed(self, attempt: AttemptNumber, task: TaskId, member: Member) -> None:
        """A process that says nothing any more has failed its task: this is how long nobody may have noticed."""
        if attempt == self._attempts.get(task) and member.heard_at_ms is not None:
            at_ms = now_ms()
            self.recoveries.failed(at_ms, max(0, at_ms - member.heard_at_ms))

    def _ended(self, attempt: AttemptNumber, task: TaskId, member: Member, future: Future[Outcome]) -> None:
        # Known before the coordinator decides: the next attempt must not go to a process that has died, or is unfit.
        error = future.exception()
        dead = partial(self._has_died, attempt, task, member)
        if self._broke(member, error, dead, partial(self._watch_end, task, attempt, member)):
            return
        if error is not None:
            member.dead |= isinstance(error, RayError)
            self._mailbox.post(lambda: dead(error))
        else:
            outcome = future.result()
            member.given_up |= outcome.unfit
            self._mailbox.post(lambda: self._has_ended(attempt, task, member, outcome))

    def _has_ended(self, attempt: AttemptNumber, task: TaskId, member: Member, outcome: Outcome) -> None:
        if outcome.kind == "finished" and attempt == self._attempts.get(task):
            self._finished.add(task)
        if outcome.kind != "failed":
            return
        if outcome.unfit:
            self.give_up(member, f"{member.name} can start no thread or open no file any more")
        reason = outcome.reason or "no reason given"
        self._tell_coordinator(co.TaskFailed(now_ms(), attempt, task, reason, outcome.permanent, outcome.fingerprint))

    def _has_died(self, attempt: AttemptNumber, task: TaskId, member: Member, error: BaseException) -> None:
        if self._fleet.closed:  # The job is over: its processes were killed, some before they could say so.
            return
        self._noticed(attempt, task, member)
        self._tell_coordinator(co.TaskFailed(now_ms(), attempt, task, reason_of(member, error)))

    def _starting(self) -> list[str]:
        return [member.name for member in self._members.values() if member.usable and member.info is None]

    def _no_room(self, why: str) -> None:
        task = next((t for t, m in self._members.items() if m.usable and m.info is None), None)
        if task is not None:
            self._tell_coordinator(co.TaskFailed(now_ms(), self._attempts[task], task, bounded_text(why)))

    def _tell(self, task: TaskId, member: Member, call: Callable[[], Watched]) -> None:
        """Say something to a task. What does not arrive fails the attempt that it was for."""
        attempt = self._attempts[task]

        def over() -> bool:
            return self._fleet.closed or (attempt == self._attempts[task] and task in self._finished)

        def lost(error: BaseException) -> None:
            # After a while (`calls.py`): if the process has died, that is the failure.
            self._mailbox.call_later(LOST_CALL_GRACE_MS, lambda: fail(error))

        def fail(error: BaseException) -> None:
            if not over():
                reason = f"a message to it did not arrive: {error}"
                self._tell_coordinator(co.TaskFailed(now_ms(), attempt, task, reason))

        def again() -> None:
            if self._cancelled.get(task, -1) < attempt == self._attempts[task] and not over():
                self._tell(task, member, call)

        def done(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None and not self._broke(member, error, lost, again):
                self._mailbox.post(lambda: lost(error))

        call().future().add_done_callback(done)
