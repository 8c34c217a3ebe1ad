"""`Recovery`: what the last recovery of a job took, from the failure until all tasks were ready, and its parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recovery:
    """Times in ms, which add up. `deployment_ms`: from the failure until the next attempt was given to processes.

    `restore_ms`: from then until the last of its tasks was ready.
    """

    deployment_ms: int
    restore_ms: int

    @property
    def total_ms(self) -> int:
        """From the failure until all tasks were ready."""
        return self.deployment_ms + self.restore_ms

    @staticmethod
    def between(failed_at_ms: int, deployed_at_ms: int, ready_at_ms: int) -> Recovery:
        """Of three moments by clocks of several processes, none of which may lie before the one that led to it."""
        deployed_at_ms = max(failed_at_ms, deployed_at_ms)
        return Recovery(deployed_at_ms - failed_at_ms, max(deployed_at_ms, ready_at_ms) - deployed_at_ms)
