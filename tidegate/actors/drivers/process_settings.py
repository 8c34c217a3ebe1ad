"""`ProcessSettings`: what a job keeps beside the processes of its tasks, and how long it waits for room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

SLOT_REQUEST_TIMEOUT_MS = 300_000

STANDBY_DELAY_MS, AUTO_STANDBY_DELAY_MS = 3_000, 10_000
"""From a deployment on: later, so that no spare process takes the processor from the tasks that start."""

Standbys: TypeAlias = int | Literal["auto", "warm"]
"""A number of spare processes; as many as there is room for; or that, and one more for each keyed task."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """`standbys`: None leaves them to the runtime. `slot_request_timeout_ms`: how long an attempt waits for room."""

    standbys: Standbys | None = None
    slot_request_timeout_ms: int = SLOT_REQUEST_TIMEOUT_MS
