"""`with_same_columns`: streams as `union(by_name=True)` unites them, each with the columns that they have together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from tidegate.actors.operators.batches.same_columns import SameColumns, united
from tidegate.api.streams.steps.stream_steps import StreamSteps
from tidegate.storage.errors import ConfigurationError

S = TypeVar("S", bound=StreamSteps)


def with_same_columns(streams: Sequence[S], allow_missing: bool) -> list[S]:
    """A step before each stream whose columns differ. ConfigurationError if they have none together."""
    schemas = [stream.schema for stream in streams if stream.schema is not None]
    if len(schemas) < len(streams):
        number = [stream.schema for stream in streams].index(None) + 1
        raise ConfigurationError(
            f"union: the columns of stream {number} are not known yet; give schema= to the map, flat_map or "
            "map_batches before it"
        )
    schema = united(schemas, allow_missing)
    return [
        stream
        if own.equals(schema)
        else stream._then(partial(SameColumns, schema), schema, "union", None, stream.input_parallelism)
        for stream, own in zip(streams, schemas, strict=True)
    ]
