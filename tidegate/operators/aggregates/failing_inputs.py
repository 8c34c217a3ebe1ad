"""`InputCheck`: sets aside the rows that functions of the program (`tg.udaf`) cannot accumulate, before an aggregate.

Rules:

- The rows of a batch are tried together, each in a new group of its own. Rows that fail together are halved and tried
  again, down to single rows.
- A row that one function cannot take counts for no aggregate. It leaves with the error of the first such function.
- A row that does not meet the condition of an aggregate is not tried for it.
- Aggregates are computed behind the exchange, from all rows that pass. What a function raises there fails the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_function import try_accumulate
from tidegate.operators.aggregates.aggregated_rows import input_column, row_mask, rows_in
from tidegate.operators.aggregates.column_expressions import ColumnExpression, ColumnLike
from tidegate.operators.functions.failing_rows import FailingRows, is_of_function
from tidegate.operators.operator import Emit, Operator
from tidegate.operators.operator_errors import blame
from tidegate.protocol.side_outputs import OutputTag


class InputCheck(Operator):
    """Tries rows on the functions of `aggregates`, by the names of these; `tag` is that of the rows that fail."""

    def __init__(self, aggregates: Mapping[str, Aggregate], tag: OutputTag) -> None:
        self._failing = FailingRows(tag)
        read = dict.fromkeys(column for each in aggregates.values() for column in each.columns)
        expressions = [column for column in read if isinstance(column, ColumnExpression)]
        names = {column: f"{number}" for number, column in enumerate(read)}
        """What the columns are called that are read: numbers, so that none shares a name with another."""
        self._copied = {names[column]: column for column in read if isinstance(column, str)}
        self._computed = None
        if expressions:
            from tidegate.operators.functions.projection import Projection

            self._computed = Projection([column.expression.alias(names[column]) for column in expressions])

        def plain(column: ColumnLike) -> ColumnLike:
            return names[column]

        self._aggregates = {label: each.over(plain) for label, each in aggregates.items()}

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows that all functions take, and the others on the side."""
        with blame(self.context, batch):
            inputs = self._inputs_of(batch)
            taken = np.ones(batch.num_rows, dtype=np.bool_)
            for label, aggregate in self._aggregates.items():
                rows = rows_in(row_mask(inputs, aggregate.condition), batch.num_rows)
                columns = [input_column(inputs, column) for column in aggregate.inputs]
                self._try(label, aggregate, rows[taken[rows]], columns, taken)
        kept = batch if taken.all() else batch.filter(pa.array(taken))
        if kept.num_rows:
            emit(kept)
        self._failing.leave(batch, self.context)

    def _inputs_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """What the aggregates read of a batch."""
        columns = {name: batch.column(column) for name, column in self._copied.items()}
        if self._computed is not None:
            made = self._computed.of(batch)
            columns.update(zip(made.schema.names, made.columns, strict=True))
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _try(
        self,
        label: str,
        aggregate: Aggregate,
        rows: NDArray[np.int64],
        columns: Sequence[pa.Array],
        taken: NDArray[np.bool_],
    ) -> None:
        """Try some rows on one function. Those that fail are no longer `taken`."""
        assert aggregate.function is not None, "an aggregate without a function"
        place = label if len(self._aggregates) > 1 else ""
        waiting = [rows] if len(rows) else []
        while waiting:
            some = waiting.pop()
            try:
                try_accumulate(aggregate.function, [column.take(pa.array(some)) for column in columns], len(some))
            except BaseException as error:
                if not is_of_function(error):
                    raise
                half = len(some) // 2
                if half:
                    waiting += [some[half:], some[:half]]
                else:
                    taken[some] = False
                    self._failing.add(int(some[0]), error, place)
