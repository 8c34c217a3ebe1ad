"""`StateOrigin`: where a task of an attempt got its state from.

A restore reads each piece of state from the cheapest place that has it.
"""

from __future__ import annotations

import enum

from tidegate.storage.codec import wire


@wire
class StateOrigin(enum.Enum):
    """The most expensive place that the task needed. Small parts may come from storage in any case."""

    MEMORY = "memory"
    """The previous task in the same process left it there."""
    LOCAL_COPY = "local copy"
    """Files on the disk of the node."""
    STORAGE = "checkpoint storage"
    """The primary copy in checkpoint storage, or the checkpoint's metadata."""
