"""`TaskStatus`: the life of a task.

CREATED    -> READY         its state is restored and its operators are open (`TaskRestored`)
READY      -> RUNNING       every task of the attempt is ready (`TasksStarted`)
RUNNING    -> FINISHING     all input has ended; the operators emit what they have left, as there is room for it
FINISHING  -> END_OF_DATA   the operators have finished; the task still takes part in checkpoints, because what its
                            sinks hold is committed by one
END_OF_DATA -> FINISHED     a final checkpoint is complete, `EndOfPartition` came on all inputs, and all output has left
"""

from __future__ import annotations

import enum


class TaskStatus(enum.Enum):
    """Where a task is in its life."""

    CREATED = "created"
    READY = "ready"
    RUNNING = "running"
    FINISHING = "finishing"
    END_OF_DATA = "end_of_data"
    FINISHED = "finished"
