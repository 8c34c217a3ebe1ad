"""Rules broken where no part of a `Protocol` reaches: transition tables, plans, what is restored, timers, savepoints.

Each is a patch that holds while a seed runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from tidegate.actors.coordinator import phases
from tidegate.actors.coordinator.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.coordinator.checkpoints import checkpoint_aborter
from tidegate.actors.coordinator.checkpoints import checkpoint_coordinator as checkpoints
from tidegate.actors.coordinator.checkpoints.checkpoint_aborter import CheckpointAborter
from tidegate.actors.coordinator.checkpoints.checkpoint_coordinator import CheckpointPlan, make_plan
from tidegate.actors.coordinator.checkpoints.checkpoint_finalizer import CheckpointFinalizer
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.phases import JobInput, JobStatus, PendingInput, PendingPhase
from tidegate.actors.restore import restore_task
from tidegate.actors.task.input_gate import InputChannel
from tidegate.actors.task.output_gate import OutputGate
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.state.timers import Timers
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.recovery import savepoints as savepoint
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.state.snapshot import Cut, FrozenState, StateTable
from tidegate.storage.state.stored_rows import TIMERS_STATE

Patch = Callable[[], AbstractContextManager[Any]]


# --- transition tables ------------------------------------------------------------------------------------------------


def _job(status: JobStatus, given: JobInput, wrong: JobStatus | None) -> Patch:
    return lambda: patch.dict(phases.JOB_TRANSITIONS, {(status, given): wrong})


def _pending(phase: PendingPhase, given: PendingInput, wrong: PendingPhase | None) -> Patch:
    return lambda: patch.dict(phases.PENDING_TRANSITIONS, {(phase, given): wrong})


_fail = CoordinatorMachine.fail_tasks


def _given_up(self: CoordinatorMachine, tasks: Any, reason: str, at_ms: int, permanent: bool = False) -> None:
    _fail(self, tasks, reason, at_ms, permanent=True)


# --- plans ------------------------------------------------------------------------------------------------------------


def _waits_for_all(spec: Any, running: Any, finished: Any) -> Any:
    plan = make_plan(spec, running, finished)
    return replace(plan, wait=spec.tasks, finished=()) if isinstance(plan, CheckpointPlan) else plan


def _triggers_sources(spec: Any, running: Any, finished: Any) -> Any:
    plan = make_plan(spec, running, finished)
    if not isinstance(plan, CheckpointPlan):
        return plan
    return replace(plan, trigger=tuple(task for task in plan.trigger if task in spec.sources))


def _not_flagged(self: CheckpointFinalizer, pending: Any) -> Any:
    metadata = _metadata(self, pending)
    over = {(task.vertex, task.subtask) for task in pending.finished}
    subtasks = (replace(s, finished=s.finished and (s.vertex, s.subtask) not in over) for s in metadata.subtasks)
    return replace(metadata, subtasks=tuple(subtasks))


_metadata = CheckpointFinalizer.make_metadata


# --- in-flight data, turns and credit ---------------------------------------------------------------------------------

_held = restore_task.in_flight_rows
_mine = restore_task.Route.mine


def _inputs_only(*args: Any) -> Any:
    return [held for held in _held(*args) if held.end.direction != "output"]


def _newest_first(*args: Any) -> Any:
    return [replace(held, batches=tuple(reversed(held.batches))) for held in reversed(_held(*args))]


def _as_they_were(route: Any, end: Any, batch: pa.RecordBatch) -> Any:
    return batch if _mine(route, end, batch) is not None else None


_take = InputChannel.take


def _half_taken(self: InputChannel, rows_max: int = 1 << 24) -> Any:
    element = _take(self)
    return element.slice(0, rows_max) if isinstance(element, pa.RecordBatch) else element


# --- timers -----------------------------------------------------------------------------------------------------------

_advance = ProcessOperator.advance_watermark
_pop = Timers.pop
_load, _freeze = ColumnarBackend.load, ColumnarBackend.freeze


def _deaf_to_the_end(self: ProcessOperator, watermark_ms: int, emit: Any) -> Iterator[None]:
    return iter(()) if watermark_ms == MAX_WATERMARK_MS else _advance(self, watermark_ms, emit)


def _skips_one(self: Timers) -> Any:
    if self.count(4) == 3:
        _pop(self)
    return _pop(self)


def _loaded_but_timers(self: ColumnarBackend, table: StateTable) -> None:
    if table.state != TIMERS_STATE:
        _load(self, table)


def _frozen_but_timers(self: ColumnarBackend, cut: Cut) -> list[FrozenState]:
    return [state for state in _freeze(self, cut) if state.state != TIMERS_STATE]


# --- savepoints -------------------------------------------------------------------------------------------------------


@contextmanager
def _savepoints_that_say(change: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Changes the `_metadata` of a savepoint. `change` receives the right one, and the one of the checkpoint."""
    rebased, encoded = savepoint.rebased, savepoint.encode_metadata
    original: list[Any] = []

    def remember(metadata: Any, *args: Any) -> Any:
        original[:] = [metadata]
        return rebased(metadata, *args)

    with (
        patch.object(savepoint, "rebased", remember),
        patch.object(savepoint, "encode_metadata", lambda own: encoded(change(own, original[0]))),
    ):
        yield


def _old_places(own: Any, original: Any) -> Any:
    return replace(own, subtasks=original.subtasks)


def _no_files(own: Any, original: Any) -> Any:
    return replace(own, subtasks=tuple(replace(s, committables=()) for s in own.subtasks))


# --- the event log ----------------------------------------------------------------------------------------------------

_truncate = EventLog.truncate


def _cut_without_takeovers(self: EventLog, before_index: int, keep: object = None) -> None:
    _truncate(self, before_index)


def _cut_at_the_fold(self: EventLog, before_index: int, keep: object = None) -> None:
    latest = self.latest_snapshot()
    assert latest is not None
    self._store.delete_all([self._entry_path(index) for index in self.indices() if index < latest[0]])


# --- stops ------------------------------------------------------------------------------------------------------------


def _given_up_with_its_attempt(self: CheckpointAborter, pending: Any, reason: Any, runs: bool) -> bool:
    return runs and reason in checkpoint_aborter.TASK_LEAVES


_S, _J, _P, _I = JobStatus, JobInput, PendingPhase, PendingInput

RULE_BREAKS: dict[str, tuple[int, Patch]] = {
    "jobs: a failed attempt is left running": (7, _job(_S.RUNNING, _J.RESTART, _S.RUNNING)),
    "jobs: tasks that are ready make no running job": (7, _job(_S.DEPLOYING, _J.ALL_READY, _S.DEPLOYING)),
    "jobs: a restart counts as deployed at once": (7, _job(_S.RESTARTING, _J.DEPLOY, _S.RUNNING)),
    "jobs: what was cancelled has finished": (6, _job(_S.ENDING, _J.OVER_CANCELLED, _S.FINISHED)),
    "jobs: what was suspended has finished": (6, _job(_S.ENDING, _J.OVER_SUSPENDED, _S.FINISHED)),
    "jobs: every failure is permanent": (7, lambda: patch.object(CoordinatorMachine, "fail_tasks", _given_up)),
    "checkpoints: hooks that answer stand for tasks": (4, _pending(_P.HOOKS, _I.HOOKS_ANSWERED, _P.ACKNOWLEDGED)),
    "checkpoints: what is acknowledged skips its turn": (7, _pending(_P.COLLECTING, _I.ALL_ACKNOWLEDGED, _P.WRITING)),
    "checkpoints: a savepoint is not exported": (7, _pending(_P.ACKNOWLEDGED, _I.EXPORT, _P.WRITING)),
    "checkpoints: a failed export is none": (7, _pending(_P.EXPORTING, _I.EXPORT_FAILED, _P.WRITING)),
    "checkpoints: a doubt is a failure": (4, _pending(_P.WRITING, _I.FATE_UNKNOWN, _P.FAILED)),
    "checkpoints: a doubt is a completion": (4, _pending(_P.VOIDING, _I.FATE_UNKNOWN, _P.COMPLETED)),
    "plan: a finished task is waited for": (7, lambda: patch.object(checkpoints, "make_plan", _waits_for_all)),
    "plan: sources alone are triggered": (7, lambda: patch.object(checkpoints, "make_plan", _triggers_sources)),
    "plan: a finished task is not flagged": (
        4,
        lambda: patch.object(CheckpointFinalizer, "make_metadata", _not_flagged),
    ),
    "restore: what a sender held is dropped": (9, lambda: patch.object(restore_task, "in_flight_rows", _inputs_only)),
    "restore: in-flight rows change their order": (
        9,
        lambda: patch.object(restore_task, "in_flight_rows", _newest_first),
    ),
    "restore: in-flight rows are not routed": (
        9,
        lambda: patch.object(restore_task.Route, "mine", _as_they_were),
    ),
    "turns: the rest of a cut batch is lost": (1, lambda: patch.object(InputChannel, "take", _half_taken)),
    "credit: what was lost is never asked for": (7, lambda: patch.object(OutputGate, "starved", lambda self: {})),
    "timers: none is restored": (9, lambda: patch.object(ColumnarBackend, "load", _loaded_but_timers)),
    "timers: none is in a checkpoint": (9, lambda: patch.object(ColumnarBackend, "freeze", _frozen_but_timers)),
    "timers: the last watermark fires none": (
        6,
        lambda: patch.object(ProcessOperator, "advance_watermark", _deaf_to_the_end),
    ),
    "timers: one of three is passed over": (6, lambda: patch.object(Timers, "pop", _skips_one)),
    "savepoints: paths are those of the checkpoint": (5, lambda: _savepoints_that_say(_old_places)),
    "savepoints: sink files are left out": (5, lambda: _savepoints_that_say(_no_files)),
    "stops: one is given up with its attempt": (
        7,
        lambda: patch.object(CheckpointAborter, "_may_be_asked_again", _given_up_with_its_attempt),
    ),
    "log: entries with which coordinators took over are cut": (
        8,
        lambda: patch.object(EventLog, "truncate", _cut_without_takeovers),
    ),
    "log: the entry before the newest is cut": (8, lambda: patch.object(EventLog, "truncate", _cut_at_the_fold)),
    "statistics: failed checkpoints are not counted": (
        4,
        lambda: patch.object(CheckpointStatistics, "has_failed", lambda self, record, history_max: None),
    ),
}
"""Every such break: its invariant, and the patch."""

RULE_FIXED: dict[str, dict[str, str | int]] = {
    rule: {"faults": "coordinator", "log": "short"} for rule in RULE_BREAKS if rule.startswith("log: ")
} | {"stops: one is given up with its attempt": {"faults": "all", "ending": "suspend"}}
"""Fixed values: a log is truncated while a replaced writer writes to it, or a job is stopped while something fails."""
