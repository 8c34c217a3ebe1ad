"""Operators around polars expressions: vectorised, picklable, and with no copy on the way in.

Rules: an expression works row by row. One that looks at other rows (`sum`, `shift`, `over`) is refused, because batches
are cut differently on every run (`row_wise_check.py`). Columns that no expression computes pass as they are, and polars
sees only those that an expression reads (`projection.py`).
"""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from tidegate.connectors.pushed_filters import Rows, rows_renamed
from tidegate.connectors.understood_filters import rows_kept
from tidegate.operators.functions.projection import Projection, columns_read, computed, frame_of
from tidegate.operators.functions.row_wise_check import check_row_wise
from tidegate.operators.operator import Columns, Emit, Operator, together
from tidegate.operators.operator_errors import blame
from tidegate.storage.errors import ConfigurationError


class FilterExpr(Operator):
    """Keeps the rows for which a boolean expression is true; false and null are dropped."""

    def __init__(self, expression: pl.Expr) -> None:
        if not isinstance(expression, pl.Expr):
            raise ConfigurationError(f"filter needs a polars expression or a function, not {type(expression).__name__}")
        check_row_wise(expression, "filter")
        self._expression = expression
        self._reads = columns_read((expression,))

    def needed_columns(self, after: Columns) -> Columns:
        """Those that the expression reads as well."""
        return together(after, columns_read((self._expression,)))

    def needed_rows(self, after: Rows) -> Rows:
        """Those that it keeps, if it is understood."""
        return rows_kept(self._expression, after)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows that stay. OperatorError if the expression cannot be evaluated or is not boolean."""
        with blame(self.context, batch):
            mask = _one_column(computed(frame_of(batch, self._reads), (self._expression,)))
            if mask.dtype != pl.Boolean:
                raise TypeError(f"filter needs a boolean expression; {self._expression} is {mask.dtype}")
            kept = batch if mask.all(ignore_nulls=False) else batch.filter(mask.rechunk().to_arrow())
        if kept.num_rows:
            emit(kept)


class WithColumns(Operator):
    """Adds columns, or replaces those of the same name; the other columns pass as they are."""

    def __init__(self, *expressions: pl.Expr) -> None:
        self._expressions = _checked(expressions, "with_columns")
        self._projection = Projection(self._expressions)

    def needed_columns(self, after: Columns) -> Columns:
        """Without those that it computes, and with those from which."""
        names = [expression.meta.output_name(raise_if_undetermined=False) for expression in self._expressions]
        if after is None or None in names:
            return None
        return together(after - {name for name in names if name is not None}, columns_read(self._expressions))

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the batch with the columns. OperatorError if an expression cannot be evaluated."""
        with blame(self.context, batch):
            added = self._projection.of(batch)
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns.update(zip(added.schema.names, added.columns, strict=True))
            result = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
        emit(result)


class Select(Operator):
    """Replaces the columns by those that the expressions (or names) compute."""

    def __init__(self, *expressions: pl.Expr | str) -> None:
        columns = tuple(pl.col(item) if isinstance(item, str) else item for item in expressions)
        self._expressions = _checked(columns, "select")
        self._projection = Projection(self._expressions)

    def needed_columns(self, after: Columns) -> Columns:
        """What its expressions read, whatever counts of what they compute: it computes all."""
        return columns_read(self._expressions)

    def needed_rows(self, after: Rows) -> Rows:
        """The same, if it only copies columns."""
        columns: dict[str, str] = {}
        for expression in self._expressions:
            name = expression.meta.output_name(raise_if_undetermined=False)
            bare = expression.meta.undo_aliases()
            if name is None or not bare.meta.is_column():
                return None
            columns[name] = bare.meta.output_name()
        return rows_renamed(columns, after)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the selected columns. OperatorError if an expression cannot be evaluated."""
        with blame(self.context, batch):
            result = self._projection.of(batch)
        emit(result)


def _checked(expressions: tuple[pl.Expr, ...], method: str) -> tuple[pl.Expr, ...]:
    if not expressions:
        raise ConfigurationError(f"{method} needs at least one expression")
    for expression in expressions:
        if not isinstance(expression, pl.Expr):
            raise ConfigurationError(
                f"{method} needs polars expressions (pl.col(...)), not {type(expression).__name__}"
            )
        check_row_wise(expression, method)
    return expressions


def _one_column(frame: pl.DataFrame) -> pl.Series:
    if frame.width != 1:
        raise TypeError(f"filter needs one boolean column; the expression gives {frame.columns}")
    return frame.to_series()
