"""`with_same_columns`: streams as `union(by_name=True)` unites them, each with the columns that they have together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from tidegate.api.streams.steps.known_columns import known_schema
from tidegate.api.streams.steps.stream_steps import StreamSteps
from tidegate.operators.functions.projection import SameColumns, united

S = TypeVar("S", bound=StreamSteps)


def with_same_columns(streams: Sequence[S], allow_missing: bool) -> list[S]:
    """A step before each stream whose columns differ. ConfigurationError if they have none together."""
    schemas = [known_schema(stream, "union", f"stream {number}") for number, stream in enumerate(streams, start=1)]
    schema = united(schemas, allow_missing)
    return [
        stream
        if own.equals(schema)
        else stream._then(partial(SameColumns, schema), schema, "union", None, stream._input_parallelism)
        for stream, own in zip(streams, schemas, strict=True)
    ]
