"""`tidegate.testing.Faults`: each field is checked as it is built."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

import tidegate as tg
from tidegate.testing import Faults
from tidegate.testing.world.faults import FAULT_KINDS

_NO_NUMBERS: tuple[object, ...] = (None, True, "0.1", [1])
_COUNT = "give a whole number from 0 up", (-1, 1.5, *_NO_NUMBERS)
_DURATION = "", (None, "soon", -1, 1.5, True)

WRONG: dict[str, tuple[str, tuple[object, ...]]] = {
    **dict.fromkeys(FAULT_KINDS, ("give a probability, a number from 0 to 1", (-0.1, 1.1, float("nan"), *_NO_NUMBERS))),
    "cut_for": ("give a range such as '0ms..2s'", (None, 5, b"0ms..2s")),
    "delay": ("give a range such as '0ms..2s'", (None, 5, b"0ms..2s")),
    "outage": ("give a range such as '0ms..2s', or None", (5, True)),
    "slow_by": _DURATION,
    "duration": _DURATION,
    "slow_copies": ("", ("soon", -1, True)),
    "heartbeats": ("", ("soon", -1, True)),
    "clock": ("", ("soon", -1, True)),
    "nodes_max": _COUNT,
    "crashes_max": _COUNT,
    "coordinator_crashes_max": _COUNT,
    "faults_max": ("give a whole number from 0 up, or None", (-1, 1.5, True, "3")),
}


@pytest.mark.parametrize("field", [field.name for field in fields(Faults)])
def test_a_field_is_checked_as_it_is_built(field: str) -> None:
    """The error names the field, and the value or what is allowed."""
    allowed, wrong = WRONG[field]
    for value in wrong:
        text = f"Faults({field}={value!r}): {allowed}" if allowed else f"Faults({field}): "
        with pytest.raises(tg.ConfigurationError, match=f"^{re.escape(text)}"):
            Faults(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["delay", "cut_for", "outage"])
def test_a_range_has_its_shorter_time_first(field: str) -> None:
    """The other way round is refused, as is one time alone or a unit that is unknown."""
    for value, why in (("3s..1s", "give the shorter time first"), ("3s", "write a range"), ("1x..3x", "unknown unit")):
        with pytest.raises(tg.ConfigurationError, match=rf"^Faults\({field}.*{why}"):
            Faults(**{field: value})  # type: ignore[arg-type]


def test_a_process_hangs_only_where_that_is_noticed() -> None:
    """Without heartbeats a run would never end."""
    with pytest.raises(tg.ConfigurationError, match="never noticed without heartbeats"):
        Faults(hang=0.1)
    assert Faults(hang=0.1, heartbeats="2s").silence_ms == 2_000
