"""Logs what a coordinator decides: the lines of its `Narrator`, once the events behind them are in the event log."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tidegate.actors.coordinator.job.job_spec import JobSpec
from tidegate.actors.coordinator.narrator import Line
from tidegate.actors.drivers.log_lines import log_fields
from tidegate.storage.ids import EventId

decisions_log = logging.getLogger("tidegate.actors.coordinator")
"""What coordinators decide, a line each; at DEBUG with what happens at every checkpoint to every task."""
checkpoints_log = decisions_log.getChild("checkpoints")
"""The same of checkpoints that go well: there may be many of them a second."""


def wants_details() -> bool:
    """Whether somebody reads what happens at every checkpoint to every task."""
    return decisions_log.isEnabledFor(logging.DEBUG)


def say(spec: JobSpec | None, lines: Iterable[tuple[Line, EventId, EventId | None]], details: bool) -> None:
    """Log these lines about a job: of which event, with its cause. `details`: they go to those who asked for them."""
    name, job_id = ("a job", None) if spec is None else (spec.job_name, spec.job_id)
    for line, number, cause in lines:
        known = {"attempt": line.attempt, "checkpoint": line.checkpoint, "event": number, "cause": cause}
        level = logging.DEBUG if line.detail and details else logging.INFO
        if line.waits:  # else the terminal shows one failure after the other, and not that the job restarts
            hint = "RestartStrategy.none() fails at once"
            decisions_log.warning(
                "%s: %s; %s", name, line.text, hint, extra=log_fields(job=name, job_id=job_id, **known)
            )
            continue
        to = decisions_log if line.checkpoint is None or line.trouble else checkpoints_log
        to.log(level, "%s: %s", name, line.text, extra=log_fields(job=name, job_id=job_id, **known))
