"""Prints the page `docs/coordinator-states.md`: the transition tables of `phases.py` and the meanings of their rows and
columns.

Run `python -m tidegate.actors.coordinator > docs/coordinator-states.md`. A test compares the page with the output.
"""

from __future__ import annotations

import enum
import sys
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
    JobStatus.ENDING: "the end status is decided; tasks stop, and the remaining work on storage is done",
    JobStatus.FINISHED: "the end: the input was read to its end, or a stop with `drain` has ended it",
    JobStatus.FAILED: "the end: nothing restarts the job any more",
    JobStatus.CANCELLED: "the end: a user has cancelled it",
    JobStatus.SUSPENDED: "the end: it was stopped with a savepoint, from which another job can continue",
}


_JOB_INPUT: Mapping[JobInput, str] = {
    JobInput.DEPLOY: "the job was submitted; or the restart is due and the fate of every checkpoint is decided",
    JobInput.ALL_READY: "the last task of the attempt has its state",
    JobInput.RESTART: "what has failed has stopped, and another attempt follows",
    JobInput.END: "the job is going to end, with any status",
    JobInput.OVER_FINISHED: "all work is done, and the job has finished; the three other inputs likewise",
}


_PHASE: Mapping[PendingPhase, str] = {
    PendingPhase.HOOKS: "the master hooks are called; the tasks are not triggered yet",
    PendingPhase.COLLECTING: "tasks were triggered; some have not acknowledged",
    PendingPhase.ACKNOWLEDGED: "every task has acknowledged; another checkpoint is being written",
    PendingPhase.EXPORTING: "the savepoint of a stop: its files are copied into its own folder",
    PendingPhase.WRITING: "`_metadata` is being created",
    PendingPhase.VOIDING: "it is unknown whether `_metadata` was created: a tombstone is created in its place",
    PendingPhase.COMPLETED: "the end: `_metadata` exists",
    PendingPhase.FAILED: "the end: it will never be complete",
}


_PENDING_INPUT: Mapping[PendingInput, str] = {
    PendingInput.HOOKS_ANSWERED: "the last master hook has answered",
    PendingInput.ALL_ACKNOWLEDGED: "the last task of the plan has acknowledged",
    PendingInput.EXPORT: "no other checkpoint is being written, and this one is a savepoint",
    PendingInput.WRITE: "no other checkpoint is being written, or the savepoint's own folder is whole",
    PendingInput.EXPORT_FAILED: "the copy has failed; it is tried again",
    PendingInput.FATE_UNKNOWN: "storage did not report whether the file was created",
    PendingInput.METADATA_FOUND: "`_metadata` was created, now or before",
    PendingInput.TOMBSTONE_FOUND: "the tombstone was first: `_metadata` cannot follow",
    PendingInput.GIVEN_UP: "a task declined, time was over, a newer one completed, or the attempt ended",
}


def render() -> str:
    """Returns the page `docs/coordinator-states.md`: the transition tables of the job and of a checkpoint, with
    explanations.
    """
    return (
        "# States of the coordinator\n\n"
        "Made by `python -m tidegate.actors.coordinator` from `tidegate/actors/coordinator/phases.py`.\n\n"
        "The coordinator stores the *status* of its job, and the *phase* of each checkpoint that was triggered and is "
        "not over. A row of a table is the present status or phase, a column is an input, and the field is the next "
        "status or phase. An empty field is an illegal transition: it raises `ProtocolError` and changes nothing.\n\n"
        f"## A job\n\n{_table('status', JobStatus, JobInput, JOB_TRANSITIONS)}\n"
        f"{_meanings('status', _STATUS)}\n{_meanings('input', _JOB_INPUT)}\n"
        "## A pending checkpoint\n\n"
        "Up to `exporting` the coordinator can abort a checkpoint. From `writing` on the first file in storage "
        "decides, and the coordinator can only find out which it is.\n\n"
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


if __name__ == "__main__":
    sys.stdout.write(render())
