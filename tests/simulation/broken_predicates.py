"""Predicates of the coordinator and of tasks, weakened so that they allow what they should forbid.

Some predicates decide. Weakened, they let something forbidden happen. Others check a decision made elsewhere. There the
decision is broken too, and the check is switched off, so that the oracle has to notice it from outside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from broken_failover import Both
from broken_rules import Patch

from tidegate.actors.coordinator import checkpoint_requests
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator import invariants as of_coordinator
from tidegate.actors.coordinator.checkpoints.checkpoint_aborter import CheckpointAborter
from tidegate.actors.coordinator.checkpoints.checkpoint_cleaner import CheckpointCleaner
from tidegate.actors.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from tidegate.actors.coordinator.checkpoints.checkpoint_finalizer import CheckpointFinalizer, SinkCommitter
from tidegate.actors.coordinator.checkpoints.savepoint_copies import SavepointCopies
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.coordinator_state import CheckpointDiscard, PendingCheckpoint, SharedStateRegistry
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver
from tidegate.actors.drivers.coordinator_effects import CoordinatorEffects
from tidegate.actors.task import invariants as of_task
from tidegate.actors.task import snapshots, task_machine
from tidegate.actors.task.barrier_aligner import BarrierAligner
from tidegate.actors.task.input_gate import InputGate
from tidegate.actors.task.subtask_checkpoints import DeferredInputs
from tidegate.protocol.identity import ChannelId
from tidegate.storage.checkpoints import permits
from tidegate.storage.ids import CheckpointId, Generation


def _says(where: ModuleType, predicate: str, answer: object) -> AbstractContextManager[Any]:
    assert hasattr(where, predicate)
    return patch.object(where, predicate, lambda *args: answer)


def _coordinator(predicate: str, answer: object, *breaks: AbstractContextManager[Any]) -> Patch:
    return lambda: Both(_says(of_coordinator, predicate, answer), *breaks)


# --- decisions that predicates look at --------------------------------------------------------------------------------

_trigger, _next = CheckpointCoordinator.start_checkpoint, SinkCommitter.commit_next
_end_if_over, _close = CoordinatorMachine.end_if_over, BarrierAligner.mark_over
_begin, _leave_copy, _write = SavepointCopies.begin, CheckpointAborter.leave_copy, CheckpointFinalizer.write_metadata
_made, _recover, _served = CoordinatorDriver.__init__, InputGate.recover, InputGate.served


def _gives_the_number_again(self: CheckpointCoordinator, *args: Any) -> None:
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


def _keeps_who_waits(self: CheckpointAborter, *args: Any) -> None:
    """Breaks: pending requests are answered when an attempt ends. Here they are not."""


def _all_of_them(self: SharedStateRegistry, own: Any, job_id: Any, paths: Any) -> tuple[str, ...]:
    """Breaks: a refused acknowledgement deletes only its own files. Here the files of its base are deleted too."""
    return tuple(paths)


def _ends_at_once(self: CoordinatorMachine, at_ms: int) -> None:
    """Breaks: a job is over when storage has decided about its checkpoints. Here it does not wait."""
    state = self.state
    pending, state.pending = state.pending, {}
    _end_if_over(self, at_ms)
    state.pending = pending


def _copies_twice(self: SavepointCopies, savepoint: PendingCheckpoint, at_ms: int) -> None:
    """Breaks: one copy of a savepoint is in progress at a time. Here a second one begins meanwhile."""
    _begin(self, savepoint, at_ms)
    self._copy(savepoint)


def _copies_before_it_is_complete(self: CheckpointFinalizer, pending: PendingCheckpoint) -> None:
    """Breaks: a savepoint is copied once its checkpoint is complete. Here while storage decides about it."""
    _write(self, pending)
    if pending.properties.copied_afterwards and pending.metadata is not None:
        permit = permits.ExportPermit(permits._DECIDED, pending.checkpoint_id)
        self._context.instruct(do.WriteSavepoint(str(pending.properties.target), pending.metadata, permit=permit))


def _deletes_what_is_copied(self: CheckpointCleaner, checkpoint_id: CheckpointId) -> None:
    """Breaks: a checkpoint stays while it is copied. Here it goes with all others that are not retained."""
    if checkpoint_id not in self._context.state.discards:
        self._start(checkpoint_id, CheckpointDiscard(False, shared=()))


def _deletes_at_once(self: CheckpointAborter, pending: PendingCheckpoint) -> None:
    """Breaks: the folder of a savepoint is deleted when its copy is over. Here when the savepoint is given up."""
    _leave_copy(self, pending)
    target = self._context.state.exports.pop(pending.checkpoint_id, None)
    self._cleaner.savepoint(pending.checkpoint_id, target)


def _of_the_same_generation(self: CoordinatorDriver, machine: CoordinatorMachine, *args: Any) -> None:
    """Breaks: each coordinator is a generation of its own. Here its successor takes the number over."""
    _made(self, machine, *args)
    self.generation = self._log.generation = Generation(max(1, machine.state.generation))


def _keeps_back(self: InputGate, channel: ChannelId, batches: Iterable[pa.RecordBatch]) -> None:
    """Breaks: what was in flight comes before everything else. Here it waits until something was taken."""
    self.__dict__.setdefault("kept_back", []).append((channel, list(batches)))


def _recovers_afterwards(self: InputGate) -> None:
    _served(self)
    for channel, batches in self.__dict__.pop("kept_back", []):
        _recover(self, channel, batches)


def _closes_nothing(self: BarrierAligner, checkpoint_id: Any) -> None:
    """Breaks: a checkpoint is over for a task once. Here its number is forgotten, and a late barrier begins it anew."""
    _close(self, checkpoint_id)
    self._closed = checkpoint_id - 1


def _without_files(missing: Collection[object], sink_files_durable: bool) -> bool:
    """Breaks: sink files are durable before their snapshot is acknowledged. Here that is not checked."""
    return not missing


PREDICATE_PATCHES: dict[str, tuple[int, Patch]] = {
    "predicates: an attempt does not wait for fates": (7, _coordinator("is_fate_known", True)),
    "predicates: what is built on may go": (5, _coordinator("is_built_on", False)),
    "predicates: two checkpoints are written at once": (4, _coordinator("being_written", 0)),
    "predicates: a number is given away twice": (
        4, _coordinator(
            "is_spent", True, patch.object(CheckpointCoordinator, "start_checkpoint", _gives_the_number_again)
        )
    ),
    "predicates: sinks commit out of turn": (
        6, _coordinator("may_commit", True, patch.object(SinkCommitter, "commit_next", _newest_first))
    ),
    "predicates: who waits is forgotten": (
        7, _coordinator(
            "is_queue_in_its_time", True, patch.object(CheckpointAborter, "refuse_queued", _keeps_who_waits)
        )
    ),
    "predicates: a refused acknowledgement takes others along": (
        5, _coordinator("may_delete_refused", True, patch.object(SharedStateRegistry, "not_needed", _all_of_them))
    ),
    "predicates: a sweep does not wait for storage": (
        5, _coordinator("may_sweep", True, patch.object(CoordinatorMachine, "end_if_over", _ends_at_once))
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
        2, lambda: Both(patch.object(BarrierAligner, "mark_over", _closes_nothing), _says(of_task, "is_newer", True))
    ),
    "predicates: rows of now go before those in flight": (
        3,
        lambda: Both(
            _says(of_task, "may_recover", True),
            patch.object(InputGate, "recover", _keeps_back),
            patch.object(InputGate, "served", _recovers_afterwards),
        ),
    ),
    "predicates: savepoints are copied without a limit": (
        10, _coordinator("may_copy", True, patch.object(of_coordinator, "are_copies_bounded", lambda *_: True))
    ),
    "predicates: a savepoint is copied twice at a time": (
        4, _coordinator("may_copy_complete", True, patch.object(SavepointCopies, "begin", _copies_twice))
    ),
    "predicates: a savepoint is copied before it is complete": (
        4, lambda: patch.object(CheckpointFinalizer, "write_metadata", _copies_before_it_is_complete)
    ),
    "predicates: a checkpoint is deleted while it is copied": (
        5, _coordinator("may_delete", True, patch.object(CheckpointCleaner, "subsumed", _deletes_what_is_copied))
    ),
    "predicates: a copy does not stop at the end of its job": (
        5, lambda: patch.object(CoordinatorEffects, "stop_copy", lambda *_: None)
    ),
    "predicates: a savepoint is deleted while it is copied": (
        5, _coordinator("may_delete_savepoint", True, patch.object(CheckpointAborter, "leave_copy", _deletes_at_once))
    ),
    "predicates: an acknowledgement that counts is refused": (5, _coordinator("is_counted", False)),
    "predicates: the queue of requests has no end": (
        10, _coordinator("is_queue_bounded", True, patch.object(checkpoint_requests, "REQUESTS_MAX", 10**6))
    ),
    "predicates: what is held back is not forgotten": (
        10, lambda: patch.object(DeferredInputs, "forget", lambda self, checkpoint_id: False)
    ),
    "predicates: two coordinators are one generation": (
        8, _coordinator("is_newer", True, patch.object(CoordinatorDriver, "__init__", _of_the_same_generation))
    ),
}  # fmt: skip
"""Every such break: its invariant, and the patch."""

_UNALIGNED: Mapping[str, str | int] = {"mode": "exactly-once", "alignment": "unaligned", "max_concurrent": 1}
_SLOW_COPIES: Mapping[str, str | int] = {
    "faults": "copies",
    "ask": "many savepoints",
    "max_concurrent": 1,
    "alignment": "aligned",
}
PREDICATE_FIXED: Mapping[str, Mapping[str, str | int]] = {
    "predicates: an attempt does not wait for fates": {"faults": "all"},
    "predicates: sinks commit out of turn": {"faults": "storage"},
    "predicates: rows of now go before those in flight": {**_UNALIGNED, "interval_ms": 60, "rows": 80},
    "predicates: savepoints are copied without a limit": {**_SLOW_COPIES, "rows": 150},
    "predicates: a savepoint is copied twice at a time": {"ask": "savepoint"},
    "predicates: a savepoint is copied before it is complete": {"ask": "savepoint"},
    "predicates: a copy does not stop at the end of its job": {**_SLOW_COPIES, "ending": "cancel"},
    "predicates: a checkpoint is deleted while it is copied": {**_SLOW_COPIES, "retained": 1, "interval_ms": 60},
    "predicates: a savepoint is deleted while it is copied": _SLOW_COPIES,
    "predicates: an acknowledgement that counts is refused": {"faults": "slow echoes", "interval_ms": 60, "rows": 150},
    "predicates: the queue of requests has no end": {"ask": "a burst", "faults": "none"},
    "predicates: two coordinators are one generation": {"faults": "coordinator"},
}
"""Fixed values of the scenarios for these breaks.

They need unknown outcomes of writes, several commits left behind by a storage, rows in flight, many requests of users,
long copies, or repeated acknowledgements while a slow storage writes checkpoints.
"""
