"""`StreamCalls`: the step of a stream whose results come from outside, such as a service. `Stream` inherits it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Self, Unpack

from tidegate.api.streams.steps.meanings import meaning
from tidegate.api.streams.steps.slot_options import SlotOptions
from tidegate.api.streams.steps.stream_steps import StreamSteps
from tidegate.operators.functions.async_map import AsyncFunction, AsyncMap, rows_of_a_turn_max
from tidegate.operators.functions.failing_rows import error_tag
from tidegate.protocol.side_outputs import OutputTag
from tidegate.storage.schemas.columns_text import columns_text
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema, returned_schema
from tidegate.storage.units import parse_duration_ms


class StreamCalls(StreamSteps):
    """A stream whose rows can be asked about elsewhere."""

    def map_async(
        self,
        fn: Callable[[Any], Any],
        *,
        schema: SchemaLike | None = None,
        capacity: int = 100,
        timeout: str | timedelta | int = "5s",
        ordered: bool = True,
        retries: int = 0,
        batch_size: int | None = None,
        batch_timeout: str | timedelta | int | None = None,
        errors_to: OutputTag | str | None = None,
        name: str = "map_async",
        uid: str | None = None,
        parallelism: int | None = None,
        **slot: Unpack[SlotOptions],
    ) -> Self:
        """Map rows by calls that wait: of a service, a database, a model elsewhere. `fn` is an `async def`.

        It gets a row as a dict, and returns the new row, or None for none; with `batch_size` it gets Arrow batches of
        at most so many rows, and returns what `map_batches` may return. It may also return a future of
        `concurrent.futures`. Each subtask has up to `capacity` calls under way, and takes no more rows then.

        With `batch_timeout` rows wait that long at most, by the clock, until a batch has `batch_size` rows. Without it
        a batch has the rows that have come.

        With `ordered=False` results go on as they come, but none overtakes a watermark. A call that raises, or takes
        longer than `timeout`, is made again up to `retries` times. After that the job fails or, with `errors_to`, its
        rows go to that side output (see `map`). Rows under way are in checkpoints, and asked for again after a restore:
        results are exactly once, calls at least once. See `docs/batches.md`.
        """
        schema = as_schema(schema, f"{name}(schema=)") or returned_schema(fn)
        timeout_ms = parse_duration_ms(timeout, setting="timeout")
        wait_ms = None if batch_timeout is None else parse_duration_ms(batch_timeout, setting="batch_timeout")
        function = AsyncFunction(fn, capacity, timeout_ms, retries, batch_size, wait_ms)
        function.check(name)
        tag = None if errors_to is None else error_tag(errors_to, self.schema, name)
        return self._then(
            partial(AsyncMap, function, schema, ordered, tag),
            schema,
            name,
            uid,
            parallelism,
            (1, rows_of_a_turn_max(function)),
            slot,
            side_outputs=() if tag is None else (tag,),
            calls=function,
            meaning=meaning(
                "calls under way",
                {"rows": None if self.schema is None else columns_text(self.schema)},
            ),
        )
