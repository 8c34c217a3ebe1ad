"""The example with a model as an operator: it learns something, each flight is scored once, and its checks can fail."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import tidegate as tg

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> Any:
    """The module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("delay_model")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def flights(example: Any) -> pl.DataFrame:
    """Every twentieth flight."""
    found: pl.DataFrame = example.flights().gather_every(20)
    return found


def score(example: Any, model: Any, rows: pl.DataFrame, folder: Path) -> tg.Job:
    """Run the example on some flights, in this process."""
    options = tg.DataPlaneOptions(source_rows_max=2_000)
    with tg.StreamEnvironment.local(2, options=options) as env:
        job: tg.Job = example.run(env, rows, model, folder)
        return job


def test_each_flight_is_scored_once_though_the_model_fails(
    example: Any, flights: pl.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what was learnt from other flights, with fewer mistakes than without; the model is loaded once a subtask."""
    loaded = []
    load = example.Model.load
    monkeypatch.setattr(example.Model, "load", lambda path: loaded.append(path) or load(path))
    past, future = flights.filter(pl.col("month") <= 6), flights.filter(pl.col("month") > 6)
    model = example.Model.train(past)
    assert score(example, model, future, tmp_path).progress().restarts == 1
    assert 3 <= len(loaded) <= 4, "two subtasks, and what has restarted"
    wrong = (model.predict(future) > 0.5) != future["late"].to_numpy()
    assert wrong.mean() < future["late"].mean() * 0.6


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda rows: rows.vstack(rows[:1]), r"the table has 301 rows, 300 of them different, of 300"),
        (lambda rows: rows.with_columns(chance=pl.col("chance") + 1e-6), "other chances than a batch"),
    ],
)
def test_the_check_of_the_example_can_fail(
    example: Any, flights: pl.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: Any, message: str
) -> None:
    """A row that is there twice, and another chance, do not pass."""
    some = flights[:300]
    model = example.Model.train(some)
    shown = tg.OutputTable.to_polars
    monkeypatch.setattr(tg.OutputTable, "to_polars", lambda table: breaks(shown(table)))
    with pytest.raises(SystemExit, match=message):
        score(example, model, some, tmp_path)
