"""`InvariantViolated`: what an oracle raises when a job has broken a rule."""

from __future__ import annotations

from tidegate.storage.errors import TidegateError


class InvariantViolated(TidegateError):
    """An invariant does not hold; `number` is its number in the architecture."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"invariant {number}: {message}")
        self.number = number
