"""`Projection`: the columns that polars expressions make of a batch. `Select` and `WithColumns` compute with it.

Rules:

- Polars is given the columns that expressions read, and no others: strings cost a copy on the way in, and another on
  the way out.
- An expression that only names columns copies them, under any name, as they are. Their types are those that polars
  would give them; a column to which polars would give another type is computed.
- Without rows or with them the columns and types are the same.
- A column that polars cannot hold is copied, and no expression can read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from tidegate.operators.operator import Columns
from tidegate.operators.output_schema import FromPolars, empty_frame, polars_frame
from tidegate.storage.schemas.polars_frames import check_polars_has, polars_has, with_types_of_polars


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to do with batches of one schema."""

    schema: pa.Schema
    output: pa.Schema
    copied: dict[str, str]
    """Columns of the output that are copies, and the columns of the input that they are copies of."""
    rest: tuple[pl.Expr, ...]
    reads: Columns


class Projection:
    """Computes expressions over the batches of a stream."""

    def __init__(self, expressions: Sequence[pl.Expr]) -> None:
        self._expressions = tuple(expressions)
        self._from_polars = FromPolars()
        self._plan: _Plan | None = None

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns of a batch. Raises what polars raises for expressions that do not fit."""
        if self._plan is None or not self._plan.schema.equals(batch.schema):
            self._plan = self._planned(batch.schema)
        plan = self._plan
        columns = {name: batch.column(source) for name, source in plan.copied.items()}
        if plan.rest:
            made = self._from_polars.convert(computed(frame_of(batch, plan.reads), plan.rest), batch.schema)
            columns.update(zip(made.schema.names, made.columns, strict=True))
        return pa.RecordBatch.from_arrays([columns[name] for name in plan.output.names], names=plan.output.names)

    def _planned(self, schema: pa.Schema) -> _Plan:
        frame = empty_frame(schema)
        output = self._from_polars.convert(computed(frame, self._expressions), with_types_of_polars(schema)).schema
        copied: dict[str, str] = {}
        rest = []
        for expression in self._expressions:
            pairs = [*_copies(expression, frame)]
            for new, old in pairs:
                if not polars_has(schema.field(old).type):
                    output = output.set(output.get_field_index(new), schema.field(old).with_name(new))
            if pairs and all(output.field(new).type == schema.field(old).type for new, old in pairs):
                copied.update(pairs)
            else:
                rest.append(expression)
        reads = columns_read(rest)
        check_polars_has(pa.schema([field for field in schema if reads is None or field.name in reads]))
        return _Plan(schema, output, copied, tuple(rest), reads)


def columns_read(expressions: Sequence[pl.Expr]) -> Columns:
    """The columns that expressions read; None (all of them) if one chooses columns by a pattern or a type."""
    if any('"Selector"' in expression.meta.serialize(format="json") for expression in expressions):
        return None
    return frozenset(name for expression in expressions for name in expression.meta.root_names())


def frame_of(batch: pa.RecordBatch, reads: Columns) -> pl.DataFrame:
    """The columns of a batch that are read, as a polars frame. Without any it is the first, for the number of rows."""
    if reads is None:
        return polars_frame(batch)
    names = [name for name in batch.schema.names if name in reads]
    return polars_frame(batch.select(names or batch.schema.names[:1]))


def computed(frame: pl.DataFrame, expressions: Sequence[pl.Expr]) -> pl.DataFrame:
    """The columns that the expressions compute, with as many rows as the frame."""
    made = frame.select(expressions)
    if made.height == frame.height:
        return made
    return frame.with_columns(expressions).select(made.columns)  # nothing but literals, which are repeated


def _copies(expression: pl.Expr, frame: pl.DataFrame) -> Iterator[tuple[str, str]]:
    """Names in the output and in the input, if the expression only names columns."""
    bare = expression.meta.undo_aliases()
    if bare.meta.is_column_selection():
        yield from zip(frame.select(expression).columns, frame.select(bare).columns, strict=True)
