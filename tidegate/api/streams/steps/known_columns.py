"""The columns of a stream where a step cannot do without them, and the `schema=` to write where they are not known.

A step around a function of the user knows its columns by `schema=`, by an annotation, or by a trace. Where none of them
tells, the error shows what the function makes of the first row of its source, as it would be written in `schema=`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.connectors.files.file_source import FilesSource
from tidegate.connectors.memory_source import MemorySource
from tidegate.operators.operator import Operator, OperatorContext
from tidegate.protocol.partitioning import Partitioning
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.schemas.row_schemas import python_schema

log = logging.getLogger(__name__)

_ROWS_MAX = 20
"""A filter may drop the first rows: up to this many are tried."""


class Columns(Protocol):
    """What is asked of a stream here: its schema, and the steps that make it."""

    @property
    def schema(self) -> pa.Schema | None: ...

    @property
    def _inputs(self) -> tuple[tuple[StreamNode, Partitioning | None], ...]: ...


def known_schema(stream: Columns, where: str, called: str = "the stream") -> pa.Schema:
    """Returns the schema of a stream. ConfigurationError, which begins with `where`, if it is not known.

    `called` names the stream in the error. It shows the `schema=` that fits the first row, if the source is in memory
    or consists of files, and no step in between has two inputs.
    """
    if stream.schema is not None:
        return stream.schema
    node = stream._inputs[0][0]
    chain = _chain(node)
    unknown = next((each for each in chain if each.schema is None), node)
    fitting = _of_first_row(chain[: chain.index(unknown) + 1]) if unknown in chain else None
    advice = "schema={...}" if fitting is None else f"schema={python_schema(fitting)}, which fits the first row"
    raise ConfigurationError(
        f"{where}: the columns of {called} are not known before the job runs. Give schema= to {unknown.name!r}: "
        f"{advice}"
    )


def _chain(node: StreamNode) -> list[StreamNode]:
    """Returns the steps from a source to a step; those after the last one with two inputs if there is one."""
    chain = [node]
    while len(chain[0].inputs) == 1:
        chain.insert(0, chain[0].inputs[0][0])
    return chain


def _of_first_row(chain: Sequence[StreamNode]) -> pa.Schema | None:
    """Returns the columns that the last step makes of the first row that gets there, or None if that cannot be found.

    The function of the user is called for that. What it raises is not the error that is reported here.
    """
    source = chain[0].source
    if not isinstance(source, MemorySource | FilesSource):
        return None
    try:
        operators = [_opened(node) for node in chain[1:]]
        rows = _first_rows(source)
        if rows is None:
            return None
        for row in range(rows.num_rows):
            batches = [rows.slice(row, 1)]
            for operator in operators:
                batches, before = [], batches
                for batch in before:
                    operator.process(batch, batches.append)
            if batches:
                schema = batches[0].schema
                return None if any(pa.types.is_null(field.type) for field in schema) else schema
    except Exception as error:  # noqa: BLE001 - the user sees the missing schema, with this advice or without
        log.debug("the columns of %r are not found from the first row: %r", chain[-1].name, error)
    return None


def _first_rows(source: MemorySource | FilesSource) -> pa.RecordBatch | None:
    splits, reader = source.splits(), source.reader()
    try:
        return reader.read(splits[0], 0, _ROWS_MAX).batch if splits else None
    finally:
        reader.close()


def _opened(node: StreamNode) -> Operator:
    assert node.factory is not None, "a step without an operator"
    operator = node.factory()
    operator.open(OperatorContext(OperatorUid(node.uid), node.name, SubtaskIndex(0), 1, 128), ())
    return operator
