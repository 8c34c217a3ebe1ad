"""Which rows of the feature map a run has exercised: counted by what was seen to happen, not by what was set."""

from __future__ import annotations

from collections import Counter

ROWS = {
    "C1": "a periodic checkpoint was triggered",
    "C2": "a request had to wait, or was refused",
    "C3": "a checkpoint completed with tasks in its plan that had finished before it",
    "C4": "an acknowledgement came late or twice",
    "C5": "a checkpoint was aborted while tasks were busy with it",
    "C6": "a checkpoint failed by a decline or a timeout",
    "C7": "a checkpoint completed, was committed and took an older one's place",
    "C8": "a savepoint completed, or checkpoints were retained or deleted as the job ended",
    "C9": "a master hook's state is in a completed checkpoint",
    "C10": "the coordinator's statistics agree with what was seen",
    "T1": "a task's snapshot was acknowledged",
    "T2": "an aligned barrier blocked a channel",
    "T3": "at-least-once: a channel went on after its barrier, in a completed checkpoint",
    "T4": "in-flight data of a completed checkpoint was restored",
    "T5": "a barrier with a timeout became unaligned",
    "T6": "a snapshot was taken while an older checkpoint was in progress",
    "T7": "the loser between completion and cancellation discarded its state",
    "T8": "a stateless task acknowledged",
    "T9": "a task finished",
    "T10": "a checkpoint with finished tasks was restored",
    "T11": "a job was stopped with a savepoint",
    "S5": "keyed state in several layers was restored",
    "S10": "a completed checkpoint refers to files of one that was deleted",
}
"""What counts for each row."""


class Coverage:
    """Counts of one run, or, added up, of many."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def saw(self, row: str) -> None:
        """It happened once more."""
        assert row in ROWS
        self.counts[row] += 1

    @property
    def missing(self) -> tuple[str, ...]:
        """Rows that never happened."""
        return tuple(row for row in ROWS if not self.counts[row])


def coverage_table(runs: Counter[str], times: Counter[str]) -> str:
    """A table for people: for each row in how many runs it happened, and how many times in all of them."""
    lines = [f"{'row':<5}{'runs':>9}{'times':>12}  what was seen"]
    lines += [f"{row:<5}{runs[row]:>9,}{times[row]:>12,}  {what}" for row, what in ROWS.items()]
    return "\n".join(lines)
