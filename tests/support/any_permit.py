"""A permit for tests of what follows a decision: it equals each permit, and is for every checkpoint."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

from tidegate.storage.ids import CheckpointId


class _AnyPermit:
    checkpoint_id = ANY

    def __init__(self, checkpoint_id: object = ANY) -> None:
        self.checkpoint_id = checkpoint_id

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def check(self, checkpoint_id: CheckpointId) -> None:
        """It is the right one."""


ANY_PERMIT: Any = _AnyPermit()


def any_permit(checkpoint_id: int) -> Any:
    """A permit for a checkpoint, which says its number and looks at nothing."""
    return _AnyPermit(CheckpointId(checkpoint_id))
