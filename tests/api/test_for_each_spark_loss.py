"""A function for each checkpoint whose Spark is lost meanwhile, without Spark."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fake_spark import fake_context

from tidegate import spark_bridge
from tidegate.api.checkpoint_calls import calling_with_spark
from tidegate.spark_bridge import SparkLostError
from tidegate.spark_bridge.spark_calls import EXECUTOR_TIMEOUT

FOR_EVER = threading.Event()
"""Nobody sets it."""


def test_a_call_whose_executors_are_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Spark action would never end. The error says which call it was, and it is retried like any error."""
    monkeypatch.setattr(spark_bridge, "files_to_dataframe", lambda *arguments: "the rows", raising=False)
    rows: Any = SimpleNamespace(store=SimpleNamespace(url="memory://rows"), info=SimpleNamespace(arrow_schema=None))
    commit: Any = SimpleNamespace(files=(), number=5)
    calls: list[tuple[Any, int]] = []

    def count(df: Any, checkpoint_id: int) -> None:
        calls.append((df, checkpoint_id))
        FOR_EVER.wait()

    with fake_context() as context:
        context.settings[EXECUTOR_TIMEOUT] = "5ms"
        context.executors = 0
        spark: Any = SimpleNamespace(sparkContext=context, _jsparkSession="its session")
        with pytest.raises(SparkLostError, match="checkpoint 5 was given up: Spark has had no executor"):
            calling_with_spark(spark)(count, rows, commit, "checkpoint 5")
    assert calls == [("the rows", 5)]
