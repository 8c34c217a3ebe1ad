"""`HeartbeatSettings`: when a process of a job that lives and does not answer counts as hung."""

from __future__ import annotations

from dataclasses import dataclass

INTERVAL_MS = 10_000
TIMEOUT_MS = 50_000
TICK_MS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """`interval_ms` between two questions; `timeout_ms` without an answer; `call_timeout_ms` in one call, if any."""

    interval_ms: int = INTERVAL_MS
    timeout_ms: int = TIMEOUT_MS
    call_timeout_ms: int | None = None

    @property
    def tick_ms(self) -> int:
        """How often the monitor looks."""
        return max(1, min(TICK_MS_MAX, self.interval_ms // 2))
