"""`summary`: minimum, maximum, mean and percentiles of some numbers, as Flink's REST API has them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}


def summary(values: Iterable[int]) -> dict[str, Any]:
    """Of these numbers. Without any, the percentiles are the text NaN, and all else is 0."""
    numbers = sorted(values)
    if not numbers:
        return {"min": 0, "max": 0, "avg": 0, **dict.fromkeys(_PERCENTILES, "NaN")}
    return {
        "min": numbers[0],
        "max": numbers[-1],
        "avg": sum(numbers) // len(numbers),
        **{name: _percentile(numbers, part) for name, part in _PERCENTILES.items()},
    }


def _percentile(numbers: Sequence[int], part: float) -> float:
    """Between the two numbers beside the place, as far apart as it is (the default of Apache Commons Math)."""
    place = part * (len(numbers) + 1)
    if place < 1:
        return float(numbers[0])
    if place >= len(numbers):
        return float(numbers[-1])
    below = math.floor(place)
    return numbers[below - 1] + (place - below) * (numbers[below] - numbers[below - 1])
