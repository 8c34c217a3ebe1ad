"""How long a job bears an outage of storage, and how long it pauses between retries.

The machine uses the pauses, and so do the hosts of coordinator and tasks.
"""

from __future__ import annotations

STORAGE_OUTAGE_MS = 600_000
"""How long a job goes on without storage, unless its configuration says otherwise."""
FIRST_PAUSE_MS = 200
"""The pause after the first failure."""
PAUSE_MS_MAX = 10_000


def pause_ms(first_ms: int, failures: int) -> int:
    """The pause after so many failures in a row: it doubles each time, up to a limit."""
    return min(first_ms << min(failures - 1, 32), max(first_ms, PAUSE_MS_MAX))
