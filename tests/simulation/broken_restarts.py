"""Restart strategies that break one rule: what they count, how long a restart waits, and when there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tidegate.actors.coordinator.failover import Restarts
from tidegate.recovery.restart_strategy import ExponentialDelay, FailureHistory, FailureRate

Patch = Callable[[], AbstractContextManager[Any]]


def _replaced(owner: type, method: str, by: Any) -> Patch:
    assert hasattr(owner, method)
    return lambda: patch.object(owner, method, by)


def _unbounded(self: ExponentialDelay, failures: FailureHistory, chance: float) -> int:
    return int(self.initial_ms * self.multiplier**failures.in_a_row * 1_000)


def _never_reset(self: ExponentialDelay, before: FailureHistory, at_ms: int, ran_ms: int | None) -> FailureHistory:
    return FailureHistory(before.in_a_row + 1)


def _all_times(self: FailureRate, before: FailureHistory, at_ms: int, ran_ms: int | None) -> FailureHistory:
    return FailureHistory(before.in_a_row + 1, (*before.times_ms, at_ms))


RESTART_PATCHES: dict[str, tuple[int, Patch]] = {
    "restarts: a wait grows without a bound": (7, _replaced(ExponentialDelay, "decide", _unbounded)),
    "restarts: back-off does not grow": (7, _replaced(ExponentialDelay, "backoff_ms", lambda self, _: self.initial_ms)),
    "restarts: back-off is never reset": (7, _replaced(ExponentialDelay, "count", _never_reset)),
    "restarts: chance goes too far": (
        7,
        _replaced(ExponentialDelay, "decide", lambda self, failures, chance: int(chance * self.maximum_ms)),
    ),
    "restarts: the interval of a rate does not slide": (7, _replaced(FailureRate, "count", _all_times)),
    "restarts: a rate never gives up": (7, _replaced(FailureRate, "decide", lambda self, *_: self.delay_ms)),
    "restarts: nobody knows since when a job runs": (7, _replaced(Restarts, "runs", lambda self, at_ms: None)),
}
"""Every such break: its invariant, and the patch."""

_EXPONENTIAL = {"restart": "exponential-delay", "faults": "tasks", "ending": "finish"}
_RATE = {"restart": "failure-rate", "faults": "tasks", "ending": "fail"}
RESTART_FIXED: Mapping[str, Mapping[str, str | int]] = {
    rule: _RATE if "rate" in rule else _EXPONENTIAL for rule in RESTART_PATCHES
}
"""Fixed values of the scenarios for these breaks: a restart strategy shows only in a job that has it and fails."""
