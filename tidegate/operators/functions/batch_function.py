"""`BatchFunction`: a function over Arrow batches with a life: a model is loaded once, and not for each batch.

Rules:

- Each subtask of each attempt has a copy of the object to itself. `open` prepares it, and `close` lets go of what it
  holds, also after a failure.
- After a failure rows are processed again, by a new copy. What the object remembers is in no checkpoint. So what
  `process` returns depends on the batch alone, and each row counts once, as with any other operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa

from tidegate.operators.function_context import FunctionContext
from tidegate.operators.functions.batch_results import BatchResult
from tidegate.operators.functions.map_and_filter import MapBatches
from tidegate.operators.operator import OperatorContext, OperatorFactory
from tidegate.operators.operator_errors import blame_call
from tidegate.operators.own_copies import own_copy
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.snapshot import StateTable


class BatchContext(FunctionContext):
    """Where a `BatchFunction` runs."""


class BatchFunction:
    """Processes a stream batch by batch, with what `open` has made once: a model, a connection, a table to look up.

    Derive from it, and give `map_batches` an object. Its attributes travel to the tasks with the program; load there,
    in `open`, what is large.
    """

    context: BatchContext
    """The same context that `open` gets."""

    def open(self, context: BatchContext) -> None:
        """Called once, before anything else. It may take its time: the task begins when all have been opened."""

    def process(self, batch: pa.RecordBatch) -> BatchResult:
        """The rows for a batch, which is not empty: a batch, a table, a polars DataFrame, or None for no rows."""
        raise NotImplementedError(f"{type(self).__name__} needs a method process(self, batch)")

    def close(self) -> None:
        """Release resources. Called once, also after a failure, and even if `open` has failed."""


class MapWithLife(MapBatches):
    """Calls a `BatchFunction`. Raises ConfigurationError for one that cannot be copied."""

    def __init__(self, function: BatchFunction, schema: pa.Schema | None = None) -> None:
        self._function = own_copy(function)
        super().__init__(self._function.process, schema)

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Open the function. OperatorError if that raises."""
        super().open(context, restored)
        self._function.context = BatchContext(context)
        with blame_call(context, "open"):
            self._function.open(self._function.context)

    def close(self) -> None:
        """Close the function."""
        self._function.close()


def batch_operator(
    fn: Callable[[pa.RecordBatch], BatchResult] | BatchFunction, schema: pa.Schema | None, name: str
) -> OperatorFactory:
    """Makes the operator of a function over batches. ConfigurationError for what is none, or cannot be copied."""
    if isinstance(fn, BatchFunction):
        factory = partial(MapWithLife, fn, schema)
        factory()
        return factory
    if isinstance(fn, type) and issubclass(fn, BatchFunction):
        raise ConfigurationError(f"{name}: {fn.__name__} is a class; give an object of it, {fn.__name__}(...)")
    return partial(MapBatches, fn, schema)
