"""Stored checkpoints: finds, verifies, reads and deletes them, and decides whether a failed job restarts.

`tidegate.recovery` is for users after a crash, in a script or through the command line (`tidegate/cli/`).

It needs only storage, and no running job. Functions that also need the meaning of events, keys or Spark's types are in
`tidegate.recovery.state_processor`; they can be imported from here as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.recovery.checkpoints import (
        CheckpointSummary,
        VerificationReport,
        latest,
        list_checkpoints,
        load_operator_state,
        verify,
    )
    from tidegate.recovery.deletion import delete
    from tidegate.recovery.differences import CheckpointDiff, KeyChanges, OperatorDiff, SplitDiff, StateDiff, diff
    from tidegate.recovery.inspection import CheckpointReport, OperatorReport, StateInfo, inspect
    from tidegate.recovery.restart_strategy import RestartStrategy
    from tidegate.recovery.state_processor.explanations import Explanation, Step, explain, history
    from tidegate.recovery.state_processor.job_states import JobState, job_state
    from tidegate.recovery.state_processor.relocation import relocate
    from tidegate.recovery.state_processor.savepoint_writer import SavepointWriter
    from tidegate.recovery.state_processor.spark_state import read_state
    from tidegate.recovery.state_reader import read_state_batches
else:
    from tidegate.lazy_names import lazy_names

    _HOME_OF = {
        "CheckpointDiff": "differences",
        "CheckpointReport": "inspection",
        "CheckpointSummary": "checkpoints",
        "Explanation": "state_processor.explanations",
        "JobState": "state_processor.job_states",
        "KeyChanges": "differences",
        "OperatorDiff": "differences",
        "OperatorReport": "inspection",
        "RestartStrategy": "restart_strategy",
        "SavepointWriter": "state_processor.savepoint_writer",
        "SplitDiff": "differences",
        "StateDiff": "differences",
        "StateInfo": "inspection",
        "Step": "state_processor.explanations",
        "VerificationReport": "checkpoints",
        "delete": "deletion",
        "diff": "differences",
        "explain": "state_processor.explanations",
        "history": "state_processor.explanations",
        "inspect": "inspection",
        "job_state": "state_processor.job_states",
        "latest": "checkpoints",
        "list_checkpoints": "checkpoints",
        "load_operator_state": "checkpoints",
        "read_state": "state_processor.spark_state",
        "read_state_batches": "state_reader",
        "relocate": "state_processor.relocation",
        "verify": "checkpoints",
    }
    __getattr__, __dir__ = lazy_names(__name__, _HOME_OF)

__all__ = [
    "CheckpointDiff",
    "CheckpointReport",
    "CheckpointSummary",
    "Explanation",
    "JobState",
    "KeyChanges",
    "OperatorDiff",
    "OperatorReport",
    "RestartStrategy",
    "SavepointWriter",
    "SplitDiff",
    "StateDiff",
    "StateInfo",
    "Step",
    "VerificationReport",
    "delete",
    "diff",
    "explain",
    "history",
    "inspect",
    "job_state",
    "latest",
    "list_checkpoints",
    "load_operator_state",
    "read_state",
    "read_state_batches",
    "relocate",
    "verify",
]
