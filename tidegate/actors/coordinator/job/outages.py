"""How long the coordinator puts up with an outage of storage, and how long it pauses between attempts."""

from __future__ import annotations

STORAGE_OUTAGE_MS = 600_000
"""For how long a job goes on without storage, where its configuration says nothing else."""
FIRST_PAUSE_MS = 200
PAUSE_MS_MAX = 10_000


def pause_ms(first_ms: int, failures: int) -> int:
    """How long to wait after so many failures in a row: each time twice as long."""
    return min(first_ms << min(failures - 1, 32), max(first_ms, PAUSE_MS_MAX))
