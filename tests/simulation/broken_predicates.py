"""Predicates of coordinator and task, weakened: each says yes to what it forbids, and somebody has to notice.

Some predicates decide: weakened, they let something happen that must not. Others look at what was decided elsewhere:
there the decision is broken too, and the predicate does not look, so that the oracle has to see it from outside.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from broken_failover import Both
from broken_rules import Patch

from tidegate.actors.coordinator import invariants as of_coordinator
from tidegate.actors.coordinator.checkpoints.abandonment import Abandoner
from tidegate.actors.coordinator.checkpoints.checkpoint_keeper import CheckpointKeeper
from tidegate.actors.coordinator.checkpoints.sink_commits import SinkCommitter
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.state.shared_state_registry import SharedStateRegistry
from tidegate.actors.task import invariants as of_task
from tidegate.actors.task import task_machine
from tidegate.actors.task.barriers import barrier_aligner
from tidegate.actors.task.barriers.barrier_aligner import BarrierAligner
from tidegate.actors.task.checkpoints import snapshots


def _says(where: ModuleType, predicate: str, answer: object) -> AbstractContextManager[Any]:
    assert hasattr(where, predicate)
    return patch.object(where, predicate, lambda *args: answer)


def _coordinator(predicate: str, answer: object, *breaks: AbstractContextManager[Any]) -> Patch:
    return lambda: Both(_says(of_coordinator, predicate, answer), *breaks)


# --- decisions that predicates look at --------------------------------------------------------------------------------

_trigger, _next = CheckpointKeeper._trigger, SinkCommitter._next
_end_if_over, _close = CoordinatorMachine._end_if_over, BarrierAligner._close


def _gives_the_number_again(self: CheckpointKeeper, *args: Any) -> None:
    """Breaks: a number is given away once. Here the second checkpoint and the third share one."""
    state = self._context.state
    _trigger(self, *args)
    if state.next_checkpoint_id == 3 and 2 in state.pending:
        state.next_checkpoint_id -= 1


def _newest_first(self: SinkCommitter) -> None:
    """Breaks: sinks commit in the order of checkpoints. Here the newest of several is next."""
    state = self._context.state
    state.commits = (state.commits[-1], *state.commits[:-1])
    _next(self)


def _keeps_who_waits(self: Abandoner, *args: Any) -> None:
    """Breaks: who waits when an attempt ends is told. Here nobody is."""


def _all_of_them(self: SharedStateRegistry, own: Any, job_id: Any, paths: Any) -> tuple[str, ...]:
    """Breaks: of a refused acknowledgement go the files that are its own. Here those of its base go too."""
    return tuple(paths)


def _ends_at_once(self: CoordinatorMachine) -> None:
    """Breaks: a job is over when storage has decided about its checkpoints. Here it does not wait."""
    state = self.state
    pending, state.pending = state.pending, {}
    _end_if_over(self)
    state.pending = pending


def _closes_nothing(self: BarrierAligner, checkpoint_id: Any) -> None:
    """Breaks: a checkpoint is over for a task once. Here its number is forgotten, and a late barrier begins it anew."""
    _close(self, checkpoint_id)
    self._closed = checkpoint_id - 1


def _without_files(missing: Collection[object], sink_files_durable: bool) -> bool:
    """Breaks: sink files are durable before their snapshot is acknowledged. Here nobody asks for them."""
    return not missing


PREDICATE_PATCHES: dict[str, tuple[int, Patch]] = {
    "predicates: an attempt does not wait for fates": (7, _coordinator("is_fate_known", True)),
    "predicates: what is built on may go": (5, _coordinator("is_built_on", False)),
    "predicates: two checkpoints are written at once": (4, _coordinator("being_written", 0)),
    "predicates: a number is given away twice": (
        4, _coordinator("is_spent", True, patch.object(CheckpointKeeper, "_trigger", _gives_the_number_again))
    ),
    "predicates: sinks commit out of turn": (
        6, _coordinator("may_commit", True, patch.object(SinkCommitter, "_next", _newest_first))
    ),
    "predicates: who waits is forgotten": (
        7, _coordinator("is_queue_in_its_time", True, patch.object(Abandoner, "refuse_queued", _keeps_who_waits))
    ),
    "predicates: a refused acknowledgement takes others along": (
        5, _coordinator("may_delete_refused", True, patch.object(SharedStateRegistry, "not_needed", _all_of_them))
    ),
    "predicates: a sweep does not wait for storage": (
        5, _coordinator("may_sweep", True, patch.object(CoordinatorMachine, "_end_if_over", _ends_at_once))
    ),
    "predicates: sink files need not be durable": (
        6, lambda: patch.object(snapshots, "may_acknowledge", _without_files)
    ),
    "predicates: a snapshot is acknowledged before it is whole": (
        4, lambda: _says(snapshots, "may_acknowledge", True)
    ),
    "predicates: a task leaves when it likes": (4, lambda: _says(task_machine, "may_leave", True)),
    "predicates: a gap is none": (1, lambda: _says(of_task, "is_gapless", True)),
    "predicates: credit has no end": (10, lambda: _says(of_task, "may_send", True)),
    "predicates: an output queue is never full": (10, lambda: _says(of_task, "is_full", False)),
    "predicates: a checkpoint is over twice": (
        2,
        lambda: Both(
            patch.object(BarrierAligner, "_close", _closes_nothing),
            _says(barrier_aligner, "check_newer", None),
        ),
    ),
}  # fmt: skip
"""Every such break: its invariant, and the patch."""

PREDICATE_FIXED: Mapping[str, Mapping[str, str | int]] = {
    "predicates: an attempt does not wait for fates": {"faults": "all"},
    "predicates: sinks commit out of turn": {"faults": "storage"},
}
"""What is not drawn for them: fates that are unknown, and a storage that leaves several commits."""
