"""`StateOrigin`: where a task of an attempt has its state from. State is taken from the cheapest place that has it."""

from __future__ import annotations

import enum

from tidegate.storage.codec import wire


@wire
class StateOrigin(enum.Enum):
    """The dearest place that a task needed; small parts of it may come from storage all the same."""

    MEMORY = "memory"
    """The task before it in the same process has left it there."""
    LOCAL_COPY = "local copy"
    """Files on the disk of the node."""
    STORAGE = "checkpoint storage"
    """The primary, or the metadata of the checkpoint."""
