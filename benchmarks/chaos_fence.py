"""What a coordinator or a task must not have left in storage after it was cut off: a look at what a job has written."""

from __future__ import annotations

import itertools

from chaos_job import Plan

from tidegate.actors.hosts.coordinator.coordinator_host import replay
from tidegate.recovery import list_checkpoints
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import JobId


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
