"""Which event answers which order. So the cause of every event is known, and no message has to carry it.

An *order* is an instruction that is answered. Its name is its kind, and the attempt, checkpoint or timer that it is
about. Tasks and storage name the same thing in their answers anyway. Whoever knows which event an order followed from
knows the cause of its answer, even if the answer reaches the next generation. (`hosts/coordinator/causes.py` keeps
that.)

Some events answer nobody and begin a chain: users ask, tasks fail or ask for splits, processes hang, sources run dry,
storage goes away.
The end of the data is an answer only if a stop with a savepoint has brought it about.
"""

from __future__ import annotations

from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.messages import instructions as do

OrderName = tuple[str, int | str]
"""The kind of an order, and the number or name of what it is about."""

BY_MANY = ("trigger", "complete", "deploy", "ask")
"""Kinds of orders that go to many tasks: several answers come, and one may come twice."""

BEGINS = (
    ev.JobSubmitted,
    ev.CoordinatorStarted,
    ev.CheckpointRequested,
    ev.CancelRequested,
    ev.TaskFailed,
    ev.ProcessGivenUp,
    ev.TaskReachedEndOfData,
    ev.SplitsRequested,
    ev.WatermarkReported,
    ev.StorageWentAway,
)
"""Events that begin a chain. They answer no order, or not always."""

STORAGE_AWAY: OrderName = ("storage", 0)
"""Not an order: it joins `StorageCameBack` to the `StorageWentAway` before it."""


def order_named(instruction: do.CoordinatorInstruction) -> OrderName | None:
    """The name of an instruction that is answered; None for one that is not."""
    match instruction:
        case do.DeployAttempt(attempt=attempt):
            return "deploy", attempt
        case do.AskTasks(generation=generation):
            return "ask", generation
        case do.TriggerCheckpoint(checkpoint_id=number):
            return "trigger", number
        case do.NotifyCompleted(checkpoint_id=number):
            return "complete", number
        case do.TriggerHooks(checkpoint_id=number):
            return "hooks", number
        case do.RestoreHooks(attempt=attempt):
            return "restore-hooks", attempt
        case do.TakeTablesBack(attempt=attempt):
            return "tables", attempt
        case do.WriteSavepoint(metadata=metadata):
            return "savepoint", metadata.checkpoint_id
        case do.DiscardSavepoint(checkpoint_id=number):
            return "discard-savepoint", number
        case do.WriteMetadata(metadata) | do.VoidCheckpoint(metadata):
            return "metadata", metadata.checkpoint_id
        case do.CommitSinks(checkpoint_id=number):
            return "commit", number
        case do.DiscardCheckpoint(checkpoint_id=number):
            return "discard", number
        case do.SetTimer(timer=timer):
            return "timer", timer
    return None


def orders_answered(event: ev.CoordinatorEvent) -> tuple[OrderName, ...]:
    """The names of the orders that an event may answer. Of two, the first one that was given counts."""
    match event:
        case ev.TaskReady(attempt=attempt) | ev.RestoreDelayed(attempt=attempt):
            return (("deploy", attempt),)
        case ev.CheckpointDamaged(attempt=attempt):
            # Hooks are restored before tasks are deployed: until then a hook has found the damage.
            return ("deploy", attempt), ("restore-hooks", attempt)
        case ev.TaskAnswered(generation=generation):
            return (("ask", generation),)
        case ev.TaskFinished(covered_by=int(number)):
            return (("complete", number),)
        case (
            ev.CheckpointAcknowledged(checkpoint_id=number)
            | ev.CheckpointDeclined(checkpoint_id=number)
            | ev.TaskReachedEndOfData(stop=int(number))
        ):
            return (("trigger", number),)
        case ev.HooksTriggered(checkpoint_id=number) | ev.HookFailed(checkpoint_id=number):
            return (("hooks", number),)
        case ev.HooksRestored(attempt=attempt) | ev.HookRestoreFailed(attempt=attempt):
            return (("restore-hooks", attempt),)
        case ev.TablesTakenBack(attempt=attempt) | ev.TablesNotTakenBack(attempt=attempt):
            return (("tables", attempt),)
        case ev.SavepointWritten(checkpoint_id=number) | ev.SavepointWriteFailed(checkpoint_id=number):
            return (("savepoint", number),)
        case ev.SavepointDiscarded(checkpoint_id=number) | ev.SavepointDiscardFailed(checkpoint_id=number):
            return (("discard-savepoint", number),)
        case (
            ev.MetadataWritten(checkpoint_id=number)
            | ev.CheckpointVoided(checkpoint_id=number)
            | ev.MetadataWriteFailed(checkpoint_id=number)
        ):
            return (("metadata", number),)
        case ev.SinksCommitted(checkpoint_id=number) | ev.SinkCommitFailed(checkpoint_id=number):
            return (("commit", number),)
        case ev.CheckpointDiscarded(checkpoint_id=number) | ev.CheckpointDiscardFailed(checkpoint_id=number):
            return (("discard", number),)
        case ev.TimerFired(timer=timer):
            return (("timer", timer),)
        case ev.StorageCameBack():
            return (STORAGE_AWAY,)
    return ()
