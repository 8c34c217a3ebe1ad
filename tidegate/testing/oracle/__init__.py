"""Checks a simulated job from outside against the invariants of `docs/architecture.md`.

`job_observer.py` observes the job, and forwards its observations to `job_oracle.py` and to the oracles of single
topics.
"""

from __future__ import annotations

_ADVICE = "; this is a bug in tidegate, please report it with the seed and the pipeline"


class InvariantViolated(Exception):
    """Raised if an invariant does not hold. `number` is its number in `docs/architecture.md`.

    The text contains the observation and its place, and the advice to report the bug with the seed of the run.

    The class does not derive from TidegateError. The oracle that watches storage raises it during an effect, and
    drivers convert tidegate's errors to events, after which the job would continue.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"invariant {number}: {message}{_ADVICE}")
        self.number = number
