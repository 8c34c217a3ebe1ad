"""What a job has written, looked at from outside: by coordinators that were replaced, and what they decided.

Nothing of a job may come from a coordinator after it was replaced. One that takes over goes on with the attempts and
the numbers of its predecessor.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

from chaos_job import Plan

from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.events import TaskFailed
from tidegate.actors.coordinator.instructions import DeployAttempt, TriggerCheckpoint
from tidegate.actors.drivers.coordinator_driver import replay
from tidegate.recovery import list_checkpoints
from tidegate.recovery.event_history import EventHistory
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import JobId

REASON_CHARS = 200


def written_by_the_replaced(plan: Plan) -> list[str]:
    """What a coordinator has written that had been replaced, in words. Raises StorageError.

    An entry of the event log after one of a later generation, and a checkpoint that is complete in storage, newer than
    the oldest one that is kept, and not known to the log.
    """
    root = f"{plan.storage}/checkpoints"
    store = open_store(root)
    found = []
    for name in store.list(""):
        log = EventLog(store, JobId(name))
        entries = [log.read(index) for index in log.indices()]
        if not entries:
            continue
        found += [
            f"entry {later.index} of the log is of generation {later.generation}, the one before {earlier.generation}"
            for earlier, later in itertools.pairwise(entries)
            if later.generation < earlier.generation
        ]
        machine, _ = replay(log)
        kept = machine.state.kept
        complete = {summary.checkpoint_id for summary in list_checkpoints(root) if summary.job_id == name}
        found += [
            f"checkpoint {number} is complete in storage, and the log does not know it"
            for number in sorted(complete - set(kept))
            if kept and number > min(kept)
        ]
    return found


@dataclass
class Decided:
    """What the coordinators of a job have decided, by the whole log. `wrong`: what must not be."""

    attempts: Counter[int] = field(default_factory=Counter)
    checkpoints: Counter[int] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    """Why each attempt failed that did."""
    wrong: list[str] = field(default_factory=list)


def decided(plan: Plan) -> Decided:
    """Fold the log of a job again.

    The log is folded again from its first entry, which gives every instruction that the coordinators have given. A
    number of a checkpoint, or of an attempt, must be given once.
    """
    store = open_store(f"{plan.storage}/checkpoints")
    found = Decided()
    (name,) = store.list("")
    machine = CoordinatorMachine()
    for index, entry, _, wrong in EventHistory.read(EventLog(store, JobId(name)), JobId(name)).entries:
        if entry is None:
            found.wrong.append(f"entry {index} of the log cannot be read: {wrong}")
            return found
        for event in entry.events:
            if isinstance(event, TaskFailed):
                found.failures.setdefault(event.attempt, f"{event.task}: {event.reason[:REASON_CHARS]}")
            for instruction in machine.handle(event):
                if isinstance(instruction, DeployAttempt):
                    found.attempts[instruction.attempt] += 1
                elif isinstance(instruction, TriggerCheckpoint):
                    found.checkpoints[instruction.checkpoint_id] += 1
    found.wrong += [f"checkpoint {number} was triggered {n} times" for number, n in found.checkpoints.items() if n > 1]
    found.wrong += [f"attempt {number} was deployed {n} times" for number, n in found.attempts.items() if n > 1]
    return found
