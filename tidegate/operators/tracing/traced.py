"""`Traced`: what an operator around a function of a row asks: can expressions do a batch, or must the function?"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from tidegate.operators.operator import OperatorContext
from tidegate.operators.tracing.code_rules import UntraceableError

if TYPE_CHECKING:
    from tidegate.operators.tracing.trace import Trace

log = logging.getLogger(__name__)

MakeTrace: TypeAlias = Callable[[pa.Schema], "Trace"]


class Traced:
    """The trace of a function, for the schema that batches have. The log says once what has come of it."""

    def __init__(self, make: MakeTrace, context: OperatorContext) -> None:
        self._make = make
        self._context = context
        self._schema: pa.Schema | None = None
        self._trace: Trace | None = None
        self._told = context.subtask != 0

    def computed(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """The result for a batch; None if the function has to be called with its rows."""
        if self._schema is None or not self._schema.equals(batch.schema):
            self._schema = batch.schema
            self._trace = self._made(batch.schema)
        return None if self._trace is None else self._trace.computed(batch)

    def _made(self, schema: pa.Schema) -> Trace | None:
        where = self._context
        told, self._told = self._told, True
        try:
            trace = self._make(schema)
        except UntraceableError as reason:
            if not told:
                said = "%r (uid %r) calls its function with each row, because %s"
                log.info(said, where.name, where.uid, reason)
            return None
        if not told:
            log.info("%r (uid %r) computes its function as expressions: %s", where.name, where.uid, str(trace)[:500])
        return trace
