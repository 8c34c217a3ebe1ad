"""Rules for copies on local disks, broken on purpose: patches that hold while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.local_copies import LocalCopies, _LocalCopy

Patch = Callable[[], AbstractContextManager[Any]]


def _all_stays(self: LocalCopies, checkpoint_id: CheckpointId, still_needed: Collection[str] = ()) -> None:
    """Breaks: copies that are no longer needed are deleted."""


def _is_right(self: _LocalCopy) -> None:
    """Breaks: a copy is verified before its first byte is used."""


COPY_PATCHES: dict[str, tuple[int, Patch]] = {
    "copies: those of a checkpoint that was given up stay": (
        5, lambda: patch.object(LocalCopies, "aborted", _all_stays)
    ),
    "copies: those from before a complete checkpoint stay": (
        5, lambda: patch.object(LocalCopies, "confirmed", _all_stays)
    ),
    "copies: nobody looks whether they are right": (6, lambda: patch.object(_LocalCopy, "_verify", _is_right)),
}  # fmt: skip
"""Each rule with the invariant that it belongs to."""

KEPT = {
    "copies": "node",
    "faults": "tasks",
    "survivors": "read",
    "hooks": "none",
    "interval_ms": 60,
    "rows": 80,
    "ending": "finish",
    "retained": 1,
}
COPY_FIXED: Mapping[str, Mapping[str, Hashable]] = dict.fromkeys(COPY_PATCHES, KEPT)
"""Fixed values with which tasks are often restored from copies: survivors do not rewind in memory."""
