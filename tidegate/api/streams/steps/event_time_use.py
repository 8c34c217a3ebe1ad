"""Holds that steps which go by event time get the times that watermarks were made of.

Event time is a column. A step between `assign_timestamps` and, for example, a window may compute that column anew. Then
rows that were in time would be late, and would be dropped. Rules:

- Polars expressions that give the column other values are refused when a step behind them uses event time. An
  expression of the column alone is tried on a few times: another type or unit of the same time is no change.
- The functions of `map` and `flat_map` are checked as they run (`KeptTime`).
- `process`, `map_batches` and `map_async` make rows of their own. Their times are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.operators.watermarks.watermark_generator import event_times_ms
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import polars as pl

EVENT_TIME = "event time"
"""The kind of the meaning of `assign_timestamps`."""

_TRIED_MS = (0, 1, 999, 1_000, 59_999, 86_399_999, 1_700_000_000_123)


def uses_event_time(step: str, *inputs: Sequence[tuple[StreamNode, object]]) -> None:
    """Note that a step goes by the event time of some streams, each given by its inputs.

    Raises ConfigurationError if a step of expressions has computed that column anew.
    """
    left = [node.maker for stream in inputs for node, _ in stream]
    seen: set[int] = set()
    while left:
        node = left.pop()
        if id(node) in seen or (node.meaning is not None and node.meaning.kind == EVENT_TIME):
            continue
        seen.add(id(node))
        if node.retimes is not None:
            raise _refusal(step, node)
        if node.kept_time is not None:
            node.kept_time.used = True
        left += [upstream.maker for upstream, _ in node.inputs]


def _refusal(step: str, node: StreamNode) -> ConfigurationError:
    return ConfigurationError(
        f"{step}: {node.name!r} (uid {node.uid!r}) computes the column of event time, {node.retimes!r}, anew; "
        f"watermarks are of the former times, so {step} would take rows for late and drop them. Give the new times "
        f"another name, or call assign_timestamps({node.retimes!r}) behind {node.name!r}"
    )


def gives_other_times(expressions: Sequence[pl.Expr | str], column: str, schema: pa.Schema | None) -> bool:
    """Whether expressions that make a column of event time provably give it other times."""
    import polars as pl

    for expression in expressions:
        if isinstance(expression, str) or expression.meta.output_name(raise_if_undetermined=False) != column:
            continue
        if expression.meta.undo_aliases().meta.eq(pl.col(column)):
            return False
        if set(expression.meta.root_names()) != {column}:
            return True
        return _changes(expression, column, pa.int64() if schema is None else schema.field(column).type)
    return False


def _changes(expression: pl.Expr, column: str, data_type: pa.DataType) -> bool:
    """Whether an expression of one column of times changes one of a few times. False where it cannot be tried."""
    import polars as pl

    try:
        tried = pa.array(_TRIED_MS, pa.timestamp("ms")).cast(data_type, safe=False)
        before = pa.record_batch({column: tried})
        frame = pl.from_arrow(pa.table(before))
        assert isinstance(frame, pl.DataFrame)
        after = frame.select(expression).to_arrow().combine_chunks().to_batches()[0]
        return not event_times_ms(before, column).equals(event_times_ms(after, column))
    except (pl.exceptions.PolarsError, pa.ArrowException, ConfigurationError, NotImplementedError):
        return False
