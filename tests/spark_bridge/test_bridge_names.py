"""What `tidegate.spark_bridge` offers is there, though nothing of it is imported before somebody asks for it."""

from __future__ import annotations

import pytest

from tidegate import spark_bridge


@pytest.mark.parametrize("name", spark_bridge.__all__)
def test_a_name_is_found_where_it_is_said_to_be(name: str) -> None:
    """Each name leads to something of that name in a module of the bridge, or of the source that reads staged files."""
    if name == "RayDPSession":
        pytest.importorskip("raydp", reason="RayDP is not installed: it takes no PySpark 4")
    found = getattr(spark_bridge, name)
    assert found.__name__ == name
    assert found.__module__.startswith(("tidegate.spark_bridge.", "tidegate.connectors.staged_parquet"))


def test_other_names_are_refused() -> None:
    """As those of any module."""
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = spark_bridge.nothing
