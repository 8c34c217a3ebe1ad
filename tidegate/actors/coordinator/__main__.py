"""Renders the transition tables of `phases.py`, with what their words mean, as the page `docs/coordinator-states.md`.

`python -m tidegate.actors.coordinator > docs/coordinator-states.md` calls it; a test compares the page with it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from tidegate.actors.coordinator.phases import (
    JOB_TRANSITIONS,
    PENDING_TRANSITIONS,
    JobInput,
    JobStatus,
    PendingInput,
    PendingPhase,
)

_STATUS: Mapping[JobStatus, str] = {
    JobStatus.CREATED: "the coordinator has started, and the job is not deployed yet",
    JobStatus.DEPLOYING: "an attempt has begun; its tasks start and read their state",
    JobStatus.RUNNING: "every task runs; only now are checkpoints taken",
    JobStatus.RESTARTING: "something has failed; a region, or the whole job, waits for its next attempt",
    JobStatus.ENDING: "it is decided how the job ends; tasks stop, and storage does what is left to do",
    JobStatus.FINISHED: "the end: the input was read to its end, or a stop with `drain` has ended it",
    JobStatus.FAILED: "the end: nothing restarts the job any more",
    JobStatus.CANCELLED: "the end: a user has cancelled it",
    JobStatus.SUSPENDED: "the end: it was stopped with a savepoint, from which another job can go on",
}


_JOB_INPUT: Mapping[JobInput, str] = {
    JobInput.DEPLOY: "the job was submitted; or the restart is due and the fate of every checkpoint is known",
    JobInput.ALL_READY: "the last task of the attempt has its state",
    JobInput.RESTART: "what has failed has stopped, and another attempt follows",
    JobInput.END: "the job is going to end, in whichever way",
    JobInput.OVER_FINISHED: "all is done, and the job has finished; the three others likewise",
}


_PHASE: Mapping[PendingPhase, str] = {
    PendingPhase.HOOKS: "the master hooks are called; no task knows of the checkpoint yet",
    PendingPhase.COLLECTING: "tasks were triggered; some have not acknowledged",
    PendingPhase.ACKNOWLEDGED: "every task has acknowledged; another checkpoint is being written",
    PendingPhase.EXPORTING: "the savepoint of a stop: its files are copied into its own folder",
    PendingPhase.WRITING: "`_metadata` is being created",
    PendingPhase.VOIDING: "nobody knows whether `_metadata` was created: a tombstone is created in its place",
    PendingPhase.COMPLETED: "the end: `_metadata` is there",
    PendingPhase.FAILED: "the end: it will never be complete",
}


_PENDING_INPUT: Mapping[PendingInput, str] = {
    PendingInput.HOOKS_ANSWERED: "the last master hook has answered",
    PendingInput.ALL_ACKNOWLEDGED: "the last task of the plan has acknowledged",
    PendingInput.EXPORT: "no other checkpoint is being written, and this one is a savepoint",
    PendingInput.WRITE: "no other checkpoint is being written, or the savepoint's own folder is whole",
    PendingInput.EXPORT_FAILED: "storage did not take the copy; it is tried again",
    PendingInput.FATE_UNKNOWN: "storage did not say whether the file was created",
    PendingInput.METADATA_FOUND: "`_metadata` was created, now or before",
    PendingInput.TOMBSTONE_FOUND: "the tombstone was first: no `_metadata` can follow",
    PendingInput.GIVEN_UP: "a task declined, time was over, a newer one completed, or the attempt ended",
}


def render() -> str:
    """The page: of the job and of a checkpoint the table, and what its rows and columns mean."""
    return (
        "# States of the coordinator\n\n"
        "Made by `python -m tidegate.actors.coordinator` from `tidegate/actors/coordinator/phases.py`.\n\n"
        "The coordinator knows the *status* of its job, and the *phase* of each checkpoint that was triggered and is "
        "not over. A row of a table is where the job or the checkpoint is, a column is an input, and the field says "
        "where that leads. An empty field is an illegal transition: it raises `ProtocolError` and changes nothing.\n\n"
        f"## A job\n\n{_table('status', JobStatus, JobInput, JOB_TRANSITIONS)}\n"
        f"{_meanings('status', _STATUS)}\n{_meanings('input', _JOB_INPUT)}\n"
        "## A pending checkpoint\n\n"
        "Up to `exporting` the coordinator can give a checkpoint up. From `writing` on storage decides, by which file "
        "is there first; the coordinator can only ask.\n\n"
        f"{_table('phase', PendingPhase, PendingInput, PENDING_TRANSITIONS)}\n"
        f"{_meanings('phase', _PHASE)}\n{_meanings('input', _PENDING_INPUT)}"
    )


def _table(name: str, states: type[enum.Enum], inputs: type[enum.Enum], table: Mapping[Any, enum.Enum | None]) -> str:
    lines = [f"| {name} | {' | '.join(i.value for i in inputs)} |", f"| --- {'| --- ' * len(inputs)}|"]
    for state in states:
        following = [table[state, i] for i in inputs]
        lines.append(f"| {state.value} | {' | '.join('' if f is None else f.value for f in following)} |")
    return "\n".join(lines) + "\n"


def _meanings(name: str, meanings: Mapping[Any, str]) -> str:
    lines = [f"| {name} | what it means |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {one.value} | {meaning} |" for one, meaning in meanings.items())]) + "\n"
