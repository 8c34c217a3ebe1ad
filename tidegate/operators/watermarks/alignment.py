"""`WatermarkAlignment`: which sources wait for each other in event time, and how far one may be ahead of the others.

`assign_timestamps` takes it, `WatermarkGenerator` holds it. A source task asks its own generator how far a split is
(`tidegate/actors/task/pipeline/split_alignment.py`), the coordinator says how far the slowest member of the group is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms

Duration: TypeAlias = str | timedelta | int


@dataclass(frozen=True, slots=True)
class WatermarkAlignment:
    """Splits of this source wait for the slowest split of all sources of the job that name the same group.

    As Flink's `withWatermarkAlignment`. A split whose watermark is more than `max_drift` ahead of the lowest watermark
    in the group is not read until the others have come nearer. Tasks say how far they are every `update_interval`,
    and at once when they have to wait. ConfigurationError for a group without a name, and for durations that are none.
    """

    group: str
    max_drift: Duration
    update_interval: Duration = "1s"
    max_drift_ms: int = field(init=False, repr=False, compare=False)
    update_interval_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.group, str) or not self.group:
            raise ConfigurationError(f"WatermarkAlignment: group={self.group!r}: give the group a name")
        drift_ms = parse_duration_ms(self.max_drift, setting="WatermarkAlignment: max_drift")
        interval_ms = parse_duration_ms(self.update_interval, setting="WatermarkAlignment: update_interval")
        if interval_ms == 0:
            raise ConfigurationError("WatermarkAlignment: update_interval must be greater than 0")
        object.__setattr__(self, "max_drift_ms", drift_ms)
        object.__setattr__(self, "update_interval_ms", interval_ms)
