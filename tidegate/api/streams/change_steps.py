"""Builds a stream of changes from the newest versions of rows, as sources of change data give them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tidegate.api.streams.changelog_mode import ChangelogMode
from tidegate.api.streams.expression_columns import known_schema
from tidegate.api.streams.state_meanings import meaning
from tidegate.api.streams.step import Step, StepOptions
from tidegate.connectors.formats.changes import UNCHANGED, version_schema
from tidegate.connectors.postgres_cdc.options import TABLE, CdcTable, rows_column
from tidegate.connectors.postgres_cdc.text_values import row_schema
from tidegate.operators.ranking.newest_rows import NewestRows, TableRows

if TYPE_CHECKING:
    from tidegate.api.streams.stream import Stream


def change_stream(stream: Stream, keys: Sequence[str], options: StepOptions, advice: str) -> Stream:
    """Returns the changes of rows. `stream` has the columns of `version_schema`.

    `advice`: what to do about an unchanged value that is not known. Raises ConfigurationError for keys that are not
    columns.
    """
    names = tuple(keys)
    schema = known_schema(stream, options.name)
    operator = partial(NewestRows, names, schema, advice)
    output = operator().output
    means = meaning("newest rows", {"keys": names}, rows={"": (output, names)})
    step = Step(operator=operator, schema=output, options=options, meaning=means)
    rows = stream._by_keys(names)._then(step)
    changelog = ChangelogMode.of(rows._inputs[0][0], names, changes=True)
    return rows._derived(keyed_by=names, changelog=changelog)


def table_changes(stream: Stream, number: int, table: CdcTable, options: StepOptions) -> Stream:
    """Returns the changes of one table, of a source of several (`source_schema`)."""
    schema = version_schema(row_schema(table))
    operator = partial(TableRows, number, TABLE, rows_column(number), schema)
    part = options.part("rows", stream._inputs[0][0].parallelism)
    rows = stream._then(Step(operator=operator, schema=schema, options=part, own=(UNCHANGED,)))
    advice = f"Run ALTER TABLE {table.text} REPLICA IDENTITY FULL, and submit the job without a checkpoint"
    return change_stream(rows, table.keys, options, advice)
