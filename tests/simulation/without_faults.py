"""Calls of a simulated store that no fault meets: what a broken protocol does in secret must happen."""

from __future__ import annotations

from typing import Any


def reliably(store: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a store while its disk never fails."""
    disk = store.disk
    reliable, disk.reliable = disk.reliable, True
    try:
        return getattr(store, method)(*arguments)
    finally:
        disk.reliable = reliable
