"""Labels of metrics on Ray: any name of a job or a step can be one."""

from __future__ import annotations

import pytest

from tidegate.actors.ray.metrics import labels, set_gauge
from tidegate.actors.runtimes import metric_registry as m


@pytest.mark.parametrize("name", ["Zählung", "ключ", "price < 10 …", "🦆"])
def test_a_name_beyond_ascii_is_a_label(name: str) -> None:
    """Ray raises for it, and the task of such a step would fail for ever: it is escaped, and stays itself."""
    set_gauge(m.STATUS, 1, {"job": name, "status": "running"})
    told = labels({"job": name})["job"]
    assert told.isascii()
    assert told.encode().decode("unicode_escape") == name


def test_a_name_in_ascii_is_left_alone() -> None:
    """So that what people ask Prometheus for is what they wrote."""
    assert labels({"job": "it's 5 < 6", "vertex": ""}) == {"job": "it's 5 < 6", "vertex": ""}
