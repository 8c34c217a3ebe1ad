"""The check that a function hands the column of event time on."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest

from tidegate.operators.watermarks.watermark_generator import EventTimeCheck
from tidegate.storage.errors import ConfigurationError


def test_the_hour_that_comes_twice_is_two_moments() -> None:
    """Python takes them for equal, and a row that is moved by an hour would be late."""
    second = dt.datetime(2024, 10, 27, 1, 30, tzinfo=dt.UTC).astimezone(ZoneInfo("Europe/Berlin"))
    checked = EventTimeCheck("at", used=True).results(lambda row: [row, {"at": row["at"] + dt.timedelta(0)}])(
        {"at": second}
    )
    assert next(iter(checked)) == {"at": second}
    with pytest.raises(ConfigurationError, match="has changed the column of event time, 'at'"):
        next(iter(checked))
