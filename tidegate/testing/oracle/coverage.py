"""Counts which effects of the checkpoint protocol a simulated run exercised.

The oracles count an effect when they see it happen, not when a setting requests it. `tidegate simulate` adds up the
counts of many seeds and prints them. `docs/simulation.md` has the same table.
"""

from __future__ import annotations

from collections import Counter

EFFECTS = {
    "periodic_checkpoint": "a periodic checkpoint was triggered",
    "request_held_back": "a request for a checkpoint or savepoint had to wait, or was refused",
    "savepoint_ahead": "a savepoint was triggered while the maximum number of checkpoints was pending",
    "finished_tasks_in_plan": "a checkpoint completed with tasks in its plan that had finished before it",
    "late_acknowledgement": "an acknowledgement came late or twice",
    "checkpoint_aborted": "a checkpoint was aborted while tasks were busy with it",
    "checkpoint_failed": "a checkpoint failed by a decline or a timeout",
    "checkpoint_subsumed": "a checkpoint with sink files to commit completed, and subsumed an older one",
    "savepoint_or_retention": "a savepoint completed, or checkpoints were retained or deleted as the job ended",
    "master_hook": "a master hook's state is in a completed checkpoint",
    "statistics_agree": "the coordinator's statistics agree with what was seen",
    "snapshot_acknowledged": "a task's snapshot was acknowledged",
    "channel_blocked": "an aligned barrier blocked a channel",
    "at_least_once": "a completed at-least-once checkpoint holds rows that followed its barrier on a channel",
    "batches_merged": "a task took several batches that waited on a channel as one",
    "in_flight_restored": "in-flight data of a completed checkpoint was restored",
    "alignment_timeout": "a barrier with a timeout became unaligned",
    "concurrent_checkpoints": "a snapshot was taken while an older checkpoint was in progress",
    "state_discarded": "a task deleted state that no checkpoint will refer to, e.g. of one that was aborted",
    "stateless_task": "a task without state acknowledged a checkpoint",
    "task_finished": "a task finished",
    "finished_tasks_restored": "a checkpoint with finished tasks was restored",
    "stop_with_savepoint": "a job was stopped with a savepoint",
    "layers_restored": "keyed state in several layers was restored",
    "state_kept": "a stopped task went back to a checkpoint with the state it had kept in memory",
    "copy_restored": "the state of a task was read from copies on its node's disk alone",
    "shared_files_kept": "a completed checkpoint refers to shared files of one that was deleted",
    "restart_put_off": "a restart waited for longer than the one before it",
    "tasks_adopted": "all tasks continued under a new coordinator, in their attempt",
    "process_killed": "a process that hung, or seemed to hang, was killed",
    "all_taken_for_hung": "a coordinator that was cut off took the processes of all tasks for hung",
    "restore_interrupted": "a process died while a task in it restored its state or waited for other tasks",
    "node_lost": "a node was lost, with all processes on it",
    "node_cut_off": "a node was cut off from storage and from all other nodes",
    "savepoint_fenced": "a replaced coordinator could not complete a savepoint, because a tombstone was there",
    "row_without_coordinator": "a task processed rows while there was no coordinator",
    "splits_tried_together": "after such a pause one read tried several splits",
    "source_paused": "no split of a source had anything to read, and the source was read again after a pause",
    "source_held": "a source had nothing left to read but splits too far ahead of others in event time",
    "split_assigned": "the coordinator assigned a split to a subtask that had requested one",
    "split_assigned_again": "a split was assigned again after a failure: no completed checkpoint recorded its reader",
    "split_in_pool": "a checkpoint completed with splits that no subtask had yet",
    "region_restarted": "regions with a failed task restarted, while other regions continued",
    "rows_combined": "a task combined rows before it sent them to an aggregate",
    "restored_session_grew": "a restored session grew by later rows, or joined another session",
    "files_put_together": "small files of a table were compacted while its job continued",
    "slot_lost": "a process died with several subtasks in it",
    "queue_lost": "a process died with frames between its subtasks in its queue",
    "sent_inside": "a subtask sent a frame to another subtask of its process",
    "committed_in_task": "a task committed prepared rows of its sink",
    "commit_repeated": "a restored task committed rows again that were committed before",
    "committed_together": "a task committed rows of several checkpoints in one call",
    "acknowledged_together": "one message had acknowledgements of several subtasks",
}
"""Description of each effect: the observation that counts as one occurrence."""


class Coverage:
    """Counts the observed effects of one simulated run."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def saw(self, effect: str) -> None:
        """Counts one more occurrence of an effect. `effect` is a key of `EFFECTS`."""
        assert effect in EFFECTS
        self.counts[effect] += 1


def coverage_table(runs: Counter[str], times: Counter[str]) -> str:
    """Returns a table of all effects: the number of runs in which each was observed, and the total number of
    occurrences.
    """
    width = max(map(len, EFFECTS))
    lines = [f"{'effect':<{width}}{'runs':>9}{'times':>12}  what was seen"]
    lines += [f"{name:<{width}}{runs[name]:>9,}{times[name]:>12,}  {what}" for name, what in EFFECTS.items()]
    return "\n".join(lines)
