"""Checkpoints at rest: find, verify, read and delete them, and decide whether a failed job restarts.

`tidegate.recovery` is what people call after a crash, from a script or through the command line in `command.py`.
It reads storage only; nothing here needs a running job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from tidegate.recovery.state_catalog import StateInfo
    from tidegate.recovery.state_reader import read_state, read_state_batches
else:
    from tidegate.lazy_names import lazy_names

    _HOME_OF = {
        "CheckpointSummary": "checkpoints",
        "RestartStrategy": "restart_strategy",
        "StateInfo": "state_catalog",
        "VerificationReport": "checkpoints",
        "delete": "deletion",
        "inspect": "checkpoints",
        "latest": "checkpoints",
        "list_checkpoints": "checkpoints",
        "load_operator_state": "checkpoints",
        "read_state": "state_reader",
        "read_state_batches": "state_reader",
        "verify": "checkpoints",
    }
    __getattr__, __dir__ = lazy_names(__name__, _HOME_OF)

__all__ = [
    "CheckpointSummary",
    "RestartStrategy",
    "StateInfo",
    "VerificationReport",
    "delete",
    "inspect",
    "latest",
    "list_checkpoints",
    "load_operator_state",
    "read_state",
    "read_state_batches",
    "verify",
]
