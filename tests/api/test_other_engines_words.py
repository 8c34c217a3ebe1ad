"""Programs that are written with the words of other engines get the word that it has here, when they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from local_jobs import local

import tidegate as tg


class Element(tg.ProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        yield value


class OfBytewax(tg.ProcessFunction):
    def process(self, key: str, context: Any, elements: Any) -> Any:  # type: ignore[override]
        yield {}


class Timestamp(tg.ProcessFunction):
    def process(self, row: Any, ctx: Any) -> Any:
        yield {"at": ctx.timestamp()}


class Service(tg.ProcessFunction):
    def process(self, row: Any, ctx: Any) -> Any:
        ctx.timer_service().register_event_time_timer(1)


class GetState(tg.ProcessFunction):
    def open(self, context: Any) -> None:
        self.count = context.get_state("count")

    def process(self, row: Any, context: Any) -> Any:
        yield row


class Nothing(tg.ProcessFunction):
    pass


class OnTimer(tg.ProcessFunction):
    def process(self, row: Any, context: Any) -> Any:
        yield row

    def on_timer(self, timestamp: int, context: Any, out: Any) -> Any:  # type: ignore[override]
        yield {}


class Both(tg.CoProcessFunction):
    def process_element1(self, value: Any, ctx: Any) -> Any:
        yield value


class Windows(tg.ProcessWindowFunction):
    def process(self, key: Any, context: Any, elements: Any) -> Any:  # type: ignore[override]
        return {}


class Right(tg.ProcessFunction):
    """All that a function may do, also with times of its own."""

    def open(self, context: tg.ProcessContext) -> None:
        self.seen = context.state(tg.ValueState("seen", int))

    def process(self, row: Any, context: tg.ProcessContext) -> Any:
        context.timer_service.register_event_time_timer((context.timestamp or 0) + 1)
        yield {"at": row["at"].timestamp(), "key": context.current_key["k"]}

    def on_timer(self, timestamp: int, context: tg.ProcessContext, unused: int = 0) -> Any:
        yield {}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (Element(), r"Element defines process_element; tidegate's process functions implement process\(row, context\)"),
        (OfBytewax(), r"OfBytewax.process\(key, context, elements\): tidegate calls process\(row, context\)"),
        (Timestamp(), r"Timestamp.process: ctx.timestamp is a value, not a method"),
        (Service(), r"ctx.timer_service is a value, not a method"),
        (GetState(), r"GetState.open: context.get_state: there is no such method; bind the state in open"),
        (Nothing(), r"Nothing needs a method process\(self, row, context\)"),
        (OnTimer(), r"tidegate calls on_timer\(timestamp, context\)"),
    ],
)
def test_process_functions_of_other_engines(function: tg.ProcessFunction, words: str) -> None:
    """With keys and without them, before any row comes."""
    with local() as env:
        rows = env.from_rows([{"k": 1}])
        with pytest.raises(tg.ConfigurationError, match=words):
            rows.key_by("k").process(function)
        with pytest.raises(tg.ConfigurationError, match=words):
            rows.process(function)


def test_functions_of_two_streams_and_of_windows() -> None:
    """They are checked as well; a function that is right passes."""
    with local() as env:
        rows = env.from_rows([{"k": 1, "t": 1}], timestamp="t")
        with pytest.raises(tg.ConfigurationError, match=r"Both defines process_element1; .* process1\(row, context\)"):
            rows.connect(rows).key_by("k", "k").process(Both())
        with pytest.raises(tg.ConfigurationError, match=r"tidegate calls process\(rows, context\)"):
            rows.key_by("k").window(tg.Tumbling("1s")).process(Windows())
        rows.key_by("k").process(Right())


@pytest.mark.parametrize(
    ("of", "name", "ours"),
    [
        (lambda env: env, "from_collection", r"from_rows\(rows\)"),
        (lambda env: env.from_rows([1]), "groupBy", r"key_by"),
        (lambda env: env.from_rows([1]), "withColumn", r"with_columns"),
        (lambda env: env.from_rows([1]).key_by("value"), "agg", r"aggregate"),
        (lambda env: env.from_rows([1]).key_by("value"), "join", r"join of a stream: use it before key_by"),
        (lambda env: env.from_rows([1]).key_by("value").window(tg.Count(2)), "reduce", r"apply\(fn\)"),
        (
            lambda env: env.from_rows([1]).key_by("value").window(tg.Count(2)),
            "select",
            r"use it before window, or on a",
        ),
    ],
)
def test_methods_of_other_engines(of: Callable[[Any], Any], name: str, ours: str) -> None:
    """The error is Python's own, with the name that the method has here."""
    with local() as env:
        stream = of(env)
        assert not hasattr(stream, name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; in tidegate it is .*{ours}"):
            getattr(stream, name)
        with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
            _ = stream.nonsense
