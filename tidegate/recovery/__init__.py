"""Checkpoints at rest: find, verify, read and delete them, and decide whether a failed job restarts.

`tidegate.recovery` is what people call after a crash, from a script or through the command line in `command.py`.
It reads storage only; nothing here needs a running job.
"""

from __future__ import annotations

from tidegate.recovery.checkpoints import (
    CheckpointSummary,
    VerificationReport,
    inspect,
    latest,
    list_checkpoints,
    load_operator_state,
    verify,
)
from tidegate.recovery.deletion import delete
from tidegate.recovery.restart_strategy import RestartStrategy

__all__ = [
    "CheckpointSummary",
    "RestartStrategy",
    "VerificationReport",
    "delete",
    "inspect",
    "latest",
    "list_checkpoints",
    "load_operator_state",
    "verify",
]
