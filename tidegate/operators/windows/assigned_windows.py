"""Windows of single rows, for what keeps a row once for each of its windows: joins, and the first rows of windows.

Aggregates do not use this: they add a row once to a slice, whatever the number of its windows (`slices.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tidegate.operators.windows.window_specs import Cumulating, Sliding, Times, Tumbling, floored


def ends_of(spec: Tumbling | Sliding | Cumulating, times: Times) -> Iterator[tuple[NDArray[np.int64], Times]]:
    """Rows and the ends of their windows, the last ones first; a row comes once for each of its windows."""
    ends = spec.last_end_ms(times)
    rows = np.arange(len(times), dtype=np.int64)
    yield rows, ends
    if isinstance(spec, Tumbling):
        return
    step_ms = spec.slide_ms if isinstance(spec, Sliding) else spec.step_ms
    while (inside := ends - step_ms > times).any():
        rows, times, ends = rows[inside], times[inside], ends[inside] - step_ms
        yield rows, ends


def starts_of(spec: Tumbling | Sliding | Cumulating, ends: Times) -> Times:
    """The starts of windows with these ends."""
    match spec:
        case Tumbling():
            return spec.bounds_ms(ends - 1)[0]
        case Sliding():
            return ends - spec.size_ms
        case Cumulating():
            return floored(ends - 1, spec.max_ms, 0)
