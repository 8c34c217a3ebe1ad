"""Settings of the whole suite: Hypothesis gives the same examples in every run, quick tests go first."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("tidegate", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("tidegate")

_TESTS = Path(__file__).parent

# Rooms whose tests start Spark or Ray; every other room comes before these.
_LATE_ROOMS = {"spark_bridge": 1, "cluster": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests by the cost of their room; within a room they keep their order."""
    items.sort(key=_room_rank)


def _room_rank(item: pytest.Item) -> int:
    room = item.path.relative_to(_TESTS).parts[0] if item.path.is_relative_to(_TESTS) else ""
    return _LATE_ROOMS.get(room, 0)
