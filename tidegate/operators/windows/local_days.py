"""When the days of a time zone begin, in milliseconds since 1970. Where clocks change, a day is shorter or longer.

Midnight may come twice: then the first one counts. It may not come at all: then the day begins when the clocks
change. So days follow each other without gaps, and each moment is in one.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import NDArray

from tidegate.storage.errors import ConfigurationError

DAY_MS = 86_400_000

_EPOCH = datetime(1970, 1, 1)
_CACHED_DAYS = 4_096


def day_starts_around(
    times: NDArray[np.int64], timezone: str, into_day_ms: int, days: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Local days (numbered from 1970-01-01) and when they begin: for each time its day, and `days` days around it.

    Days begin `into_day_ms` after midnight, as clocks show it. Raises ConfigurationError outside of the years 1 to
    9999, which calendars have.
    """
    utc_days = np.unique(times // DAY_MS)
    # Local time is less than a day from UTC, and a start lies up to a day after midnight.
    around = np.arange(-days - 2, days + 2)
    known = np.unique((utc_days[:, None] + around).ravel())
    starts = np.array([_day_start(timezone, day, into_day_ms) for day in known.tolist()], dtype=np.int64)
    return known, starts


@lru_cache(maxsize=_CACHED_DAYS)
def _day_start(timezone: str, day: int, into_day_ms: int) -> int:
    try:
        wall = _EPOCH + timedelta(days=day, milliseconds=into_day_ms)
        offset = wall.replace(tzinfo=ZoneInfo(timezone)).utcoffset()
    except OverflowError as error:
        raise ConfigurationError(
            f"day {day} since 1970 is outside of the years 1 to 9999, and has no date in {timezone}; filter such rows "
            "before the window"
        ) from error
    assert offset is not None, f"{timezone} has no offset"
    return day * DAY_MS + into_day_ms - offset // timedelta(milliseconds=1)
