"""Checks a simulated job from outside against the invariants of `docs/architecture.md`.

`job_observer.py` observes the job and passes everything on to `job_oracle.py` and to the oracles of single subjects.
"""

from __future__ import annotations


class InvariantViolated(Exception):
    """An invariant does not hold. `number` is its number in `docs/architecture.md`.

    The class is not one of tidegate's errors. The oracle that watches storage raises it in the middle of an effect, and
    effects turn tidegate's errors into events, after which the job would continue.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"invariant {number}: {message}")
        self.number = number
