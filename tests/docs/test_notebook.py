"""The notebook runs from top to bottom, and what it shows is right."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest

NOTEBOOK = json.loads((Path(__file__).parents[2] / "examples" / "quickstart.ipynb").read_text())


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that there are when every cell has been run, in their order."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    return names


@pytest.mark.slow
def test_each_cell_shows_what_is_right(shown: dict[str, Any]) -> None:
    """Though a function fails on the way: each order is counted once."""
    orders = shown["orders"]
    count, turnover = pl.len().cast(pl.Int64).alias("orders"), pl.col("price").sum().alias("turnover")
    assert shown["shop_totals"].equals(orders.group_by("shop").agg(count, turnover).sort("shop"))
    dear = orders.filter(pl.col("price") >= 80)
    assert shown["dear_orders"].equals(dear.group_by("shop").agg(count, turnover).sort("shop"))
    assert [row["order"] for row in shown["jump_rows"]] == [2]
    assert (shown["status"], shown["restarts"]) == ("finished", 1)
    assert shown["checkpoints"]


def test_no_output_is_committed() -> None:
    """What a cell has shown on somebody's machine is noise in every diff; names of cells are given once."""
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    names = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(names)) == len(names)
