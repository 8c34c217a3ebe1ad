"""Rules of takeovers, broken on purpose. Each is a patch that holds while a seed runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from broken_failover import Both

from tidegate.actors.coordinator import coordinator_machine, failover
from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator.checkpoints import checkpoint_coordinator
from tidegate.actors.coordinator.checkpoints.checkpoint_aborter import CheckpointAborter
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.failover import Takeover
from tidegate.actors.coordinator.instructions import KillProcess
from tidegate.actors.drivers import coordinator_effects
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver
from tidegate.actors.task import instructions as do
from tidegate.actors.task import task_machine
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId
from tidegate.recovery import savepoints
from tidegate.storage.ids import CheckpointId
from tidegate.testing.runtime import processes
from tidegate.testing.runtime.ports import SimulatedCoordinatorPort
from tidegate.testing.world.disk import SimulatedStore

Patch = Callable[[], AbstractContextManager[Any]]

_answered, _give_up_open, _has_passed = (
    Takeover.answered,
    CheckpointAborter.give_up_open,
    coordinator_machine.has_passed,
)
_take_over, _answer_to = Takeover.take_over, task_machine.answer_to


def _all(self: Takeover) -> tuple[TaskId, ...]:
    """Breaks: what runs keeps its attempt. Here everything starts anew, as if it had failed."""
    return self._context.spec.tasks


def _unheard(*args: Any, **known: Any) -> do.AnswerTakeover:
    """Breaks: a task repeats its earlier reports to a new coordinator. Here it only reports that it lives."""
    return replace(_answer_to(*args, **known), ended=False, finished=False)


def _never_due(timer: str, state: CoordinatorState) -> bool:
    """Breaks: a task that does not answer has failed. Here it is waited for."""
    return timer.startswith("adopt:") or _has_passed(timer, state)


def _keeps_open(
    self: CheckpointAborter, reason: Reason, at_ms: int, detail: str = "", before: CheckpointId | None = None
) -> None:
    """Breaks: pending checkpoints are aborted. Here they continue, although acknowledgements were lost with the
    coordinator.
    """
    if reason is not Reason.COORDINATOR_LOST:
        _give_up_open(self, reason, at_ms, detail, before)


def _reuses(self: Takeover, at_ms: int) -> None:
    """Breaks: no number is used twice. Here what was given up gives its number back."""
    state = self._context.state
    given_up = [pending.checkpoint_id for pending in state.pending.values() if pending.phase.open]
    _take_over(self, at_ms)
    state.next_checkpoint_id = min([*given_up, state.next_checkpoint_id])


def _does_not_ask(self: Takeover, event: ev.TaskAnswered) -> None:
    """Breaks: a task that has not received the order to start gets it again. Here it waits for ever."""
    _answered(self, replace(event, started=True))


def _ends_at_once(self: CoordinatorDriver, event: ev.CoordinatorEvent) -> None:
    """Breaks: a process is killed only when the log has the decision. Here it is killed by any coordinator that takes
    it for hung.
    """
    if isinstance(event, ev.ProcessGivenUp):
        self._port.kill_process(KillProcess(event.process))
    _handle(self, event)


def _ends_its_tasks(self: SimulatedCoordinatorPort, reason: str, *, fenced: bool) -> None:
    """Breaks: a coordinator that was replaced touches nothing. Here it ends its tasks, as if it were the last one."""
    _halt(self, reason, fenced=False)


def _only_deletes(self: CheckpointAborter) -> None:
    """Breaks: a savepoint that may still be copied is voided. Here its folder is deleted, and may be there again."""
    for checkpoint_id in list(self._context.state.exports):
        self.export_answered(checkpoint_id)


def _deletes_the_tombstone(target: SimulatedStore) -> None:
    """Breaks: the tombstone of a savepoint stays. Here it goes with the rest."""
    target.delete_tree("")


def _says_nothing(*known: Any) -> bool:
    """Breaks: a coordinator that voids a savepoint is notified whether it was whole. Here it never was."""
    _void_savepoint(*known)
    return False


def _unchecked() -> tuple[Any, ...]:
    """No machine looks before it triggers or adopts: the oracle has to."""
    return (
        patch.object(checkpoint_coordinator, "check_trigger", lambda *_: None),
        patch.object(failover, "check_answer", lambda *_: None),
    )


_void_savepoint = savepoints.void_savepoint
_handle, _halt = CoordinatorDriver.handle, SimulatedCoordinatorPort.halt

TAKEOVER_PATCHES: dict[str, tuple[int, Patch]] = {
    "takeover: tasks that run start anew": (7, lambda: patch.object(Takeover, "_lost", _all)),
    "takeover: tasks obey the coordinator before": (8, lambda: patch.object(task_machine, "may_obey", lambda *_: True)),
    "takeover: a checkpoint begins before all have answered": (
        8, lambda: Both(patch.object(checkpoint_coordinator, "may_trigger", lambda *_: True), *_unchecked())
    ),
    "takeover: who does not answer is waited for": (
        7, lambda: patch.object(coordinator_machine, "has_passed", _never_due)
    ),
    "takeover: what a task had told is not told again": (7, lambda: patch.object(task_machine, "answer_to", _unheard)),
    "takeover: a start that got lost is not repeated": (7, lambda: patch.object(Takeover, "answered", _does_not_ask)),
    "takeover: what was open goes on": (4, lambda: patch.object(CheckpointAborter, "give_up_open", _keeps_open)),
    "takeover: a number is given away twice": (
        4, lambda: Both(patch.object(Takeover, "take_over", _reuses), *_unchecked())
    ),
    "takeover: who seems to hang is ended at once": (
        8, lambda: patch.object(CoordinatorDriver, "handle", _ends_at_once)
    ),
    "takeover: who was replaced ends its tasks": (
        8, lambda: Both(
            patch.object(SimulatedCoordinatorPort, "halt", _ends_its_tasks),
            patch.object(processes, "may_obey", lambda *_: True),
        )
    ),
    "takeover: who was given up gets a task again": (
        8, lambda: patch.object(CoordinatorState, "give_up", lambda *_: None)
    ),
    "takeover: a savepoint that may still be copied is only deleted": (
        4, lambda: patch.object(CheckpointAborter, "take_over", _only_deletes)
    ),
    "takeover: the tombstone of a savepoint goes": (
        4, lambda: patch.object(savepoints, "clear_folder", _deletes_the_tombstone)
    ),
    "takeover: nobody knows that a savepoint was whole": (
        4, lambda: patch.object(coordinator_effects, "void_savepoint", _says_nothing)
    ),
}  # fmt: skip
"""Each rule with the invariant that it belongs to."""

_LOST = {"takeover": "adopt", "faults": "coordinator", "ending": "finish", "hooks": "none", "interval_ms": 60}
CUT_OFF = {**_LOST, "faults": "links", "topology": "chain"}
LATE_COPIES = {**_LOST, "faults": "late copies", "ending": "suspend", "turn_rows": 1, "rows": 120}
"""The savepoint of a stop is given up with its coordinator. Others are copied again."""
TAKEOVER_FIXED: dict[str, dict[str, Any]] = {
    **{rule: dict(_LOST) for rule in TAKEOVER_PATCHES},
    "takeover: who does not answer is waited for": {**_LOST, "faults": "all"},
    "takeover: who seems to hang is ended at once": CUT_OFF,
    "takeover: who was replaced ends its tasks": CUT_OFF,
    "takeover: who was given up gets a task again": {**CUT_OFF, "faults": "impatience"},
    "takeover: a savepoint that may still be copied is only deleted": LATE_COPIES,
    "takeover: the tombstone of a savepoint goes": LATE_COPIES,
    "takeover: nobody knows that a savepoint was whole": LATE_COPIES,
}
"""Fixed values with which tasks continue when a coordinator is lost."""
