"""`InvariantViolated`: what an oracle raises when a job has broken a rule."""

from __future__ import annotations


class InvariantViolated(Exception):
    """An invariant does not hold; `number` is its number in the architecture.

    It is none of the errors of tidegate: what watches storage raises it in the middle of an effect, and effects turn
    those errors into events, from which the job would go on.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"invariant {number}: {message}")
        self.number = number
