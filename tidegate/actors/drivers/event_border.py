"""Makes facts fit for the event log where they come in: what cannot be written down must not stop the coordinator.

Rules: free texts are bounded and escaped. Values of users' rows in them are withheld unless `log_rows` is on. An event
that the codec cannot encode, whatever is in it, becomes the failure of what it speaks of, with the cause; so the log
can always be written, and the job continues by its own rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tidegate.actors.coordinator.messages import events as co
from tidegate.protocol.failure_reasons import bounded_text, error_text
from tidegate.storage.codec import encode
from tidegate.storage.errors import CodecError


def fit_for_the_log(event: co.CoordinatorEvent, withhold: Callable[[str], str]) -> co.CoordinatorEvent:
    """The event, or what takes its place; `withhold` takes values of rows out of a text. CodecError if nothing can."""

    def fit(text: str) -> str:
        return withhold(bounded_text(text))

    match event:
        case co.TaskFailed(reason=text) | co.CheckpointDamaged(reason=text) | co.ProcessGivenUp(reason=text):
            return replace(event, reason=fit(text))
        case co.CheckpointDeclined(message=text):
            return replace(event, message=fit(text))
        case (
            co.HookFailed(error=text)
            | co.HookRestoreFailed(error=text)
            | co.SavepointWriteFailed(error=text)
            | co.SavepointDiscardFailed(error=text)
            | co.MetadataWriteFailed(error=text)
            | co.SinkCommitFailed(error=text)
            | co.CheckpointDiscardFailed(error=text)
            | co.TablesNotTakenBack(error=text)
            | co.StorageWentAway(error=text)
        ):
            return replace(event, error=fit(text))
        case co.CheckpointAcknowledged() | co.HooksTriggered() | co.JobSubmitted() | co.CheckpointRequested():
            return _encodable(event)
        case _:
            return event


def _encodable(event: co.CoordinatorEvent) -> co.CoordinatorEvent:
    """These hold what others have made: states, names, paths."""
    try:
        encode(event)
    except CodecError as error:
        text = f"its {type(event).__name__} cannot be written to the event log: {error_text(error)}"
        match event:
            case co.CheckpointAcknowledged():
                return co.TaskFailed(event.at_ms, event.attempt, event.task, bounded_text(text))
            case co.HooksTriggered():
                return co.HookFailed(event.at_ms, event.checkpoint_id, bounded_text(text))
            case _:
                raise
    return event
